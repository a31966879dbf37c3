// One block a register: AES-NI and SSE4.1.
#include "kernels_x86.hpp"

namespace deepseal {
namespace {

struct Vector {
  static constexpr std::size_t blocks = 1;
  static constexpr std::size_t garbled = 3;
  static constexpr std::size_t evaluated = 6;
  static constexpr std::size_t streamed = 8;

  __m128i value;

  static void expand(Block key, AesKey& expanded) { expand_key(key, expanded); }
  template <std::size_t K>
  DEEPSEAL_INLINE static void permute(const AesKey& key, Vector (&x)[K]) { permute_registers(key, x); }
  DEEPSEAL_INLINE static Vector load(const Block* from) { return {load_block(from)}; }
  DEEPSEAL_INLINE static void store(Block* to, Vector x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x.value); }
  DEEPSEAL_INLINE static Vector broadcast(const Block& block) { return load(&block); }
  // first, first + step, ... in the low halves
  DEEPSEAL_INLINE static Vector count(Block first, int) {
    return {_mm_set_epi64x(static_cast<long long>(first.high), static_cast<long long>(first.low))};
  }
  // All bits of each block set to its bit 0.
  DEEPSEAL_INLINE static Vector spread(Vector x) {
    return {_mm_shuffle_epi32(_mm_srai_epi32(_mm_slli_epi32(x.value, 31), 31), 0)};
  }
  DEEPSEAL_INLINE static void store_pairs(Block* to, Vector x, Vector y) {
    store(to, x);
    store(to + 1, y);
  }
  DEEPSEAL_INLINE static void load_pairs(const Block* from, Vector& x, Vector& y) {
    x = load(from);
    y = load(from + 1);
  }
  DEEPSEAL_INLINE Vector advanced(std::uint64_t by) const {
    return {_mm_add_epi64(value, _mm_set_epi64x(0, static_cast<long long>(by)))};
  }
  DEEPSEAL_INLINE Vector round(Vector key) const { return {_mm_aesenc_si128(value, key.value)}; }
  DEEPSEAL_INLINE Vector last_round(Vector key) const { return {_mm_aesenclast_si128(value, key.value)}; }
};

DEEPSEAL_INLINE Vector operator^(Vector x, Vector y) { return {_mm_xor_si128(x.value, y.value)}; }
DEEPSEAL_INLINE Vector operator&(Vector x, Vector y) { return {_mm_and_si128(x.value, y.value)}; }

}  // namespace

extern const Kernels aesni_kernels;
constinit const Kernels aesni_kernels = kernels_of<Vector>("aes-ni");

}  // namespace deepseal
