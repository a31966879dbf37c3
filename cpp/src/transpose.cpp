#include "deepseal/transpose.hpp"

namespace deepseal {
namespace {

using Pair = std::uint64_t __attribute__((vector_size(16)));

// Swaps the upper right quarter of every 2 d x 2 d square with the lower left one.
template <unsigned d>
void swap_quarters(Pair* x, std::uint64_t keep) {
  for (unsigned start = 0; start < 128; start += 2 * d)
    for (unsigned row = start; row < start + d; ++row) {
      const Pair t = (x[row] >> d ^ x[row + d]) & keep;
      x[row] ^= t << d;
      x[row + d] ^= t;
    }
}

}  // namespace

void transpose(const Block* rows, std::size_t stride, Block* out) {
  Pair x[128];
  for (unsigned row = 0; row < 64; ++row) {
    const Block low = rows[row * stride];
    const Block high = rows[(row + 64) * stride];
    x[row] = Pair{low.low, high.low};
    x[row + 64] = Pair{low.high, high.high};
  }
  swap_quarters<32>(x, 0x00000000ffffffff);
  swap_quarters<16>(x, 0x0000ffff0000ffff);
  swap_quarters<8>(x, 0x00ff00ff00ff00ff);
  swap_quarters<4>(x, 0x0f0f0f0f0f0f0f0f);
  swap_quarters<2>(x, 0x3333333333333333);
  swap_quarters<1>(x, 0x5555555555555555);
  for (unsigned row = 0; row < 128; ++row) out[row] = {x[row][0], x[row][1]};
}

}  // namespace deepseal
