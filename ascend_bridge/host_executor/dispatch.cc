#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#ifdef PJ_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"

namespace pagedjax {

#if defined(__x86_64__)
extern const Kernels kernels_base, kernels_avx2, kernels_avx512;
#ifdef PJ_HAS_AMX
extern const Kernels kernels_amx;
#endif
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_base;
#endif

namespace {

#if defined(__x86_64__)
// GCC before 11 cannot ask for F16C by name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
}

#ifdef PJ_HAS_AMX
// Whether the processor has AMX for bfloat16 and the system lets this process use it:
// https://docs.kernel.org/arch/x86/xstate.html. Asked for once, for all its threads.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const unsigned tiles = 3u << 22;  // AMX-BF16 and AMX-TILE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tiles) != tiles) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool runs_here(const Kernels& k) {
  __builtin_cpu_init();
#ifdef PJ_HAS_AMX
  if (&k == &kernels_amx) return has_avx512() && has_amx();
#endif
  if (&k == &kernels_avx512) return has_avx512();
  if (&k == &kernels_avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
  return true;
}
#endif

struct Usable {
  const Kernels* list[4];
  int count = 0;

  Usable() {
#if defined(__x86_64__)
#ifdef PJ_HAS_AMX
    if (runs_here(kernels_amx)) list[count++] = &kernels_amx;
#endif
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
