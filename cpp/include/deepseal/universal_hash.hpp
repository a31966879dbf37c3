// The consistency check of the subspace VOLE behind the OT extension, against a receiver that sends corrections for
// several choice vectors at once.
//
// L. Roy, "SoftSpokenOT", CRYPTO 2022, section 4.1, with the universal hash h(x) = sum chi_i x_i over GF(2^128), chi from
// a seed that the sender draws once the corrections are fixed. It is linear over GF(2), so row r of q = t + x delta
// hashes to h(t_r) + delta_r h(x). The last 128 OTs must have random choices, have chi = 1 and be thrown away: they
// hide what the hashes say of the others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "deepseal/secret.hpp"
#include "deepseal/session.hpp"

namespace deepseal {

// A product in GF(2)[x], low half first; x^128 + x^7 + x^2 + x + 1 reduces it.
struct Product {
  Block low;
  Block high;
};

// Adds a * b; `a` must be public.
void multiply_add(Product& sum, Block a, Block b) noexcept;
Block reduce(Product product) noexcept;

// Hashes of the 128 rows of t, and of the choice bits; t and bits hold a multiple of 128 OTs, at least 256.
// Throws std::invalid_argument for another number of them.
struct RowHashes {
  std::array<Block, 128> rows;
  Block choices;
};
RowHashes hash_rows(const Kernels& kernels, Block seed, std::span<const Block> t, const std::uint8_t* bits);

// What the sender expects the receiver's rows to hash to, from q and the receiver's hash of its choices.
std::array<Block, 128> expected_rows(const Kernels& kernels, Block seed, std::span<const Block> q, const Delta& delta,
                                     Block choices);

}  // namespace deepseal
