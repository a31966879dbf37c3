// Bit matrices: from a row for each bit of delta to a block for each oblivious transfer.
#pragma once

#include <cstddef>

#include "deepseal/block.hpp"

namespace deepseal {

// Bit r of out[i] = bit i of rows[r * stride]; 128 x 128 bits.
void transpose(const Block* rows, std::size_t stride, Block* out);

}  // namespace deepseal
