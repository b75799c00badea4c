// Runs the small kernels: one for ctypes, or all of them for a program.
#include "harness.h"

#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <vector>

namespace {

std::vector<const TestKernel*>& kernels() {
  static std::vector<const TestKernel*> made;
  return made;
}

}  // namespace

TestKernel::TestKernel(const char* name, void (*body)(Arrays))
    : name(name), body(body) {
  kernels().push_back(this);
}

Bench::Bench(Arrays arrays) {
  pipe.InitBuffer(in, 2, 1024);
  pipe.InitBuffer(out, 2, 1024);
  pipe.InitBuffer(work, 4096);
  a = arrays.tensor<float>(arrays.a);
  b = arrays.tensor<float>(arrays.b);
  c = arrays.tensor<float>(arrays.c);
  x = work.Get<float>();
  y = x[256];
  z = x[512];
  h = x[768].ReinterpretCast<half>();
  Duplicate(x, 1.0f, 256);
  Duplicate(y, 2.0f, 256);
  Duplicate(z, 3.0f, 256);
  Duplicate(h, half(4), 256);
  PipeBarrier<PIPE_V>();
}

extern "C" {

int sim_test_count() { return int(kernels().size()); }

const char* sim_test_name(int index) { return kernels()[size_t(index)]->name; }

// The number of errors; pagedjax_sim_error has them.
int sim_test_run(int index, int blocks, uint8_t* a, uint8_t* b, uint8_t* c) {
  struct Call {
    const TestKernel* kernel;
    Arrays arrays;
  } call{kernels()[size_t(index)], Arrays{a, b, c}};
  pagedjax_sim_add_region(a, kBytes, "a");
  pagedjax_sim_add_region(b, kBytes, "b");
  pagedjax_sim_add_region(c, kBytes, "c");
  const int errors = pagedjax_sim_launch(
      uint32_t(blocks),
      [](void* argument) {
        const Call& made = *static_cast<Call*>(argument);
        made.kernel->body(made.arrays);
      },
      &call);
  for (const uint8_t* array : {a, b, c}) pagedjax_sim_remove_region(array);
  return errors;
}

// Whether a call outside a launch throws, rather than touch memory that is not there.
int sim_test_outside() {
  try {
    GetBlockIdx();
  } catch (const std::logic_error&) {
    return 1;
  }
  return 0;
}

// Runs every kernel in four schedules and prints what is reported.
int sim_test_main() {
  std::vector<uint8_t> a(kBytes), b(kBytes), c(kBytes);
  for (int seed = 0; seed < 4; ++seed) {
    pagedjax_sim_set_seed(uint64_t(seed));
    for (int i = 0; i < sim_test_count(); ++i) {
      pagedjax_sim_clear_errors();
      sim_test_run(i, 2, a.data(), b.data(), c.data());
      for (int e = 0; e < pagedjax_sim_error_count(); ++e) {
        std::printf("%d %s %s\n", seed, sim_test_name(i), pagedjax_sim_error(e));
      }
    }
  }
  std::printf("ran %d kernels\n", sim_test_count());
  return 0;
}

}  // extern "C"
