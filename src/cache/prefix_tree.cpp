#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "cache/page_hash.hpp"
#include "cache/page_state.hpp"
#include "flashpage/kv_cache.hpp"

namespace flashpage {
namespace {

using Tokens = std::span<const std::int32_t>;

// Index of the first difference, at most `n`. Whole blocks by memcmp, which is as wide as the CPU.
std::size_t first_difference(const std::int32_t* a, const std::int32_t* b, std::size_t n) {
  constexpr std::size_t kBlock = 256;
  std::size_t i = 0;
  while (i + kBlock <= n && std::memcmp(a + i, b + i, kBlock * sizeof *a) == 0) i += kBlock;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

// Gives back memory that eviction left unused, once it is more than half: O(1) a page evicted.
void shrink(std::vector<std::int32_t>& vector) {
  if (vector.size() < vector.capacity() / 2) vector.shrink_to_fit();
}

}  // namespace

// One node stands for the edge above it. Every page of an edge has the same last use and the same
// protection, because a match or insertion that ends inside an edge splits it there.
struct PrefixTree::Impl {
  struct Node {
    Node* parent = nullptr;            // null in the root of a name space
    std::vector<std::int32_t> tokens;  // page_size for each page
    std::vector<std::int32_t> pages;   // at least one, but in a root
    std::uint64_t id = 0;              // never reused; a part of its children's key
    std::uint64_t last_use = 0;        // clock; not kept in a root
    std::int64_t num_children = 0;
    std::int64_t num_holds = 0;               // pins ending here, plus children that are held
    const std::string* name_space = nullptr;  // in a root only
  };

  // No two leaves have equal last uses (those used by one call lie on one path), so this is a
  // strict order without a tie-break.
  struct ByLastUse {
    bool operator()(const Node* a, const Node* b) const { return a->last_use < b->last_use; }
  };

  Impl(PagePool& pool_in, std::int64_t page_size_in) : pool(pool_in), page_size(page_size_in) {}

  PagePool& pool;
  const std::int64_t page_size;
  std::int64_t num_pages = 0;
  std::uint64_t clock = 0;
  std::uint64_t next_id = 0;
  std::deque<Node> nodes;                                  // all nodes ever made; addresses stay
  std::vector<Node*> spare;                                // those not in use
  std::map<std::string, Node*, std::less<>> roots;         // none without children
  std::unordered_multimap<std::uint32_t, Node*> children;  // by child_key(); every node but roots
  std::set<Node*, ByLastUse> evictable;                    // leaves that nothing holds

  static Pin make_pin(Impl* tree, Node* node) {
    tree->hold(node);
    return Pin(tree, node);
  }
  static Node* node_of(const Pin& pin) { return static_cast<Node*>(pin.node_); }
  void check_own(const Pin& pin, const char* action) const {
    if (pin.tree_ == this) return;
    throw Error(ErrorKind::kInvalidArgument,
                std::string("PrefixTree::") + action + ": the pin is of another tree");
  }

  std::size_t tokens_in(std::size_t num) const { return num * static_cast<std::size_t>(page_size); }

  Node* new_node(Node* parent) {
    Node* node;
    if (spare.empty()) {
      node = &nodes.emplace_back();
    } else {
      node = spare.back();
      spare.pop_back();
    }
    node->id = next_id++;
    node->parent = parent;
    return node;
  }

  // Leaves nothing of the old node behind: neither links nor memory.
  void recycle(Node* node) {
    *node = Node{};
    spare.push_back(node);
  }

  static std::uint32_t child_key(const Node* parent, Tokens first_page) {
    const std::uint64_t mixed = parent->id * 0x9E3779B97F4A7C15U;
    return cache::page_hash(first_page) ^ static_cast<std::uint32_t>(mixed >> 32);
  }

  std::uint32_t key_of(const Node* node) const {
    return child_key(node->parent, Tokens(node->tokens).first(tokens_in(1)));
  }

  void unindex(Node* node) {
    const auto [begin, end] = children.equal_range(key_of(node));
    children.erase(std::find_if(begin, end, [node](const auto& e) { return e.second == node; }));
  }

