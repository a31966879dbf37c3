// What a fuzzer was given, taken piece by piece; zeros after the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "deepseal/block.hpp"

// Ends the process, so that the fuzzer keeps the input; unlike assert, in release builds as well.
#define EXPECT(...)                                                                        \
  do {                                                                                     \
    if (!(__VA_ARGS__)) {                                                                  \
      std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #__VA_ARGS__);      \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

namespace deepseal::fuzzing {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }

  void fill(void* out, std::size_t size) {
    std::memset(out, 0, size);
    const std::size_t taken = std::min(size, left_);
    if (taken > 0) std::memcpy(out, data_, taken);
    data_ += taken;
    left_ -= taken;
  }

  template <class T>
  T take() {
    T value;
    fill(&value, sizeof value);
    return value;
  }

  // 0 ... bound - 1
  std::uint32_t below(std::uint32_t bound) { return take<std::uint16_t>() % bound; }

  template <class T>
  std::vector<T> many(std::size_t n) {
    std::vector<T> all(n);
    if (n > 0) fill(all.data(), n * sizeof(T));
    return all;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

}  // namespace deepseal::fuzzing
