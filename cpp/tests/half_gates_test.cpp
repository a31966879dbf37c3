#include "deepseal/half_gates.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "netlists.hpp"
#include "test.hpp"
#include "textbook_aes.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

const std::size_t lane_counts[] = {1, 2, 3, 15, 16, 17, 33};
const std::size_t pieces[] = {1, 2, 7, 64, 300, 1 << 20};  // tables
const std::size_t chunks[] = {0, 1, 4, 16, 20};            // lanes

std::shared_ptr<const Plan> plan_of(const Netlist& netlist, Order order) {
  return std::make_shared<Plan>(netlist.view(), order);
}

// One AND gate, and a tree of 2^depth - 1 of them.
Netlist single_and() {
  Netlist netlist{.inputs = 2};
  netlist.outputs = {netlist.add(Op::and_, 0, 1)};
  return netlist;
}

Netlist and_tree(unsigned depth) {
  Netlist netlist{.inputs = 1u << depth};
  std::vector<std::uint32_t> level(netlist.inputs);
  for (std::uint32_t i = 0; i < netlist.inputs; ++i) level[i] = i;
  while (level.size() > 1) {
    for (std::size_t i = 0; i < level.size() / 2; ++i) level[i] = netlist.add(Op::and_, level[2 * i], level[2 * i + 1]);
    level.resize(level.size() / 2);
  }
  netlist.outputs = level;
  return netlist;
}

// (inputs, lanes) bits to (outputs, lanes) bits.
std::vector<std::uint8_t> clear(const Netlist& netlist, std::size_t lanes, const std::vector<std::uint8_t>& bits) {
  std::vector<std::uint8_t> result(netlist.outputs.size() * lanes);
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    std::vector<std::uint8_t> own(netlist.inputs);
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = bits[i * lanes + lane];
    const std::vector<std::uint8_t> out = evaluate_clear(netlist, own);
    for (std::size_t i = 0; i < out.size(); ++i) result[i * lanes + lane] = out[i];
  }
  return result;
}

std::vector<Block> activate(const Parties& parties, const std::vector<Block>& zero, const std::vector<std::uint8_t>& bits) {
  std::vector<Block> active(zero.size());
  parties.garbler->offset(zero.data(), bits.data(), active.data(), zero.size());
  return active;
}

// The scheme again, gate by gate as the paper has it, with the textbook's AES.
struct Textbook {
  Block offset;
  std::uint64_t gate = 0;
  std::uint64_t epoch = ~std::uint64_t{0};
  Block key{};

  Block hash(Block x, Block t) const {
    const Block inner = textbook_aes(key, x);
    return textbook_aes(key, inner ^ t) ^ inner;
  }

  Block garble(Block a, Block b, std::vector<Block>& tables) {
    if (gate >> 12 != epoch) {
      epoch = gate >> 12;
      key = textbook_aes(session_seed, Block{epoch, 1});
    }
    const Block ta{2 * gate, std::uint64_t{1} << 56};
    const Block tb{2 * gate + 1, std::uint64_t{1} << 56};
    ++gate;
    const bool colour_a = a.low & 1;
    const bool colour_b = b.low & 1;
    Block generator = hash(a, ta) ^ hash(a ^ offset, ta);
    if (colour_b) generator ^= offset;
    const Block evaluator = hash(b, tb) ^ hash(b ^ offset, tb) ^ a;
    tables.push_back(generator);
    tables.push_back(evaluator);
    Block c = hash(a, ta) ^ hash(b, tb);
    if (colour_a) c ^= generator;
    if (colour_b) c ^= evaluator ^ a;
    return c;
  }

