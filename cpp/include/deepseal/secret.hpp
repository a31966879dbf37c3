// Delta, the secret offset of free XOR and of correlated OT, and randomness from the operating system.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "deepseal/block.hpp"

namespace deepseal {

// Fills from the operating system. Throws std::runtime_error where that fails.
void random_bytes(void* out, std::size_t size);

// Overwrites memory that held a secret, so that the compiler cannot drop it.
void wipe(void* memory, std::size_t size) noexcept;

// Marks an object as in use for the length of a block. Counters that two threads share would give a tweak twice.
class Exclusive {
 public:
  // Throws std::logic_error where somebody else is inside.
  explicit Exclusive(std::atomic_flag& busy);
  ~Exclusive() { busy_.clear(std::memory_order_release); }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::atomic_flag& busy_;
};

// Lives on the garbler's side only: it is never copied, printed or returned, and is wiped at its end. Bit 0 is 1.
class Delta {
 public:
  Delta();
  explicit Delta(Block value);  // for repeatable tests
  ~Delta();
  Delta(const Delta&) = delete;
  Delta& operator=(const Delta&) = delete;

  // out[i] = bit i of delta ? ones[i] : zeros[i], by masks; 128 items of `width` bytes each.
  void choose(const std::uint8_t* zeros, const std::uint8_t* ones, std::size_t width, std::uint8_t* out) const;

  // rows[i] ^= bit i of delta ? value : 0
  void add_where_set(Block value, std::array<Block, 128>& rows) const;

 private:
  std::uint64_t bit(unsigned i) const noexcept { return (i < 64 ? value_.low >> i : value_.high >> (i - 64)) & 1; }

  friend class Garbler;
  friend class CotSender;
  friend class OtKeys;
  friend class LinearOt;
  Block value_;
  mutable std::atomic_flag garbles_;  // by one garbler only: a second one would count its gates from 0 again
};

}  // namespace deepseal
