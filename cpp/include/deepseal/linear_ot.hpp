// A linear layer on secret-shared bits by correlated OT: y = sum_i x_i w_i over Z_2^l, where one party (the receiver)
// holds the bits of x as labels and the other (the sender) holds the weights w.
//
// N. Gilboa, "Two party RSA key generation", CRYPTO 1999, with the correlations of Asharov, Lindell, Schneider, Zohner,
// CCS 2013: bit b of x_i is the choice of one OT whose message is a row of all weights that x_i meets, times 2^b. Only
// l - b bits of an element are sent. The OT's keys come from a pair of labels under the session's delta: those of
// correlated OT (whose choice is the bit itself), or those of a garbled wire (whose choice is the colour, with the
// garbler knowing the permute bit p: bit = p ^ colour).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "deepseal/secret.hpp"
#include "deepseal/session.hpp"

namespace deepseal {

// The public shape of the layer: element i of the source meets the connections starts[i] ... starts[i + 1] - 1, each to
// an element of the target. One for all sessions.
class Connections {
 public:
  // Throws std::invalid_argument for starts and targets that do not fit together.
  Connections(std::vector<std::uint64_t> starts, std::vector<std::uint32_t> targets, std::size_t outputs);

  std::size_t sources() const noexcept { return starts_.size() - 1; }
  std::size_t outputs() const noexcept { return outputs_; }
  std::size_t count() const noexcept { return targets_.size(); }
  std::size_t widest() const noexcept { return widest_; }
  std::size_t start(std::size_t i) const noexcept { return starts_[i]; }
  std::size_t degree(std::size_t i) const noexcept { return starts_[i + 1] - starts_[i]; }

  // share[target] += sign sum[j] over the connections j of element i.
  template <class Word>
  void scatter(std::size_t i, const Word* sum, bool negative, std::uint64_t* share) const;

 private:
  std::vector<std::uint64_t> starts_;
  std::vector<std::uint32_t> targets_;
  std::vector<std::uint8_t> runs_;  // whether the targets of element i follow each other
  std::size_t outputs_;
  std::size_t widest_ = 0;
};

// One layer of one session, for any number of samples. Both parties count the blocks of pads in the same way.
class LinearOt {
 public:
  // l: bits of the ring, 2 to 64. k: bits of a source element, 1 to l, the highest negative where `is_signed`.
  // use: below 2^32, apart from every other layer of the session.
  // Throws std::invalid_argument for others.
  LinearOt(const SessionKeys& session, std::shared_ptr<const Connections> shape, unsigned l, unsigned k, bool is_signed,
           std::uint64_t use);

  const Connections& shape() const noexcept { return *shape_; }
  unsigned source_bits() const noexcept { return k_; }

  // Bytes sent for the source elements first ... last - 1.
  std::size_t message_bytes(std::size_t first, std::size_t last) const;

  // The weight owner's part for these elements. weights: one for each connection. labels: zero labels, bit b of element i
  // at [b stride + i]. Subtracts its share from `share` (outputs), modulo 2^64, and writes the message.
  void send(const Delta& delta, std::span<const std::int64_t> weights, std::size_t first, std::size_t last,
            const Block* labels, std::size_t stride, std::uint64_t* share, std::uint8_t* message);

  // The other party's, with active labels. Adds its share to `share`.
  void receive(std::size_t first, std::size_t last, const Block* labels, std::size_t stride,
               std::span<const std::uint8_t> message, std::uint64_t* share);

 private:
  template <class Word, class Mask>
  void send_rows(Mask mask, const Delta& delta, std::span<const std::int64_t> weights, std::size_t first, std::size_t last,
                 const Block* labels, std::size_t stride, std::uint64_t* share, std::span<std::uint8_t> message);
  template <class Word, class Open>
  void receive_rows(Open open, std::size_t first, std::size_t last, const Block* labels, std::size_t stride,
                    std::span<const std::uint8_t> message, std::uint64_t* share);
  void pads(const Block* labels, std::size_t share, std::size_t blocks, std::size_t stride, Block* out);

  std::size_t row_bytes(std::size_t degree, unsigned bit) const noexcept { return (degree * (l_ - bit) + 7) / 8; }

  const Kernels& kernels_;
  Permutation permutation_;
  std::shared_ptr<const Connections> shape_;
  unsigned l_;
  unsigned k_;
  bool signed_;
  std::uint64_t use_;
  std::uint64_t used_ = 0;  // blocks of pads
  std::atomic_flag busy_;
};

}  // namespace deepseal
