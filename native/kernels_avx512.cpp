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

constexpr size_t LANES = 16;
constexpr int REGISTERS = 32;
typedef int16_t shorts __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline shorts mulhrs(shorts a, shorts b) { return (shorts)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b); }
static inline shorts twice(int8_t w) { return (shorts)_mm512_set1_epi8(w); }
static inline ints multiply_add(shorts a, shorts b) { return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static inline bool any(ints m) { return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0; }
// Four weights by one load, each spread where it is needed: a byte's own way from memory or a register takes longer.
#define BY_FOUR
struct Four {
  __m512i bytes;
  explicit Four(const int8_t* w) {
    int together;
    __builtin_memcpy(&together, w, 4);
    bytes = _mm512_set1_epi32(together);
  }
  shorts operator[](int i) const { return (shorts)_mm512_shuffle_epi8(bytes, _mm512_set1_epi8(static_cast<char>(i))); }
};

#include "kernels.inc"
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace avx512
const Kernels avx512_kernels = KERNELS(avx512);
}  // namespace pinscher

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
