#include "deepseal/softspoken.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "deepseal/transpose.hpp"

namespace deepseal {
namespace {

constexpr std::size_t chunk = 32;  // blocks of 128 OTs whose rows stay in the cache

// The two children of a node: H(node, tweak), H(node, tweak + 1).
void children(const Kernels& kernels, const AesKey& key, Block node, unsigned tree, unsigned level, Block (&out)[2]) {
  const Block both[2] = {node, node};
  kernels.hash(key, both, tweak(Domain::ot, tree << 8 | level, 0), out, 2);
}

// H(leaf, tweak), H(leaf, tweak + 1), apart from the tweaks of the levels.
void append_checks(const Kernels& kernels, const AesKey& key, std::span<const Block> leaves, unsigned tree,
                   std::vector<Block>& checks) {
  for (const Block leaf : leaves) {
    Block out[2];
    children(kernels, key, leaf, tree, 0, out);
    checks.insert(checks.end(), out, out + 2);
  }
}

std::vector<AesKey> keys_of(const Kernels& kernels, std::vector<Block>& leaves) {
  std::vector<AesKey> keys(leaves.size());
  for (std::size_t i = 0; i < leaves.size(); ++i) kernels.expand(leaves[i], keys[i]);
  wipe(leaves.data(), leaves.size() * sizeof(Block));
  return keys;
}

void add(Block* to, const Block* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] ^= from[i];
}

// For the bits b of a leaf's index, row b of `rows` takes the sum of the streams whose index has bit b; `sum`, if
// wanted, that of all streams. Offset 0 is skipped where its key is unknown.
void sum_streams(const Kernels& kernels, const std::vector<AesKey>& leaves, unsigned depth, bool all,
                 std::uint64_t position, std::size_t n, Block* rows, Block* sum) {
  Block stream[chunk];
  for (unsigned b = 0; b < depth; ++b) std::fill_n(rows + b * chunk, n, Block{});
  if (all) std::fill_n(sum, n, Block{});
  for (std::size_t index = all ? 0 : 1; index < leaves.size(); ++index) {
    kernels.stream(leaves[index], tweak(Domain::prg, 0, position), stream, n);
    if (all) add(sum, stream, n);
    for (unsigned b = 0; b < depth; ++b)
      if (index >> b & 1) add(rows + b * chunk, stream, n);
  }
  wipe(stream, sizeof stream);
}

void to_columns(const Block* rows, std::size_t n, Block* out, std::size_t wanted) {
  Block square[128];
  for (std::size_t word = 0; word < n; ++word) {
    const std::size_t left = wanted - 128 * word;
    if (left >= 128) {
      transpose(rows + word, chunk, out + 128 * word);
    } else {
      transpose(rows + word, chunk, square);
      std::copy_n(square, left, out + 128 * word);
      wipe(square, sizeof square);
    }
  }
}

}  // namespace

Trees::Trees(unsigned bits) : k(bits) {
  if (k < 1 || k > 8) throw std::invalid_argument("expected k from 1 to 8, found " + std::to_string(k));
}

unsigned Trees::depth(unsigned tree) const noexcept { return std::min(k, ot_security - tree * k); }

std::size_t Trees::opening_blocks() const noexcept {
  std::size_t blocks = 0;
  for (unsigned tree = 0; tree < count(); ++tree) blocks += 2 * (depth(tree) - 1);
  return blocks;
}

CotReceiver::CotReceiver(const SessionKeys& session, unsigned k, std::span<const Block> pairs)
    : kernels_(session.kernels()), trees_(k) {
  if (pairs.size() != 2 * ot_security)
    throw std::invalid_argument("expected 128 pairs of keys, found " + std::to_string(pairs.size()) + " keys");
  const AesKey key = session.derive(Domain::ot, 0);
  for (unsigned tree = 0; tree < trees_.count(); ++tree) {
    // The sender's key for a bit of delta opens the other side, hence the swapped pairs.
    const auto offered = [&](unsigned level, unsigned side) { return pairs[2 * (tree * k + level) + (1 - side)]; };
    std::vector<Block> nodes{offered(0, 0), offered(0, 1)};
    for (unsigned level = 1; level < trees_.depth(tree); ++level) {
      std::vector<Block> next(2 * nodes.size());
      Block sums[2] = {};
      for (std::size_t node = 0; node < nodes.size(); ++node) {
        Block child[2];
        children(kernels_, key, nodes[node], tree, level, child);
        for (unsigned side = 0; side < 2; ++side) {
          next[node | std::size_t{side} << level] = child[side];
          sums[side] ^= child[side];
        }
      }
      for (unsigned side = 0; side < 2; ++side) opening_.push_back(sums[side] ^ offered(level, side));
      wipe(nodes.data(), nodes.size() * sizeof(Block));
      nodes = std::move(next);
    }
    append_checks(kernels_, key, nodes, tree, leaf_checks_);
    leaves_.push_back(keys_of(kernels_, nodes));
  }
}

CotReceiver::~CotReceiver() {
  for (auto& keys : leaves_) wipe(keys.data(), keys.size() * sizeof(AesKey));
}

