#include "deepseal/linear_ot.hpp"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "draw.hpp"
#include "test.hpp"

using namespace deepseal;
using deepseal::testing::Draw;

namespace {

constexpr Block seed{3, 4};

struct Layer {
  std::size_t sources;
  std::size_t outputs;
  std::size_t widest;  // connections of an element
  bool dense;
};

std::shared_ptr<const Connections> drawn(Draw& draw, const Layer& layer, std::vector<std::vector<std::uint32_t>>& targets) {
  std::vector<std::uint64_t> starts{0};
  std::vector<std::uint32_t> flat;
  targets.assign(layer.sources, {});
  for (auto& row : targets) {
    const std::size_t degree = layer.dense ? layer.outputs : draw.below(layer.widest + 1);
    for (std::size_t j = 0; j < degree; ++j)
      row.push_back(layer.dense ? static_cast<std::uint32_t>(j) : draw.below(layer.outputs));
    flat.insert(flat.end(), row.begin(), row.end());
    starts.push_back(flat.size());
  }
  return std::make_shared<const Connections>(std::move(starts), std::move(flat), layer.outputs);
}

// Both parties on one sample; the message has exactly its size, so that a sanitizer sees what reaches beyond it.
void check_layer(Draw& draw, const Kernels& tested, const Layer& layer, unsigned l, unsigned k, bool is_signed) {
  const SessionKeys session(tested, seed);
  const Block offset = {draw.word() | 1, draw.word()};
  const Delta delta(offset);
  std::vector<std::vector<std::uint32_t>> targets;
  const auto shape = drawn(draw, layer, targets);
  std::vector<std::int64_t> weights(shape->count());
  for (auto& weight : weights) weight = static_cast<std::int64_t>(draw.below(255)) - 127;
  const std::vector<std::uint8_t> bits = draw.bits(k * layer.sources);
  const std::vector<Block> zero = draw.blocks(k * layer.sources);
  std::vector<Block> active = zero;
  for (std::size_t i = 0; i < active.size(); ++i) active[i] ^= mask(bits[i]) & offset;

  std::vector<std::uint64_t> wanted(layer.outputs), shares(layer.outputs);
  std::size_t place = 0;
  for (std::size_t i = 0; i < layer.sources; ++i) {
    std::uint64_t x = 0;
    for (unsigned b = 0; b < k; ++b) {
      const std::uint64_t value = std::uint64_t{bits[b * layer.sources + i]} << b;
      x += is_signed && b == k - 1 ? 0 - value : value;
    }
    for (const std::uint32_t target : targets[i]) wanted[target] += x * static_cast<std::uint64_t>(weights[place++]);
  }

  LinearOt sender(session, shape, l, k, is_signed, 7), receiver(SessionKeys(kernels("portable"), seed), shape, l, k, is_signed, 7);
  const std::size_t cut = draw.below(layer.sources + 1);
  for (const auto& [first, last] : {std::pair{std::size_t{0}, cut}, std::pair{cut, layer.sources}}) {
    std::vector<std::uint8_t> message(sender.message_bytes(first, last));
    sender.send(delta, weights, first, last, zero.data(), layer.sources, shares.data(), message.data());
    receiver.receive(first, last, active.data(), layer.sources, message, shares.data());
  }
  const std::uint64_t ring = l == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << l) - 1;
  for (std::size_t i = 0; i < layer.outputs; ++i) CHECK(((shares[i] - wanted[i]) & ring) == 0);
}

}  // namespace

TEST_CASE("the parties' shares add up to W x, on every kernel, ring and length of row") {
  Draw draw(1);
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    for (unsigned l = 2; l <= 64; ++l) {
      CAPTURE(l);
      const unsigned k = 1 + draw.below(std::min(l, 12U));
      check_layer(draw, *tested, {5, 9, 40, false}, l, k, l % 2 == 0);
      check_layer(draw, *tested, {3, 1 + draw.below(70), 0, true}, l, k, l % 3 == 0);
    }
  }
}

TEST_CASE("rows that a key does not outlast, and rows of several keys") {
  Draw draw(2);
  for (const std::size_t outputs : {1000, 20000, 40000}) {
    CAPTURE(outputs);
    check_layer(draw, kernels(), {4, outputs, 0, true}, 24, 8, false);
  }
  check_layer(draw, kernels(), {3, 20000, 0, true}, 40, 5, true);
}

TEST_CASE("shapes that do not fit are refused") {
  CHECK_THROWS_AS(Connections({}, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(Connections({1, 1}, {0}, 1), std::invalid_argument);
  CHECK_THROWS_AS(Connections({0, 2}, {0}, 1), std::invalid_argument);
  CHECK_THROWS_AS(Connections({0, 1}, {1}, 1), std::invalid_argument);
  const auto shape = std::make_shared<const Connections>(std::vector<std::uint64_t>{0, 1}, std::vector<std::uint32_t>{0}, 1);
  const SessionKeys session(kernels(), seed);
  CHECK_THROWS_AS(LinearOt(session, shape, 1, 1, false, 0), std::invalid_argument);
  CHECK_THROWS_AS(LinearOt(session, shape, 65, 1, false, 0), std::invalid_argument);
  CHECK_THROWS_AS(LinearOt(session, shape, 8, 9, false, 0), std::invalid_argument);
  CHECK_THROWS_AS(LinearOt(session, shape, 8, 8, false, std::uint64_t{1} << 32), std::invalid_argument);
}
