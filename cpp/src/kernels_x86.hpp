// Vectors of blocks in x86 registers.
#pragma once

#include <immintrin.h>

#include "kernels.hpp"

namespace deepseal {
namespace {

template <int constant>
DEEPSEAL_INLINE __m128i next_round_key(__m128i key) {
  const __m128i assist = _mm_shuffle_epi32(_mm_aeskeygenassist_si128(key, constant), 0xff);
  key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
  key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
  return _mm_xor_si128(key, assist);
}

DEEPSEAL_INLINE __m128i load_block(const Block* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

inline void expand_key(Block key, AesKey& expanded) {
  __m128i round[11];
  round[0] = load_block(&key);
  round[1] = next_round_key<0x01>(round[0]);
  round[2] = next_round_key<0x02>(round[1]);
  round[3] = next_round_key<0x04>(round[2]);
  round[4] = next_round_key<0x08>(round[3]);
  round[5] = next_round_key<0x10>(round[4]);
  round[6] = next_round_key<0x20>(round[5]);
  round[7] = next_round_key<0x40>(round[6]);
  round[8] = next_round_key<0x80>(round[7]);
  round[9] = next_round_key<0x1b>(round[8]);
  round[10] = next_round_key<0x36>(round[9]);
  for (int i = 0; i < 11; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(&expanded.round[i]), round[i]);
}

// The rounds of AES on K registers at once: independent instructions hide each other's latency.
template <class V, std::size_t K>
DEEPSEAL_INLINE void permute_registers(const AesKey& key, V (&x)[K]) {
  const V first = V::broadcast(key.round[0]);
  for (std::size_t i = 0; i < K; ++i) x[i] = x[i] ^ first;
#pragma GCC unroll 9
  for (int round = 1; round < 10; ++round) {
    const V k = V::broadcast(key.round[round]);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < K; ++i) x[i] = x[i].round(k);
  }
  const V last = V::broadcast(key.round[10]);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < K; ++i) x[i] = x[i].last_round(last);
}

}  // namespace
}  // namespace deepseal
