// Bytes become a netlist, valid or not. It is refused exactly if it is none; otherwise garbling, evaluating and decoding
// it gives what evaluating it in the clear does, with all kernels and in drawn pieces.
#include <stdexcept>

#include "bytes.hpp"
#include "netlists.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

// With `repaired`, operations and operands are reduced to ones that exist, so that long netlists are valid, too.
Netlist read_netlist(fuzzing::Bytes& bytes, bool repaired) {
  Netlist netlist{.inputs = bytes.below(40) + (repaired ? 1u : 0u)};
  const std::size_t outputs = bytes.below(10);
  const std::size_t gates = bytes.below(600);
  for (std::size_t i = 0; i < gates; ++i) {
    auto op = bytes.take<std::uint8_t>();
    std::uint32_t a = bytes.below(1 << 16);
    std::uint32_t b = bytes.below(1 << 16);
    if (repaired) {
      op %= 5;
      a %= static_cast<Op>(op) == Op::constant ? 2 : netlist.wires();
      b %= netlist.wires();
    }
    netlist.add(static_cast<Op>(op), a, b);
  }
  for (std::size_t i = 0; i < outputs; ++i) {
    const std::uint32_t wire = bytes.below(1 << 16);
    netlist.outputs.push_back(repaired ? wire % netlist.wires() : wire);
  }
  return netlist;
}

bool valid(const Netlist& netlist) {
  for (std::uint32_t i = 0; i < netlist.ops.size(); ++i) {
    const std::uint32_t wire = netlist.inputs + i;
    const bool left = netlist.a[i] < wire;
    switch (netlist.ops[i]) {
      case 0: case 1: if (!left || netlist.b[i] >= wire) return false; break;
      case 2: case 4: if (!left) return false; break;
      case 3: if (netlist.a[i] > 1) return false; break;
      default: return false;
    }
  }
  return std::ranges::all_of(netlist.outputs, [&](std::uint32_t wire) { return wire < netlist.wires(); });
}

std::shared_ptr<const Plan> plan_or_null(const Netlist& netlist, Order order) {
  try {
    return std::make_shared<Plan>(netlist.view(), order);
  } catch (const std::invalid_argument&) {
    return nullptr;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzzing::Bytes bytes(data, size);
  const auto flags = bytes.take<std::uint8_t>();
  const std::size_t lanes = 1 + bytes.below(40);
  const std::size_t piece = 1 + bytes.below(700);
  const std::size_t chunk = bytes.take<std::uint8_t>() % 50;
  Draw draw(bytes.take<std::uint8_t>());
  const Netlist netlist = read_netlist(bytes, (flags & 1) != 0);
  const auto plan = plan_or_null(netlist, (flags & 2) != 0 ? Order::depth : Order::given);
  EXPECT((plan != nullptr) == valid(netlist));
  if (!plan) return 0;
  EXPECT(plan->temporaries() <= netlist.ops.size());

  const std::vector<std::uint8_t> bits = draw.bits(netlist.inputs * lanes);
  const std::vector<Block> zero = draw.blocks(bits.size());
  const Block delta = draw.block();
  std::vector<Block> tables;
  for (const Kernels* tested : available_kernels()) {
    const Parties parties(*tested, delta);
    const Garbled garbled = garble(parties, plan, lanes, zero, piece, chunk);
    if (tables.empty()) tables = garbled.tables;
    EXPECT(garbled.tables == tables);
    EXPECT(tables.size() == table_blocks * plan->and_gates() * lanes);
    std::vector<Block> active(zero.size());
    parties.garbler->offset(zero.data(), bits.data(), active.data(), zero.size());
    const std::vector<Block> out = evaluate(parties, plan, lanes, active, tables, 1 + draw.below(700), chunk);
    std::vector<std::uint8_t> result(out.size());
    EXPECT(parties.garbler->decode(garbled.outputs.data(), out.data(), result.data(), out.size()));
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      std::vector<std::uint8_t> own(netlist.inputs);
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = bits[i * lanes + lane];
      const std::vector<std::uint8_t> expected = evaluate_clear(netlist, own);
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT(result[i * lanes + lane] == expected[i]);
    }
  }
  return 0;
}
