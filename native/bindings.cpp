#include "bindings.h"

NB_MODULE(_native, module) {
  bind_store(module);
  bind_runtime(module);
}
