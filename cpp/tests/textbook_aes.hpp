// AES-128 byte by byte as FIPS 197 writes it, with an S-box that is computed from its definition (section 5.1.1): slow,
// leaky, and independent of everything that it is compared with.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "deepseal/block.hpp"

namespace deepseal::testing {

using Bytes16 = std::array<std::uint8_t, 16>;

inline Bytes16 bytes_of(Block block) {
  Bytes16 bytes;
  std::memcpy(bytes.data(), &block, sizeof block);
  return bytes;
}

inline Block block_of(const Bytes16& bytes) {
  Block block;
  std::memcpy(&block, bytes.data(), sizeof block);
  return block;
}

// In GF(2^8) modulo x^8 + x^4 + x^3 + x + 1.
inline std::uint8_t multiply(unsigned x, unsigned y) {
  unsigned product = 0;
  for (unsigned bit = 0; bit < 8; ++bit)
    if (y >> bit & 1) product ^= x << bit;
  for (unsigned bit = 15; bit-- > 8;)
    if (product >> bit & 1) product ^= 0x11bu << (bit - 8);
  return static_cast<std::uint8_t>(product);
}

inline std::array<std::uint8_t, 256> make_sbox() {
  std::array<std::uint8_t, 256> table{};
  for (unsigned x = 0; x < 256; ++x) {
    unsigned inverse = 0;
    while (x != 0 && multiply(x, inverse) != 1) ++inverse;
    unsigned y = 0x63;
    for (unsigned turn = 0; turn < 5; ++turn) y ^= (inverse << turn | inverse >> (8 - turn)) & 0xff;
    table[x] = static_cast<std::uint8_t>(y);
  }
  return table;
}

inline std::uint8_t sbox(std::uint8_t x) {
  static const auto table = make_sbox();
  return table[x];
}

inline std::array<Bytes16, 11> textbook_round_keys(const Bytes16& key) {
  std::array<Bytes16, 11> rounds{key};
  std::uint8_t constant = 1;
  for (std::size_t round = 1; round < 11; ++round) {
    const Bytes16& last = rounds[round - 1];
    Bytes16& next = rounds[round];
    for (std::size_t i = 0; i < 16; ++i) {
      const std::uint8_t before = i < 4 ? sbox(last[12 + (i + 1) % 4]) : next[i - 4];
      next[i] = last[i] ^ before ^ (i == 0 ? constant : std::uint8_t{0});
    }
    constant = multiply(constant, 2);
  }
  return rounds;
}

inline Bytes16 textbook_aes(const Bytes16& key, Bytes16 state) {
  const auto rounds = textbook_round_keys(key);
  for (std::size_t i = 0; i < 16; ++i) state[i] ^= rounds[0][i];
  for (std::size_t round = 1; round < 11; ++round) {
    Bytes16 shifted;
    for (std::size_t column = 0; column < 4; ++column)
      for (std::size_t row = 0; row < 4; ++row)
        shifted[4 * column + row] = sbox(state[4 * ((column + row) % 4) + row]);
    for (std::size_t column = 0; column < 4; ++column)
      for (std::size_t row = 0; row < 4; ++row) {
        const auto at = [&](std::size_t down) { return shifted[4 * column + (row + down) % 4]; };
        const std::uint8_t mixed = multiply(at(0), 2) ^ multiply(at(1), 3) ^ at(2) ^ at(3);
        state[4 * column + row] = (round < 10 ? mixed : at(0)) ^ rounds[round][4 * column + row];
      }
  }
  return state;
}

inline Block textbook_aes(Block key, Block x) { return block_of(textbook_aes(bytes_of(key), bytes_of(x))); }

}  // namespace deepseal::testing
