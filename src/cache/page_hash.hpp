// The hash that finds a child edge by its first page. It only says where to look: the tree compares
// the tokens themselves, so a collision costs time and nothing else.
#pragma once

#include <cstdint>
#include <span>

namespace flashpage::cache {

inline std::uint32_t page_hash(std::span<const std::int32_t> page) {
  // A multiply and a fold a token (both steps invertible, so no state is lost before the end).
  std::uint64_t state = 0x9E3779B97F4A7C15U;
  for (const std::int32_t token : page) {
    state = (state ^ static_cast<std::uint32_t>(token)) * 0xD6E8FEB86659FD93U;
    state ^= state >> 32;
  }
  return static_cast<std::uint32_t>(state);
}

}  // namespace flashpage::cache
