// The KV-cache manager: who owns which page of the K/V tensors. It moves no K/V data itself.
//
//   PagePool    pages as numbers: allocation and reference counts
//   PrefixTree  which token prefixes have their K/V in which pages, for any request to share
//   Sequences   the requests in flight: their block tables, forks, windows, preemption
//
// All three are single-owner: one thread at a time may use a pool together with everything built on
// it, and there are no locks inside. Running out of pages is an ordinary result (nullopt or false)
// that changes nothing; a broken rule throws Error(kInvalidArgument), and that changes nothing
// either.
//
// At every step each page is in exactly one of three states, so free + cached + in use = total:
//   free    no references
//   cached  held by a PrefixTree alone
//   in use  held by anyone else, whether or not a tree holds it too
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashpage/types.hpp"

namespace flashpage {

/// A block table entry that names no page: the window has moved past it.
inline constexpr std::int32_t kNoPage = -1;

/// A pool of `num_pages` equal pages, numbered from 0, each with a count of references.
///
/// This is the physical side of PagedAttention (Kwon et al. 2023). Every operation is O(1) a page.
class PagePool {
 public:
  /// `num_pages` from 1 to 2^31 - 1. Throws Error otherwise.
  explicit PagePool(std::int64_t num_pages);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// A free page, now with one reference; nullopt if there is none. The most recently freed page
  /// comes first; fresh pages come in ascending order.
  [[nodiscard]] std::optional<std::int32_t> allocate();

  /// Fills `out` with distinct free pages, one reference each. False, with nothing changed, if
  /// fewer are free.
  [[nodiscard]] bool allocate(std::span<std::int32_t> out);

  /// Adds a reference to each page. Throws Error, with nothing changed, if one is free or does not
  /// exist.
  void retain(std::int32_t page) { retain(std::span<const std::int32_t>(&page, 1)); }
  void retain(std::span<const std::int32_t> pages);

  /// Drops a reference to each page; the last one frees it. Throws Error, with nothing changed, if
  /// a page is free already, does not exist, is named twice in one call, or has only its tree's
  /// reference left, which is the tree's to drop.
  void release(std::int32_t page) { release(std::span<const std::int32_t>(&page, 1)); }
  void release(std::span<const std::int32_t> pages);

  /// References to `page`; 0 if it is free. Throws Error if there is no such page.
  std::int64_t num_references(std::int32_t page) const;

  std::int64_t num_pages() const { return static_cast<std::int64_t>(states_.size()); }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_cached() const { return num_cached_; }
  std::int64_t num_in_use() const { return num_pages() - num_free() - num_cached(); }

  /// Of the cached pages, those that no pin protects: what eviction could free.
  std::int64_t num_reclaimable() const { return num_reclaimable_; }

  /// Recounts everything. Empty if all is well, otherwise what is broken. O(num_pages).
  [[nodiscard]] std::string check_invariants() const;

 private:
  friend class PrefixTree;

  // What the tree tells the pool about the pages it holds, so that the counts above stay exact
  // however references come and go.
  void adopt(std::span<const std::int32_t> pages);
  void disown(std::int32_t page);
  void set_protected(std::span<const std::int32_t> pages, bool on);

  std::uint32_t& checked_state(std::int32_t page, const char* action);
  void count(std::uint32_t state, std::int64_t by);

  std::vector<std::uint32_t> states_;  // reference count and flags; see page_pool.cpp
  std::vector<std::int32_t> free_;     // a stack
  std::int64_t num_cached_ = 0;
  std::int64_t num_reclaimable_ = 0;
};

/// Token prefixes whose K/V is cached, as a radix tree over token ids at page granularity
/// (RadixAttention, Zheng et al. 2023): an edge is a run of whole pages with their token ids.
///
/// Identity is the whole name space string and every token id from position 0, compared in full;
/// hashes only say where to look. The name space should hold everything besides the tokens that the
/// K/V depends on: model, adapter, tenant's salt.
///
/// Eviction is plain LRU over pages. A page was last used when the latest match() or insert()
/// passed through it. So it is never more recent than the page before it in its prefix, and of
/// pages last used by the same call the later in the prefix goes first: what is cached is always a
/// set of whole prefixes, and the order has no ties. Pinned prefixes are never evicted.
///
/// Costs: match and insert are O(tokens) compares plus one hash look-up an edge; eviction is O(1) a
/// page plus O(log leaves) an edge; memory is 4 (page_size + 1) bytes a page plus about 200 an
/// edge.
class PrefixTree {
 public:
  struct Impl;

