// Two blocks a register: VAES with AVX2.
#include "kernels_x86.hpp"

namespace deepseal {
namespace {

struct Vector {
  static constexpr std::size_t blocks = 2;
  static constexpr std::size_t garbled = 3;
  static constexpr std::size_t evaluated = 6;
  static constexpr std::size_t streamed = 8;

  __m256i value;

  static void expand(Block key, AesKey& expanded) { expand_key(key, expanded); }
  template <std::size_t K>
  DEEPSEAL_INLINE static void permute(const AesKey& key, Vector (&x)[K]) { permute_registers(key, x); }
  DEEPSEAL_INLINE static Vector load(const Block* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
  }
  DEEPSEAL_INLINE static void store(Block* to, Vector x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.value); }
  DEEPSEAL_INLINE static Vector broadcast(const Block& block) { return {_mm256_broadcastsi128_si256(load_block(&block))}; }
  // first, first + step, ... in the low halves
  DEEPSEAL_INLINE static Vector count(Block first, int step) {
    const __m128i one = _mm_set_epi64x(static_cast<long long>(first.high), static_cast<long long>(first.low));
    return {_mm256_add_epi64(_mm256_broadcastsi128_si256(one), _mm256_set_epi64x(0, step, 0, 0))};
  }
  // All bits of each block set to its bit 0.
  DEEPSEAL_INLINE static Vector spread(Vector x) {
    return {_mm256_shuffle_epi32(_mm256_srai_epi32(_mm256_slli_epi32(x.value, 31), 31), 0)};
  }
  DEEPSEAL_INLINE static void store_pairs(Block* to, Vector x, Vector y) {
    store(to, {_mm256_permute2x128_si256(x.value, y.value, 0x20)});
    store(to + 2, {_mm256_permute2x128_si256(x.value, y.value, 0x31)});
  }
  DEEPSEAL_INLINE static void load_pairs(const Block* from, Vector& x, Vector& y) {
    const Vector first = load(from);
    const Vector second = load(from + 2);
    x = {_mm256_permute2x128_si256(first.value, second.value, 0x20)};
    y = {_mm256_permute2x128_si256(first.value, second.value, 0x31)};
  }
  DEEPSEAL_INLINE Vector advanced(std::uint64_t by) const {
    const auto low = static_cast<long long>(by);
    return {_mm256_add_epi64(value, _mm256_set_epi64x(0, low, 0, low))};
  }
  DEEPSEAL_INLINE Vector round(Vector key) const { return {_mm256_aesenc_epi128(value, key.value)}; }
  DEEPSEAL_INLINE Vector last_round(Vector key) const { return {_mm256_aesenclast_epi128(value, key.value)}; }
};

DEEPSEAL_INLINE Vector operator^(Vector x, Vector y) { return {_mm256_xor_si256(x.value, y.value)}; }
DEEPSEAL_INLINE Vector operator&(Vector x, Vector y) { return {_mm256_and_si256(x.value, y.value)}; }

}  // namespace

extern const Kernels vaes256_kernels;
constinit const Kernels vaes256_kernels = kernels_of<Vector>("vaes-256");

}  // namespace deepseal
