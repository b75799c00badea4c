// DataCopy and DataCopyPad: between global memory and the unified buffer.
#pragma once

#include "sim_pipe.h"
#include "sim_vector.h"

namespace simulator {

// A copy of `count` blocks. Steps are from the start of one block to the next.
struct CopyPlan {
  int64_t count, bytes;
  int64_t gm_step, ub_step;
  int64_t esize;
  int64_t pad_left = 0, pad_right = 0;  // bytes, of DataCopyPad into UB
  bool fill = false;                    // padding has a value
  uint8_t value[8] = {};
};

// Elements from the first to the end of the last, in global memory.
inline uint64_t extent(const CopyPlan& plan) {
  if (plan.count == 0) return 0;
  return uint64_t(((plan.count - 1) * plan.gm_step + plan.bytes) / plan.esize);
}

void copy_in(const char* api, Where at, const View& dst, uintptr_t src,
             const CopyPlan& plan);
void copy_out(const char* api, Where at, uintptr_t dst, const View& src,
              const CopyPlan& plan);
void copy_local(Where at, const View& dst, const View& src, int64_t count,
                int64_t bytes, int64_t dst_step, int64_t src_step);
// bfloat16_t is unknown to arch 1001, even to copies.
void require_copied(Where at, const char* api, Kind kind);
bool count_plan(Where at, int64_t count, int64_t esize, CopyPlan* plan);
bool block_plan(Where at, const AscendC::DataCopyParams& params, int64_t esize,
                bool into_ub, CopyPlan* plan);
bool pad_plan(Where at, const AscendC::DataCopyExtParams& params, int64_t esize,
              bool into_ub, int64_t left, int64_t right, CopyPlan* plan);

}  // namespace simulator

namespace AscendC {

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                     int64_t count, simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (simulator::count_plan(at, count, sizeof(T), &plan) &&
      src.fits(0, uint64_t(count), "DataCopy", at)) {
    simulator::copy_in("DataCopy", at, dst.view("dst"), src.address(), plan);
  }
}

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                     const DataCopyParams& params,
                     simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (simulator::block_plan(at, params, sizeof(T), true, &plan) &&
      src.fits(0, simulator::extent(plan), "DataCopy", at)) {
    simulator::copy_in("DataCopy", at, dst.view("dst"), src.address(), plan);
  }
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                     int64_t count, simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (simulator::count_plan(at, count, sizeof(T), &plan) &&
      dst.fits(0, uint64_t(count), "DataCopy", at)) {
    simulator::copy_out("DataCopy", at, dst.address(), src.view("src"), plan);
  }
}

template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                     const DataCopyParams& params,
                     simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (simulator::block_plan(at, params, sizeof(T), false, &plan) &&
      dst.fits(0, simulator::extent(plan), "DataCopy", at)) {
    simulator::copy_out("DataCopy", at, dst.address(), src.view("src"), plan);
  }
}

// Within the unified buffer; an instruction of the vector unit.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                     int64_t count, simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (simulator::count_plan(at, count, sizeof(T), &plan)) {
    simulator::copy_local(at, dst.view("dst"), src.view("src"), 1, plan.bytes, 0, 0);
  }
}

template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                     const DataCopyParams& params,
                     simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopy", simulator::kind_of<T>());
  if (!simulator::block_plan(at, params, sizeof(T), true, &plan)) return;
  const int64_t bytes = params.blockLen * simulator::kBlock;
  simulator::copy_local(at, dst.view("dst"), src.view("src"), params.blockCount, bytes,
                        bytes + params.dstStride * simulator::kBlock,
                        bytes + params.srcStride * simulator::kBlock);
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                        const DataCopyExtParams& params,
                        const DataCopyPadExtParams<T>& pad,
                        simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopyPad", simulator::kind_of<T>());
  const int64_t left = pad.isPad ? pad.leftPadding : 0;
  const int64_t right = pad.isPad ? pad.rightPadding : 0;
  if (!simulator::pad_plan(at, params, sizeof(T), true, left, right, &plan)) return;
  plan.fill = pad.isPad;
  std::memcpy(plan.value, &pad.paddingValue, sizeof(T));
  if (src.fits(0, simulator::extent(plan), "DataCopyPad", at)) {
    simulator::copy_in("DataCopyPad", at, dst.view("dst"), src.address(), plan);
  }
}

template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                        const DataCopyParams& params, const DataCopyPadParams& pad,
                        simulator::Where at = simulator::Where::here()) {
  T value;
  std::memcpy(&value, &pad.paddingValue, sizeof(T));
  const DataCopyExtParams wide(params.blockCount, params.blockLen, params.srcStride,
                               params.dstStride, 0);
  const DataCopyPadExtParams<T> wide_pad(pad.isPad, pad.leftPadding, pad.rightPadding,
                                         value);
  DataCopyPad(dst, src, wide, wide_pad, at);
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                        const DataCopyExtParams& params,
                        simulator::Where at = simulator::Where::here()) {
  simulator::CopyPlan plan;
  simulator::require_copied(at, "DataCopyPad", simulator::kind_of<T>());
  if (simulator::pad_plan(at, params, sizeof(T), false, 0, 0, &plan) &&
      dst.fits(0, simulator::extent(plan), "DataCopyPad", at)) {
    simulator::copy_out("DataCopyPad", at, dst.address(), src.view("src"), plan);
  }
}

template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                        const DataCopyParams& params,
                        simulator::Where at = simulator::Where::here()) {
  const DataCopyExtParams wide(params.blockCount, params.blockLen, params.srcStride,
                               params.dstStride, 0);
  DataCopyPad(dst, src, wide, at);
}

}  // namespace AscendC
