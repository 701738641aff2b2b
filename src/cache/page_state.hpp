// What the pool knows about a page, in one word: flags above, reference count below.
#pragma once

#include <cstdint>

namespace flashpage::cache {

inline constexpr std::uint32_t kCached = 1U << 31;     // one of the references is a tree's
inline constexpr std::uint32_t kProtected = 1U << 30;  // a pin keeps the tree from evicting it
inline constexpr std::uint32_t kSeen = 1U << 29;       // named by the release() in progress
inline constexpr std::uint32_t kReferences = kSeen - 1;

}  // namespace flashpage::cache
