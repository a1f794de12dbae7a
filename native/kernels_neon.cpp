#include "kernels.h"
#if defined(__aarch64__)
#include <arm_neon.h>

namespace pinscher {
namespace neon {

#include "neon.inc"  // every aarch64 machine has these: no other target than the rest

// Every sum of two is exact: 2 · 127 · 127 is less than 2^15.
constexpr int32_t HIGHER = 0;
struct FourBytes {
  int8x16_t all;
  explicit FourBytes(const int8_t* w) {
    int32_t together;
    __builtin_memcpy(&together, w, 4);
    all = vreinterpretq_s8_s32(vdupq_n_s32(together));
  }
  ints times(bytes x, ints sum) const {
    const int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)x), vget_low_s8(all)), high = vmull_high_s8((int8x16_t)x, all);
    return (ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
  }
};

#include "kernels.inc"
static bool supported() { return true; }

}  // namespace neon
const Kernels neon_kernels = KERNELS(neon);
}  // namespace pinscher
#endif
