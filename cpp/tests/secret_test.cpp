#include "deepseal/secret.hpp"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "draw.hpp"
#include "test.hpp"

using deepseal::Block;
using deepseal::Delta;
using deepseal::testing::Draw;

static_assert(!std::is_copy_constructible_v<Delta> && !std::is_copy_assignable_v<Delta>);
static_assert(!std::is_move_constructible_v<Delta> && !std::is_move_assignable_v<Delta>);

TEST_CASE("random bytes: every byte is filled, two draws differ, nothing is asked for nothing") {
  std::vector<std::uint8_t> seen(1000), drawn(1000), other(1000);
  for (int i = 0; i < 16; ++i) {  // a byte stays 0 by chance with probability 2^-128
    deepseal::random_bytes(drawn.data(), drawn.size());
    for (std::size_t j = 0; j < seen.size(); ++j) seen[j] |= drawn[j];
  }
  CHECK(std::count(seen.begin(), seen.end(), 0) == 0);
  deepseal::random_bytes(other.data(), other.size());
  CHECK(drawn != other);
  deepseal::random_bytes(nullptr, 0);
}

TEST_CASE("wipe: the bytes and no others") {
  std::vector<std::uint8_t> memory(40, 7);
  deepseal::wipe(memory.data() + 3, 30);
  for (std::size_t i = 0; i < memory.size(); ++i) CHECK(memory[i] == (i >= 3 && i < 33 ? 0 : 7));
}

TEST_CASE("delta chooses row by row, and its bit 0 is always 1") {
  Draw draw(1);
  for (const std::size_t width : {1, 16, 33}) {
    CAPTURE(width);
    const Block value = draw.block();
    std::vector<std::uint8_t> zeros(128 * width), ones(128 * width), out(128 * width);
    for (std::size_t i = 0; i < zeros.size(); ++i) {
      zeros[i] = static_cast<std::uint8_t>(draw.word());
      ones[i] = static_cast<std::uint8_t>(draw.word());
    }
    for (const std::uint64_t lowest : {0, 1}) {
      Delta(Block{(value.low & ~std::uint64_t{1}) | lowest, value.high}).choose(zeros.data(), ones.data(), width, out.data());
      bool right = true;
      for (std::size_t i = 0; i < 128; ++i) {
        const bool bit = i == 0 || ((i < 64 ? value.low >> i : value.high >> (i - 64)) & 1) != 0;
        for (std::size_t j = 0; j < width; ++j)
          right = right && out[i * width + j] == (bit ? ones : zeros)[i * width + j];
      }
      CHECK(right);
    }
  }
}

TEST_CASE("drawn deltas differ") {
  const std::vector<std::uint8_t> zeros(128, 0), ones(128, 1);
  std::vector<std::uint8_t> first(128), second(128);
  Delta().choose(zeros.data(), ones.data(), 1, first.data());
  Delta().choose(zeros.data(), ones.data(), 1, second.data());
  CHECK(first != second);
  CHECK((first[0] == 1 && second[0] == 1));
}
