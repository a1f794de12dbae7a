#include "kernels.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

// From here on, and only in this file, code may use the dot product; nothing shared is defined below.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace pinscher {
namespace neondot {

#include "neon.inc"

constexpr int32_t HIGHER = 0;
struct FourBytes {
  int8x16_t all;
  explicit FourBytes(const int8_t* w) {
    int32_t together;
    __builtin_memcpy(&together, w, 4);
    all = vreinterpretq_s8_s32(vdupq_n_s32(together));
  }
  ints times(bytes x, ints sum) const { return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)x, all); }
};

#include "kernels.inc"
static bool supported() {
#if defined(__linux__)
  constexpr unsigned long DOT = 1ul << 20;  // HWCAP_ASIMDDP, which older headers do not name
  return getauxval(AT_HWCAP) & DOT;
#else
  return true;  // every Mac of this architecture has it
#endif
}

}  // namespace neondot
const Kernels neondot_kernels = KERNELS(neondot);
}  // namespace pinscher

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
