#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

// From here on, and only in this file, code may use the wide registers; nothing shared is defined below.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace pinscher {
namespace avx512 {

#include "avx512.inc"

// Every product of two is exact: 2 · 127 · 127 is less than 2^15.
constexpr int32_t HIGHER = 0;
struct FourBytes {
  __m512i size;
  __mmask64 negative;
  explicit FourBytes(const int8_t* w) {
    int together;
    __builtin_memcpy(&together, w, 4);
    const __m512i all = _mm512_set1_epi32(together);
    size = _mm512_abs_epi8(all);
    negative = _mm512_movepi8_mask(all);
  }
  ints times(bytes x, ints sum) const {
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    const __m512i pairs = _mm512_maddubs_epi16(size, turned);
    return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
};

#include "kernels.inc"
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace avx512
const Kernels avx512_kernels = KERNELS(avx512);
}  // namespace pinscher

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
