#include <cstdlib>
#include <cstring>

#include "attention.h"

namespace pagedjax {

#if defined(__x86_64__)
extern const Kernels kernels_base, kernels_avx2, kernels_avx512;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_base;
#endif

namespace {

#if defined(__x86_64__)
bool runs_here(const Kernels& k) {
  __builtin_cpu_init();
  if (&k == &kernels_avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma");
  }
  if (&k == &kernels_avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  return true;
}
#endif

struct Usable {
  const Kernels* list[3];
  int count = 0;

  Usable() {
#if defined(__x86_64__)
    for (const Kernels* k : {&kernels_avx512, &kernels_avx2, &kernels_base}) {
      if (runs_here(*k)) list[count++] = k;
    }
#elif defined(__aarch64__)
    list[count++] = &kernels_neon;
#else
    list[count++] = &kernels_base;
#endif
  }
};

const Usable& usable() {
  static const Usable found;
  return found;
}

const Kernels& choose() {
  const char* wanted = std::getenv("PAGEDJAX_HOST_ISA");
  for (int i = 0; wanted != nullptr && i < usable().count; ++i) {
    if (std::strcmp(wanted, usable().list[i]->name) == 0) return *usable().list[i];
  }
  return *usable().list[0];
}

}  // namespace

const Kernels* const* all_kernels(int* count) {
  *count = usable().count;
  return usable().list;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace pagedjax
