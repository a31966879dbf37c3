#include "deepseal/linear_ot.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace deepseal {
namespace {

constexpr std::uint64_t epoch_blocks = 1 << 13;  // two hash calls each at the sender

// Secret words that are wiped in the end; as blocks, since pads are.
class Scratch {
 public:
  explicit Scratch(std::size_t blocks) : blocks_(blocks) {}
  ~Scratch() { wipe(blocks_.data(), blocks_.size() * sizeof(Block)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  Block* data() noexcept { return blocks_.data(); }
  template <class Word>
  Word* words() noexcept { return reinterpret_cast<Word*>(blocks_.data()); }

 private:
  std::vector<Block> blocks_;
};

template <class Word>
std::size_t blocks_of(std::size_t words) {
  return (words * sizeof(Word) + sizeof(Block) - 1) / sizeof(Block);
}

std::size_t padded(std::size_t blocks) { return (blocks + 3) / 4 * 4; }

}  // namespace

Connections::Connections(std::vector<std::uint64_t> starts, std::vector<std::uint32_t> targets, std::size_t outputs)
    : starts_(std::move(starts)), targets_(std::move(targets)), outputs_(outputs) {
  const bool sound = !starts_.empty() && starts_.front() == 0 && std::ranges::is_sorted(starts_) &&
                     starts_.back() == targets_.size() && outputs <= std::numeric_limits<std::uint32_t>::max() &&
                     std::ranges::all_of(targets_, [&](std::uint32_t target) { return target < outputs; });
  if (!sound) throw std::invalid_argument("expected the shape of a linear layer, found starts and targets that do not fit");
  runs_.resize(sources());
  for (std::size_t i = 0; i < sources(); ++i) {
    const std::span row(targets_.data() + start(i), degree(i));
    runs_[i] = std::ranges::adjacent_find(row, [](auto x, auto y) { return y != x + 1; }) == row.end();
    widest_ = std::max(widest_, row.size());
  }
}

template <class Word>
void Connections::scatter(std::size_t i, const Word* sum, bool negative, std::uint64_t* share) const {
  const std::uint32_t* targets = targets_.data() + start(i);
  const std::size_t n = degree(i);
  const std::uint64_t flip = negative ? ~std::uint64_t{0} : 0;
  if (runs_[i]) {
    std::uint64_t* row = n == 0 ? share : share + targets[0];
    for (std::size_t j = 0; j < n; ++j) row[j] += (sum[j] ^ flip) - flip;
  } else {
    for (std::size_t j = 0; j < n; ++j) share[targets[j]] += (sum[j] ^ flip) - flip;
  }
}

LinearOt::LinearOt(const SessionKeys& session, std::shared_ptr<const Connections> shape, unsigned l, unsigned k,
                   bool is_signed, std::uint64_t use)
    : kernels_(session.kernels()),
      permutation_(session, Domain::payload),
      shape_(std::move(shape)),
      l_(l),
      k_(k),
      signed_(is_signed),
      use_(use) {
  const bool sound = l >= 2 && l <= 64 && k >= 1 && k <= l && use < std::uint64_t{1} << 32;
  if (!sound) throw std::invalid_argument("expected a ring of 2 to 64 bits, 1 to l bits of the source and a use below 2^32, found others");
}

std::size_t LinearOt::message_bytes(std::size_t first, std::size_t last) const {
  if (first > last || last > shape_->sources()) throw std::invalid_argument("expected source elements of the layer, found others");
  std::size_t bytes = 0;
  for (std::size_t i = first; i < last; ++i)
    for (unsigned bit = 0; bit < k_; ++bit) bytes += row_bytes(shape_->degree(i), bit);
  return bytes;
}

// Pseudo-random rows for each bit, `share` of them (one for each label) with the same tweaks: H(label, payload | use |
// index ...). A key of its own for each layer and epoch: none serves more than 2^14 calls, however many layers there are.
void LinearOt::pads(const Block* labels, std::size_t share, std::size_t blocks, std::size_t stride, Block* out) {
  if (blocks == 0) return;
  for (unsigned bit = 0; bit < k_;) {
    const std::uint64_t left = epoch_blocks - used_ % epoch_blocks;
    const auto key = [&] { return permutation_.at(use_ << 32 | used_ / epoch_blocks); };
    if (const auto fit = static_cast<unsigned>(std::min<std::uint64_t>(k_ - bit, left / blocks)); fit > 0) {
      kernels_.stretch(key(), labels + bit * share, fit * share, share, tweak(Domain::payload, use_, used_), blocks, stride,
                       out + bit * share * stride);
      used_ += fit * blocks;
      bit += fit;
      continue;
    }
    for (std::size_t done = 0; done < blocks;) {  // a row in several epochs, in steps that keep the next one aligned
      const std::size_t size = std::min<std::uint64_t>(blocks - done, epoch_blocks - used_ % epoch_blocks);
      const std::size_t room = padded(size);
      Scratch rows(share * room);
      kernels_.stretch(key(), labels + bit * share, share, share, tweak(Domain::payload, use_, used_), size, room, rows.data());
      for (std::size_t i = 0; i < share; ++i)
        std::copy_n(rows.data() + i * room, size, out + (bit * share + i) * stride + done);
      used_ += size;
      done += size;
    }
    ++bit;
  }
}

template <class Word, class Mask>
void LinearOt::send_rows(Mask mask_row, const Delta& delta, std::span<const std::int64_t> weights, std::size_t first,
                         std::size_t last, const Block* labels, std::size_t stride, std::uint64_t* share,
                         std::span<std::uint8_t> message) {
  const std::size_t most = padded(blocks_of<Word>(shape_->widest()));
  Scratch rows(2 * k_ * most);
  Scratch row(2 * most);
  Word* w = row.words<Word>();
  Word* sum = w + most * (sizeof(Block) / sizeof(Word));
  Scratch pairs(2 * k_);
  std::uint8_t permute[64];
  std::uint8_t* to = message.data();
  std::uint8_t* const end = to + message.size();
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t degree = shape_->degree(i);
    const std::size_t room = padded(blocks_of<Word>(degree));
    for (unsigned bit = 0; bit < k_; ++bit) {
      const Block zero = labels[bit * stride + i];
      permute[bit] = static_cast<std::uint8_t>(zero.low & 1);
      pairs.data()[2 * bit] = zero ^ (mask(zero.low) & delta.value_);  // of colour 0
      pairs.data()[2 * bit + 1] = pairs.data()[2 * bit] ^ delta.value_;
    }
    pads(pairs.data(), 2, blocks_of<Word>(degree), room, rows.data());
    const std::int64_t* own = weights.data() + shape_->start(i);
    for (std::size_t j = 0; j < degree; ++j) w[j] = static_cast<Word>(own[j]);
    mask_row(rows.words<Word>(), room * (sizeof(Block) / sizeof(Word)), w, degree, permute, RowShape{l_, k_, signed_}, sum, to, end);
    for (unsigned bit = 0; bit < k_; ++bit) to += row_bytes(degree, bit);
    shape_->scatter(i, sum, true, share);
  }
  wipe(permute, sizeof permute);
}

template <class Word, class Open>
void LinearOt::receive_rows(Open open_row, std::size_t first, std::size_t last, const Block* labels, std::size_t stride,
                            std::span<const std::uint8_t> message, std::uint64_t* share) {
  const std::size_t most = padded(blocks_of<Word>(shape_->widest()));
  Scratch rows(k_ * most);
  Scratch row(2 * most);
  Word* sent = row.words<Word>();
  Word* sum = sent + most * (sizeof(Block) / sizeof(Word));
  Scratch active(k_);
  std::uint8_t choices[64];
  const std::uint8_t* from = message.data();
  const std::uint8_t* const end = from + message.size();
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t degree = shape_->degree(i);
    const std::size_t room = padded(blocks_of<Word>(degree));
    for (unsigned bit = 0; bit < k_; ++bit) {
      active.data()[bit] = labels[bit * stride + i];
      choices[bit] = static_cast<std::uint8_t>(active.data()[bit].low & 1);
    }
    pads(active.data(), 1, blocks_of<Word>(degree), room, rows.data());
    open_row(rows.words<Word>(), room * (sizeof(Block) / sizeof(Word)), degree, choices, RowShape{l_, k_, signed_}, from, end, sent, sum);
    for (unsigned bit = 0; bit < k_; ++bit) from += row_bytes(degree, bit);
    shape_->scatter(i, sum, false, share);
  }
  wipe(choices, sizeof choices);
}

