// What the kernels share. Device code: Ascend C by its public API, one source for
// architecture 2201 (910B1 to 910B4, 910_93) and 1001 (910A).
#pragma once

// The build names the architecture, for the host has to know it as well; the compiler
// says it to device code only.
#if !defined(PAGEDJAX_ASCEND_ARCH)
#error "compile with -DPAGEDJAX_ASCEND_ARCH=2201 (910B1 to 910B4, 910_93) or 1001 (910A)"
#elif defined(__NPU_ARCH__) && __NPU_ARCH__ != PAGEDJAX_ASCEND_ARCH
#error "PAGEDJAX_ASCEND_ARCH is not the architecture that is compiled for"
#endif

#include "kernel_operator.h"

#include "tiling.h"

namespace pagedjax_ascend {

// Some versions of the vendor's headers have GetTPipePtr outside the namespace.
using namespace AscendC;

#if PAGEDJAX_ASCEND_ARCH == 2201
// Vector cores alone; the cube cores of the chip stay idle. The keyword says it to the
// compiler, the macro to the scripts of ascendc.cmake, and each means nothing to the other.
#if defined(PAGEDJAX_BY_ASCENDC_CMAKE)
#define PAGEDJAX_KERNEL extern "C" __global__ __aicore__
#else
#define PAGEDJAX_KERNEL extern "C" __global__ __vector__
#endif
#define PAGEDJAX_VECTOR_ONLY() KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY)
constexpr AscendC::RoundMode kNarrow = AscendC::RoundMode::CAST_RINT;
#else
#define PAGEDJAX_KERNEL extern "C" __global__ __aicore__
#define PAGEDJAX_VECTOR_ONLY() static_cast<void>(0)
// The only mode there is from float; it rounds to nearest.
constexpr AscendC::RoundMode kNarrow = AscendC::RoundMode::CAST_NONE;
#endif

constexpr int32_t kBlockBytes = 32;
constexpr int32_t kHalfBlock = 16;     // 16-bit elements of 32 bytes
constexpr int32_t kRepeatFloats = 64;  // floats of one repeat
// Below any score, and still finite: the difference of two of them is 0, not NaN.
constexpr float kLowest = -3.0e38f;

__aicore__ inline int32_t round_up(int32_t n, int32_t unit) {
  return (n + unit - 1) / unit * unit;
}
__aicore__ inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

// What follows on the second pipe of `kEvent` waits for all before on the first.
template <HardEvent kEvent>
__aicore__ inline void order() {
  const event_t id = static_cast<event_t>(GetTPipePtr()->FetchEventID(kEvent));
  AscendC::SetFlag<kEvent>(id);
  AscendC::WaitFlag<kEvent>(id);
}

// What follows on the vector pipe reads what was written before on it.
__aicore__ inline void settle() {
  AscendC::PipeBarrier<PIPE_V>();
}

// An int32 list in GM that the scalar unit reads through the unified buffer: a run of it
// is brought on-chip at once, not one number at a time.
class IdList {
 public:
  __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR list, int64_t size) {
    // Copies are of whole blocks, which the list is readable for.
    list_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(list), (size + 7) / 8 * 8);
    pipe->InitBuffer(queue_, 1, kIds * sizeof(int32_t));
  }

  // list[at]; a run that is brought in for it ends at `end`, if that is not too far.
  __aicore__ inline int32_t get(int64_t at, int64_t end) {
    if (at < begin_ || at >= begin_ + count_) load(at, end);
    return ids_.GetValue(static_cast<uint32_t>(at - begin_));
  }

  __aicore__ inline void release() {
    if (count_ > 0) queue_.FreeTensor(ids_);
    count_ = 0;
  }

 private:
  __aicore__ inline void load(int64_t at, int64_t end) {
    if (count_ > 0) {
      order<HardEvent::S_MTE2>();
      queue_.FreeTensor(ids_);
    }
    begin_ = at / 8 * 8;
    const int64_t wanted = (end - begin_ + 7) / 8 * 8;
    count_ = static_cast<int32_t>(wanted < kIds ? wanted : kIds);
    ids_ = queue_.AllocTensor<int32_t>();
    AscendC::DataCopy(ids_, list_[begin_], count_);
    queue_.EnQue(ids_);
    ids_ = queue_.DeQue<int32_t>();
    order<HardEvent::MTE2_S>();
  }

  AscendC::GlobalTensor<int32_t> list_;
  AscendC::TQue<TPosition::VECIN, 1> queue_;
  AscendC::LocalTensor<int32_t> ids_;
  int64_t begin_ = 0;
  int32_t count_ = 0;
};

// rows[i][0..dim) *= by[i], where by holds each factor 8 times. The widest operation is
// one repeat of 64 lanes per row, so a row is taken in slices.
__aicore__ inline void scale_rows(const AscendC::LocalTensor<float>& rows,
                                  const AscendC::LocalTensor<float>& by, int32_t count,
                                  int32_t dim) {
  const uint8_t stride = static_cast<uint8_t>(dim / kLanes);
  for (int32_t at = 0; at < dim; at += kRepeatFloats) {
    const uint64_t lanes = smaller(kRepeatFloats, dim - at);
    AscendC::Mul(rows[at], rows[at], by, lanes, static_cast<uint8_t>(count),
                 AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
  }
}

}  // namespace pagedjax_ascend
