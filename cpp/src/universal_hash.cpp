#include "deepseal/universal_hash.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "deepseal/cpu.hpp"
#include "deepseal/transpose.hpp"

namespace deepseal {

#if defined(DEEPSEAL_X86_KERNELS)
void multiply_add_pclmul(Product& sum, const Block* a, const Block* b, std::size_t stride, std::size_t n) noexcept;
#endif

namespace {

constexpr std::size_t group = 64;  // blocks of 128 OTs whose rows are hashed together

// sum += a[i] * b[i * stride]
void accumulate(Product& sum, const Block* a, const Block* b, std::size_t stride, std::size_t n) noexcept {
#if defined(DEEPSEAL_X86_KERNELS)
  static const bool fast = cpu_features().pclmul;
  if (fast) return multiply_add_pclmul(sum, a, b, stride, n);
#endif
  for (std::size_t i = 0; i < n; ++i) multiply_add(sum, a[i], b[i * stride]);
}

void check_size(std::size_t n) {
  if (n % 128 != 0 || n < 256) throw std::invalid_argument("expected a multiple of 128 OTs, at least 256, found " + std::to_string(n));
}

std::vector<Block> coefficients(const Kernels& kernels, Block seed, std::size_t blocks) {
  AesKey key;
  kernels.expand(seed, key);
  std::vector<Block> chi(blocks);
  kernels.stream(key, tweak(Domain::prg, 0, 0), chi.data(), blocks - 1);
  chi.back() = {1, 0};
  return chi;
}

std::array<Block, 128> hash_columns(std::span<const Block> chi, std::span<const Block> columns) {
  std::array<Product, 128> sums{};
  std::vector<Block> rows(group * 128);
  for (std::size_t start = 0; start < chi.size(); start += group) {
    const std::size_t size = std::min(group, chi.size() - start);
    for (std::size_t i = 0; i < size; ++i) transpose(&columns[128 * (start + i)], 1, &rows[128 * i]);
    for (std::size_t row = 0; row < 128; ++row) accumulate(sums[row], &chi[start], &rows[row], 128, size);
  }
  wipe(rows.data(), rows.size() * sizeof(Block));
  std::array<Block, 128> hashes;
  std::ranges::transform(sums, hashes.begin(), reduce);
  return hashes;
}

}  // namespace

void multiply_add(Product& sum, Block a, Block b) noexcept {
  // b, shifted step by step; only a's bits are looked at.
  std::uint64_t word[4] = {b.low, b.high, 0, 0};
  for (unsigned i = 0; i < 128; ++i) {
    const Block bit = mask(i < 64 ? a.low >> i : a.high >> (i - 64));
    sum.low ^= bit & Block{word[0], word[1]};
    sum.high ^= bit & Block{word[2], word[3]};
    for (unsigned j = 3; j > 0; --j) word[j] = word[j] << 1 | word[j - 1] >> 63;
    word[0] <<= 1;
  }
}

Block reduce(Product product) noexcept {
  // x^128 = x^7 + x^2 + x + 1, first for the upper half, then for what that carries over.
  const auto fold = [](Block x, std::uint64_t& carry) {
    Block out{};
    carry = 0;
    for (const unsigned shift : {0U, 1U, 2U, 7U}) {
      out.low ^= x.low << shift;
      out.high ^= x.high << shift ^ (shift == 0 ? 0 : x.low >> (64 - shift));
      carry ^= shift == 0 ? 0 : x.high >> (64 - shift);
    }
    return out;
  };
  std::uint64_t carry = 0;
  Block result = product.low ^ fold(product.high, carry);
  std::uint64_t none = 0;
  return result ^ fold({carry, 0}, none);
}

RowHashes hash_rows(const Kernels& kernels, Block seed, std::span<const Block> t, const std::uint8_t* bits) {
  check_size(t.size());
  const std::vector<Block> chi = coefficients(kernels, seed, t.size() / 128);
  std::vector<Block> packed(chi.size());
  for (std::size_t i = 0; i < t.size(); ++i)
    (i % 128 < 64 ? packed[i / 128].low : packed[i / 128].high) |= std::uint64_t{bits[i] & 1U} << i % 64;
  Product sum{};
  accumulate(sum, chi.data(), packed.data(), 1, chi.size());
  wipe(packed.data(), packed.size() * sizeof(Block));
  return {hash_columns(chi, t), reduce(sum)};
}

std::array<Block, 128> expected_rows(const Kernels& kernels, Block seed, std::span<const Block> q, const Delta& delta,
                                     Block choices) {
  check_size(q.size());
  std::array<Block, 128> rows = hash_columns(coefficients(kernels, seed, q.size() / 128), q);
  delta.add_where_set(choices, rows);
  return rows;
}

}  // namespace deepseal