void LinearOt::send(const Delta& delta, std::span<const std::int64_t> weights, std::size_t first, std::size_t last,
                    const Block* labels, std::size_t stride, std::uint64_t* share, std::uint8_t* message) {
  const std::span<std::uint8_t> room(message, message_bytes(first, last));
  const Exclusive only(busy_);
  if (weights.size() != shape_->count())
    throw std::invalid_argument("expected " + std::to_string(shape_->count()) + " weights, found " + std::to_string(weights.size()));
  if (l_ <= 32)
    send_rows<std::uint32_t>(kernels_.mask32, delta, weights, first, last, labels, stride, share, room);
  else
    send_rows<std::uint64_t>(kernels_.mask64, delta, weights, first, last, labels, stride, share, room);
}

void LinearOt::receive(std::size_t first, std::size_t last, const Block* labels, std::size_t stride,
                       std::span<const std::uint8_t> message, std::uint64_t* share) {
  if (message.size() != message_bytes(first, last))
    throw std::invalid_argument("expected a message of " + std::to_string(message_bytes(first, last)) + " bytes, found " +
                                std::to_string(message.size()));
  const Exclusive only(busy_);
  if (l_ <= 32)
    receive_rows<std::uint32_t>(kernels_.open32, first, last, labels, stride, message, share);
  else
    receive_rows<std::uint64_t>(kernels_.open64, first, last, labels, stride, message, share);
}

}  // namespace deepseal
