// Four blocks a register: VAES with AVX-512.
#include "kernels_x86.hpp"

namespace deepseal {
namespace {

struct Vector {
  static constexpr std::size_t blocks = 4;
  static constexpr std::size_t garbled = 3;
  static constexpr std::size_t evaluated = 6;
  static constexpr std::size_t streamed = 8;

  __m512i value;

  static void expand(Block key, AesKey& expanded) { expand_key(key, expanded); }
  template <std::size_t K>
  DEEPSEAL_INLINE static void permute(const AesKey& key, Vector (&x)[K]) { permute_registers(key, x); }
  DEEPSEAL_INLINE static Vector load(const Block* from) { return {_mm512_loadu_si512(from)}; }
  DEEPSEAL_INLINE static void store(Block* to, Vector x) { _mm512_storeu_si512(to, x.value); }
  DEEPSEAL_INLINE static Vector broadcast(const Block& block) { return {_mm512_broadcast_i32x4(load_block(&block))}; }
  // first, first + step, ... in the low halves
  DEEPSEAL_INLINE static Vector count(Block first, int step) {
    const __m128i one = _mm_set_epi64x(static_cast<long long>(first.high), static_cast<long long>(first.low));
    return {_mm512_add_epi64(_mm512_broadcast_i32x4(one), _mm512_set_epi64(0, 3 * step, 0, 2 * step, 0, step, 0, 0))};
  }
  // All bits of each block set to its bit 0.
  DEEPSEAL_INLINE static Vector spread(Vector x) {
    return {_mm512_shuffle_epi32(_mm512_srai_epi32(_mm512_slli_epi32(x.value, 31), 31), _MM_PERM_AAAA)};
  }
  DEEPSEAL_INLINE static void store_pairs(Block* to, Vector x, Vector y) {
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    store(to, {_mm512_permutex2var_epi64(x.value, low, y.value)});
    store(to + 4, {_mm512_permutex2var_epi64(x.value, high, y.value)});
  }
  DEEPSEAL_INLINE static void load_pairs(const Block* from, Vector& x, Vector& y) {
    const Vector first = load(from);
    const Vector second = load(from + 4);
    const __m512i even = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0);
    const __m512i odd = _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2);
    x = {_mm512_permutex2var_epi64(first.value, even, second.value)};
    y = {_mm512_permutex2var_epi64(first.value, odd, second.value)};
  }
  DEEPSEAL_INLINE Vector advanced(std::uint64_t by) const {
    const auto low = static_cast<long long>(by);
    return {_mm512_add_epi64(value, _mm512_set_epi64(0, low, 0, low, 0, low, 0, low))};
  }
  DEEPSEAL_INLINE Vector round(Vector key) const { return {_mm512_aesenc_epi128(value, key.value)}; }
  DEEPSEAL_INLINE Vector last_round(Vector key) const { return {_mm512_aesenclast_epi128(value, key.value)}; }
};

DEEPSEAL_INLINE Vector operator^(Vector x, Vector y) { return {_mm512_xor_si512(x.value, y.value)}; }
DEEPSEAL_INLINE Vector operator&(Vector x, Vector y) { return {_mm512_and_si512(x.value, y.value)}; }

}  // namespace

extern const Kernels vaes512_kernels;
constinit const Kernels vaes512_kernels = kernels_of<Vector>("vaes-512");

}  // namespace deepseal
