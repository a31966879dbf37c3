#include "deepseal/linear_ot.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace deepseal {
namespace {

constexpr std::uint64_t epoch_blocks = 1 << 13;  // two hash calls each at the sender

template <class Word>
constexpr Word low_bits(unsigned bits) {
  return bits >= 8 * sizeof(Word) ? ~Word{0} : static_cast<Word>((Word{1} << bits) - 1);
}

// n numbers of `bits` bits one after another, least significant bit first.
template <class Word>
void pack(const Word* values, std::size_t n, unsigned bits, std::uint8_t* out) {
  unsigned __int128 buffer = 0;
  unsigned filled = 0;
  for (std::size_t i = 0; i < n; ++i) {
    buffer |= static_cast<unsigned __int128>(values[i]) << filled;
    filled += bits;
    if (filled >= 64) {
      const auto word = static_cast<std::uint64_t>(buffer);
      std::memcpy(out, &word, 8);
      out += 8;
      buffer >>= 64;
      filled -= 64;
    }
  }
  for (; filled > 0; filled -= std::min(8U, filled)) {
    *out++ = static_cast<std::uint8_t>(buffer);
    buffer >>= 8;
  }
}

template <class Word>
void unpack(const std::uint8_t* in, std::size_t bytes, std::size_t n, unsigned bits, Word* values) {
  unsigned __int128 buffer = 0;
  unsigned filled = 0;
  const std::uint8_t* end = in + bytes;
  for (std::size_t i = 0; i < n; ++i) {
    if (filled < bits) {
      std::uint64_t word = 0;
      const auto size = std::min<std::size_t>(8, static_cast<std::size_t>(end - in));
      std::memcpy(&word, in, size);
      in += size;
      buffer |= static_cast<unsigned __int128>(word) << filled;
      filled += 64;
    }
    values[i] = static_cast<Word>(buffer) & low_bits<Word>(bits);
    buffer >>= bits;
    filled -= bits;
  }
}

}  // namespace

LinearOt::LinearOt(const SessionKeys& session, std::shared_ptr<const Connections> shape, unsigned l, unsigned k,
                   bool is_signed, std::uint64_t use)
    : kernels_(session.kernels()),
      permutation_(session, Domain::payload),
      shape_(std::move(shape)),
      l_(l),
      k_(k),
      signed_(is_signed),
      use_(use) {
  const auto& [starts, targets, weights, outputs, weight_count] = *shape_;
  const bool sound = l >= 2 && l <= 64 && k >= 1 && k <= l && use < std::uint64_t{1} << 32 && !starts.empty() &&
                     starts.front() == 0 && std::ranges::is_sorted(starts) && starts.back() == targets.size() &&
                     targets.size() == weights.size() && outputs <= std::numeric_limits<std::uint32_t>::max() &&
                     std::ranges::all_of(targets, [&](std::uint32_t target) { return target < outputs; }) &&
                     std::ranges::all_of(weights, [&](std::uint32_t weight) { return weight < weight_count; });
  if (!sound) throw std::invalid_argument("expected the shape of a linear layer, found starts, targets, weights, l or k that do not fit");
}

std::size_t LinearOt::message_bytes(std::size_t first, std::size_t last) const {
  if (first > last || last > sources()) throw std::invalid_argument("expected source elements of the layer, found others");
  std::size_t bytes = 0;
  for (std::size_t i = first; i < last; ++i)
    for (unsigned bit = 0; bit < k_; ++bit) bytes += row_bytes(shape_->starts[i + 1] - shape_->starts[i], bit);
  return bytes;
}

// Pseudo-random words: H(label, payload | use | index ...).
template <class Word>
void LinearOt::pads(Block label, std::size_t blocks, std::uint64_t index, Word* out) {
  points_.assign(blocks, label);
  auto* to = reinterpret_cast<Block*>(out);
  for (std::size_t i = 0; i < blocks;) {
    const std::uint64_t at = index + i;
    const std::size_t size = std::min<std::size_t>(blocks - i, epoch_blocks - at % epoch_blocks);
    // A key of its own for each layer and epoch: no key serves more than 2^14 calls, however many layers there are.
    kernels_.hash(permutation_.at(use_ << 32 | at / epoch_blocks), points_.data() + i, tweak(Domain::payload, use_, at), to + i, size);
    i += size;
  }
}

