// The arithmetic of a linear layer's rows, compiled once for each instruction set. Words are modulo 2^32 or 2^64, of
// which the ring's l bits count. Nothing branches on its data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "deepseal/aes.hpp"

namespace deepseal {
namespace {

template <class Word>
DEEPSEAL_INLINE constexpr Word low_bits(unsigned bits) {
  return bits >= 8 * sizeof(Word) ? ~Word{0} : static_cast<Word>((Word{1} << bits) - 1);
}

// n numbers of m bits one after another, least significant bit first, a few at a time.
template <class Word>
DEEPSEAL_INLINE void pack_slowly(const Word* values, std::size_t n, unsigned m, std::uint8_t* out) {
  unsigned __int128 buffer = 0;
  unsigned filled = 0;
  for (std::size_t i = 0; i < n; ++i) {
    buffer |= static_cast<unsigned __int128>(values[i]) << filled;
    for (filled += m; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<std::uint8_t>(buffer);
  }
  if (filled > 0) *out = static_cast<std::uint8_t>(buffer);
}

template <class Word>
DEEPSEAL_INLINE void unpack_slowly(const std::uint8_t* in, std::size_t n, unsigned m, Word* values) {
  unsigned __int128 buffer = 0;
  unsigned filled = 0;
  for (std::size_t i = 0; i < n; ++i) {
    for (; filled < m; filled += 8) buffer |= static_cast<unsigned __int128>(*in++) << filled;
    values[i] = static_cast<Word>(buffer) & low_bits<Word>(m);
    buffer >>= m;
    filled -= m;
  }
}

DEEPSEAL_INLINE std::size_t packed_bytes(std::size_t n, unsigned m) { return (n * m + 7) / 8; }

// Eight numbers of at most 32 bits are m whole bytes; up to 32 bytes from `out` on are written.
DEEPSEAL_INLINE void pack_eight(const std::uint32_t* v, unsigned m, std::uint8_t* out) {
  unsigned __int128 half[2];
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t first = v[4 * i] | static_cast<std::uint64_t>(v[4 * i + 1]) << m;
    const std::uint64_t second = v[4 * i + 2] | static_cast<std::uint64_t>(v[4 * i + 3]) << m;
    half[i] = first | static_cast<unsigned __int128>(second) << (2 * m);
  }
  const unsigned whole = 4 * m / 8;
  const unsigned shift = 4 * m % 8;
  std::memcpy(out, &half[0], 16);
  if (shift != 0) half[1] = half[1] << shift | half[0] >> (8 * whole);
  std::memcpy(out + whole, &half[1], 16);
}

// What lies behind the packed numbers, up to `end`, may be overwritten.
DEEPSEAL_INLINE void pack(const std::uint32_t* values, std::size_t n, unsigned m, std::uint8_t* out, std::uint8_t* end) {
  for (; n >= 8 && end - out >= 32; n -= 8, values += 8, out += m) pack_eight(values, m, out);
  pack_slowly(values, n, m, out);
}

DEEPSEAL_INLINE void pack(const std::uint64_t* values, std::size_t n, unsigned m, std::uint8_t* out, std::uint8_t*) {
  pack_slowly(values, n, m, out);
}

DEEPSEAL_INLINE void unpack(const std::uint8_t* in, const std::uint8_t* end, std::size_t n, unsigned m, std::uint32_t* values) {
  unsigned offsets[8];
  unsigned shifts[8];
  for (unsigned j = 0; j < 8; ++j) {
    offsets[j] = j * m / 8;
    shifts[j] = j * m % 8;
  }
  const std::uint64_t keep = low_bits<std::uint64_t>(m);
  for (; n >= 8 && end - in >= 40; n -= 8, values += 8, in += m) {
#pragma GCC unroll 8
    for (unsigned j = 0; j < 8; ++j) {
      std::uint64_t word;
      std::memcpy(&word, in + offsets[j], 8);
      values[j] = static_cast<std::uint32_t>(word >> shifts[j] & keep);
    }
  }
  unpack_slowly(in, n, m, values);
}

DEEPSEAL_INLINE void unpack(const std::uint8_t* in, const std::uint8_t*, std::size_t n, unsigned m, std::uint64_t* values) {
  unpack_slowly(in, n, m, values);
}

// One source element at the weight owner. For bit b there are two rows of pads, of choice 0 and of choice 1; with the
// permute bit p, bit = p ^ c for the choice c, so bit w = p w + c (1 - 2 p) w. `sum` gets the pads' part of the owner's
// share, and the message is what a choice of 1 adds.
template <class Word>
void mask_rows(Word* pads, std::size_t stride, const Word* weights, std::size_t n, const std::uint8_t* permute, RowShape shape,
               Word* sum, std::uint8_t* message, std::uint8_t* end) {
  std::fill_n(sum, n, Word{0});
  for (unsigned bit = 0; bit < shape.source_bits; ++bit) {
    const Word* own = pads + 2 * bit * stride;
    Word* other = pads + (2 * bit + 1) * stride;
    const unsigned m = shape.bits - bit;
    const Word flip = Word{0} - static_cast<Word>(permute[bit] & 1);
    const Word negate = shape.is_signed && bit == shape.source_bits - 1 ? ~Word{0} : Word{0};
    const Word keep = low_bits<Word>(m);
    for (std::size_t j = 0; j < n; ++j) {
      const Word w = (weights[j] ^ negate) - negate;
      other[j] = (own[j] + ((w ^ flip) - flip) - other[j]) & keep;
      sum[j] += (own[j] - (w & flip)) << bit;
    }
    pack(other, n, m, message, end);
    message += packed_bytes(n, m);
  }
}

// The same element at the other party, with one row of pads for each bit.
template <class Word>
void open_rows(const Word* pads, std::size_t stride, std::size_t n, const std::uint8_t* choices, RowShape shape,
               const std::uint8_t* message, const std::uint8_t* end, Word* row, Word* sum) {
  std::fill_n(sum, n, Word{0});
  for (unsigned bit = 0; bit < shape.source_bits; ++bit) {
    const Word* own = pads + bit * stride;
    const unsigned m = shape.bits - bit;
    const Word chosen = Word{0} - static_cast<Word>(choices[bit] & 1);
    unpack(message, end, n, m, row);
    message += packed_bytes(n, m);
    for (std::size_t j = 0; j < n; ++j) sum[j] += (own[j] + (row[j] & chosen)) << bit;
  }
}

}  // namespace
}  // namespace deepseal
