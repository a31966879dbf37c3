#include "deepseal/plan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace deepseal {
namespace {

// What a wire of the netlist stands for: a constant, or a node (an input or a gate that is kept).
struct Value {
  bool constant = false;
  std::uint32_t value = 0;

  bool operator==(const Value&) const = default;
};

struct Node {
  Op op = Op::xor_;
  std::uint32_t level = 0;
  std::uint32_t a = 0;
  std::uint32_t b = 0;
};

void refuse(const std::string& expected, const std::string& found) {
  throw std::invalid_argument("expected " + expected + ", found " + found);
}

void check(const NetlistView& netlist) {
  const std::size_t gates = netlist.ops.size();
  if (netlist.a.size() != gates || netlist.b.size() != gates) refuse("operands for each gate", "arrays of other lengths");
  if (netlist.inputs + std::uint64_t{gates} > std::numeric_limits<std::uint32_t>::max() / 2)
    refuse("fewer than 2^31 wires", std::to_string(netlist.inputs + std::uint64_t{gates}));
  if (netlist.outputs.size() > std::numeric_limits<std::uint32_t>::max() / 2)
    refuse("fewer than 2^31 outputs", std::to_string(netlist.outputs.size()));
  for (std::size_t i = 0; i < gates; ++i) {
    const auto wire = static_cast<std::uint32_t>(netlist.inputs + i);
    if (netlist.ops[i] > static_cast<std::uint8_t>(Op::copy)) refuse("operations 0 to 4", std::to_string(netlist.ops[i]));
    const auto op = static_cast<Op>(netlist.ops[i]);
    if (op == Op::constant ? netlist.a[i] > 1 : netlist.a[i] >= wire) refuse("an earlier wire", std::to_string(netlist.a[i]));
    if ((op == Op::xor_ || op == Op::and_) && netlist.b[i] >= wire) refuse("an earlier wire", std::to_string(netlist.b[i]));
  }
  for (const std::uint32_t wire : netlist.outputs)
    if (wire >= netlist.inputs + gates) refuse("outputs that are wires", std::to_string(wire));
}

// The nodes in order (inputs first), and what each wire stands for.
struct Folded {
  std::vector<Node> nodes;
  std::vector<Value> wires;

  explicit Folded(const NetlistView& netlist) : nodes(netlist.inputs) {
    wires.reserve(netlist.inputs + netlist.ops.size());
    for (std::uint32_t i = 0; i < netlist.inputs; ++i) wires.push_back({false, i});
    for (std::size_t i = 0; i < netlist.ops.size(); ++i)
      wires.push_back(fold(static_cast<Op>(netlist.ops[i]), netlist.a[i], netlist.b[i]));
  }

  Value fold(Op op, std::uint32_t left, std::uint32_t right) {
    if (op == Op::constant) return {true, left};
    const Value x = wires[left];
    if (op == Op::copy) return x;
    if (op == Op::not_) return x.constant ? Value{true, x.value ^ 1} : keep(op, x.value, x.value);
    const Value y = wires[right];
    if (x == y && !x.constant) return op == Op::and_ ? x : Value{true, 0};
    if (x.constant && y.constant) return {true, op == Op::and_ ? x.value & y.value : x.value ^ y.value};
    if (!x.constant && !y.constant) return keep(op, x.value, y.value);
    const Value fixed = x.constant ? x : y;
    const Value other = x.constant ? y : x;
    if (op == Op::and_) return fixed.value == 1 ? other : Value{true, 0};
    return fixed.value == 0 ? other : keep(Op::not_, other.value, other.value);
  }

  Value keep(Op op, std::uint32_t a, std::uint32_t b) {
    const std::uint32_t level = std::max(nodes[a].level, nodes[b].level) + (op == Op::and_ ? 1 : 0);
    nodes.push_back({op, level, a, b});
    return {false, static_cast<std::uint32_t>(nodes.size() - 1)};
  }
};

constexpr std::uint32_t never = std::numeric_limits<std::uint32_t>::max();

}  // namespace

Plan::Plan(const NetlistView& netlist, Order order) : inputs_(netlist.inputs), order_(order) {
  check(netlist);
  const Folded folded(netlist);
  const std::vector<Node>& nodes = folded.nodes;

  std::vector<bool> used(nodes.size());
  for (const std::uint32_t wire : netlist.outputs)
    if (!folded.wires[wire].constant) used[folded.wires[wire].value] = true;
  for (std::size_t node = nodes.size(); node-- > inputs_;)
    if (used[node]) used[nodes[node].a] = used[nodes[node].b] = true;

  std::vector<std::uint32_t> sequence;
  for (std::uint32_t node = inputs_; node < nodes.size(); ++node)
    if (used[node]) sequence.push_back(node);
  if (order == Order::depth)  // the ANDs of a level, then what is free on it
    std::ranges::stable_sort(sequence, {}, [&](std::uint32_t node) {
      return 2 * std::uint64_t{nodes[node].level} + (nodes[node].op == Op::and_ ? 0 : 1);
    });

  // The step after which nobody reads a node any more; outputs stay.
  std::vector<std::uint32_t> last(nodes.size(), 0);
  for (std::uint32_t step = 0; step < sequence.size(); ++step)
    last[nodes[sequence[step]].a] = last[nodes[sequence[step]].b] = step + 1;
  for (const std::uint32_t wire : netlist.outputs)
    if (!folded.wires[wire].constant) last[folded.wires[wire].value] = never;

  std::vector<std::uint32_t> slot(nodes.size(), never);
  for (std::uint32_t i = 0; i < inputs_; ++i) slot[i] = i;
  slots_ = inputs_;
  for (const std::uint32_t wire : netlist.outputs) {
    const Value value = folded.wires[wire];
    if (!value.constant && slot[value.value] == never) slot[value.value] = slots_;
    outputs_.push_back({value.constant, value.constant ? value.value : slot[value.value]});
    ++slots_;
  }
  const std::uint32_t fixed = slots_;
  std::vector<std::uint32_t> unused;
  steps_.reserve(sequence.size());
  for (std::uint32_t index = 0; index < sequence.size(); ++index) {
    const Node& node = nodes[sequence[index]];
    const auto release = [&](std::uint32_t operand) {
      if (last[operand] == index + 1 && slot[operand] >= fixed) unused.push_back(slot[operand]);
    };
    release(node.a);
    if (node.b != node.a) release(node.b);
    std::uint32_t& own = slot[sequence[index]];
    if (own == never) {
      if (unused.empty()) unused.push_back(slots_++);
      own = unused.back();
      unused.pop_back();
    }
    steps_.push_back({node.op, node.level, slot[node.a], slot[node.b], own});
    and_gates_ += node.op == Op::and_ ? 1 : 0;
    depth_ = std::max(depth_, node.level);
  }
}

}  // namespace deepseal
