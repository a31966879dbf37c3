// Netlists for tests: built gate by gate or drawn, and evaluated in the clear by their definition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "deepseal/plan.hpp"
#include "draw.hpp"

namespace deepseal::testing {

struct Netlist {
  std::uint32_t inputs = 0;
  std::vector<std::uint8_t> ops{};
  std::vector<std::uint32_t> a{};
  std::vector<std::uint32_t> b{};
  std::vector<std::uint32_t> outputs{};

  std::uint32_t wires() const { return inputs + static_cast<std::uint32_t>(ops.size()); }
  NetlistView view() const { return {inputs, ops, a, b, outputs}; }

  // The wire of the new gate.
  std::uint32_t add(Op op, std::uint32_t left, std::uint32_t right = 0) {
    ops.push_back(static_cast<std::uint8_t>(op));
    a.push_back(left);
    b.push_back(right);
    return wires() - 1;
  }
};

inline std::vector<std::uint8_t> evaluate_clear(const Netlist& netlist, std::span<const std::uint8_t> bits) {
  std::vector<std::uint8_t> wire(bits.begin(), bits.end());
  for (std::size_t i = 0; i < netlist.ops.size(); ++i) {
    const std::uint32_t a = netlist.a[i];
    const std::uint32_t b = netlist.b[i];
    switch (static_cast<Op>(netlist.ops[i])) {
      case Op::xor_: wire.push_back(wire[a] ^ wire[b]); break;
      case Op::and_: wire.push_back(wire[a] & wire[b]); break;
      case Op::not_: wire.push_back(wire[a] ^ 1); break;
      case Op::constant: wire.push_back(static_cast<std::uint8_t>(a)); break;
      case Op::copy: wire.push_back(wire[a]); break;
    }
  }
  std::vector<std::uint8_t> result;
  for (const std::uint32_t output : netlist.outputs) result.push_back(wire[output]);
  return result;
}

// All operations, operands mostly recent so that depth grows; outputs anywhere, inputs and repeats among them.
inline Netlist draw_netlist(Draw& draw, std::uint32_t inputs, std::size_t gates, std::size_t outputs) {
  constexpr Op often[] = {Op::and_, Op::and_, Op::and_, Op::and_, Op::xor_, Op::xor_,
                          Op::xor_, Op::not_, Op::not_, Op::constant, Op::copy};
  Netlist netlist{.inputs = inputs};
  const auto earlier = [&] {
    const std::uint32_t reach = draw.below(4) == 0 ? netlist.wires() : std::min<std::uint32_t>(netlist.wires(), 20);
    return netlist.wires() - 1 - draw.below(reach);
  };
  for (std::size_t i = 0; i < gates; ++i) {
    const Op op = often[draw.below(std::size(often))];
    const std::uint32_t left = op == Op::constant ? draw.below(2) : earlier();
    netlist.add(op, left, op == Op::xor_ || op == Op::and_ ? earlier() : 0);
  }
  for (std::size_t i = 0; i < outputs; ++i) netlist.outputs.push_back(draw.below(netlist.wires()));
  return netlist;
}

}  // namespace deepseal::testing
