// The compiled Ascend C kernels as a table of functions, loaded with dlopen.
#pragma once

#include <string>

#include "../kernels/launch.h"

#define PAGEDJAX_ASCEND_FUNCTIONS(X)                                             \
  X(pagedjax_ascend_version)                                                     \
  X(pagedjax_ascend_arch)                                                        \
  X(pagedjax_ascend_is_simulated)                                                \
  X(pagedjax_ascend_paged_attention)                                             \
  X(pagedjax_ascend_combine)                                                     \
  X(pagedjax_ascend_reshape_and_cache)                                           \
  X(pagedjax_ascend_block_copy)

namespace pagedjax::device {

struct KernelTable {
#define PAGEDJAX_KERNEL_POINTER(name) decltype(&::name) name = nullptr;
  PAGEDJAX_ASCEND_FUNCTIONS(PAGEDJAX_KERNEL_POINTER)
#undef PAGEDJAX_KERNEL_POINTER
  int arch = 0;  // 1001 or 2201
  bool simulated = false;
};

// The kernels of the library that PAGEDJAX_ASCEND_KERNELS names, or of
// libpagedjax_ascend_kernels.so on the loader's path or in `beside`; nullptr, with the
// reason. Loaded once.
const KernelTable* load_kernels(std::string* why);
// Lets the next load look again. Nothing may be open.
void forget_kernels();

// Where else to look: the folder of the Python package.
void look_for_kernels_in(const std::string& folder);

// The compiler architecture of a product, from its name in any case: "Ascend910B3" is
// 2201, and "Ascend910B", without a digit, belongs to the older 910A. 0 = not known, as
// "Ascend910" is, which several call themselves. The same rule as `arch_of_soc` of
// ../kernels/build.py.
int arch_of(const std::string& soc);

}  // namespace pagedjax::device