  // Chunk by chunk of lanes, gate by gate, lane by lane.
  Garbled run(const Plan& plan, std::size_t lanes, const std::vector<Block>& zero, std::size_t chunk = 0) {
    std::vector<Block> slot(plan.slots() * lanes);
    std::copy(zero.begin(), zero.end(), slot.begin());
    const auto at = [&](std::size_t wire, std::size_t lane) -> Block& { return slot[wire * lanes + lane]; };
    Garbled result{{}, std::vector<Block>(plan.outputs().size() * lanes)};
    const std::size_t width = chunk == 0 ? lanes : chunk;
    for (std::size_t start = 0; start < lanes; start += width)
      for (const Step& step : plan.steps())
        for (std::size_t lane = start; lane < std::min(lanes, start + width); ++lane) {
          const Block a = at(step.a, lane);
          const Block b = at(step.b, lane);
          at(step.c, lane) = step.op == Op::and_ ? garble(a, b, result.tables) : step.op == Op::xor_ ? a ^ b : a ^ offset;
        }
    for (std::size_t i = 0; i < plan.outputs().size(); ++i)
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        const Output& output = plan.outputs()[i];
        const Block constant = output.value == 1 ? offset : Block{};
        result.outputs[i * lanes + lane] = output.constant ? constant : at(output.value, lane);
      }
    return result;
  }
};

struct BlockHash {
  std::size_t operator()(Block x) const { return x.low ^ x.high * 0x9e3779b97f4a7c15; }
};

}  // namespace

TEST_CASE("drawn netlists: garble, evaluate, decode is the clear evaluation, whatever kernels, lanes and pieces") {
  Draw draw(1);
  for (const Order order : {Order::given, Order::depth})
    for (const std::size_t lanes : lane_counts) {
      const Netlist netlist = draw_netlist(draw, 1 + draw.below(12), 300, 10);
      const auto plan = plan_of(netlist, order);
      const Block delta = draw.block();
      const std::vector<Block> zero = draw.blocks(netlist.inputs * lanes);
      const std::vector<std::uint8_t> bits = draw.bits(zero.size());
      Textbook textbook{.offset = {delta.low | 1, delta.high}};
      const Garbled reference = textbook.run(*plan, lanes, zero);
      REQUIRE(reference.tables.size() == 2 * lanes * plan->and_gates());
      for (const Kernels* tested : available_kernels())
        for (const std::size_t piece : pieces) {
          CAPTURE(lanes);
          CAPTURE(tested->name);
          CAPTURE(piece);
          const Parties parties(*tested, delta);
          const Garbled garbled = garble(parties, plan, lanes, zero, piece);
          CHECK(garbled.tables == reference.tables);
          CHECK(garbled.outputs == reference.outputs);
          // The evaluator's pieces are others than the garbler's.
          const std::vector<Block> active =
              evaluate(parties, plan, lanes, activate(parties, zero, bits), garbled.tables, piece / 2 + 1);
          std::vector<std::uint8_t> result(active.size());
          CHECK(parties.garbler->decode(garbled.outputs.data(), active.data(), result.data(), active.size()));
          CHECK(result == clear(netlist, lanes, bits));
          CHECK(parties.garbler->gates() == lanes * plan->and_gates());
          CHECK(parties.evaluator->gates() == lanes * plan->and_gates());
        }
    }
}

TEST_CASE("lanes in chunks: the tables come chunk by chunk, the outputs are in the order of the lanes") {
  Draw draw(12);
  for (const Order order : {Order::given, Order::depth})
    for (const std::size_t chunk : chunks)
      for (const std::size_t piece : {1, 11, 5000}) {
        CAPTURE(chunk);
        CAPTURE(piece);
        const std::size_t lanes = 37;
        const Netlist netlist = draw_netlist(draw, 9, 100, 12);
        const auto plan = plan_of(netlist, order);
        const Parties parties(kernels(), draw.block());
        const std::vector<Block> zero = draw.blocks(9 * lanes);
        const std::vector<std::uint8_t> bits = draw.bits(zero.size());
        const Garbled garbled = garble(parties, plan, lanes, zero, piece, chunk);
        const Garbled reference = Textbook{.offset = parties.offset}.run(*plan, lanes, zero, chunk);
        CHECK(garbled.tables == reference.tables);
        CHECK(garbled.outputs == reference.outputs);
        const std::vector<Block> active =
            evaluate(parties, plan, lanes, activate(parties, zero, bits), garbled.tables, piece / 2 + 1, chunk);
        std::vector<std::uint8_t> result(active.size());
        CHECK(parties.garbler->decode(garbled.outputs.data(), active.data(), result.data(), active.size()));
        CHECK(result == clear(netlist, lanes, bits));
      }
}