template <class Word>
void LinearOt::send_rows(const Delta& delta, std::span<const std::int64_t> weights, std::size_t first, std::size_t last,
                         const Block* zero, const std::uint8_t* permute, std::uint64_t* share, std::uint8_t* message) {
  std::size_t widest = 0;
  for (std::size_t i = first; i < last; ++i) widest = std::max<std::size_t>(widest, shape_->starts[i + 1] - shape_->starts[i]);
  const std::size_t room = widest + sizeof(Block);
  std::vector<Block> memory(3 * (room * sizeof(Word) / sizeof(Block) + 1));
  Word* row = reinterpret_cast<Word*>(memory.data());
  Word* own = reinterpret_cast<Word*>(memory.data() + memory.size() / 3);
  Word* other = reinterpret_cast<Word*>(memory.data() + 2 * (memory.size() / 3));
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t start = shape_->starts[i];
    const std::size_t degree = shape_->starts[i + 1] - start;
    const std::uint32_t* targets = &shape_->targets[start];
    const std::size_t blocks = (degree * sizeof(Word) + sizeof(Block) - 1) / sizeof(Block);
    for (std::size_t j = 0; j < degree; ++j) row[j] = static_cast<Word>(weights[shape_->weights[start + j]]);
    for (unsigned bit = 0; bit < k_; ++bit, ++zero, ++permute) {
      if (signed_ && bit == k_ - 1)
        for (std::size_t j = 0; j < degree; ++j) row[j] = Word{0} - row[j];
      pads(*zero, blocks, used_, own);
      pads(*zero ^ delta.value_, blocks, used_, other);
      used_ += blocks;
      // bit = p ^ c for the choice c, so bit w = p w + c (1 - 2 p) w; all by masks, as p is secret.
      const Word flip = Word{0} - static_cast<Word>(*permute & 1);
      const Word keep = low_bits<Word>(l_ - bit);
      for (std::size_t j = 0; j < degree; ++j) {
        const Word w = row[j];
        const Word signed_weight = (w ^ flip) - flip;
        other[j] = (own[j] + signed_weight - other[j]) & keep;
        own[j] = (own[j] & keep) - (w & flip);
      }
      for (std::size_t j = 0; j < degree; ++j) share[targets[j]] -= static_cast<std::uint64_t>(own[j]) << bit;
      pack(other, degree, l_ - bit, message);
      message += row_bytes(degree, bit);
    }
  }
  wipe(memory.data(), memory.size() * sizeof(Block));
  wipe(points_.data(), points_.size() * sizeof(Block));
}

template <class Word>
void LinearOt::receive_rows(std::size_t first, std::size_t last, const Block* active, const std::uint8_t* choices,
                            const std::uint8_t* message, std::uint64_t* share) {
  std::size_t widest = 0;
  for (std::size_t i = first; i < last; ++i) widest = std::max<std::size_t>(widest, shape_->starts[i + 1] - shape_->starts[i]);
  const std::size_t room = widest + sizeof(Block);
  std::vector<Block> memory(2 * (room * sizeof(Word) / sizeof(Block) + 1));
  Word* own = reinterpret_cast<Word*>(memory.data());
  Word* sent = reinterpret_cast<Word*>(memory.data() + memory.size() / 2);
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t start = shape_->starts[i];
    const std::size_t degree = shape_->starts[i + 1] - start;
    const std::uint32_t* targets = &shape_->targets[start];
    const std::size_t blocks = (degree * sizeof(Word) + sizeof(Block) - 1) / sizeof(Block);
    for (unsigned bit = 0; bit < k_; ++bit, ++active, ++choices) {
      pads(*active, blocks, used_, own);
      used_ += blocks;
      unpack(message, row_bytes(degree, bit), degree, l_ - bit, sent);
      message += row_bytes(degree, bit);
      const Word chosen = Word{0} - static_cast<Word>(*choices & 1);
      const Word keep = low_bits<Word>(l_ - bit);
      for (std::size_t j = 0; j < degree; ++j) own[j] = (own[j] + (sent[j] & chosen)) & keep;
      for (std::size_t j = 0; j < degree; ++j) share[targets[j]] += static_cast<std::uint64_t>(own[j]) << bit;
    }
  }
  wipe(memory.data(), memory.size() * sizeof(Block));
  wipe(points_.data(), points_.size() * sizeof(Block));
}

void LinearOt::send(const Delta& delta, std::span<const std::int64_t> weights, std::size_t first, std::size_t last,
                    const Block* zero, const std::uint8_t* permute, std::uint64_t* share, std::uint8_t* message) {
  static_cast<void>(message_bytes(first, last));
  const Exclusive only(busy_);
  if (weights.size() != shape_->weight_count)
    throw std::invalid_argument("expected " + std::to_string(shape_->weight_count) + " weights, found " + std::to_string(weights.size()));
  if (l_ <= 32)
    send_rows<std::uint32_t>(delta, weights, first, last, zero, permute, share, message);
  else
    send_rows<std::uint64_t>(delta, weights, first, last, zero, permute, share, message);
}

void LinearOt::receive(std::size_t first, std::size_t last, const Block* active, const std::uint8_t* choices,
                       std::span<const std::uint8_t> message, std::uint64_t* share) {
  if (message.size() != message_bytes(first, last))
    throw std::invalid_argument("expected a message of " + std::to_string(message_bytes(first, last)) + " bytes, found " +
                                std::to_string(message.size()));
  const Exclusive only(busy_);
  if (l_ <= 32)
    receive_rows<std::uint32_t>(first, last, active, choices, message.data(), share);
  else
    receive_rows<std::uint64_t>(first, last, active, choices, message.data(), share);
}

}  // namespace deepseal
