#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

// From here on, and only in this file, code may use the wide registers; nothing shared is defined below.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace pinscher {
namespace avx2 {

constexpr size_t LANES = 8;
constexpr int REGISTERS = 16;
typedef int16_t shorts __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef int8_t bytes __attribute__((vector_size(LANES * 4)));

static inline shorts mulhrs(shorts a, shorts b) { return (shorts)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b); }
static inline shorts twice(int8_t w) { return (shorts)_mm256_set1_epi8(w); }
static inline ints multiply_add(shorts a, shorts b) { return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static inline bool any(ints m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }
static inline ints rounded(__m256 x) { return (ints)_mm256_cvtps_epi32(x); }

// Every product of two is exact: 2 · 127 · 127 is less than 2^15.
constexpr int32_t HIGHER = 0;
struct FourBytes {
  __m256i all, size;
  explicit FourBytes(const int8_t* w) {
    int together;
    __builtin_memcpy(&together, w, 4);
    all = _mm256_set1_epi32(together);
    size = _mm256_abs_epi8(all);
  }
  ints times(bytes x, ints sum) const {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)x, all));
    return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
};

#include "kernels.inc"
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace avx2
const Kernels avx2_kernels = KERNELS(avx2);
}  // namespace pinscher

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