  /// Keeps one prefix from being evicted while it lives. Must not outlive its tree.
  class Pin {
   public:
    Pin() noexcept : tree_(nullptr), node_(nullptr) {}
    Pin(Pin&& other) noexcept;
    Pin& operator=(Pin&& other) noexcept;
    ~Pin() { reset(); }

    /// A second pin on the same prefix.
    Pin clone() const;
    /// Lets go. Does nothing if empty.
    void reset() noexcept;
    /// Whether a prefix is held; a pin on a miss is empty.
    explicit operator bool() const { return node_ != nullptr; }

   private:
    friend struct Impl;
    Pin(Impl* tree, void* node) : tree_(tree), node_(node) {}
    Impl* tree_;
    void* node_;
  };

  struct Match {
    std::vector<std::int32_t> pages;  ///< pages of the longest cached prefix, from position 0
    Pin pin;                          ///< protects these pages; adds no reference to them
  };

  struct Insertion {
    /// Pages of the leading part that was there already. Where they differ from the caller's own,
    /// the caller holds duplicates: put these into its table first, then release its own.
    std::vector<std::int32_t> present;
    std::int64_t num_added = 0;  ///< pages after `present` that the tree took a reference to
    Pin pin;                     ///< protects `present` and the pages added
  };

  /// An empty tree over pages of `pool`, which must outlive it. `page_size` in tokens, 1 to 2^30.
  /// Throws Error otherwise.
  PrefixTree(PagePool& pool, std::int64_t page_size);
  /// Drops the tree's references.
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  /// The longest cached prefix of `tokens`, in whole pages, and a use of it. Any length is legal;
  /// fewer tokens than a page is a miss, and a miss leaves nothing behind.
  [[nodiscard]] Match match(std::string_view name_space, std::span<const std::int32_t> tokens);

  /// As match(), but not a use: the order of eviction stays. For a caller that may yet turn the
  /// request away; touch() makes it a use afterwards.
  [[nodiscard]] Match find(std::string_view name_space, std::span<const std::int32_t> tokens);
  void touch(const Pin& pin);

  /// Caches the whole pages of `tokens`; `pages[i]` holds tokens i * page_size onward, and a tail
  /// of less than a page is left out. The tree takes a reference to each page that is new to it.
  ///
  /// An entry may be kNoPage where the caller no longer has the page: if the tree has none there
  /// either, the insertion ends before it. `held` is a pin of the caller's on a prefix of `tokens`,
  /// given up for the one returned (which lets a growing sequence extend its edge in place).
  ///
  /// Throws Error, with nothing changed but `held` given up, if `pages` is shorter than the whole
  /// pages of `tokens`, or a new page is free, does not exist, is named twice or is in a tree
  /// already.
  Insertion insert(std::string_view name_space, std::span<const std::int32_t> tokens,
                   std::span<const std::int32_t> pages, Pin held = {});

  /// Evicts up to `num_pages` pages in LRU order and returns how many went. One that someone else
  /// still references leaves the tree but does not become free.
  std::int64_t evict(std::int64_t num_pages);

  /// Evicts until `num_pages` pages of the pool are free. False, with nothing evicted, if that
  /// cannot be reached.
  [[nodiscard]] bool make_room(std::int64_t num_pages);

  PagePool& pool() const;
  std::int64_t page_size() const;
  std::int64_t num_pages() const;  ///< pages the tree holds
  std::int64_t num_edges() const;  ///< edges they are grouped into; never more than num_pages()

