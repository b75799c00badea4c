// Running kernels on the simulator: for tests, the mock device and the kernel library.
//
// A kernel is a function that includes `kernel_operator.h`; a launch runs it once for
// each of `blocks` cores and says which rules it broke. What breaks a rule is an error
// in the report, never the end of the process:
//
//   simulator::add_region(q, bytes, "q");
//   simulator::Report report =
//       simulator::launch(8, /*seed=*/0, [&] { my_kernel(q, out); });
//   for (const std::string& error : report.errors) puts(error.c_str());
//
// Seed 0 runs the cores in order, and each instruction when it is issued. Another seed
// shuffles the cores and lets the pipes of each lag behind its scalar unit, as far as
// flags, queues and barriers allow.
//
// Compile the kernels with `-std=c++17 -D__NPU_ARCH__=2201 -I simulator/include` (or
// 1001) and link `simulator/src/*.cpp` compiled with the same architecture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace simulator {

struct Report {
  std::vector<std::string> errors;  // "file:line: API: text [rule]", in order
  int64_t instructions = 0;         // issued, all cores together
};

// Global memory that kernels may touch. Regions do not overlap; adding one that starts
// where another does replaces it.
void add_region(const void* address, size_t bytes, const std::string& name);
void remove_region(const void* address);
void clear_regions();

// Runs a kernel on `blocks` cores. One launch runs at a time; others wait.
Report launch(uint32_t blocks, uint64_t seed, const std::function<void()>& kernel);

}  // namespace simulator

// The same for Python's ctypes. The errors of all launches are kept until cleared; the
// seed set here is the one that `pagedjax_sim_launch` uses.
extern "C" {
void pagedjax_sim_add_region(const void* address, size_t bytes, const char* name);
void pagedjax_sim_remove_region(const void* address);
void pagedjax_sim_clear_regions();
void pagedjax_sim_set_seed(uint64_t seed);
// Returns the number of errors of this launch.
int pagedjax_sim_launch(uint32_t blocks, void (*kernel)(void*), void* argument);
int pagedjax_sim_error_count();
const char* pagedjax_sim_error(int index);  // "" past the end
void pagedjax_sim_clear_errors();
int64_t pagedjax_sim_instructions();  // of the last launch
int pagedjax_sim_arch();              // 2201 or 1001
}
