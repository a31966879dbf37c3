#include "deepseal/universal_hash.hpp"

#include <stdexcept>

#include "deepseal/softspoken.hpp"
#include "test.hpp"
#include "textbook_aes.hpp"
#include "transfer.hpp"

using namespace deepseal;
using deepseal::testing::Dealt;
using deepseal::testing::Draw;
using deepseal::testing::textbook_aes;

namespace {

bool bit_of(Block x, std::size_t i) { return ((i < 64 ? x.low >> i : x.high >> (i - 64)) & 1) != 0; }

Block times_x(Block a) {
  const Block carry = mask(a.high >> 63) & Block{0x87, 0};
  return Block{a.low << 1, a.high << 1 | a.low >> 63} ^ carry;
}

// In GF(2^128) modulo x^128 + x^7 + x^2 + x + 1, bit by bit.
Block textbook_product(Block a, Block b) {
  Block result{};
  for (std::size_t i = 0; i < 128; ++i, a = times_x(a))
    if (bit_of(b, i)) result ^= a;
  return result;
}

Block product(Block a, Block b) {
  Product sum{};
  multiply_add(sum, a, b);
  return reduce(sum);
}

// The hash by its definition: chi from the seed, the last coefficient 1.
Block textbook_hash(Block seed, const std::vector<std::vector<bool>>& row_bits, std::size_t row) {
  const std::size_t blocks = row_bits[row].size() / 128;
  Block sum{};
  for (std::size_t i = 0; i < blocks; ++i) {
    Block x{};
    for (std::size_t j = 0; j < 128; ++j)
      if (row_bits[row][128 * i + j]) (j < 64 ? x.low : x.high) |= std::uint64_t{1} << j % 64;
    sum ^= textbook_product(i + 1 == blocks ? Block{1, 0} : textbook_aes(seed, Block{i, std::uint64_t{3} << 56}), x);
  }
  return sum;
}

struct Extended {
  std::vector<std::uint8_t> bits;
  std::vector<Block> t, q;
};

// `bend` may change the corrections on their way.
template <class Bend>
Extended extended(Draw& draw, const Dealt& dealt, std::size_t n, const Bend& bend) {
  const SessionKeys session(kernels(), Block{1, 2});
  CotReceiver receiver(session, 4, dealt.pairs);
  CotSender sender(session, 4, dealt.delta, dealt.keys, receiver.opening());
  Extended result{draw.bits(n), std::vector<Block>(n), std::vector<Block>(n)};
  std::vector<Block> corrections(receiver.correction_blocks(n));
  receiver.extend(result.bits.data(), n, result.t.data(), corrections.data());
  bend(corrections);
  sender.extend(corrections, n, result.q.data());
  return result;
}

bool passes(const Extended& ots, const Dealt& dealt, Block seed) {
  const RowHashes hashes = hash_rows(kernels(), seed, ots.t, ots.bits.data());
  return expected_rows(kernels("portable"), seed, ots.q, *dealt.delta, hashes.choices) == hashes.rows;
}

}  // namespace

TEST_CASE("products in GF(2^128), by the definition") {
  Draw draw(1);
  CHECK(product({0, std::uint64_t{1} << 63}, {2, 0}) == Block{0x87, 0});  // x^127 x
  CHECK(product({1, 0}, {5, 6}) == Block{5, 6});
  for (int i = 0; i < 300; ++i) {
    const Block a = draw.block(), b = draw.block();
    CHECK(product(a, b) == textbook_product(a, b));
    CHECK(product(a, b) == product(b, a));
  }
}

TEST_CASE("hashes of rows and choices, by the definition") {
  Draw draw(2);
  for (const std::size_t n : {256, 128 * 65, 128 * 130}) {
    CAPTURE(n);
    const Block seed = draw.block();
    const std::vector<Block> t = draw.blocks(n);
    const std::vector<std::uint8_t> bits = draw.bits(n);
    std::vector<std::vector<bool>> rows(129, std::vector<bool>(n));
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t row = 0; row < 128; ++row) rows[row][i] = bit_of(t[i], row);
      rows[128][i] = bits[i] == 1;
    }
    for (const Kernels* tested : available_kernels()) {
      const RowHashes hashes = hash_rows(*tested, seed, t, bits.data());
      CHECK(hashes.choices == textbook_hash(seed, rows, 128));
      for (const std::size_t row : {0, 1, 63, 64, 127}) CHECK(hashes.rows[row] == textbook_hash(seed, rows, row));
    }
  }
}

TEST_CASE("an honest receiver passes; corrections for several choice vectors do not") {
  Draw draw(3);
  for (const std::size_t n : {256, 384, 128 * 70}) {
    CAPTURE(n);
    const Dealt dealt(draw);
    CHECK(passes(extended(draw, dealt, n, [](std::vector<Block>&) {}), dealt, draw.block()));
  }
  int caught = 0, harmless = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const Dealt dealt(draw);
    const std::size_t place = draw.below(3 * 32);
    const Extended ots = extended(draw, dealt, 384, [&](std::vector<Block>& corrections) { corrections[place] ^= Block{8, 0}; });
    bool guessed = true;  // the tree's four bits of delta are all 0: the receiver may pass, and learns just that
    for (unsigned bit = 0; bit < 4; ++bit) guessed = guessed && dealt.offset_bit(4 * static_cast<unsigned>(place / 3) + bit) == 0;
    CHECK(passes(ots, dealt, draw.block()) == guessed);
    ++(guessed ? harmless : caught);
  }
  CHECK((caught > 150 && harmless > 0));
}

TEST_CASE("sizes that cannot be checked are refused") {
  const std::vector<Block> t(512);
  const std::vector<std::uint8_t> bits(512);
  const Delta delta(Block{1, 2});
  for (const std::size_t n : {0, 1, 128, 255, 257, 300}) {
    CHECK_THROWS_AS(hash_rows(kernels(), {}, std::span(t).first(n), bits.data()), std::invalid_argument);
    CHECK_THROWS_AS(expected_rows(kernels(), {}, std::span(t).first(n), delta, {}), std::invalid_argument);
  }
}
