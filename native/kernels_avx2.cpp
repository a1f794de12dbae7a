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

static inline shorts mulhrs(shorts a, shorts b) { return (shorts)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b); }
static inline shorts twice(int8_t w) { return (shorts)_mm256_set1_epi8(w); }
static inline ints multiply_add(shorts a, shorts b) { return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static inline bool any(ints m) { return !_mm256_testz_si256((__m256i)m, (__m256i)m); }

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