TEST_CASE("the two parties may have different kernels") {
  Draw draw(2);
  const Netlist netlist = draw_netlist(draw, 8, 200, 8);
  const auto plan = plan_of(netlist, Order::depth);
  const std::vector<Block> zero = draw.blocks(8 * 5);
  const std::vector<std::uint8_t> bits = draw.bits(8 * 5);
  for (const Kernels* left : available_kernels())
    for (const Kernels* right : available_kernels()) {
      const Parties parties(*left, *right, draw.block());
      const Garbled garbled = garble(parties, plan, 5, zero, 50);
      const auto active = evaluate(parties, plan, 5, activate(parties, zero, bits), garbled.tables, 33);
      std::vector<std::uint8_t> result(active.size());
      CHECK(parties.garbler->decode(garbled.outputs.data(), active.data(), result.data(), active.size()));
      CHECK(result == clear(netlist, 5, bits));
    }
}

TEST_CASE("all four rows of a gate under all four colours") {
  Draw draw(3);
  const auto plan = plan_of(single_and(), Order::given);
  for (unsigned colours = 0; colours < 4; ++colours) {
    const Parties parties(kernels(), draw.block());
    std::vector<Block> zero = draw.blocks(2 * 4);
    for (std::size_t lane = 0; lane < 4; ++lane) {
      zero[lane].low = (zero[lane].low & ~std::uint64_t{1}) | (colours & 1);
      zero[4 + lane].low = (zero[4 + lane].low & ~std::uint64_t{1}) | colours >> 1;
    }
    const std::vector<std::uint8_t> bits{0, 0, 1, 1, 0, 1, 0, 1};
    const Garbled garbled = garble(parties, plan, 4, zero, 4);
    const auto active = evaluate(parties, plan, 4, activate(parties, zero, bits), garbled.tables, 4);
    for (std::size_t lane = 0; lane < 4; ++lane) {
      const Block expected = garbled.outputs[lane] ^ (lane == 3 ? parties.offset : Block{});
      CHECK(active[lane] == expected);
      CHECK(((active[lane].low ^ garbled.outputs[lane].low) & 1) == (lane == 3 ? 1 : 0));  // colour decodes
    }
  }
}

TEST_CASE("the counter goes on from run to run, and the key changes after 4,096 gates") {
  Draw draw(4);
  const auto single = plan_of(single_and(), Order::given);
  const auto tree = plan_of(and_tree(8), Order::depth);
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    const Block delta = draw.block();
    const Parties parties(*tested, delta);
    Textbook textbook{.offset = parties.offset};
    std::uint64_t gates = 0;
    const auto step = [&](const std::shared_ptr<const Plan>& plan, std::size_t lanes, std::size_t piece) {
      const std::vector<Block> zero = draw.blocks(plan->inputs() * lanes);
      const std::vector<std::uint8_t> bits = draw.bits(zero.size());
      const Garbled garbled = garble(parties, plan, lanes, zero, piece);
      CHECK(garbled.tables == textbook.run(*plan, lanes, zero).tables);
      const auto active = evaluate(parties, plan, lanes, activate(parties, zero, bits), garbled.tables, piece + 1);
      std::vector<std::uint8_t> result(active.size());
      CHECK(parties.garbler->decode(garbled.outputs.data(), active.data(), result.data(), active.size()));
      gates += lanes * plan->and_gates();
      CHECK(parties.garbler->gates() == gates);
      CHECK(parties.evaluator->gates() == gates);
    };
    step(single, 4000, 5000);
    step(tree, 1, 1000);      // gathered gates, 96 of them before the change
    step(single, 4000, 999);  // lanes
    step(single, 5, 5);
  }
  // The same inputs under another key and another number: no table comes twice.
  const Parties parties(kernels(), draw.block());
  const std::vector<Block> zero(2 * 5000, Block{42, 43});
  const Garbled garbled = garble(parties, single, 5000, zero, 5000);
  const std::unordered_set<Block, BlockHash> different(garbled.tables.begin(), garbled.tables.end());
  CHECK(different.size() == garbled.tables.size());
}

