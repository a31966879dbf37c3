// Test data drawn from fixed seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "deepseal/block.hpp"

namespace deepseal::testing {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t word() { return engine_(); }
  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(engine_() % n); }

  Block block() {
    const std::uint64_t low = word();
    return {low, word()};
  }

  std::vector<Block> blocks(std::size_t n) {
    std::vector<Block> all(n);
    for (Block& one : all) one = block();
    return all;
  }

  // One a byte.
  std::vector<std::uint8_t> bits(std::size_t n) {
    std::vector<std::uint8_t> all(n);
    for (std::uint8_t& one : all) one = word() & 1;
    return all;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace deepseal::testing
