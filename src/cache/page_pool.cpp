#include <limits>
#include <utility>

#include "cache/page_state.hpp"
#include "flashpage/kv_cache.hpp"

namespace flashpage {

using cache::kCached;
using cache::kProtected;
using cache::kReferences;
using cache::kSeen;

PagePool::PagePool(std::int64_t num_pages) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_pages < 1 || num_pages > kMax) {
    throw Error(ErrorKind::kInvalidArgument, "PagePool: num_pages = " + std::to_string(num_pages) +
                                                 "; expected 1 to " + std::to_string(kMax));
  }
  states_.resize(static_cast<std::size_t>(num_pages));
  free_.resize(static_cast<std::size_t>(num_pages));
  auto page = static_cast<std::int32_t>(num_pages);
  for (std::int32_t& slot : free_) slot = --page;
}

std::optional<std::int32_t> PagePool::allocate() {
  std::int32_t page = kNoPage;
  if (!allocate(std::span<std::int32_t>(&page, 1))) return std::nullopt;
  return page;
}

bool PagePool::allocate(std::span<std::int32_t> out) {
  if (out.size() > free_.size()) return false;
  for (std::int32_t& page : out) {
    page = free_.back();
    free_.pop_back();
    states_[static_cast<std::size_t>(page)] = 1;
  }
  return true;
}

void PagePool::retain(std::span<const std::int32_t> pages) {
  // Checked and applied in one pass, undone on error: a list may name a page often, and each time
  // counts against the limit.
  std::size_t done = 0;
  try {
    for (; done < pages.size(); ++done) {
      std::uint32_t& state = checked_state(pages[done], "retain");
      if ((state & kReferences) == kReferences) {
        throw Error(ErrorKind::kInvalidArgument,
                    "PagePool::retain: page " + std::to_string(pages[done]) + " has " +
                        std::to_string(kReferences) + " references, the most possible");
      }
      count(state, -1);
      count(++state, 1);
    }
  } catch (...) {
    while (done-- > 0) {
      std::uint32_t& state = states_[static_cast<std::size_t>(pages[done])];
      count(state, -1);
      count(--state, 1);
    }
    throw;
  }
}

void PagePool::release(std::span<const std::int32_t> pages) {
  std::size_t seen = 0;
  try {
    for (; seen < pages.size(); ++seen) {
      std::uint32_t& state = checked_state(pages[seen], "release");
      if ((state & kSeen) != 0) {
        throw Error(ErrorKind::kInvalidArgument, "PagePool::release: page " +
                                                     std::to_string(pages[seen]) +
                                                     " is named twice in one call");
      }
      if ((state & kCached) != 0 && (state & kReferences) == 1) {
        throw Error(ErrorKind::kInvalidArgument,
                    "PagePool::release: page " + std::to_string(pages[seen]) +
                        " has one reference, held by a prefix tree; it goes by eviction");
      }
      state |= kSeen;
    }
  } catch (...) {
    while (seen-- > 0) states_[static_cast<std::size_t>(pages[seen])] &= ~kSeen;
    throw;
  }
  for (const std::int32_t page : pages) {
    std::uint32_t& state = states_[static_cast<std::size_t>(page)];
    state &= ~kSeen;
    --state;
    if (state == 0) {
      free_.push_back(page);
    } else {
      count(state, 1);  // before, it had two references or more and was not counted
    }
  }
}

std::int64_t PagePool::num_references(std::int32_t page) const {
  if (page < 0 || page >= num_pages()) {
    throw Error(ErrorKind::kInvalidArgument, "PagePool::num_references: page " +
                                                 std::to_string(page) + "; expected 0 to " +
                                                 std::to_string(num_pages() - 1));
  }
  return states_[static_cast<std::size_t>(page)] & kReferences;
}

void PagePool::adopt(std::span<const std::int32_t> pages) {
  std::size_t done = 0;
  try {
    for (; done < pages.size(); ++done) {
      std::uint32_t& state = checked_state(pages[done], "PrefixTree::insert");
      if ((state & kCached) != 0) {
        throw Error(ErrorKind::kInvalidArgument, "PrefixTree::insert: page " +
                                                     std::to_string(pages[done]) +
                                                     " is in a tree already, or named twice");
      }
      state = (state | kCached) + 1;
    }
  } catch (...) {
    while (done-- > 0) {
      std::uint32_t& state = states_[static_cast<std::size_t>(pages[done])];
      state = (state & ~kCached) - 1;
    }
    throw;
  }
}

void PagePool::disown(std::int32_t page) {
  std::uint32_t& state = states_[static_cast<std::size_t>(page)];
  count(state, -1);
  state = (state & ~(kCached | kProtected)) - 1;
  if (state == 0) free_.push_back(page);
}

void PagePool::set_protected(std::span<const std::int32_t> pages, bool on) {
  for (const std::int32_t page : pages) {
    std::uint32_t& state = states_[static_cast<std::size_t>(page)];
    count(state, -1);
    state = on ? state | kProtected : state & ~kProtected;
    count(state, 1);
  }
}

// A page that exists and has a reference, or Error.
std::uint32_t& PagePool::checked_state(std::int32_t page, const char* action) {
  if (page < 0 || page >= num_pages()) {
    throw Error(ErrorKind::kInvalidArgument, std::string(action) + ": page " +
                                                 std::to_string(page) + "; expected 0 to " +
                                                 std::to_string(num_pages() - 1));
  }
  std::uint32_t& state = states_[static_cast<std::size_t>(page)];
  if (state == 0) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string(action) + ": page " + std::to_string(page) + " is free");
  }
  return state;
}

// Adds `by` to the totals that a page in this state belongs to.
void PagePool::count(std::uint32_t state, std::int64_t by) {
  if ((state & (kCached | kReferences)) != (kCached | 1)) return;
  num_cached_ += by;
  if ((state & kProtected) == 0) num_reclaimable_ += by;
}

std::string PagePool::check_invariants() const {
  std::vector<char> is_free(states_.size(), 0);
  for (const std::int32_t page : free_) {
    if (page < 0 || page >= num_pages()) {
      return "free list names page " + std::to_string(page) + ", which does not exist";
    }
    if (std::exchange(is_free[static_cast<std::size_t>(page)], char{1}) != 0) {
      return "free list names page " + std::to_string(page) + " twice";
    }
  }
  std::int64_t cached = 0;
  std::int64_t reclaimable = 0;
  for (std::size_t page = 0; page < states_.size(); ++page) {
    const std::uint32_t state = states_[page];
    const std::uint32_t references = state & kReferences;
    const bool flags_fit = (state & kSeen) == 0 && ((state & kCached) == 0 || references > 0) &&
                           ((state & kProtected) == 0 || (state & kCached) != 0);
    if (!flags_fit || (references == 0) != (is_free[page] != 0)) {
      return "page " + std::to_string(page) + " has " + std::to_string(references) +
             " references and flags " + std::to_string(state >> 29) + ", and is " +
             (is_free[page] != 0 ? "in" : "not in") + " the free list";
    }
    if (references == 1 && (state & kCached) != 0) {
      ++cached;
      if ((state & kProtected) == 0) ++reclaimable;
    }
  }
  if (cached != num_cached_ || reclaimable != num_reclaimable_) {
    return "counted " + std::to_string(num_cached_) + " cached and " +
           std::to_string(num_reclaimable_) + " reclaimable pages; there are " +
           std::to_string(cached) + " and " + std::to_string(reclaimable);
  }
  return "";
}

}  // namespace flashpage
