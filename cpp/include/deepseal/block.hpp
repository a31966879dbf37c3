// 128-bit blocks: labels, offsets, tables, keys. Bit 0 of `low` is the colour bit of a label.
#pragma once

#include <cstddef>
#include <cstdint>

// Inlined always: a copy that is compiled for AES or AVX-512 must never become the one that the linker keeps.
#define DEEPSEAL_INLINE [[gnu::always_inline]] inline

namespace deepseal {

struct alignas(16) Block {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

DEEPSEAL_INLINE constexpr Block operator^(Block x, Block y) noexcept { return {x.low ^ y.low, x.high ^ y.high}; }
DEEPSEAL_INLINE constexpr Block operator&(Block x, Block y) noexcept { return {x.low & y.low, x.high & y.high}; }
DEEPSEAL_INLINE constexpr Block& operator^=(Block& x, Block y) noexcept { return x = x ^ y; }
DEEPSEAL_INLINE constexpr bool operator==(Block x, Block y) noexcept { return ((x.low ^ y.low) | (x.high ^ y.high)) == 0; }

// All ones where the bit is 1, without a branch.
DEEPSEAL_INLINE constexpr Block mask(std::uint64_t bit) noexcept {
  const std::uint64_t word = ~((bit & 1) - 1);
  return {word, word};
}

// One tweak space for everything that is hashed in a session: domain | use | index.
enum class Domain : std::uint64_t { key = 0, gate = 1, ot = 2, prg = 3, payload = 4 };

DEEPSEAL_INLINE constexpr Block tweak(Domain domain, std::uint64_t use, std::uint64_t index) noexcept {
  return {index, static_cast<std::uint64_t>(domain) << 56 | use};
}

}  // namespace deepseal
