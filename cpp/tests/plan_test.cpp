#include "deepseal/plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "netlists.hpp"
#include "test.hpp"

using deepseal::NetlistView;
using deepseal::Op;
using deepseal::Order;
using deepseal::Output;
using deepseal::Plan;
using deepseal::Step;
using deepseal::testing::Draw;
using deepseal::testing::draw_netlist;
using deepseal::testing::evaluate_clear;
using deepseal::testing::Netlist;

namespace {

// x and y are inputs; zero and one are constants of the netlist.
constexpr std::uint32_t x = 0, y = 1, zero = 2, one = 3;

Netlist small() {
  Netlist netlist{.inputs = 2};
  netlist.add(Op::constant, 0);
  netlist.add(Op::constant, 1);
  return netlist;
}

// The plan of one gate on x, y, zero, one.
Plan folded(Op op, std::uint32_t a, std::uint32_t b = 0) {
  Netlist netlist = small();
  netlist.outputs = {netlist.add(op, a, b)};
  return Plan(netlist.view(), Order::given);
}

bool is_constant(const Plan& plan, std::uint32_t bit) {
  const Output& output = plan.outputs()[0];
  return plan.steps().empty() && output.constant && output.value == bit;
}

bool is_alias(const Plan& plan, std::uint32_t input) {
  const Output& output = plan.outputs()[0];
  return plan.steps().empty() && !output.constant && output.value == input;
}

bool is_gate(const Plan& plan, Op op, std::uint32_t a, std::uint32_t b) {
  const Output& output = plan.outputs()[0];
  if (plan.steps().size() != 1 || output.constant) return false;
  const Step& step = plan.steps()[0];
  return step.op == op && step.a == a && step.b == b && step.c == output.value;
}

// What Replay does, on bits.
std::vector<std::uint8_t> run(const Plan& plan, std::span<const std::uint8_t> bits) {
  std::vector<std::uint8_t> slot(plan.slots());
  std::copy(bits.begin(), bits.end(), slot.begin());
  for (const Step& step : plan.steps()) {
    const std::uint8_t a = slot.at(step.a);
    const std::uint8_t b = slot.at(step.b);
    slot.at(step.c) = step.op == Op::and_ ? a & b : step.op == Op::xor_ ? a ^ b : a ^ 1;
  }
  std::vector<std::uint8_t> result;
  for (const Output& output : plan.outputs())
    result.push_back(output.constant ? static_cast<std::uint8_t>(output.value) : slot.at(output.value));
  return result;
}

bool refused(const NetlistView& netlist) {
  try {
    Plan(netlist, Order::given);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("folding: XOR") {
  CHECK(is_constant(folded(Op::xor_, x, x), 0));
  CHECK(is_alias(folded(Op::xor_, x, zero), x));
  CHECK(is_alias(folded(Op::xor_, zero, y), y));
  CHECK(is_gate(folded(Op::xor_, x, one), Op::not_, x, x));
  CHECK(is_gate(folded(Op::xor_, one, y), Op::not_, y, y));
  CHECK(is_constant(folded(Op::xor_, one, zero), 1));
  CHECK(is_constant(folded(Op::xor_, one, one), 0));
  CHECK(is_gate(folded(Op::xor_, x, y), Op::xor_, x, y));
}

TEST_CASE("folding: AND") {
  CHECK(is_alias(folded(Op::and_, x, x), x));
  CHECK(is_constant(folded(Op::and_, x, zero), 0));
  CHECK(is_constant(folded(Op::and_, zero, y), 0));
  CHECK(is_alias(folded(Op::and_, x, one), x));
  CHECK(is_alias(folded(Op::and_, one, y), y));
  CHECK(is_constant(folded(Op::and_, one, one), 1));
  CHECK(is_constant(folded(Op::and_, one, zero), 0));
  CHECK(is_gate(folded(Op::and_, x, y), Op::and_, x, y));
}

TEST_CASE("folding: NOT, COPY, CONST") {
  CHECK(is_constant(folded(Op::not_, zero), 1));
  CHECK(is_constant(folded(Op::not_, one), 0));
  CHECK(is_gate(folded(Op::not_, y), Op::not_, y, y));
  CHECK(is_alias(folded(Op::copy, y), y));
  CHECK(is_constant(folded(Op::copy, one), 1));
  CHECK(is_constant(folded(Op::constant, 1), 1));
}

TEST_CASE("folding sees through aliases, and does no more than its rules") {
  Netlist netlist = small();
  const std::uint32_t alias = netlist.add(Op::copy, netlist.add(Op::and_, x, one));
  netlist.outputs = {netlist.add(Op::xor_, alias, x), netlist.add(Op::and_, x, alias)};
  const Plan through(netlist.view(), Order::given);
  CHECK(through.steps().empty());
  CHECK(through.outputs()[0].constant);
  CHECK(!through.outputs()[1].constant);

  Netlist kept{.inputs = 2};
  kept.outputs = {kept.add(Op::not_, kept.add(Op::not_, x)), kept.add(Op::and_, x, y), kept.add(Op::and_, x, y)};
  const Plan plan(kept.view(), Order::given);
  CHECK(plan.steps().size() == 4);
  CHECK(plan.and_gates() == 2);
}

TEST_CASE("dead gates are dropped, what only they read as well") {
  Netlist netlist{.inputs = 3};
  const std::uint32_t alive = netlist.add(Op::and_, 0, 1);
  const std::uint32_t feeder = netlist.add(Op::xor_, 1, 2);
  netlist.add(Op::and_, feeder, alive);
  netlist.outputs = {alive};
  const Plan plan(netlist.view(), Order::given);
  CHECK(plan.steps().size() == 1);
  CHECK(plan.and_gates() == 1);
  CHECK(plan.depth() == 1);

  netlist.outputs = {};
  CHECK(Plan(netlist.view(), Order::depth).steps().empty());
}

TEST_CASE("a gate that folding made needless is dead") {
  Netlist netlist = small();
  const std::uint32_t product = netlist.add(Op::and_, x, y);
  netlist.outputs = {netlist.add(Op::and_, product, zero)};
  CHECK(is_constant(Plan(netlist.view(), Order::given), 0));
}

TEST_CASE("slots are used again: a chain needs one beside its inputs and its output") {
  Netlist netlist{.inputs = 2};
  std::uint32_t last = 0;
  for (int i = 0; i < 1000; ++i) last = netlist.add(i % 3 == 0 ? Op::and_ : i % 3 == 1 ? Op::xor_ : Op::not_, last, 1);
  netlist.outputs = {last};
  for (const Order order : {Order::given, Order::depth}) {
    const Plan plan(netlist.view(), order);
    CHECK(plan.temporaries() == 1);
    CHECK(plan.slots() == 4);
  }
}

TEST_CASE("no step writes an input or, twice, an output; each output has its slot") {
  Draw draw(3);
  for (int i = 0; i < 100; ++i) {
    CAPTURE(i);
    const Netlist netlist = draw_netlist(draw, 1 + draw.below(8), 200, 10);
    for (const Order order : {Order::given, Order::depth}) {
      const Plan plan(netlist.view(), order);
      std::vector<unsigned> written(plan.slots());
      for (const Step& step : plan.steps()) ++written.at(step.c);
      const auto is_written_once = [](unsigned times) { return times <= 1; };
      const auto outputs = written.begin() + plan.inputs();
      CHECK(std::all_of(written.begin(), outputs, [](unsigned times) { return times == 0; }));
      CHECK(std::all_of(outputs, outputs + 10, is_written_once));
      for (std::uint32_t o = 0; o < 10; ++o) {
        const Output& output = plan.outputs()[o];
        CHECK((output.constant || output.value <= plan.inputs() + o));
      }
    }
  }
  Netlist netlist{.inputs = 3};
  const std::uint32_t first = netlist.add(Op::xor_, 0, 1);
  netlist.outputs = {0, first, netlist.add(Op::and_, first, 1), first};
  const Plan plan(netlist.view(), Order::given);
  const std::uint32_t expected[] = {0, 4, 5, 4};
  for (std::size_t o = 0; o < 4; ++o) CHECK(plan.outputs()[o].value == expected[o]);
  CHECK(plan.temporaries() == 0);
}

TEST_CASE("orders: as given, or by AND-depth and stable") {
  Netlist netlist{.inputs = 6};
  const std::uint32_t deep = netlist.add(Op::and_, netlist.add(Op::and_, 0, 1), 2);
  netlist.outputs = {0, 1, 2, 3, 4, 5, deep, netlist.add(Op::and_, 3, 4), netlist.add(Op::and_, 1, 5)};
  const auto operands = [&](Order order) {  // inputs stay in their slots, as they are outputs
    std::vector<std::uint32_t> second;
    const Plan plan(netlist.view(), order);
    for (const Step& step : plan.steps()) second.push_back(step.b);
    return second;
  };
  CHECK(operands(Order::given) == std::vector<std::uint32_t>{1, 2, 4, 5});
  CHECK(operands(Order::depth) == std::vector<std::uint32_t>{1, 4, 5, 2});
}

TEST_CASE("by depth, the ANDs of a level come before what is free on it") {
  Draw draw(1);
  for (int i = 0; i < 50; ++i) {
    const Plan plan(draw_netlist(draw, 10, 500, 10).view(), Order::depth);
    const auto key = [](const Step& step) { return std::tuple(step.level, step.op != Op::and_); };
    CHECK(std::ranges::is_sorted(plan.steps(), {}, key));
    CHECK((plan.steps().empty() || plan.steps().back().level == plan.depth()));
  }
}

TEST_CASE("drawn netlists: plans of both orders compute what the netlist does") {
  Draw draw(2);
  for (int i = 0; i < 300; ++i) {
    CAPTURE(i);
    const Netlist netlist = draw_netlist(draw, 1 + draw.below(20), draw.below(400), draw.below(12));
    const Plan given(netlist.view(), Order::given);
    const Plan depth(netlist.view(), Order::depth);
    CHECK(given.and_gates() == depth.and_gates());
    CHECK(given.depth() == depth.depth());
    CHECK(given.inputs() == netlist.inputs);
    for (int trial = 0; trial < 4; ++trial) {
      const std::vector<std::uint8_t> bits = draw.bits(netlist.inputs);
      const std::vector<std::uint8_t> expected = evaluate_clear(netlist, bits);
      CHECK(run(given, bits) == expected);
      CHECK(run(depth, bits) == expected);
    }
  }
}

TEST_CASE("netlists without inputs, gates or outputs") {
  const Plan nothing(Netlist{}.view(), Order::depth);
  CHECK((nothing.inputs() == 0 && nothing.slots() == 0 && nothing.steps().empty() && nothing.outputs().empty()));

  Netlist constants;
  constants.outputs = {constants.add(Op::not_, constants.add(Op::constant, 0))};
  CHECK(is_constant(Plan(constants.view(), Order::given), 1));

  const Netlist wire{.inputs = 1, .outputs = {0, 0}};
  CHECK(Plan(wire.view(), Order::given).outputs().size() == 2);
}

TEST_CASE("arrays that are no netlist are refused") {
  CHECK(!refused(small().view()));
  const std::vector<std::uint8_t> one_op(1), two_ops(2);
  const std::vector<std::uint32_t> one_wire(1), two_wires(2);
  CHECK(!refused({1, one_op, one_wire, one_wire, {}}));
  CHECK(refused({1, one_op, two_wires, one_wire, {}}));
  CHECK(refused({1, one_op, one_wire, two_wires, {}}));
  CHECK(refused({1, two_ops, one_wire, one_wire, {}}));
  CHECK(refused({0x80000000, {}, {}, {}, {}}));  // too many wires
  CHECK(refused({0x7fffffff, one_op, one_wire, one_wire, {}}));
  CHECK(refused({0xffffffff, one_op, one_wire, one_wire, {}}));  // the sum does not fit 32 bits

  const auto refuses = [](std::uint8_t op, std::uint32_t a, std::uint32_t b) {
    Netlist netlist{.inputs = 3};
    netlist.add(Op::xor_, 0, 1);
    netlist.add(static_cast<Op>(op), a, b);
    return refused(netlist.view());
  };
  for (const std::uint8_t op : {std::uint8_t{0}, std::uint8_t{1}}) {
    CHECK(!refuses(op, 3, 3));
    CHECK(refuses(op, 4, 0));  // itself
    CHECK(refuses(op, 0, 4));
    CHECK(refuses(op, 0xffffffff, 0));
    CHECK(refuses(op, 0, 0xffffffff));
  }
  for (const std::uint8_t op : {std::uint8_t{2}, std::uint8_t{4}}) {
    CHECK(!refuses(op, 3, 0));
    CHECK(refuses(op, 4, 0));
  }
  CHECK(!refuses(3, 1, 0));
  CHECK(refuses(3, 2, 0));
  CHECK(refuses(5, 0, 0));
  CHECK(refuses(255, 0, 0));

  Netlist netlist{.inputs = 3};
  netlist.outputs = {netlist.add(Op::not_, 0) + 1};
  CHECK(refused(netlist.view()));
  CHECK(refused(Netlist{.outputs = {0}}.view()));
}