TEST_CASE("own labels: expanded from the seed, offset where the bit is 1") {
  Draw draw(5);
  const Block seed = draw.block();
  for (const Kernels* tested : available_kernels())
    for (const std::size_t n : {0, 1, 33, 100}) {
      const Parties parties(*tested, draw.block());
      const std::vector<std::uint8_t> bits = draw.bits(n);
      std::vector<Block> zero(n), active(n);
      parties.garbler->own_labels(seed, bits.data(), zero.data(), n);
      active_labels(*tested, seed, active.data(), n);
      bool right = true;
      for (std::size_t i = 0; i < n; ++i)
        right = right && active[i] == textbook_aes(seed, Block{i, std::uint64_t{3} << 56}) &&
                zero[i] == (bits[i] == 1 ? active[i] ^ parties.offset : active[i]);
      CHECK(right);
    }
}

TEST_CASE("tables are refused: half ones, more than are left; the run then goes on as if nothing had happened") {
  Draw draw(6);
  const auto plan = plan_of(and_tree(4), Order::given);
  for (const std::size_t lanes : {1, 20}) {
    const Parties parties(kernels(), draw.block());
    const std::vector<Block> zero = draw.blocks(16 * lanes);
    const Garbled garbled = garble(parties, plan, lanes, zero, 1000);
    const std::span<const Block> tables = garbled.tables;
    Evaluation evaluation(parties.evaluator, plan, lanes, zero);
    CHECK(evaluation.tables_left() == 15 * lanes);
    CHECK_THROWS_AS(evaluation.next(tables.first(1)), std::invalid_argument);
    evaluation.next(tables.first(6));
    CHECK(evaluation.tables_left() == 15 * lanes - 3);
    CHECK_THROWS_AS(evaluation.next(tables.first(7)), std::invalid_argument);
    CHECK_THROWS_AS(evaluation.next(tables), std::invalid_argument);
    CHECK_THROWS_AS(evaluation.outputs(), std::logic_error);
    evaluation.next({});
    CHECK(evaluation.tables_left() == 15 * lanes - 3);
    evaluation.next(tables.subspan(6));
    CHECK(evaluation.tables_left() == 0);
    CHECK_THROWS_AS(evaluation.next(tables.first(2)), std::invalid_argument);
    CHECK(std::ranges::equal(evaluation.outputs(), garbled.outputs));  // all inputs were 0
    CHECK(parties.evaluator->gates() == 15 * lanes);
  }
}

TEST_CASE("a garbling gives no outputs before its end, and no tables after it") {
  Draw draw(7);
  const auto plan = plan_of(and_tree(3), Order::depth);
  const Parties parties(kernels(), draw.block());
  const std::vector<Block> zero = draw.blocks(8);
  Garbling garbling(parties.garbler, plan, 1, zero);
  std::vector<Block> room(100);
  CHECK_THROWS_AS(garbling.outputs(), std::logic_error);
  CHECK(garbling.next(std::span(room).first(1)) == 0);  // no room for a table
  CHECK(garbling.next(std::span(room).first(5)) == 2);
  CHECK_THROWS_AS(garbling.outputs(), std::logic_error);
  CHECK(garbling.next(room) == 5);
  CHECK(garbling.next(room) == 0);
  CHECK(garbling.done());
  CHECK(garbling.outputs().size() == 1);
  CHECK(parties.garbler->gates() == 7);
}

