// An evaluator gets arbitrary tables in arbitrary pieces, as from a garbler that does not keep to the protocol: pieces are
// refused exactly if they are half tables or too many, labels do not depend on the pieces, and decoding gives bits.
#include <stdexcept>

#include "bytes.hpp"
#include "netlists.hpp"
#include "yao.hpp"

using namespace deepseal;
using namespace deepseal::testing;

namespace {

template <class Error, class Action>
bool refused(const Action& action) {
  try {
    action();
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzzing::Bytes bytes(data, size);
  const auto& known = available_kernels();
  const Kernels& tested = *known[bytes.take<std::uint8_t>() % known.size()];
  const Order order = bytes.take<std::uint8_t>() % 2 == 0 ? Order::given : Order::depth;
  const std::size_t lanes = 1 + bytes.below(40);
  const std::size_t chunk = bytes.take<std::uint8_t>() % 50;
  Draw draw(bytes.take<std::uint8_t>());
  const Netlist netlist = draw_netlist(draw, 1 + draw.below(10), draw.below(200), draw.below(8));
  const auto plan = std::make_shared<Plan>(netlist.view(), order);
  const std::vector<Block> active = draw.blocks(netlist.inputs * lanes);

  const Parties parties(tested, draw.block());
  Evaluation evaluation(parties.evaluator, plan, lanes, active, chunk);
  std::size_t left = plan->and_gates() * lanes;
  std::vector<Block> all;
  const auto feed = [&](std::span<const Block> piece) {
    const bool wrong = piece.size() % 2 != 0 || piece.size() / 2 > left;
    EXPECT(refused<std::invalid_argument>([&] { evaluation.next(piece); }) == wrong);
    if (!wrong) {
      left -= piece.size() / 2;
      all.insert(all.end(), piece.begin(), piece.end());
    }
    EXPECT(evaluation.tables_left() == left);
    EXPECT(parties.evaluator->gates() == all.size() / 2);
  };
  while (!bytes.empty()) {
    EXPECT(left == 0 || refused<std::logic_error>([&] { evaluation.outputs(); }));
    feed(bytes.many<Block>(bytes.below(100)));
  }
  feed(draw.blocks(2 * left));
  const std::span<const Block> labels = evaluation.outputs();
  const std::vector<Block> out(labels.begin(), labels.end());
  EXPECT(out.size() == netlist.outputs.size() * lanes);

  const Parties whole(kernels(), draw.block());
  EXPECT(evaluate(whole, plan, lanes, active, all, all.size() + 1, chunk) == out);

  const std::vector<Block> zero = draw.blocks(out.size());
  std::vector<std::uint8_t> decoded(out.size(), 2);
  parties.garbler->decode(zero.data(), out.data(), decoded.data(), out.size());
  for (const std::uint8_t bit : decoded) EXPECT(bit <= 1);
  return 0;
}