  Node* find_child(const Node* parent, Tokens first_page) const {
    const auto [begin, end] = children.equal_range(child_key(parent, first_page));
    for (auto entry = begin; entry != end; ++entry) {
      Node* node = entry->second;
      if (node->parent == parent &&
          std::equal(first_page.begin(), first_page.end(), node->tokens.begin())) {
        return node;
      }
    }
    return nullptr;
  }

  bool is_evictable(const Node* node) const {
    return node->parent != nullptr && node->num_children == 0 && node->num_holds == 0;
  }

  // A hold protects the whole path; each node counts its held children once, so this stops at the
  // first ancestor that is held already.
  void hold(Node* node) {
    for (; node->parent != nullptr; node = node->parent) {
      if (is_evictable(node)) evictable.erase(node);
      if (node->num_holds++ > 0) return;
      pool.set_protected(node->pages, true);
    }
  }

  void drop(Node* node) {
    for (; node->parent != nullptr; node = node->parent) {
      if (--node->num_holds > 0) return;
      pool.set_protected(node->pages, false);
      if (is_evictable(node)) evictable.insert(node);
    }
  }

  // The path must be held, or else its leaf would change its place in `evictable`.
  void touch(Node* node) {
    ++clock;
    for (; node->parent != nullptr; node = node->parent) node->last_use = clock;
  }

  // Cuts the edge after its first `num` pages and returns the new upper part. The node itself
  // becomes the lower part, because pins on it mean its end.
  Node* split(Node* node, std::size_t num) {
    const auto cut_tokens = static_cast<std::ptrdiff_t>(tokens_in(num));
    const auto cut_pages = static_cast<std::ptrdiff_t>(num);
    Node* head = new_node(node->parent);
    head->tokens.assign(node->tokens.begin(), node->tokens.begin() + cut_tokens);
    head->pages.assign(node->pages.begin(), node->pages.begin() + cut_pages);
    head->last_use = node->last_use;
    head->num_children = 1;
    head->num_holds = node->num_holds > 0 ? 1 : 0;

    unindex(node);
    node->tokens = std::vector(node->tokens.begin() + cut_tokens, node->tokens.end());
    node->pages = std::vector(node->pages.begin() + cut_pages, node->pages.end());
    node->parent = head;
    children.emplace(key_of(head), head);
    children.emplace(key_of(node), node);
    return head;
  }

  // The node at whose end the longest cached prefix ends, appending the prefix's pages to `found`.
  // Null if nothing is cached under this name space, its root if nothing matches there.
  Node* descend(std::string_view name_space, Tokens tokens, std::vector<std::int32_t>& found) {
    const auto root = roots.find(name_space);
    if (root == roots.end()) return nullptr;
    Node* node = root->second;
    const std::size_t page = tokens_in(1);
    while (tokens.size() >= page) {
      Node* child = find_child(node, tokens.first(page));
      if (child == nullptr) break;
      const std::size_t reach = std::min(child->tokens.size(), tokens.size());
      const std::size_t same = first_difference(child->tokens.data(), tokens.data(), reach) / page;
      const bool whole = same == child->pages.size();
      node = whole ? child : split(child, same);
      found.insert(found.end(), node->pages.begin(), node->pages.end());
      if (!whole) break;
      tokens = tokens.subspan(child->tokens.size());
    }
    return node;
  }

  // Hangs pages below `parent`, or on its own end where it is a leaf that nobody holds.
  Node* grow(Node* parent, Tokens tokens, std::span<const std::int32_t> pages) {
    num_pages += static_cast<std::int64_t>(pages.size());
    if (is_evictable(parent)) {
      parent->tokens.insert(parent->tokens.end(), tokens.begin(), tokens.end());
      parent->pages.insert(parent->pages.end(), pages.begin(), pages.end());
      return parent;
    }
    Node* node = new_node(parent);
    node->tokens.assign(tokens.begin(), tokens.end());
    node->pages.assign(pages.begin(), pages.end());
    ++parent->num_children;
    children.emplace(key_of(node), node);
    return node;
  }

  Node* new_root(std::string_view name_space) {
    const auto entry = roots.emplace(name_space, new_node(nullptr)).first;
    entry->second->name_space = &entry->first;
    return entry->second;
  }