TEST_CASE("outputs go where they are wanted, constants, inputs and repeated wires among them; other room is refused") {
  Draw draw(13);
  Netlist netlist{.inputs = 2};
  const std::uint32_t both = netlist.add(Op::and_, 0, 1);
  netlist.outputs = {both, 1, netlist.add(Op::constant, 1), both, netlist.add(Op::not_, both)};
  const auto plan = plan_of(netlist, Order::given);
  const std::size_t lanes = 7;
  for (const std::size_t chunk : {0, 3}) {
    const Parties parties(kernels(), draw.block());
    const std::vector<Block> zero = draw.blocks(2 * lanes);
    std::vector<Block> room(5 * lanes), tables(table_blocks * lanes);
    Garbling garbling(parties.garbler, plan, lanes, zero, chunk, room);
    CHECK(garbling.next(tables) == lanes);
    CHECK(garbling.outputs().data() == room.data());
    const Garbled reference = Textbook{.offset = parties.offset}.run(*plan, lanes, zero, chunk);
    CHECK(room == reference.outputs);
    CHECK(tables == reference.tables);
    for (const std::size_t wrong : {1, 34})
      CHECK_THROWS_AS(Garbling(parties.garbler, plan, lanes, zero, chunk, std::span(room).first(wrong)), std::invalid_argument);
  }
}

TEST_CASE("another number of labels than inputs and lanes is refused, also where the product overflows") {
  const auto plan = plan_of(single_and(), Order::given);
  const Parties parties(kernels(), Block{1, 2});
  const std::vector<Block> labels(4);
  for (const std::size_t size : {0, 1, 3})
    CHECK_THROWS_AS(Garbling(parties.garbler, plan, 2, std::span(labels).first(size)), std::invalid_argument);
  CHECK_THROWS_AS(Garbling(parties.garbler, plan, 0, {}), std::invalid_argument);
  CHECK_THROWS_AS(Evaluation(parties.evaluator, plan, 0, {}), std::invalid_argument);
  CHECK_THROWS_AS(Evaluation(parties.evaluator, plan, std::size_t{1} << 63, {}), std::invalid_argument);
  CHECK_THROWS_AS(Evaluation(parties.evaluator, plan, (std::size_t{1} << 63) + 2, labels), std::invalid_argument);
  const auto empty = std::make_shared<Plan>(Netlist{}.view(), Order::given);
  CHECK(Evaluation(parties.evaluator, empty, 3, {}).outputs().empty());
  Netlist constants;
  constants.outputs = {constants.add(Op::constant, 1), 0};
  const auto no_inputs = plan_of(constants, Order::given);
  CHECK(Evaluation(parties.evaluator, no_inputs, 3, {}).outputs().size() == 6);
  CHECK_THROWS_AS(Evaluation(parties.evaluator, no_inputs, std::size_t{1} << 63, {}), std::invalid_argument);
}

TEST_CASE("constants and aliases as outputs cost no table and decode") {
  Netlist netlist{.inputs = 1};
  const std::uint32_t one = netlist.add(Op::constant, 1);
  netlist.outputs = {one, netlist.add(Op::not_, one), 0, netlist.add(Op::not_, 0)};
  const auto plan = plan_of(netlist, Order::given);
  Draw draw(8);
  const Parties parties(kernels(), draw.block());
  const std::vector<Block> zero = draw.blocks(2);
  const Garbled garbled = garble(parties, plan, 2, zero, 4);
  CHECK(garbled.tables.empty());
  const auto active = evaluate(parties, plan, 2, activate(parties, zero, {0, 1}), {}, 1);
  std::vector<std::uint8_t> result(8);
  CHECK(parties.garbler->decode(garbled.outputs.data(), active.data(), result.data(), 8));
  CHECK(result == std::vector<std::uint8_t>{1, 1, 0, 0, 0, 1, 1, 0});
}