  /// Checks every edge, link, pin and count. Empty if all is well, otherwise what is broken.
  [[nodiscard]] std::string check_invariants() const;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Names a sequence; never reused.
using SequenceId = std::int64_t;

/// Work on the K/V tensors that the caller owes before it writes to page `dst`.
struct PageCopy {
  std::int32_t src = kNoPage;
  std::int32_t dst = kNoPage;
};

/// The requests in flight. Each sequence is its token ids and a block table that names one page for
/// every page_size of them, a reference held to each.
///
/// Pages shared with other sequences or with the tree are never written: they are full, or
/// append() replaces them first. Where pages are short, cached prefixes are evicted from the tree.
/// Every method taking a SequenceId throws Error if there is no such sequence.
class Sequences {
 public:
  struct Appended {
    std::optional<PageCopy> copy;  ///< set if the last page was shared: copy it before writing
  };

  /// No sequences yet. `tree` and its pool must outlive this.
  explicit Sequences(PrefixTree& tree);
  /// Frees every sequence.
  ~Sequences();
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  /// A sequence of `prompt`, its longest cached prefix shared and pages allocated for the rest.
  /// nullopt if pages are short now. Throws Error if the pool could never hold it.
  [[nodiscard]] std::optional<SequenceId> create(std::string_view name_space,
                                                 std::span<const std::int32_t> prompt);

  /// Adds tokens, and pages as they are needed. A last page that is partly filled and shared is
  /// replaced by a new one (copy on write). nullopt if pages are short now. Throws Error if
  /// preempted, or if the pool could never hold the pages of the result.
  [[nodiscard]] std::optional<Appended> append(SequenceId id, std::span<const std::int32_t> tokens);

  /// A second sequence with the same tokens and pages. Needs no page. Throws Error if preempted.
  SequenceId fork(SequenceId id);

  /// Ends the sequence. What it published stays cached.
  void free(SequenceId id);

  /// Makes the whole pages of the first `num_computed` tokens, whose K/V the caller has written,
  /// matchable by others. Where the tree has the same prefix in other pages, the table is remapped
  /// to them and the sequence's own are released. Returns how many entries were remapped: above 0,
  /// copies of the block table are stale. Throws Error if preempted or `num_computed` is not in 0
  /// to num_tokens.
  ///
  /// After release_before() only what follows on from the tree can still be published.
  std::int64_t publish(SequenceId id, std::int64_t num_computed);

  /// Releases the pages all of whose positions are below `position`, for a sliding window: with
  /// window_left w and the next query at p, `position` = p - w. Their entries become kNoPage.
  /// Returns how many pages were released. Throws Error if preempted or `position` > num_tokens.
  std::int64_t release_before(SequenceId id, std::int64_t position);

  /// Releases all pages of the sequence, keeping its tokens. What it published stays cached, until
  /// it is evicted. Throws Error if preempted already.
  void preempt(SequenceId id);

  /// Gives a preempted sequence pages for all its tokens, from position 0, as create() would; the
  /// caller computes again what lies past num_cached_tokens. False if pages are short now. Throws
  /// Error if not preempted, or if the pool could never hold it.
  [[nodiscard]] bool restore(SequenceId id);

  /// The sequence's row of `block_table`: ceil(num_tokens / page_size) entries; empty while
  /// preempted. Valid until the sequence is next changed.
  std::span<const std::int32_t> block_table(SequenceId id) const;
  std::span<const std::int32_t> tokens(SequenceId id) const;
  std::int64_t num_tokens(SequenceId id) const;
  /// Leading tokens whose K/V create() or restore() found cached; may be all of them.
  std::int64_t num_cached_tokens(SequenceId id) const;
  bool is_preempted(SequenceId id) const;
  std::int64_t size() const;  ///< sequences, the preempted included

  PrefixTree& tree() const;

  /// Checks tables, tree and pool against each other, on the premise that nothing else holds pages
  /// of this pool. Empty if all is well, otherwise what is broken. O(everything).
  [[nodiscard]] std::string check_invariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashpage
