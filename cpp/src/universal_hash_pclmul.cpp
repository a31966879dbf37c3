// Products of polynomials by PCLMULQDQ.
#include <wmmintrin.h>

#include "deepseal/universal_hash.hpp"

namespace deepseal {

void multiply_add_pclmul(Product& sum, const Block* a, const Block* b, std::size_t stride, std::size_t n) noexcept {
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&sum.low));
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&sum.high));
  __m128i middle = _mm_setzero_si128();
  for (std::size_t i = 0; i < n; ++i) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i * stride));
    low = _mm_xor_si128(low, _mm_clmulepi64_si128(x, y, 0x00));
    high = _mm_xor_si128(high, _mm_clmulepi64_si128(x, y, 0x11));
    middle = _mm_xor_si128(middle, _mm_xor_si128(_mm_clmulepi64_si128(x, y, 0x01), _mm_clmulepi64_si128(x, y, 0x10)));
  }
  low = _mm_xor_si128(low, _mm_slli_si128(middle, 8));
  high = _mm_xor_si128(high, _mm_srli_si128(middle, 8));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&sum.low), low);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&sum.high), high);
}

}  // namespace deepseal