TEST_CASE("a flipped bit of a table spoils the label where the half is used, and decoding says so") {
  Draw draw(9);
  const auto plan = plan_of(single_and(), Order::given);
  int spoilt = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const Parties parties(kernels(), draw.block());
    const std::vector<Block> zero = draw.blocks(2);
    const std::vector<Block> active = activate(parties, zero, draw.bits(2));
    Garbled garbled = garble(parties, plan, 1, zero, 1);
    const std::size_t half = draw.below(2);
    garbled.tables[half].high ^= std::uint64_t{1} << draw.below(64);
    const auto out = evaluate(parties, plan, 1, active, garbled.tables, 1);
    std::uint8_t bit = 2;
    const bool used = (active[half].low & 1) != 0;
    CHECK(parties.garbler->decode(garbled.outputs.data(), out.data(), &bit, 1) == !used);
    CHECK(bit <= 1);
    spoilt += used;
  }
  CHECK((spoilt > 50 && spoilt < 150));
}

TEST_CASE("delta is nowhere in what the evaluator sees, nor between two blocks of it") {
  Draw draw(10);
  const Netlist netlist = draw_netlist(draw, 20, 2000, 40);
  const auto plan = plan_of(netlist, Order::given);
  const std::size_t lanes = 4;
  const Parties parties(kernels(), draw.block());
  const std::vector<Block> zero = draw.blocks(netlist.inputs * lanes);
  const std::vector<Block> active = activate(parties, zero, draw.bits(zero.size()));
  const Garbled garbled = garble(parties, plan, lanes, zero, 100);
  const auto out = evaluate(parties, plan, lanes, active, garbled.tables, 100);
  std::unordered_set<Block, BlockHash> seen;
  for (const auto* blocks : {&active, &garbled.tables, &out}) seen.insert(blocks->begin(), blocks->end());
  CHECK(seen.size() > 2 * lanes * plan->and_gates());
  CHECK(!seen.contains(parties.offset));
  CHECK(std::ranges::none_of(seen, [&](Block x) { return seen.contains(x ^ parties.offset); }));
}

namespace {

// A half gate as the paper has it, with the textbook's AES; half gate i of a session has the tweak of half i of a gate.
struct TextbookHalves {
  Block offset;
  std::uint64_t half = 0;

  Block hash(Block x) const {
    const Block key = textbook_aes(session_seed, Block{half >> 13, 1});
    const Block inner = textbook_aes(key, x);
    return textbook_aes(key, inner ^ Block{half, std::uint64_t{1} << 56}) ^ inner;
  }

  // The generator knows the bit: the table and the zero label.
  std::pair<Block, Block> generator(Block a, bool bit) {
    Block table = hash(a) ^ hash(a ^ offset);
    if (bit) table ^= offset;
    Block c = hash(a);
    if ((a.low & 1) == 1) c ^= table;
    ++half;
    return {table, c};
  }

  std::pair<Block, Block> evaluator(Block a, Block b) {
    const std::pair<Block, Block> result{hash(b) ^ hash(b ^ offset) ^ a, hash(b)};
    ++half;
    return result;
  }

  void whole_gate() { half += half & 1; }
};

}  // namespace

