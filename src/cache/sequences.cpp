#include <algorithm>
#include <unordered_map>
#include <utility>

#include "flashpage/kv_cache.hpp"

namespace flashpage {
namespace {

using Tokens = std::span<const std::int32_t>;

struct Sequence {
  std::string name_space;
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> table;  // a reference held to each page named
  PrefixTree::Pin pin;              // on the part the tree has; empty once the window moves
  std::size_t num_released = 0;     // leading entries that are kNoPage
  std::size_t num_published = 0;    // leading entries that came from or went to the tree
  std::size_t num_cached_tokens = 0;
  bool preempted = false;

  // The entries that name pages.
  Tokens live() const { return Tokens(table).subspan(num_released); }
};

[[noreturn]] void reject(const char* action, const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, std::string("Sequences::") + action + ": " + what);
}

}  // namespace

struct Sequences::Impl {
  explicit Impl(PrefixTree& tree_in)
      : tree(tree_in),
        pool(tree_in.pool()),
        page_size(static_cast<std::size_t>(tree_in.page_size())) {}

  PrefixTree& tree;
  PagePool& pool;
  const std::size_t page_size;
  std::unordered_map<SequenceId, Sequence> sequences;
  SequenceId next_id = 0;

  std::size_t pages_for(std::size_t num_tokens) const {
    return num_tokens / page_size + (num_tokens % page_size != 0 ? 1 : 0);
  }

  Sequence& get(SequenceId id, const char* action) {
    const auto entry = sequences.find(id);
    if (entry == sequences.end()) reject(action, "no sequence " + std::to_string(id));
    return entry->second;
  }

  Sequence& get_running(SequenceId id, const char* action) {
    Sequence& sequence = get(id, action);
    if (sequence.preempted) {
      reject(action, "sequence " + std::to_string(id) + " is preempted; restore it first");
    }
    return sequence;
  }

  SequenceId add(Sequence sequence) {
    sequences.emplace(next_id, std::move(sequence));
    return next_id++;
  }

  void check_fits(std::size_t num_pages, const char* action) const {
    if (std::cmp_less_equal(num_pages, pool.num_pages())) return;
    reject(action, "the sequence needs " + std::to_string(num_pages) +
                       " pages at once; the pool has " + std::to_string(pool.num_pages()));
  }

  // Gives a sequence without pages those for all its tokens; false, and no change, if short.
  bool acquire(Sequence& sequence, const char* action) {
    const std::size_t num_pages = pages_for(sequence.tokens.size());
    check_fits(num_pages, action);
    PrefixTree::Match match = tree.find(sequence.name_space, sequence.tokens);
    const std::size_t num_matched = match.pages.size();
    if (!tree.make_room(static_cast<std::int64_t>(num_pages - num_matched))) return false;

    tree.touch(match.pin);
    pool.retain(match.pages);
    sequence.table = std::move(match.pages);
    sequence.table.resize(num_pages);
    take_free(std::span(sequence.table).subspan(num_matched));
    sequence.pin = std::move(match.pin);
    sequence.num_released = 0;
    sequence.num_published = num_matched;
    sequence.num_cached_tokens = num_matched * page_size;
    return true;
  }

  // Allocates after make_room() has promised as many.
  void take_free(std::span<std::int32_t> out) {
    if (!pool.allocate(out)) throw std::logic_error("Sequences: make_room broke its promise");
  }

  void release_all(Sequence& sequence) {
    const std::vector<std::int32_t> table = std::exchange(sequence.table, {});
    pool.release(Tokens(table).subspan(sequence.num_released));
    sequence.num_released = 0;
    sequence.num_published = 0;
    sequence.pin.reset();
  }

  std::string check() const;
};

Sequences::Sequences(PrefixTree& tree) : impl_(std::make_unique<Impl>(tree)) {}

Sequences::~Sequences() {
  for (auto& [id, sequence] : impl_->sequences) impl_->release_all(sequence);
}

std::optional<SequenceId> Sequences::create(std::string_view name_space, Tokens prompt) {
  Sequence sequence;
  sequence.name_space = name_space;
  sequence.tokens.assign(prompt.begin(), prompt.end());
  if (!impl_->acquire(sequence, "create")) return std::nullopt;
  return impl_->add(std::move(sequence));
}

