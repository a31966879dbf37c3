// AES-128 (FIPS 197) and what is built on it, in one table of functions for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "deepseal/block.hpp"

namespace deepseal {

// Made and used by the kernels of one kind.
struct AesKey {
  Block round[11];
  std::uint64_t planes[11][8];  // bitsliced round keys, in the portable kernels only
};

// A linear layer's element of `source_bits` bits in a ring of `bits`; the highest bit is negative where `is_signed`.
struct RowShape {
  unsigned bits;
  unsigned source_bits;
  bool is_signed;
};

// The same functions, the same bytes; they differ in speed. None branches or indexes on its data.
//
// `hash` is TMMO, H(x, t) = pi(pi(x) ^ t) ^ pi(x) with pi = AES under a public key (Guo, Katz, Wang, Yu, "Efficient and
// secure multiparty computation from fixed-key block ciphers", S&P 2020, section 7.4): tweakable circular-correlation
// robust in the ideal-cipher model.
struct Kernels {
  std::string_view name;
  void (*expand)(Block key, AesKey& expanded);
  // c[i] = a[i] ^ b[i]; `c` may be `a` or `b`.
  void (*add)(const Block* a, const Block* b, Block* c, std::size_t n);
  void (*encrypt)(const AesKey& key, const Block* in, Block* out, std::size_t n);
  // AES in counter mode: out[i] = AES(first + i), counted in the low 64 bits.
  void (*stream)(const AesKey& key, Block first, Block* out, std::size_t n);
  // out[i] = H(x[i], first + i); `out` may be `x`.
  void (*hash)(const AesKey& key, const Block* x, Block first, Block* out, std::size_t n);
  // Rows of n hashes of one block each: out[r stride + j] = H(x[r], first + (r / share) n + j). `stride` is a multiple of
  // 4 and at least n; what lies between is undefined.
  void (*stretch)(const AesKey& key, const Block* x, std::size_t rows, std::size_t share, Block first, std::size_t n,
                  std::size_t stride, Block* out);
  // See linear_rows.hpp. The rows of pads become the rows of the message.
  void (*mask32)(std::uint32_t* pads, std::size_t stride, const std::uint32_t* weights, std::size_t n, const std::uint8_t* permute,
                 RowShape shape, std::uint32_t* sum, std::uint8_t* message, std::uint8_t* end);
  void (*mask64)(std::uint64_t* pads, std::size_t stride, const std::uint64_t* weights, std::size_t n, const std::uint8_t* permute,
                 RowShape shape, std::uint64_t* sum, std::uint8_t* message, std::uint8_t* end);
  void (*open32)(const std::uint32_t* pads, std::size_t stride, std::size_t n, const std::uint8_t* choices, RowShape shape,
                 const std::uint8_t* message, const std::uint8_t* end, std::uint32_t* row, std::uint32_t* sum);
  void (*open64)(const std::uint64_t* pads, std::size_t stride, std::size_t n, const std::uint8_t* choices, RowShape shape,
                 const std::uint8_t* message, const std::uint8_t* end, std::uint64_t* row, std::uint64_t* sum);
  // Half gates (Zahur, Rosulek, Evans, Eurocrypt 2015), gates `first` ... `first` + n - 1 of the session: zero labels
  // a, b give zero labels c and two table blocks a gate. `c` may be `a` or `b`.
  void (*garble)(const AesKey& key, Block delta, const Block* a, const Block* b, Block* c, Block* tables,
                 std::uint64_t first, std::size_t n);
  // Active labels a, b and the tables give active labels c.
  void (*evaluate)(const AesKey& key, const Block* a, const Block* b, const Block* tables, Block* c,
                   std::uint64_t first, std::size_t n);
};

// Those that this processor can run, the fastest first; the last one is always "portable".
const std::vector<const Kernels*>& available_kernels();

// The fastest, or the one of that name. Throws std::invalid_argument for a name that this processor cannot run.
const Kernels& kernels(std::string_view name = "");

}  // namespace deepseal