void CotReceiver::extend(const std::uint8_t* bits, std::size_t n, Block* t, Block* corrections) {
  const Exclusive only(busy_);
  const std::size_t blocks = (n + 127) / 128;
  std::vector<Block> rows(ot_security * chunk);
  for (std::size_t start = 0; start < blocks; start += chunk) {
    const std::size_t size = std::min(chunk, blocks - start);
    Block choices[chunk] = {};
    for (std::size_t i = 0; i < 128 * size && 128 * start + i < n; ++i) {
      const std::uint64_t bit = bits[128 * start + i] & 1;
      (i % 128 < 64 ? choices[i / 128].low : choices[i / 128].high) |= bit << i % 64;
    }
    for (unsigned tree = 0; tree < trees_.count(); ++tree) {
      sum_streams(kernels_, leaves_[tree], trees_.depth(tree), true, position_, size, &rows[tree * trees_.k * chunk],
                  corrections);
      add(corrections, choices, size);
      corrections += size;
    }
    to_columns(rows.data(), size, t + 128 * start, n - 128 * start);
    wipe(choices, sizeof choices);
    position_ += size;
  }
  wipe(rows.data(), rows.size() * sizeof(Block));
}

CotSender::CotSender(const SessionKeys& session, unsigned k, std::shared_ptr<const Delta> delta,
                     std::span<const Block> keys, std::span<const Block> opening)
    : kernels_(session.kernels()), trees_(k), delta_(std::move(delta)) {
  if (keys.size() != ot_security) throw std::invalid_argument("expected 128 keys, found " + std::to_string(keys.size()));
  if (opening.size() != trees_.opening_blocks())
    throw std::invalid_argument("expected " + std::to_string(trees_.opening_blocks()) + " blocks to open the trees, found " +
                                std::to_string(opening.size()));
  const AesKey key = session.derive(Domain::ot, 0);
  std::size_t read = 0;
  for (unsigned tree = 0; tree < trees_.count(); ++tree) {
    const auto chosen = [&](unsigned level) { return mask(delta_->bit(tree * k + level)); };
    std::vector<Block> nodes{Block{}, keys[tree * k]};
    for (unsigned level = 1; level < trees_.depth(tree); ++level) {
      const Block bit = chosen(level);  // the punctured path goes to this side
      std::vector<Block> next(2 * nodes.size());
      // What the base OT gave: the sum of the children on the other side.
      const Block zero = opening[read++];
      const Block one = opening[read++];
      Block missing = keys[tree * k + level] ^ one ^ (bit & (zero ^ one));
      for (std::size_t offset = 1; offset < nodes.size(); ++offset) {
        Block child[2];
        children(kernels_, key, nodes[offset], tree, level, child);
        const Block swap = bit & (child[0] ^ child[1]);
        next[offset] = child[0] ^ swap;
        next[offset | std::size_t{1} << level] = child[1] ^ swap;
        missing ^= child[1] ^ swap;
      }
      next[std::size_t{1} << level] = missing;
      wipe(nodes.data(), nodes.size() * sizeof(Block));
      nodes = std::move(next);
    }
    append_checks(kernels_, key, nodes, tree, leaf_checks_);
    leaves_.push_back(keys_of(kernels_, nodes));
  }
}

CotSender::~CotSender() {
  for (auto& keys : leaves_) wipe(keys.data(), keys.size() * sizeof(AesKey));
}

std::vector<Block> CotSender::leaf_checks(std::span<const Block> sums) const {
  if (sums.size() != 2 * trees_.count())
    throw std::invalid_argument("expected " + std::to_string(2 * trees_.count()) + " blocks of sums, found " +
                                std::to_string(sums.size()));
  std::vector<Block> result;
  std::size_t start = 0;
  for (unsigned tree = 0; tree < trees_.count(); ++tree) {
    const std::size_t leaves = std::size_t{1} << trees_.depth(tree);
    std::vector<Block> own(leaf_checks_.begin() + static_cast<std::ptrdiff_t>(start),
                           leaf_checks_.begin() + static_cast<std::ptrdiff_t>(start + 2 * leaves));
    start += 2 * leaves;
    for (unsigned half = 0; half < 2; ++half) {
      own[half] = sums[2 * tree + half];
      for (std::size_t offset = 1; offset < leaves; ++offset) own[half] ^= own[2 * offset + half];
    }
    // From offsets to indices: one masked exchange for each bit of delta.
    for (unsigned level = 0; level < trees_.depth(tree); ++level) {
      const Block bit = mask(delta_->bit(tree * trees_.k + level));
      for (std::size_t i = 0; i < leaves; ++i) {
        if (i >> level & 1) continue;
        for (unsigned half = 0; half < 2; ++half) {
          Block& x = own[2 * i + half];
          Block& y = own[2 * (i | std::size_t{1} << level) + half];
          const Block swap = bit & (x ^ y);
          x ^= swap;
          y ^= swap;
        }
      }
    }
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

void CotSender::extend(std::span<const Block> corrections, std::size_t n, Block* q) {
  const std::size_t blocks = (n + 127) / 128;
  if (corrections.size() != correction_blocks(n))
    throw std::invalid_argument("expected " + std::to_string(correction_blocks(n)) + " blocks of corrections, found " +
                                std::to_string(corrections.size()));
  const Exclusive only(busy_);
  std::vector<Block> rows(ot_security * chunk);
  std::size_t read = 0;
  for (std::size_t start = 0; start < blocks; start += chunk) {
    const std::size_t size = std::min(chunk, blocks - start);
    for (unsigned tree = 0; tree < trees_.count(); ++tree) {
      const unsigned depth = trees_.depth(tree);
      Block* row = &rows[tree * trees_.k * chunk];
      sum_streams(kernels_, leaves_[tree], depth, false, position_, size, row, nullptr);
      for (unsigned b = 0; b < depth; ++b, row += chunk) {
        const Block bit = mask(delta_->bit(tree * trees_.k + b));
        for (std::size_t j = 0; j < size; ++j) row[j] ^= bit & corrections[read + j];
      }
      read += size;
    }
    to_columns(rows.data(), size, q + 128 * start, n - 128 * start);
    position_ += size;
  }
  wipe(rows.data(), rows.size() * sizeof(Block));
}

}  // namespace deepseal