TEST_CASE("half gates: one block of table, the paper's bytes, the right bits, whatever kernels; the counter goes on") {
  Draw draw(20);
  for (const Kernels* tested : available_kernels()) {
    CAPTURE(tested->name);
    const Parties parties(*tested, draw.block());
    TextbookHalves textbook{parties.offset};
    std::uint64_t gates = 0;
    const auto step = [&](std::size_t n, bool ours, bool in_place) {
      CAPTURE(n);
      const std::vector<Block> a = draw.blocks(n), b = draw.blocks(n);
      const std::vector<std::uint8_t> x = draw.bits(n), y = draw.bits(n);
      const std::vector<Block> active_a = activate(parties, a, x), active_b = activate(parties, b, y);
      std::vector<Block> zero = in_place ? a : std::vector<Block>(n), active = in_place ? active_a : std::vector<Block>(n);
      std::vector<Block> tables(n), expected_tables(n), expected(n);
      const Block* from = in_place ? zero.data() : a.data();
      const Block* active_from = in_place ? active.data() : active_a.data();
      for (std::size_t i = 0; i < n; ++i)
        std::tie(expected_tables[i], expected[i]) = ours ? textbook.generator(a[i], y[i] == 1) : textbook.evaluator(a[i], b[i]);
      textbook.whole_gate();
      if (ours) {
        parties.garbler->and_own(from, y.data(), zero.data(), tables.data(), n);
        parties.evaluator->and_peer(active_from, tables.data(), active.data(), n);
      } else {
        parties.garbler->and_peer(from, b.data(), zero.data(), tables.data(), n);
        parties.evaluator->and_own(active_from, active_b.data(), y.data(), tables.data(), active.data(), n);
      }
      CHECK(tables == expected_tables);
      CHECK(zero == expected);
      std::vector<std::uint8_t> bits(n), wanted(n);
      for (std::size_t i = 0; i < n; ++i) wanted[i] = x[i] & y[i];
      CHECK(parties.garbler->decode(zero.data(), active.data(), bits.data(), n));
      CHECK(bits == wanted);
      gates += (n + 1) / 2;
      CHECK(parties.garbler->gates() == gates);
      CHECK(parties.evaluator->gates() == gates);
    };
    for (const std::size_t n : {0, 1, 2, 33, 255, 256, 257, 1000})
      for (const bool ours : {true, false}) step(n, ours, n % 2 == 1);
    step(8000, true, false);  // across the change of the key
    step(9000, false, true);
  }
}

TEST_CASE("half gates and whole gates share one counter: no tweak comes twice") {
  Draw draw(21);
  const auto single = plan_of(single_and(), Order::given);
  const Parties parties(kernels(), draw.block());
  std::vector<Block> tables(7);
  std::vector<Block> c(7);
  const std::vector<Block> a = draw.blocks(7);
  parties.garbler->and_own(a.data(), draw.bits(7).data(), c.data(), tables.data(), 7);
  const std::vector<Block> zero = draw.blocks(2 * 20);
  Textbook textbook{.offset = parties.offset, .gate = 4};
  CHECK(garble(parties, single, 20, zero, 20).tables == textbook.run(*single, 20, zero).tables);
  TextbookHalves halves{parties.offset, 2 * 24};
  parties.garbler->and_peer(a.data(), zero.data(), c.data(), tables.data(), 1);
  CHECK(tables[0] == halves.evaluator(a[0], zero[0]).first);
}

TEST_CASE("the tables of half gates do not hold delta, nor do two blocks of what the evaluator sees differ by it") {
  Draw draw(22);
  const std::size_t n = 5000;
  const Parties parties(kernels(), draw.block());
  const std::vector<Block> a = draw.blocks(n), b = draw.blocks(n);
  const std::vector<std::uint8_t> bits = draw.bits(n);
  const std::vector<Block> active_a = activate(parties, a, draw.bits(n)), active_b = activate(parties, b, bits);
  std::unordered_set<Block, BlockHash> seen;
  for (const bool ours : {true, false}) {
    std::vector<Block> zero(n), active(n), tables(n);
    if (ours) {
      parties.garbler->and_own(a.data(), bits.data(), zero.data(), tables.data(), n);
      parties.evaluator->and_peer(active_a.data(), tables.data(), active.data(), n);
    } else {
      parties.garbler->and_peer(a.data(), b.data(), zero.data(), tables.data(), n);
      parties.evaluator->and_own(active_a.data(), active_b.data(), bits.data(), tables.data(), active.data(), n);
    }
    for (const std::vector<Block>& blocks : {active_a, active_b, tables, active}) seen.insert(blocks.begin(), blocks.end());
  }
  CHECK(seen.size() > 5 * n);
  CHECK(!seen.contains(parties.offset));
  CHECK(std::ranges::none_of(seen, [&](Block x) { return seen.contains(x ^ parties.offset); }));
}
