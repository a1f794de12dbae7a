#include "kernels.h"

#include <cstring>

namespace pinscher {

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> every = {
#if defined(__x86_64__)
      &avx512_kernels, &avx2_kernels,
#elif defined(__aarch64__)
      &neon_kernels,
#endif
      &scalar_kernels};
  return every;
}

const Kernels* kernels(const char* name) {
  for (const Kernels* some : all_kernels())
    if (some->supported() && (!name || std::strcmp(name, some->name) == 0)) return some;
  return nullptr;
}

}  // namespace pinscher
