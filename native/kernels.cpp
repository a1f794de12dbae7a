#include "kernels.h"

#include <cstring>

namespace pinscher {

const std::vector<Isa>& all_isas() {
#define ISA(name, ...) {name##_kernels, {__VA_ARGS__}},
  static const std::vector<Isa> every = {
#include "isas.inc"
  };
#undef ISA
  return every;
}

const Kernels* kernels(const char* name) {
  for (const Isa& some : all_isas())
    if (some.kernels.supported() && (!name || std::strcmp(name, some.kernels.name) == 0)) return &some.kernels;
  return nullptr;
}

}  // namespace pinscher