std::optional<Sequences::Appended> Sequences::append(SequenceId id, Tokens tokens) {
  Sequence& sequence = impl_->get_running(id, "append");
  if (tokens.empty()) return Appended{};
  const std::size_t num_old = sequence.table.size();
  const std::size_t num_all = impl_->pages_for(sequence.tokens.size() + tokens.size());
  impl_->check_fits(num_all - sequence.num_released, "append");

  const bool writes_last = sequence.tokens.size() % impl_->page_size != 0;
  const bool copies = writes_last && impl_->pool.num_references(sequence.table.back()) > 1;
  const std::size_t num_new = num_all - num_old + (copies ? 1 : 0);
  if (!impl_->tree.make_room(static_cast<std::int64_t>(num_new))) return std::nullopt;

  Appended result;
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
  sequence.table.resize(num_all);
  if (copies) {
    std::int32_t& last = sequence.table[num_old - 1];
    const std::int32_t shared = last;
    impl_->take_free(std::span(&last, 1));
    impl_->pool.release(shared);
    result.copy = PageCopy{shared, last};
  }
  impl_->take_free(std::span(sequence.table).subspan(num_old));
  return result;
}

SequenceId Sequences::fork(SequenceId id) {
  const Sequence& from = impl_->get_running(id, "fork");
  Sequence copy;
  copy.name_space = from.name_space;
  copy.tokens = from.tokens;
  copy.table = from.table;
  copy.num_released = from.num_released;
  copy.num_published = from.num_published;
  copy.num_cached_tokens = from.num_cached_tokens;
  impl_->pool.retain(copy.live());
  copy.pin = from.pin.clone();
  return impl_->add(std::move(copy));
}

void Sequences::free(SequenceId id) {
  impl_->release_all(impl_->get(id, "free"));
  impl_->sequences.erase(id);
}

std::int64_t Sequences::publish(SequenceId id, std::int64_t num_computed) {
  Sequence& sequence = impl_->get_running(id, "publish");
  if (num_computed < 0 || std::cmp_greater(num_computed, sequence.tokens.size())) {
    reject("publish", "num_computed = " + std::to_string(num_computed) + "; expected 0 to " +
                          std::to_string(sequence.tokens.size()) + ", the tokens there are");
  }
  const std::size_t num_whole = static_cast<std::size_t>(num_computed) / impl_->page_size;
  if (num_whole <= sequence.num_published) return 0;

  PrefixTree::Insertion insertion = impl_->tree.insert(
      sequence.name_space, Tokens(sequence.tokens).first(num_whole * impl_->page_size),
      Tokens(sequence.table).first(num_whole), std::move(sequence.pin));
  const std::size_t num_present = insertion.present.size();
  sequence.num_published = num_present + static_cast<std::size_t>(insertion.num_added);

  // The table names the tree's pages before its own are let go: from there on, those may be
  // anyone's.
  std::vector<std::int32_t> duplicates;
  for (std::size_t i = sequence.num_released; i < num_present; ++i) {
    if (sequence.table[i] == insertion.present[i]) continue;
    impl_->pool.retain(insertion.present[i]);
    duplicates.push_back(std::exchange(sequence.table[i], insertion.present[i]));
  }
  impl_->pool.release(duplicates);
  if (sequence.num_released == 0) sequence.pin = std::move(insertion.pin);
  return static_cast<std::int64_t>(duplicates.size());
}

std::int64_t Sequences::release_before(SequenceId id, std::int64_t position) {
  Sequence& sequence = impl_->get_running(id, "release_before");
  if (std::cmp_greater(position, sequence.tokens.size())) {
    reject("release_before", "position = " + std::to_string(position) + "; expected at most " +
                                 std::to_string(sequence.tokens.size()) + ", the tokens there are");
  }
  const std::size_t end =
      static_cast<std::size_t>(std::max<std::int64_t>(position, 0)) / impl_->page_size;
  if (end <= sequence.num_released) return 0;

  std::vector<std::int32_t> pages;
  for (std::size_t i = sequence.num_released; i < end; ++i) {
    pages.push_back(std::exchange(sequence.table[i], kNoPage));
  }
  sequence.num_released = end;
  impl_->pool.release(pages);
  // A pin holds a prefix from position 0, so it would keep the pages just given up. The references
  // protect the others; the tree may forget them.
  sequence.pin.reset();
  return static_cast<std::int64_t>(pages.size());
}

