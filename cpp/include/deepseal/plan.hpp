// A boolean netlist made ready for replay: constants folded, dead gates dropped, gates ordered, wires put into slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace deepseal {

enum class Op : std::uint8_t { xor_ = 0, and_ = 1, not_ = 2, constant = 3, copy = 4 };

// `given` keeps the netlist's order, which touches few slots; `depth` sorts by AND-depth, so that a lane alone has
// independent gates to keep the processor busy.
enum class Order : std::uint8_t { given = 0, depth = 1 };

// Gate i writes wire inputs + i; operands are earlier wires (for `constant`, a is the bit).
struct NetlistView {
  std::uint32_t inputs = 0;
  std::span<const std::uint8_t> ops;
  std::span<const std::uint32_t> a;
  std::span<const std::uint32_t> b;
  std::span<const std::uint32_t> outputs;
};

struct Step {
  Op op = Op::xor_;
  std::uint32_t level = 0;  // AND-depth
  std::uint32_t a = 0;      // slots
  std::uint32_t b = 0;
  std::uint32_t c = 0;
};

// A constant bit, or the slot where the output is found in the end; its own slot, `inputs` + its number, unless it is
// an input or the same wire as an earlier output.
struct Output {
  bool constant = false;
  std::uint32_t value = 0;
};

// Slots: the inputs, which nothing overwrites, then a slot for each output, then temporary ones that are used again.
class Plan {
 public:
  // Throws std::invalid_argument for arrays that are not a netlist.
  Plan(const NetlistView& netlist, Order order);

  std::uint32_t inputs() const noexcept { return inputs_; }
  std::uint32_t slots() const noexcept { return slots_; }
  std::uint32_t temporaries() const noexcept { return slots_ - inputs_ - static_cast<std::uint32_t>(outputs_.size()); }
  std::size_t and_gates() const noexcept { return and_gates_; }
  std::uint32_t depth() const noexcept { return depth_; }
  Order order() const noexcept { return order_; }
  std::span<const Step> steps() const noexcept { return steps_; }
  std::span<const Output> outputs() const noexcept { return outputs_; }

 private:
  std::uint32_t inputs_;
  std::uint32_t slots_ = 0;
  std::uint32_t depth_ = 0;
  std::size_t and_gates_ = 0;
  Order order_;
  std::vector<Step> steps_;
  std::vector<Output> outputs_;
};

}  // namespace deepseal
