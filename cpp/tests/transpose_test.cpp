#include "deepseal/transpose.hpp"

#include <algorithm>
#include <vector>

#include "draw.hpp"
#include "test.hpp"

using deepseal::Block;
using deepseal::testing::Draw;

namespace {

bool bit_of(Block x, unsigned i) { return ((i < 64 ? x.low >> i : x.high >> (i - 64)) & 1) != 0; }

Block one_bit(unsigned i) { return i < 64 ? Block{std::uint64_t{1} << i, 0} : Block{0, std::uint64_t{1} << (i - 64)}; }

}  // namespace

TEST_CASE("each single bit goes to its own place and nowhere else") {
  bool right = true;
  for (unsigned row = 0; row < 128; ++row)
    for (unsigned column = 0; column < 128; ++column) {
      Block rows[128] = {};
      Block out[128];
      rows[row] = one_bit(column);
      deepseal::transpose(rows, 1, out);
      for (unsigned i = 0; i < 128; ++i) right = right && out[i] == (i == column ? one_bit(row) : Block{});
    }
  CHECK(right);
}

TEST_CASE("drawn matrices, by the definition, with strides") {
  Draw draw(1);
  for (const std::size_t stride : {1, 2, 32, 33}) {
    CAPTURE(stride);
    const std::vector<Block> rows = draw.blocks(128 * stride);
    Block out[128];
    deepseal::transpose(rows.data(), stride, out);
    bool right = true;
    for (unsigned row = 0; row < 128; ++row)
      for (unsigned i = 0; i < 128; ++i) right = right && bit_of(out[i], row) == bit_of(rows[row * stride], i);
    CHECK(right);
  }
}

TEST_CASE("twice is the identity, in place as well") {
  Draw draw(2);
  const std::vector<Block> rows = draw.blocks(128);
  std::vector<Block> once(128), place = rows;
  deepseal::transpose(rows.data(), 1, once.data());
  deepseal::transpose(place.data(), 1, place.data());
  CHECK(place == once);
  deepseal::transpose(place.data(), 1, place.data());
  CHECK(place == rows);
}
