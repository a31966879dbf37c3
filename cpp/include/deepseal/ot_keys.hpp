// From correlated to random OT: the keys of both messages of each OT, and correlations over the ring Z_2^l.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "deepseal/secret.hpp"
#include "deepseal/session.hpp"

namespace deepseal {

// Breaks the correlation of q and t: keys H(q), H(q ^ delta), and H(t). The tweak of an OT is its domain, a use (below
// 2^56) that sets apart what the same wires are read for twice, and its index in the session.
class OtKeys {
 public:
  explicit OtKeys(const SessionKeys& session, Domain domain = Domain::ot)
      : kernels_(session.kernels()), permutation_(session, domain), domain_(domain) {}

  // out[i] = H(t[i], domain | use | first + i)
  void chosen(const Block* t, std::uint64_t use, std::uint64_t first, Block* out, std::size_t n);

  // out[2 i] = H(q[i], ...), out[2 i + 1] = H(q[i] ^ delta, ...)
  void pairs(const Delta& delta, const Block* q, std::uint64_t use, std::uint64_t first, Block* out, std::size_t n);

 private:
  const Kernels& kernels_;
  Permutation permutation_;
  Domain domain_;
};

// Correlated OT over Z_2^l with vector payloads (Asharov, Lindell, Schneider, Zohner, CCS 2013, section 5.4, over a
// ring): for a bit c the receiver gets r = s + c v mod 2^l where the sender has s, of `width` elements each.
class RingOt {
 public:
  // Throws std::invalid_argument unless 1 <= bits <= 64 and 1 <= width < 2^32.
  RingOt(const SessionKeys& session, unsigned bits, std::size_t width);

  std::size_t width() const noexcept { return width_; }
  std::size_t row_bytes() const noexcept { return (width_ * bits_ + 7) / 8; }

  // keys: (n, 2); values: (n, width). Gives the shares s, (n, width), and the message, n rows of row_bytes().
  void send(std::span<const Block> keys, std::span<const std::uint64_t> values, std::uint64_t* shares,
            std::uint8_t* message) const;

  // keys: (n); choices: (n). Gives the shares r, (n, width).
  void receive(std::span<const Block> keys, const std::uint8_t* choices, std::span<const std::uint8_t> message,
               std::uint64_t* shares) const;

 private:
  void expand(Block key, std::uint64_t* out, std::vector<Block>& stream) const;
  std::uint64_t modulus_mask() const noexcept { return bits_ == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits_) - 1; }

  const Kernels& kernels_;
  unsigned bits_;
  std::size_t width_;
};

}  // namespace deepseal
