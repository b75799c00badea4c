// Reductions: over all elements, over each repeat, and over each block of 32 bytes.
#pragma once

#include "sim_vector.h"

namespace simulator {

using AscendC::ReduceOrder;
using AscendC::ReduceType;

// The product adds pairs, then pairs of sums, rounding to T each time; an element that
// takes no part counts as 0.
template <class T>
inline T add_tree(T* values, int64_t count) {
  for (; count > 1; count = (count + 1) / 2) {
    for (int64_t i = 0; i < count / 2; ++i) {
      values[i] = Add()(values[2 * i], values[2 * i + 1]);
    }
    if (count % 2) values[count / 2] = values[count - 1];
  }
  return values[0];
}

template <class T>
struct Found {
  T value = T(0);
  int64_t index = -1;  // -1: no element took part
};

// The first of the largest (smallest) elements; NaN wins.
template <class T>
inline void meet(Found<T>* found, T value, int64_t index, bool largest) {
  const float x = float(value), best = float(found->value);
  const bool better =
      found->index < 0 || (best == best && x != x) || (largest ? x > best : x < best);
  if (better) *found = Found<T>{value, index};
}

// An index stored in the bits of the element type.
template <class T>
inline void store_index(uint8_t* at, int64_t index) {
  if (sizeof(T) == 2) {
    store<uint16_t>(at, uint16_t(index));
  } else {
    store<uint32_t>(at, uint32_t(index));
  }
}

// Checks a reduction's accesses: `sources` as the lanes say, and runs of bytes written.
bool reduce_begin(Where at, const char* api, const Lanes& lanes, const View& src,
                  const View& dst, int64_t runs, int64_t bytes, int64_t step);

bool spread_begin(Where at, const char* api, const View& src, const View& dst,
                  int64_t repeats, int64_t width);

template <class T>
inline void reduce_repeats(Where at, const char* api, ReduceType type, View dst,
                           View src, Lanes lanes, int64_t dst_step, ReduceOrder order) {
  const bool sum = type == ReduceType::SUM;
  const bool both = !sum && (order == ReduceOrder::ORDER_VALUE_INDEX ||
                             order == ReduceOrder::ORDER_INDEX_VALUE);
  // An index alone takes 4 bytes whatever the type.
  const int64_t index_bytes =
      !sum && order == ReduceOrder::ORDER_ONLY_INDEX ? 4 : int64_t(sizeof(T));
  const int64_t width = both ? 2 * int64_t(sizeof(T)) : index_bytes;
  dst.align = width;
  const int64_t repeats = total_repeats(lanes);
  if (!reduce_begin(at, api, lanes, src, dst, repeats, width, dst_step * width)) return;
  Core* const where = &core();
  where->issue([=] {
    uint8_t* const ub = where->ub();
    for (int64_t r = 0; r < repeats; ++r) {
      uint8_t* const out = ub + dst.at + r * dst_step * width;
      T values[kRepeat / sizeof(T)];
      Found<T> found;
      for (int64_t i = 0; i < lanes.per_repeat; ++i) {
        const bool active = is_active(lanes, r, i);
        values[i] = active ? load<T>(ub + address(src, r, i)) : T(0);
        if (active) meet(&found, values[i], i, type == ReduceType::MAX);
      }
      if (found.index < 0) continue;
      if (sum) {
        store<T>(out, add_tree(values, lanes.per_repeat));
      } else if (order == ReduceOrder::ORDER_ONLY_VALUE) {
        store<T>(out, found.value);
      } else if (order == ReduceOrder::ORDER_ONLY_INDEX) {
        store<uint32_t>(out, uint32_t(found.index));
      } else {
        const bool first = order == ReduceOrder::ORDER_VALUE_INDEX;
        store<T>(out + (first ? 0 : sizeof(T)), found.value);
        store_index<T>(out + (first ? sizeof(T) : 0), found.index);
      }
    }
  });
}

template <class T>
inline void reduce_blocks(Where at, const char* api, ReduceType type, View dst,
                          View src, Lanes lanes, int64_t dst_step) {
  constexpr int64_t per_block = kBlock / int64_t(sizeof(T));
  constexpr int64_t width = 8 * int64_t(sizeof(T));  // the results of one repeat
  dst.align = width;
  const int64_t repeats = total_repeats(lanes);
  // A block of which nothing takes part leaves its result as it was.
  int64_t blocks = 8;
  while (blocks > 1 && !is_active(lanes, 0, (blocks - 1) * per_block)) --blocks;
  if (!reduce_begin(at, api, lanes, src, dst, repeats, blocks * int64_t(sizeof(T)),
                    dst_step * width)) {
    return;
  }
  Core* const where = &core();
  where->issue([=] {
    uint8_t* const ub = where->ub();
    for (int64_t r = 0; r < repeats; ++r) {
      for (int64_t b = 0; b < 8; ++b) {
        T values[kBlock / sizeof(T)];
        Found<T> found;
        for (int64_t i = 0; i < per_block; ++i) {
          const int64_t lane = b * per_block + i;
          const bool active = is_active(lanes, r, lane);
          values[i] = active ? load<T>(ub + address(src, r, lane)) : T(0);
          if (active) meet(&found, values[i], i, type == ReduceType::MAX);
        }
        if (found.index < 0) continue;
        store<T>(ub + dst.at + r * dst_step * width + b * int64_t(sizeof(T)),
                 type == ReduceType::SUM ? add_tree(values, per_block) : found.value);
      }
    }
  });
}

// Bytes of work space of a reduction of `repeats` repeats to one number.
int64_t work_bytes(int64_t repeats, int64_t esize, bool sum, bool with_index);

// A reduction of n elements to one, by repeats and then again. Sums of repeats are
// added in order on 2201, which needs no work space, and as a tree on 1001.
template <class T>
inline void reduce_all(Where at, const char* api, ReduceType type, View dst, View src,
                       View work, int64_t count, bool with_index) {
  constexpr int64_t lanes_of = per_repeat<T>();
  const Lanes lanes = counted(lanes_of, count);
  const int64_t repeats = total_repeats(lanes);
  const bool sum = type == ReduceType::SUM;
  const int64_t needed = work_bytes(repeats, sizeof(T), sum, with_index);
  const int64_t width = int64_t(sizeof(T)) * (with_index ? 2 : 1);
  dst.align = sum ? int64_t(sizeof(T)) : 2 * int64_t(sizeof(T));
  if (count <= 0) return;
  if (!reduce_begin(at, api, lanes, src, dst, 1, width, 0)) return;
  Core& on = core();
  if (!on.check_view(work)) return;
  if (!on.use(work, work.at, work.at + needed, true)) return;
  on.forget(work.at, work.at + needed);
  on.use(dst, dst.at, dst.at + width, true);  // dst and the work space may overlap
  Core* const where = &on;
  on.issue([=] {
    uint8_t* const ub = where->ub();
    std::vector<T> sums;
    Found<T> found;
    for (int64_t r = 0; r < repeats; ++r) {
      T values[kRepeat / sizeof(T)];
      for (int64_t i = 0; i < lanes_of; ++i) {
        const bool active = is_active(lanes, r, i);
        values[i] = active ? load<T>(ub + address(src, r, i)) : T(0);
        if (active) {
          meet(&found, values[i], r * lanes_of + i, type == ReduceType::MAX);
        }
      }
      sums.push_back(add_tree(values, lanes_of));
    }
    if (__NPU_ARCH__ == 2201) {
      for (size_t r = 1; r < sums.size(); ++r) sums[0] = Add()(sums[0], sums[r]);
    } else {
      add_tree(sums.data(), int64_t(sums.size()));
    }
    std::memset(ub + work.at, 0xff, size_t(needed));
    store<T>(ub + dst.at, sum ? sums[0] : found.value);
    if (with_index) store_index<T>(ub + dst.at + sizeof(T), found.index);
  });
}

}  // namespace simulator

