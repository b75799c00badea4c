// Small kernels for the tests of the simulator.
//
// A line that must be reported ends in a comment with an exclamation mark and the rule,
// and, where one product only objects, its architecture:
//
//   DataCopy(x, a, 7);  // ! copy-length
//   Maxs(x, x, 1.0f, 8);  // ! 1001 product
//
// A kernel without such a line must be run without an error.
#pragma once

#include "kernel_operator.h"
#include "simulator.h"

using namespace AscendC;

constexpr int kBytes = 8192;  // of each of the arrays a, b and c

struct Arrays {
  uint8_t *a, *b, *c;
  template <typename T>
  GlobalTensor<T> tensor(uint8_t* at) const {
    GlobalTensor<T> made;
    made.SetGlobalBuffer(reinterpret_cast<T*>(at));
    return made;
  }
};

struct TestKernel {
  TestKernel(const char* name, void (*body)(Arrays));
  const char* name;
  void (*body)(Arrays);
};

#define KERNEL(name)                                  \
  static void name(Arrays arrays);                    \
  static const TestKernel name##_kernel(#name, name); \
  static void name([[maybe_unused]] Arrays arrays)

// What most kernels need: two input buffers and two output buffers of 1 KiB, three work
// tensors of 256 floats that hold 1, 2 and 3, and one of 256 halves that hold 4.
struct Bench {
  explicit Bench(Arrays arrays);
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<TPosition::VECCALC> work;
  GlobalTensor<float> a, b, c;
  LocalTensor<float> x, y, z;
  LocalTensor<half> h;
};