void Sequences::preempt(SequenceId id) {
  Sequence& sequence = impl_->get_running(id, "preempt");
  impl_->release_all(sequence);
  sequence.num_cached_tokens = 0;
  sequence.preempted = true;
}

bool Sequences::restore(SequenceId id) {
  Sequence& sequence = impl_->get(id, "restore");
  if (!sequence.preempted)
    reject("restore", "sequence " + std::to_string(id) + " is not preempted");
  if (!impl_->acquire(sequence, "restore")) return false;
  sequence.preempted = false;
  return true;
}

std::span<const std::int32_t> Sequences::block_table(SequenceId id) const {
  return impl_->get(id, "block_table").table;
}
std::span<const std::int32_t> Sequences::tokens(SequenceId id) const {
  return impl_->get(id, "tokens").tokens;
}
std::int64_t Sequences::num_tokens(SequenceId id) const {
  return static_cast<std::int64_t>(impl_->get(id, "num_tokens").tokens.size());
}
std::int64_t Sequences::num_cached_tokens(SequenceId id) const {
  return static_cast<std::int64_t>(impl_->get(id, "num_cached_tokens").num_cached_tokens);
}
bool Sequences::is_preempted(SequenceId id) const {
  return impl_->get(id, "is_preempted").preempted;
}
std::int64_t Sequences::size() const { return static_cast<std::int64_t>(impl_->sequences.size()); }
PrefixTree& Sequences::tree() const { return impl_->tree; }

std::string Sequences::check_invariants() const {
  if (std::string fault = impl_->pool.check_invariants(); !fault.empty()) return "pool: " + fault;
  if (std::string fault = impl_->tree.check_invariants(); !fault.empty()) return "tree: " + fault;
  if (std::string fault = impl_->check(); !fault.empty()) return "sequences: " + fault;
  return "";
}

std::string Sequences::Impl::check() const {
  std::vector<std::int64_t> held(static_cast<std::size_t>(pool.num_pages()), 0);
  for (const auto& [id, sequence] : sequences) {
    const std::string name = "sequence " + std::to_string(id) + ": ";
    const std::size_t expected = sequence.preempted ? 0 : pages_for(sequence.tokens.size());
    if (sequence.table.size() != expected) {
      return name + std::to_string(sequence.table.size()) + " table entries; expected " +
             std::to_string(expected);
    }
    for (std::size_t i = 0; i < sequence.table.size(); ++i) {
      const std::int32_t page = sequence.table[i];
      if ((page == kNoPage) != (i < sequence.num_released) || page >= pool.num_pages()) {
        return name + "entry " + std::to_string(i) + " is " + std::to_string(page) + " with " +
               std::to_string(sequence.num_released) + " released";
      }
      if (page != kNoPage) ++held[static_cast<std::size_t>(page)];
    }
  }
  std::int64_t num_in_use = 0;
  std::int64_t num_in_tree = 0;
  for (std::int32_t page = 0; page < pool.num_pages(); ++page) {
    const std::int64_t by_sequences = held[static_cast<std::size_t>(page)];
    const std::int64_t by_tree = pool.num_references(page) - by_sequences;
    if (by_tree < 0 || by_tree > 1) {
      return "page " + std::to_string(page) + " has " + std::to_string(by_tree + by_sequences) +
             " references, " + std::to_string(by_sequences) + " of them by sequences";
    }
    num_in_tree += by_tree;
    num_in_use += by_sequences > 0 ? 1 : 0;
  }
  if (num_in_use != pool.num_in_use()) return "pages in use are miscounted";
  if (num_in_tree != tree.num_pages()) return "a page has a reference that nobody holds";
  return "";
}

}  // namespace flashpage
