#include "deepseal/secret.hpp"

#include <cstring>
#include <stdexcept>
#include <sys/random.h>

namespace deepseal {

void random_bytes(void* out, std::size_t size) {
  auto* bytes = static_cast<std::uint8_t*>(out);
  while (size > 0) {
    const ssize_t got = getrandom(bytes, size, 0);
    if (got <= 0) throw std::runtime_error("expected random bytes from the operating system, found none");
    bytes += got;
    size -= static_cast<std::size_t>(got);
  }
}

void wipe(void* memory, std::size_t size) noexcept {
  if (size == 0) return;
  std::memset(memory, 0, size);
  __asm__ volatile("" : : "r"(memory) : "memory");
}

Exclusive::Exclusive(std::atomic_flag& busy) : busy_(busy) {
  if (busy_.test_and_set(std::memory_order_acquire))
    throw std::logic_error("expected one thread in a session, found a second one");
}

Delta::Delta() {
  random_bytes(&value_, sizeof value_);
  value_.low |= 1;
}

Delta::Delta(Block value) : value_(value) { value_.low |= 1; }

Delta::~Delta() { wipe(&value_, sizeof value_); }

void Delta::choose(const std::uint8_t* zeros, const std::uint8_t* ones, std::size_t width, std::uint8_t* out) const {
  for (unsigned i = 0; i < 128; ++i) {
    const auto select = static_cast<std::uint8_t>(~(bit(i) - 1));
    for (std::size_t j = 0; j < width; ++j) {
      const std::size_t place = i * width + j;
      out[place] = static_cast<std::uint8_t>(zeros[place] ^ (select & (zeros[place] ^ ones[place])));
    }
  }
}

void Delta::add_where_set(Block value, std::array<Block, 128>& rows) const {
  for (unsigned i = 0; i < 128; ++i) rows[i] ^= mask(bit(i)) & value;
}

}  // namespace deepseal
