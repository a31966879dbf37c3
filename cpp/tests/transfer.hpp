// Both sides of the OT extension after base OTs that a trusted dealer made.
#pragma once

#include <memory>
#include <vector>

#include "deepseal/softspoken.hpp"
#include "draw.hpp"

namespace deepseal::testing {

struct Dealt {
  Block offset;
  std::shared_ptr<const Delta> delta;
  std::vector<Block> pairs;  // (128, 2)
  std::vector<Block> keys;   // (128)

  explicit Dealt(Draw& draw) : offset(draw.block()), pairs(draw.blocks(256)), keys(128) {
    offset.low |= 1;
    delta = std::make_shared<Delta>(offset);
    for (unsigned i = 0; i < 128; ++i) keys[i] = pairs[2 * i + offset_bit(i)];
  }

  unsigned offset_bit(unsigned i) const { return (i < 64 ? offset.low >> i : offset.high >> (i - 64)) & 1; }
};

}  // namespace deepseal::testing
