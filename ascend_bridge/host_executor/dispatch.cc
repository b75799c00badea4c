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

bool runs_here(const Kernels& k) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&k == &kernels_avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma");
  }
  if (&k == &kernels_avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#else
  (void)k;
#endif
  return true;
}

const Kernels& choose() {
#if defined(__x86_64__)
  const Kernels* all[] = {&kernels_avx512, &kernels_avx2, &kernels_base};
#elif defined(__aarch64__)
  const Kernels* all[] = {&kernels_neon};
#else
  const Kernels* all[] = {&kernels_base};
#endif
  const char* wanted = std::getenv("PAGEDJAX_HOST_ISA");
  for (const Kernels* k : all) {
    if (wanted != nullptr && std::strcmp(wanted, k->name) == 0 && runs_here(*k)) return *k;
  }
  for (const Kernels* k : all) {
    if (runs_here(*k)) return *k;
  }
  std::abort();  // the last of the list runs everywhere
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace pagedjax
