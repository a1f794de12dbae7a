#include "kernels.h"
#if defined(__aarch64__)
#include <arm_neon.h>

namespace pinscher {
namespace neon {

constexpr size_t LANES = 4;  // every aarch64 machine has these: no other target than the rest
constexpr int REGISTERS = 32;
typedef int16_t shorts __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

static inline shorts mulhrs(shorts a, shorts b) { return (shorts)vqrdmulhq_s16((int16x8_t)a, (int16x8_t)b); }
static inline shorts twice(int8_t w) { return (shorts)vdupq_n_s8(w); }
static inline ints multiply_add(shorts a, shorts b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (ints)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
static inline bool any(ints m) { return vmaxvq_u32((uint32x4_t)m) != 0; }

#include "kernels.inc"
static bool supported() { return true; }

}  // namespace neon
const Kernels neon_kernels = KERNELS(neon);
}  // namespace pinscher
#endif