  // Takes up to `limit` pages off the end of the least recently used leaf; returns how many.
  std::int64_t trim_oldest(std::int64_t limit) {
    Node* node = *evictable.begin();
    const auto size = static_cast<std::int64_t>(node->pages.size());
    const std::int64_t count = std::min(limit, size);
    if (count == size) {
      evictable.erase(evictable.begin());
      unindex(node);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      pool.disown(node->pages.back());
      node->pages.pop_back();
    }
    num_pages -= count;
    if (count == size) {
      remove(node);
    } else {
      node->tokens.resize(tokens_in(node->pages.size()));
      shrink(node->tokens);
      shrink(node->pages);
    }
    return count;
  }

  // Takes an emptied leaf out of the tree, and its name space with the last of its leaves.
  void remove(Node* node) {
    Node* parent = node->parent;
    recycle(node);
    --parent->num_children;
    if (is_evictable(parent)) evictable.insert(parent);
    if (parent->parent == nullptr && parent->num_children == 0) {
      roots.erase(roots.find(*parent->name_space));
      recycle(parent);
    }
  }

  std::string check_node(const Node& node) const;
  std::string check() const;
};

PrefixTree::Pin::Pin(Pin&& other) noexcept
    : tree_(std::exchange(other.tree_, nullptr)), node_(std::exchange(other.node_, nullptr)) {}

PrefixTree::Pin& PrefixTree::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    reset();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
  }
  return *this;
}

PrefixTree::Pin PrefixTree::Pin::clone() const {
  return node_ == nullptr ? Pin() : Impl::make_pin(tree_, Impl::node_of(*this));
}

void PrefixTree::Pin::reset() noexcept {
  if (node_ != nullptr) tree_->drop(Impl::node_of(*this));
  tree_ = nullptr;
  node_ = nullptr;
}

PrefixTree::PrefixTree(PagePool& pool, std::int64_t page_size) {
  constexpr std::int64_t kMax = std::int64_t{1} << 30;
  if (page_size < 1 || page_size > kMax) {
    throw Error(ErrorKind::kInvalidArgument,
                "PrefixTree: page_size = " + std::to_string(page_size) + "; expected 1 to " +
                    std::to_string(kMax));
  }
  impl_ = std::make_unique<Impl>(pool, page_size);
}

PrefixTree::~PrefixTree() {
  for (const Impl::Node& node : impl_->nodes) {
    for (const std::int32_t page : node.pages) impl_->pool.disown(page);
  }
}

PrefixTree::Match PrefixTree::find(std::string_view name_space, Tokens tokens) {
  Match match;
  Impl::Node* node = impl_->descend(name_space, tokens, match.pages);
  if (!match.pages.empty()) match.pin = Impl::make_pin(impl_.get(), node);
  return match;
}

PrefixTree::Match PrefixTree::match(std::string_view name_space, Tokens tokens) {
  Match match = find(name_space, tokens);
  touch(match.pin);
  return match;
}

void PrefixTree::touch(const Pin& pin) {
  if (!pin) return;
  impl_->check_own(pin, "touch");
  impl_->touch(Impl::node_of(pin));
}

PrefixTree::Insertion PrefixTree::insert(std::string_view name_space, Tokens tokens,
                                         std::span<const std::int32_t> pages, Pin held) {
  if (held) impl_->check_own(held, "insert");
  held.reset();
  const std::size_t num_whole = tokens.size() / impl_->tokens_in(1);
  if (pages.size() < num_whole) {
    throw Error(ErrorKind::kInvalidArgument, "PrefixTree::insert: " + std::to_string(pages.size()) +
                                                 " pages for " + std::to_string(tokens.size()) +
                                                 " tokens; expected at least " +
                                                 std::to_string(num_whole));
  }
  Insertion result;
  Impl::Node* node = impl_->descend(name_space, tokens, result.present);
  const std::size_t num_present = result.present.size();
  pages = pages.first(num_whole).subspan(num_present);
  pages = pages.first(
      static_cast<std::size_t>(std::find(pages.begin(), pages.end(), kNoPage) - pages.begin()));
  if (!pages.empty()) {
    impl_->pool.adopt(pages);
    if (node == nullptr) node = impl_->new_root(name_space);
    node = impl_->grow(
        node, tokens.subspan(impl_->tokens_in(num_present), impl_->tokens_in(pages.size())), pages);
    result.num_added = static_cast<std::int64_t>(pages.size());
  }
  if (num_present > 0 || !pages.empty()) {
    result.pin = Impl::make_pin(impl_.get(), node);
    impl_->touch(node);
  }
  return result;
}

