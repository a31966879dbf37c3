// What the other party sees looks drawn: chi-square tests on bytes, with fixed seeds, at a level of 10^-6 on each side.
#include <array>
#include <cmath>
#include <cstring>

#include "deepseal/ot_keys.hpp"
#include "netlists.hpp"
#include "test.hpp"
#include "transfer.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

constexpr double quantile = 4.753;  // of the normal distribution, 10^-6 above it

// Wilson and Hilferty, "The distribution of chi-square", PNAS 17 (1931): its cube root is nearly normal.
bool plausible(double chi_square, double degrees) {
  const double spread = 2 / (9 * degrees);
  return std::abs(std::cbrt(chi_square / degrees) - (1 - spread)) < quantile * std::sqrt(spread);
}

template <std::size_t N>
double chi_square(const std::array<std::size_t, N>& counts, double expected) {
  double sum = 0;
  for (const std::size_t count : counts) sum += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected);
  return sum / expected;
}

bool uniform_bytes(std::span<const Block> blocks) {
  std::array<std::size_t, 256> counts{};
  for (const Block& block : blocks) {
    std::uint8_t bytes[16];
    std::memcpy(bytes, &block, sizeof bytes);
    for (const std::uint8_t byte : bytes) ++counts[byte];
  }
  return plausible(chi_square(counts, static_cast<double>(blocks.size()) * 16 / 256), 255);
}

// Each of the 128 bits is 1 in half of the blocks: a sum of 128 squares that are nearly normal.
bool balanced_bits(std::span<const Block> blocks) {
  const auto n = static_cast<double>(blocks.size());
  double sum = 0;
  for (unsigned bit = 0; bit < 128; ++bit) {
    std::size_t ones = 0;
    for (const Block& block : blocks) ones += (bit < 64 ? block.low >> bit : block.high >> (bit - 64)) & 1;
    const double score = (static_cast<double>(ones) - n / 2) / std::sqrt(n / 4);
    sum += score * score;
  }
  return plausible(sum, 128);
}

bool looks_drawn(std::span<const Block> blocks) { return uniform_bytes(blocks) && balanced_bits(blocks); }

constexpr std::size_t many = 1 << 16;  // blocks, 1 MiB

}  // namespace

TEST_CASE("the tests themselves: pass the Mersenne Twister, fail a bias of 2.5 % in one bit, zeros and a counter") {
  Draw draw(1);
  std::vector<Block> blocks = draw.blocks(many);
  CHECK(looks_drawn(blocks));
  std::vector<Block> biased = blocks;
  for (Block& block : biased)
    if (draw.below(20) == 0) block.low |= 1 << 5;
  CHECK(!looks_drawn(biased));
  CHECK(!looks_drawn(std::vector<Block>(many)));
  for (std::size_t i = 0; i < many; ++i) blocks[i] = {i, i << 20};
  CHECK(!looks_drawn(blocks));
}

TEST_CASE("tables, active labels and output labels, whatever the inputs") {
  Draw draw(2);
  Netlist netlist{.inputs = 2};
  const std::uint32_t both = netlist.add(Op::and_, 0, 1);
  netlist.outputs = {both, netlist.add(Op::and_, netlist.add(Op::xor_, both, 0), netlist.add(Op::not_, 1))};
  const auto plan = std::make_shared<Plan>(netlist.view(), Order::given);
  const std::size_t lanes = many / 4;
  for (const unsigned inputs : {0u, 1u, 2u, 3u}) {
    CAPTURE(inputs);
    const Parties parties(kernels(), draw.block());
    std::vector<std::uint8_t> bits(2 * lanes);
    std::fill(bits.begin(), bits.begin() + static_cast<std::ptrdiff_t>(lanes), inputs & 1);
    std::fill(bits.begin() + static_cast<std::ptrdiff_t>(lanes), bits.end(), inputs >> 1);
    std::vector<Block> zero(2 * lanes), active(2 * lanes);
    const Block seed = draw.block();
    parties.garbler->own_labels(seed, bits.data(), zero.data(), zero.size());
    active_labels(kernels(), seed, active.data(), active.size());
    const Garbled garbled = garble(parties, plan, lanes, zero, 4096);
    const std::vector<Block> out = evaluate(parties, plan, lanes, active, garbled.tables, 4096);
    CHECK(garbled.tables.size() == many);
    CHECK(looks_drawn(garbled.tables));
    CHECK(looks_drawn(active));
    CHECK(looks_drawn(out));
    CHECK(looks_drawn(garbled.outputs));  // their colour bits as well
  }
}

TEST_CASE("related labels, all from a counter: tables still look drawn") {
  Draw draw(3);
  Netlist netlist{.inputs = 2};
  netlist.outputs = {netlist.add(Op::and_, 0, 1)};
  const auto plan = std::make_shared<Plan>(netlist.view(), Order::given);
  const std::size_t lanes = many / 2;
  std::vector<Block> zero(2 * lanes);
  for (std::size_t i = 0; i < lanes; ++i) {
    zero[i] = {i, 0};
    zero[lanes + i] = {0, i};
  }
  const Parties parties(kernels(), Block{1, 0});  // delta alone in the lowest bit
  const Garbled garbled = garble(parties, plan, lanes, zero, 4096);
  std::vector<Block> tables = garbled.tables;
  for (std::size_t i = 0; i < lanes; ++i) tables[2 * i + 1] ^= zero[i];  // the scheme adds a0 itself
  CHECK(looks_drawn(tables));
}

TEST_CASE("OT: corrections, t, q, the unchosen keys, and how they differ from the chosen ones") {
  Draw draw(4);
  for (const std::uint8_t choice : {std::uint8_t{0}, std::uint8_t{1}}) {
    for (const unsigned k : {1u, 8u}) {
      CAPTURE(static_cast<int>(choice));
      CAPTURE(k);
      const Dealt dealt(draw);
      const SessionKeys session(kernels(), session_seed);
      CotReceiver receiver(session, k, dealt.pairs);
      CotSender sender(session, k, dealt.delta, dealt.keys, receiver.opening());
      const std::vector<std::uint8_t> bits(many, choice);
      std::vector<Block> t(many), q(many), corrections, pairs(2 * many), unchosen(many), differences(many);
      corrections.resize(receiver.correction_blocks(many));
      receiver.extend(bits.data(), many, t.data(), corrections.data());
      sender.extend(corrections, many, q.data());
      OtKeys keys(session);
      keys.pairs(*dealt.delta, q.data(), 0, 0, pairs.data(), many);
      for (std::size_t i = 0; i < many; ++i) {
        unchosen[i] = pairs[2 * i + 1 - choice];
        differences[i] = pairs[2 * i] ^ pairs[2 * i + 1];
      }
      for (const auto* blocks : {&corrections, &t, &q, &unchosen, &differences}) CHECK(looks_drawn(*blocks));
    }
  }
}

TEST_CASE("ring: the message for values that are all zero") {
  Draw draw(5);
  const RingOt ring(SessionKeys(kernels(), session_seed), 32, 64);
  const std::size_t n = many / 16;  // rows of 16 blocks
  const std::vector<Block> keys = draw.blocks(2 * n);
  const std::vector<std::uint64_t> values(n * 64);
  std::vector<std::uint64_t> shares(n * 64);
  std::vector<std::uint8_t> message(n * ring.row_bytes());
  ring.send(keys, values, shares.data(), message.data());
  std::vector<Block> blocks(message.size() / sizeof(Block));
  std::memcpy(blocks.data(), message.data(), message.size());
  CHECK(blocks.size() == many);
  CHECK(looks_drawn(blocks));
}
