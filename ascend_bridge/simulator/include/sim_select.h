// Compare and Select: comparisons give one bit for each element.
#pragma once

#include "sim_vector.h"

namespace simulator {

using AscendC::CMPMODE;
using AscendC::SELMODE;

template <class T>
inline bool compare(T a, T b, CMPMODE mode) {
  const auto x = Wide<T>(a), y = Wide<T>(b);
  switch (mode) {
    case CMPMODE::LT: return x < y;
    case CMPMODE::GT: return x > y;
    case CMPMODE::EQ: return x == y;
    case CMPMODE::LE: return x <= y;
    case CMPMODE::GE: return x >= y;
    case CMPMODE::NE: return x != y;
  }
  return false;
}

// Checks a comparison of `count` elements, whose bits go to dst one behind another.
bool compare_begin(Where at, const char* api, const Lanes& lanes, const View& dst,
                   const View* src, int srcs);
bool select_begin(Where at, const Lanes& lanes, const View& dst, const View& mask,
                  const View* src, int srcs, SELMODE mode);
void check_whole_repeats(Where at, const char* api, int64_t bytes);
void check_compare_type(Where at, const char* api, Kind kind, CMPMODE mode,
                        uint32_t on_1001);

template <class T, class F>
inline void compare_all(Where at, const char* api, const Lanes& lanes, View dst,
                        const View* src, int srcs, F f) {
  if (!compare_begin(at, api, lanes, dst, src, srcs)) return;
  Core* const where = &core();
  where->issue([=] {
    uint8_t* const ub = where->ub();
    const int64_t repeats = total_repeats(lanes);
    for (int64_t r = 0; r < repeats; ++r) {
      for (int64_t i = 0; i < lanes.per_repeat; ++i) {
        const int64_t bit = r * lanes.per_repeat + i;
        if (lanes.count >= 0 && bit >= lanes.count) break;
        uint8_t* const byte = ub + dst.at + bit / 8;
        if (bit % 8 == 0) *byte = 0;
        if (f(ub, r, i)) *byte = uint8_t(*byte | 1 << bit % 8);
      }
    }
  });
}

template <class T, class F>
inline void select_all(Where at, const Lanes& lanes, View dst, View mask,
                       const View* src, int srcs, SELMODE mode, F f) {
  if (!select_begin(at, lanes, dst, mask, src, srcs, mode)) return;
  Core* const where = &core();
  where->issue([=] {
    uint8_t* const ub = where->ub();
    for_lanes(lanes, [&](int64_t r, int64_t i) {
      const int64_t bit =
          i + (mode == SELMODE::VSEL_CMPMASK_SPR ? 0 : r * lanes.per_repeat);
      const bool first = ub[mask.at + bit / 8] >> bit % 8 & 1;
      store<T>(ub + address(dst, r, i), f(ub, r, i, first));
    });
  });
}

}  // namespace simulator

namespace AscendC {

template <typename T, typename U>
inline void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                    const LocalTensor<T>& src1, CMPMODE cmpMode, uint32_t count,
                    simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  check_compare_type(at, "Compare", kind_of<T>(), cmpMode, kFloats);
  check_whole_repeats(at, "Compare", int64_t(count) * int64_t(sizeof(T)));
  const View sources[] = {src0.view("src0"), src1.view("src1")};
  const View a = sources[0], b = sources[1];
  compare_all<T>(at, "Compare", counted(per_repeat<T>(), count), dst.view("dst"),
                 sources, 2, [=](const uint8_t* ub, int64_t r, int64_t i) {
                   return compare(load<T>(ub + address(a, r, i)),
                                  load<T>(ub + address(b, r, i)), cmpMode);
                 });
}

template <typename T, typename U, bool isSetMask = true, typename M>
inline auto Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                    const LocalTensor<T>& src1, CMPMODE cmpMode, M, int64_t repeatTime,
                    const BinaryRepeatParams& params,
                    simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  check_compare_type(at, "Compare", kind_of<T>(), cmpMode, kFloats);
  const View a = src0.view("src0", params.src0BlkStride, params.src0RepStride);
  const View b = src1.view("src1", params.src1BlkStride, params.src1RepStride);
  const View sources[] = {a, b};
  compare_all<T>(at, "Compare",  // the products ignore the mask
                 masked(at, "Compare", per_repeat<T>(), uint64_t(per_repeat<T>()),
                        repeatTime, true),
                 dst.view("dst"), sources, 2,
                 [=](const uint8_t* ub, int64_t r, int64_t i) {
                   return compare(load<T>(ub + address(a, r, i)),
                                  load<T>(ub + address(b, r, i)), cmpMode);
                 });
}

template <typename T, typename U>
inline void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                     const T src1Scalar, CMPMODE cmpMode, uint32_t count,
                     simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  check_compare_type(at, "Compares", kind_of<T>(), cmpMode, 0);
  check_whole_repeats(at, "Compares", int64_t(count) * int64_t(sizeof(T)));
  const View a = src0.view("src0");
  compare_all<T>(at, "Compares", counted(per_repeat<T>(), count), dst.view("dst"), &a,
                 1, [=](const uint8_t* ub, int64_t r, int64_t i) {
                   return compare(load<T>(ub + address(a, r, i)), src1Scalar, cmpMode);
                 });
}
// The name before CANN 9.1.
template <typename T, typename U>
inline void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                          const T src1Scalar, CMPMODE cmpMode, uint32_t count,
                          simulator::Where at = simulator::Where::here()) {
  Compares(dst, src0, src1Scalar, cmpMode, count, at);
}

// Where the bit is set src0, elsewhere src1.
template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                   const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   SELMODE selMode, uint32_t count,
                   simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "Select", kind_of<T>(), kFloats, kFloats);
  const View a = src0.view("src0"), b = src1.view("src1");
  const View sources[] = {a, b};
  select_all<T>(at, counted(per_repeat<T>(), count), dst.view("dst"),
                selMask.view("selMask"), sources, 2, selMode,
                [=](const uint8_t* ub, int64_t r, int64_t i, bool first) {
                  return load<T>(ub + address(first ? a : b, r, i));
                });
}
template <typename T, typename U, bool isSetMask = true, typename M>
inline auto Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                   const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                   SELMODE selMode, M mask, int64_t repeatTime,
                   const BinaryRepeatParams& params,
                   simulator::Where at = simulator::Where::here())
    -> simulator::IsPlainMask<M> {
  using namespace simulator;
  require(at, "Select", kind_of<T>(), kFloats, kFloats);
  const View a = src0.view("src0", params.src0BlkStride, params.src0RepStride);
  const View b = src1.view("src1", params.src1BlkStride, params.src1RepStride);
  const View sources[] = {a, b};
  select_all<T>(
      at, masked(at, "Select", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
      dst.view("dst", params.dstBlkStride, params.dstRepStride),
      selMask.view("selMask"), sources, 2, selMode,
      [=](const uint8_t* ub, int64_t r, int64_t i, bool first) {
        return load<T>(ub + address(first ? a : b, r, i));
      });
}
template <typename T, typename U>
inline void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                   const LocalTensor<T>& src0, T src1, SELMODE selMode, uint32_t count,
                   simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "Select", kind_of<T>(), kFloats, 0);
  const View a = src0.view("src0");
  select_all<T>(at, counted(per_repeat<T>(), count), dst.view("dst"),
                selMask.view("selMask"), &a, 1, selMode,
                [=](const uint8_t* ub, int64_t r, int64_t i, bool first) {
                  return first ? load<T>(ub + address(a, r, i)) : src1;
                });
}

}  // namespace AscendC
