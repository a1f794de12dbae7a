// What runs anywhere: four lanes that every compiler turns into what the machine has.
#include "kernels.h"

namespace pinscher {
namespace scalar {

constexpr size_t LANES = 4;
constexpr int REGISTERS = 16;
typedef int16_t shorts __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 8)));
typedef int32_t lanes __attribute__((vector_size(LANES * 4)));
typedef int8_t bytes __attribute__((vector_size(LANES * 4)));
typedef float floats __attribute__((vector_size(LANES * 4)));

static inline shorts mulhrs(shorts a, shorts b) {
  const ints product = __builtin_convertvector(a, ints) * __builtin_convertvector(b, ints);
  return __builtin_convertvector((product + 0x4000) >> 15, shorts);
}
static inline shorts twice(int8_t w) { return static_cast<int16_t>(static_cast<uint8_t>(w) * 0x0101) - (shorts){}; }
static inline lanes multiply_add(shorts a, shorts b) {
  const lanes low = ((lanes)a << 16 >> 16) * ((lanes)b << 16 >> 16), high = ((lanes)a >> 16) * ((lanes)b >> 16);
  return low + high;
}
static inline bool any(lanes m) { return m[0] | m[1] | m[2] | m[3]; }
static inline lanes rounded(floats x) {
  lanes whole;
  for (size_t i = 0; i < LANES; ++i) whole[i] = x[i] >= -2147483648.0f && x[i] < 2147483648.0f ? static_cast<int32_t>(__builtin_rintf(x[i])) : 0;
  return whole;
}

constexpr int32_t HIGHER = 0;
struct FourBytes {
  shorts even, odd;
  explicit FourBytes(const int8_t* w) {
    for (size_t i = 0; i < 2 * LANES; ++i) even[i] = w[i % 2 * 2], odd[i] = w[i % 2 * 2 + 1];
  }
  lanes times(bytes x, lanes sum) const {
    return sum + multiply_add((shorts)x << 8 >> 8, even) + multiply_add((shorts)x >> 8, odd);
  }
};

#include "kernels.inc"
static bool supported() { return true; }

}  // namespace scalar
const Kernels scalar_kernels = KERNELS(scalar);
}  // namespace pinscher
