#include "deepseal/ot_keys.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace deepseal {
namespace {

constexpr std::uint64_t epoch_indices = 1 << 13;  // two hash calls each at the sender
constexpr std::size_t group = 512;

// Element j of a row of `bits`-bit numbers, least significant bit first. `size` bytes may be read.
std::uint64_t read_bits(const std::uint8_t* row, std::size_t size, std::size_t j, unsigned bits) {
  const std::size_t start = j * bits;
  std::uint8_t near[9] = {};
  std::memcpy(near, row + start / 8, std::min<std::size_t>(sizeof near, size - start / 8));
  std::uint64_t word;
  std::memcpy(&word, near, sizeof word);
  const unsigned shift = start % 8;
  return shift == 0 ? word : word >> shift | std::uint64_t{near[8]} << (64 - shift);
}

void write_bits(std::uint8_t* row, std::size_t size, std::size_t j, unsigned bits, std::uint64_t value) {
  const std::size_t start = j * bits;
  const unsigned shift = start % 8;
  const std::uint64_t low = value << shift;
  const auto high = static_cast<std::uint8_t>(shift == 0 ? 0 : value >> (64 - shift));
  const std::size_t bytes = std::min<std::size_t>((shift + bits + 7) / 8, size - start / 8);
  for (std::size_t i = 0; i < bytes; ++i)
    row[start / 8 + i] |= i < 8 ? static_cast<std::uint8_t>(low >> 8 * i) : high;
}

}  // namespace

// Epoch 0 of the OT domain belongs to the trees.
void OtKeys::chosen(const Block* t, std::uint64_t use, std::uint64_t first, Block* out, std::size_t n) {
  for (std::size_t i = 0; i < n;) {
    const std::uint64_t index = first + i;
    const std::size_t size = std::min<std::size_t>(n - i, epoch_indices - index % epoch_indices);
    kernels_.hash(permutation_.at(1 + index / epoch_indices), t + i, tweak(domain_, use, index), out + i, size);
    i += size;
  }
}

void OtKeys::pairs(const Delta& delta, const Block* q, std::uint64_t use, std::uint64_t first, Block* out,
                   std::size_t n) {
  Block some[group];
  for (std::size_t start = 0; start < n; start += group) {
    const std::size_t size = std::min(group, n - start);
    for (unsigned side = 0; side < 2; ++side) {
      for (std::size_t i = 0; i < size; ++i) some[i] = q[start + i] ^ (mask(side) & delta.value_);
      chosen(some, use, first + start, some, size);
      for (std::size_t i = 0; i < size; ++i) out[2 * (start + i) + side] = some[i];
    }
  }
  wipe(some, sizeof some);
}

RingOt::RingOt(const SessionKeys& session, unsigned bits, std::size_t width)
    : kernels_(session.kernels()), bits_(bits), width_(width) {
  if (bits < 1 || bits > 64 || width < 1 || width >> 32 != 0)
    throw std::invalid_argument("expected 1 to 64 bits and a width of 1 to 2^32 - 1, found " + std::to_string(bits) + " and " +
                                std::to_string(width));
}

void RingOt::expand(Block key, std::uint64_t* out, std::vector<Block>& stream) const {
  stream.resize((row_bytes() + sizeof(Block) - 1) / sizeof(Block));
  if (stream.size() == 1) {
    stream[0] = key;
  } else {
    AesKey expanded;
    kernels_.expand(key, expanded);
    kernels_.stream(expanded, tweak(Domain::prg, 0, 0), stream.data(), stream.size());
    wipe(&expanded, sizeof expanded);
  }
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(stream.data());
  for (std::size_t j = 0; j < width_; ++j)
    out[j] = read_bits(bytes, stream.size() * sizeof(Block), j, bits_) & modulus_mask();
}

void RingOt::send(std::span<const Block> keys, std::span<const std::uint64_t> values, std::uint64_t* shares,
                  std::uint8_t* message) const {
  const std::size_t n = keys.size() / 2;
  if (keys.size() != 2 * n || values.size() != n * width_)
    throw std::invalid_argument("expected two keys and a row of values for each OT, found another number of them");
  std::vector<std::uint64_t> other(width_);
  std::vector<Block> stream;
  std::fill_n(message, n * row_bytes(), std::uint8_t{0});
  for (std::size_t i = 0; i < n; ++i) {
    std::uint64_t* own = shares + i * width_;
    expand(keys[2 * i], own, stream);
    expand(keys[2 * i + 1], other.data(), stream);
    for (std::size_t j = 0; j < width_; ++j)
      write_bits(message + i * row_bytes(), row_bytes(), j, bits_,
                 (own[j] + values[i * width_ + j] - other[j]) & modulus_mask());
  }
  wipe(other.data(), other.size() * sizeof other[0]);
  wipe(stream.data(), stream.size() * sizeof(Block));
}

void RingOt::receive(std::span<const Block> keys, const std::uint8_t* choices, std::span<const std::uint8_t> message,
                     std::uint64_t* shares) const {
  if (message.size() != keys.size() * row_bytes())
    throw std::invalid_argument("expected a message of " + std::to_string(keys.size() * row_bytes()) + " bytes, found " +
                                std::to_string(message.size()));
  std::vector<Block> stream;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::uint64_t* own = shares + i * width_;
    const std::uint64_t chosen = mask(choices[i]).low;
    expand(keys[i], own, stream);
    for (std::size_t j = 0; j < width_; ++j)
      own[j] = (own[j] + (chosen & read_bits(message.data() + i * row_bytes(), row_bytes(), j, bits_))) & modulus_mask();
  }
  wipe(stream.data(), stream.size() * sizeof(Block));
}

}  // namespace deepseal