namespace AscendC {

template <ReduceType reduceType, typename T, typename U, bool isSetMask = true,
          typename M>
inline auto ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, M mask,
                         int64_t repeatTime, int64_t dstRepStride, int64_t srcBlkStride,
                         int64_t srcRepStride,
                         ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                         simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  static_assert(std::is_same<T, U>::value, "both types are the same on these products");
  require(at, "ReduceRepeat", kind_of<T>(), kFloats, kHalf);
  if (__NPU_ARCH__ == 1001 && reduceType != ReduceType::SUM &&
      order != ReduceOrder::ORDER_VALUE_INDEX) {
    core().error(at, "ReduceRepeat", "product", "arch 1001 has ORDER_VALUE_INDEX only");
  }
  reduce_repeats<T>(
      at, "ReduceRepeat", reduceType, dst.view("dst"),
      src.view("src", srcBlkStride, srcRepStride),
      masked(at, "ReduceRepeat", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
      dstRepStride, order);
}

template <ReduceType reduceType, typename T, typename U, bool isSetMask = true,
          typename M>
inline auto ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                            M mask, int64_t repeatTime, int64_t dstRepStride,
                            int64_t srcBlkStride, int64_t srcRepStride,
                            simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  static_assert(std::is_same<T, U>::value, "both types are the same on these products");
  require(at, "ReduceDataBlock", kind_of<T>(), kFloats, kHalf);
  if (__NPU_ARCH__ == 1001 && dstRepStride == 0) {
    core().error(at, "ReduceDataBlock", "product",
                 "arch 1001 has no dstRepStride of 0");
  }
  reduce_blocks<T>(at, "ReduceDataBlock", reduceType, dst.view("dst"),
                   src.view("src", srcBlkStride, srcRepStride),
                   masked(at, "ReduceDataBlock", per_repeat<T>(), as_mask(mask),
                          repeatTime, isSetMask),
                   dstRepStride);
}

