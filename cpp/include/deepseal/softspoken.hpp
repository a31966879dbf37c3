// Correlated oblivious transfer with offset delta: the sender gets q, the receiver t = q ^ x delta for its bits x.
//
// L. Roy, "SoftSpokenOT: quieter OT extension from small-field silent VOLE in the Minicrypt model", CRYPTO 2022, with the
// repetition code: ceil(128 / k) small-field VOLEs over GF(2^k), each from a punctured PRF (GGM tree) of 2^k leaves, and
// 128 / k bits sent an OT. With k = 1 this is the extension of Ishai, Kilian, Nissim, Petrank (CRYPTO 2003). Semi-honest
// unless the consistency checks of both files are run.
//
// The 128 base OTs run the other way: the extension's receiver offers pairs, its sender chooses with the bits of delta.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "deepseal/secret.hpp"
#include "deepseal/session.hpp"

namespace deepseal {

inline constexpr unsigned ot_security = 128;

// The bits of delta that each tree takes: k of them, the last tree what is left.
struct Trees {
  explicit Trees(unsigned k);  // throws std::invalid_argument unless 1 <= k <= 8

  unsigned depth(unsigned tree) const noexcept;
  unsigned count() const noexcept { return (ot_security + k - 1) / k; }
  // Blocks that open the trees: two for each level but the first.
  std::size_t opening_blocks() const noexcept;

  unsigned k;
};

// OTs come in batches that are padded to a multiple of 128; each index is used once.
class CotReceiver {
 public:
  // pairs: (128, 2) keys of the base OTs.
  CotReceiver(const SessionKeys& session, unsigned k, std::span<const Block> pairs);
  ~CotReceiver();

  // What the sender needs to open its trees.
  std::span<const Block> opening() const noexcept { return opening_; }

  // For the check of the trees (section 4.2 of the paper): two blocks a leaf, tree by tree. The receiver sends each
  // tree's sum and a digest of all; the sender completes its own from the sums and compares the digest.
  std::span<const Block> leaf_checks() const noexcept { return leaf_checks_; }

  // bits: n choice bits, one a byte. Gives t for each of them and the corrections to send, correction_blocks(n).
  void extend(const std::uint8_t* bits, std::size_t n, Block* t, Block* corrections);

  std::size_t correction_blocks(std::size_t n) const noexcept { return trees_.count() * ((n + 127) / 128); }

  std::uint64_t used() const noexcept { return 128 * position_; }

 private:
  const Kernels& kernels_;
  Trees trees_;
  std::vector<Block> opening_;
  std::vector<Block> leaf_checks_;
  std::vector<std::vector<AesKey>> leaves_;
  std::uint64_t position_ = 0;  // blocks of 128 OTs
  std::atomic_flag busy_;
};

class CotSender {
 public:
  // keys: (128) the base OTs' keys that delta's bits chose. Throws std::invalid_argument for an opening of wrong length.
  CotSender(const SessionKeys& session, unsigned k, std::shared_ptr<const Delta> delta, std::span<const Block> keys,
            std::span<const Block> opening);
  ~CotSender();

  // Gives q for n OTs. Throws std::invalid_argument for corrections of the wrong length.
  void extend(std::span<const Block> corrections, std::size_t n, Block* q);

  // As the receiver's if it was honest, from its sums of each tree (two blocks each).
  std::vector<Block> leaf_checks(std::span<const Block> sums) const;

  std::uint64_t used() const noexcept { return 128 * position_; }
  std::size_t correction_blocks(std::size_t n) const noexcept { return trees_.count() * ((n + 127) / 128); }

 private:
  const Kernels& kernels_;
  Trees trees_;
  std::shared_ptr<const Delta> delta_;
  // At offset e lies the leaf of index e ^ (the tree's bits of delta); offset 0 is the unknown one.
  std::vector<std::vector<AesKey>> leaves_;
  std::vector<Block> leaf_checks_;  // in the order of offsets
  std::uint64_t position_ = 0;
  std::atomic_flag busy_;
};

}  // namespace deepseal