std::int64_t PrefixTree::evict(std::int64_t num_pages) {
  std::int64_t done = 0;
  while (done < num_pages && !impl_->evictable.empty())
    done += impl_->trim_oldest(num_pages - done);
  return done;
}

bool PrefixTree::make_room(std::int64_t num_pages) {
  const PagePool& pool = impl_->pool;
  if (num_pages > pool.num_free() + pool.num_reclaimable()) return false;
  // More than once only where pages leave the tree that others still reference.
  while (pool.num_free() < num_pages) evict(num_pages - pool.num_free());
  return true;
}

PagePool& PrefixTree::pool() const { return impl_->pool; }
std::int64_t PrefixTree::page_size() const { return impl_->page_size; }
std::int64_t PrefixTree::num_pages() const { return impl_->num_pages; }
std::int64_t PrefixTree::num_edges() const {
  return static_cast<std::int64_t>(impl_->children.size());
}

std::string PrefixTree::check_invariants() const { return impl_->check(); }

// Empty, or what is wrong with the node by itself and against its parent and its pages.
std::string PrefixTree::Impl::check_node(const Node& node) const {
  if (node.pages.empty() || node.tokens.size() != tokens_in(node.pages.size())) {
    return std::to_string(node.pages.size()) + " pages with " + std::to_string(node.tokens.size()) +
           " tokens";
  }
  if (node.last_use == 0 || node.last_use > clock ||
      (node.parent->parent != nullptr && node.last_use > node.parent->last_use)) {
    return "last use " + std::to_string(node.last_use) + " above its parent's " +
           std::to_string(node.parent->last_use) + " or the clock's " + std::to_string(clock);
  }
  if (find_child(node.parent, Tokens(node.tokens).first(tokens_in(1))) != &node) {
    return "not found by its first page";
  }
  const auto entry = evictable.find(const_cast<Node*>(&node));
  if (is_evictable(&node) != (entry != evictable.end() && *entry == &node)) {
    return "wrongly in or out of the eviction order";
  }
  for (const std::int32_t page : node.pages) {
    const std::uint32_t state = pool.states_.at(static_cast<std::size_t>(page));
    if ((state & cache::kCached) == 0 ||
        ((state & cache::kProtected) != 0) != (node.num_holds > 0)) {
      return "page " + std::to_string(page) + " does not carry its flags in the pool";
    }
  }
  return "";
}

std::string PrefixTree::Impl::check() const {
  std::set<std::int32_t> pages;
  std::map<const Node*, std::pair<std::int64_t, std::int64_t>> below;  // children, those held
  std::size_t num_pages_seen = 0;
  std::size_t num_evictable = 0;
  for (const auto& [key, node] : children) {
    if (node->parent == nullptr) return "an edge without a parent is indexed";
    const std::string edge = "edge " + std::to_string(node->id) + ": ";
    if (const std::string fault = check_node(*node); !fault.empty()) return edge + fault;
    if (key != key_of(node)) return edge + "indexed under a wrong key";
    pages.insert(node->pages.begin(), node->pages.end());
    num_pages_seen += node->pages.size();
    num_evictable += is_evictable(node) ? 1U : 0U;
    auto& [num_children, num_held] = below[node->parent];
    ++num_children;
    if (node->num_holds > 0) ++num_held;
  }
  for (const auto& [name, root] : roots) {
    if (root->num_children == 0 || root->parent != nullptr || *root->name_space != name) {
      return "name space '" + name + "' has a broken or empty root";
    }
    if (root->num_children != below[root].first) return "name space '" + name + "' miscounts";
  }
  for (const auto& [key, node] : children) {
    const auto& [num_children, num_held] = below[node];
    if (node->num_children != num_children || node->num_holds < num_held) {
      return "edge " + std::to_string(node->id) + ": miscounts its children or holds";
    }
  }
  if (pages.size() != num_pages_seen) return "a page is in two places of the tree";
  if (static_cast<std::int64_t>(num_pages_seen) != num_pages) return "pages are miscounted";
  if (evictable.size() != num_evictable) return "the eviction order holds a stranger";
  if (nodes.size() != spare.size() + roots.size() + children.size()) return "nodes are lost";
  return "";
}

}  // namespace flashpage