// The names before CANN 9.1.
template <typename T, bool isSetMask = true, typename M>
inline auto WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,
                           int64_t repeatTime, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceRepeat<ReduceType::SUM, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride,
      ReduceOrder::ORDER_VALUE_INDEX, at);
}
template <typename T, bool isSetMask = true, typename M>
inline auto WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,
                           int64_t repeatTime, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceRepeat<ReduceType::MAX, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, at);
}
template <typename T, bool isSetMask = true, typename M>
inline auto WholeReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,
                           int64_t repeatTime, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceRepeat<ReduceType::MIN, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, at);
}
template <typename T, bool isSetMask = true, typename M>
inline auto BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                           int64_t repeatTime, M mask, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceDataBlock<ReduceType::SUM, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, at);
}
template <typename T, bool isSetMask = true, typename M>
inline auto BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                           int64_t repeatTime, M mask, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceDataBlock<ReduceType::MAX, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, at);
}
template <typename T, bool isSetMask = true, typename M>
inline auto BlockReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                           int64_t repeatTime, M mask, int64_t dstRepStride,
                           int64_t srcBlkStride, int64_t srcRepStride,
                           simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  ReduceDataBlock<ReduceType::MIN, T, T, isSetMask>(
      dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, at);
}

template <typename T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "ReduceSum", kind_of<T>(), kFloats, kHalf);
  reduce_all<T>(at, "ReduceSum", ReduceType::SUM, dst.view("dst"), src.view("src"),
                sharedTmpBuffer.view("sharedTmpBuffer"), count, false);
}
template <typename T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      bool calIndex = false,
                      simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "ReduceMax", kind_of<T>(), kFloats, kHalf);
  reduce_all<T>(at, "ReduceMax", ReduceType::MAX, dst.view("dst"), src.view("src"),
                sharedTmpBuffer.view("sharedTmpBuffer"), count, calIndex);
}
template <typename T>
inline void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                      bool calIndex = false,
                      simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "ReduceMin", kind_of<T>(), kFloats, kHalf);
  reduce_all<T>(at, "ReduceMin", ReduceType::MIN, dst.view("dst"), src.view("src"),
                sharedTmpBuffer.view("sharedTmpBuffer"), count, calIndex);
}

// Each of 8 elements per repeat is spread over a block of 32 bytes.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                 const int64_t repeatTime, const BrcbRepeatParams& params,
                 simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  constexpr uint32_t kinds = kFloats | kBfloat16 | kInt16 | kUint16 | kInt32 | kUint32;
  require(at, "Brcb", kind_of<T>(), kinds, 0);
  constexpr int64_t width = 8 * int64_t(sizeof(T));
  const View from = src.view("src", 1, 1);
  const View to = dst.view("dst", params.dstBlkStride, params.dstRepStride);
  if (!spread_begin(at, "Brcb", from, to, repeatTime, width)) return;
  Core* const where = &core();
  where->issue([=] {
    uint8_t* const ub = where->ub();
    for (int64_t r = 0; r < repeatTime; ++r) {
      for (int64_t b = 0; b < 8; ++b) {
        const T value = load<T>(ub + from.at + r * width + b * int64_t(sizeof(T)));
        uint8_t* const out = ub + to.at + (r * to.rep + b * to.blk) * kBlock;
        for (int64_t i = 0; i < kBlock / int64_t(sizeof(T)); ++i) {
          store<T>(out + i * int64_t(sizeof(T)), value);
        }
      }
    }
  });
}

}  // namespace AscendC
