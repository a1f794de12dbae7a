#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>

// From here on, and only in this file, code may use the wide registers; nothing shared is defined below.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

namespace pinscher {
namespace avx512vnni {

#include "avx512.inc"

constexpr int32_t HIGHER = 128;  // vpdpbusd takes activations without a sign
struct FourBytes {
  __m512i all;
  explicit FourBytes(const int8_t* w) {
    int together;
    __builtin_memcpy(&together, w, 4);
    all = _mm512_set1_epi32(together);
  }
  explicit FourBytes(__m512i all) : all(all) {}
  ints times(bytes x, ints sum) const { return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, all); }
};
// Four groups' weights by one load, each spread where it is needed: loads are what there is least of.
#define QUADS_AT_ONCE
struct FourQuads {
  static constexpr __mmask16 ALL = 0xffff;
  __m512i four;
  explicit FourQuads(const int8_t* w)
      : four(_mm512_maskz_broadcast_i32x4(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)))) {}
  FourBytes operator[](int i) const {
    switch (i) {
      case 0: return FourBytes(_mm512_maskz_shuffle_epi32(ALL, four, _MM_PERM_AAAA));
      case 1: return FourBytes(_mm512_maskz_shuffle_epi32(ALL, four, _MM_PERM_BBBB));
      case 2: return FourBytes(_mm512_maskz_shuffle_epi32(ALL, four, _MM_PERM_CCCC));
      default: return FourBytes(_mm512_maskz_shuffle_epi32(ALL, four, _MM_PERM_DDDD));
    }
  }
};

#include "kernels.inc"
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace avx512vnni
const Kernels avx512vnni_kernels = KERNELS(avx512vnni);
}  // namespace pinscher

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
