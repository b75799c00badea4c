// Sums and maxima across lanes, and their spreading: where the two products differ most.
//
//   2201  one reduce instruction per row and Brcb
//   1001  no float reduction and no Brcb: the scalar unit does the last step, correct and
//         slow
#pragma once

#include "common.h"

namespace pagedjax_ascend {

#if PAGEDJAX_ASCEND_ARCH == 2201
constexpr int32_t kReduceLanes = 64;  // floats that lane_sums can add up
#else
constexpr int32_t kReduceLanes = 8;
#endif

// sums[i] = the sum of the first `lanes` of rows[i], i < count; rows are `dim` apart.
__aicore__ inline void lane_sums(const AscendC::LocalTensor<float>& sums,
                                 const AscendC::LocalTensor<float>& rows, int32_t count,
                                 int32_t lanes, int32_t dim) {
#if PAGEDJAX_ASCEND_ARCH == 2201
  AscendC::WholeReduceSum(sums, rows, lanes, count, 1, 1, dim / kLanes);
  settle();
#else
  order<HardEvent::V_S>();
  for (int32_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int32_t j = 0; j < lanes; ++j) sum += rows.GetValue(i * dim + j);
    sums.SetValue(i, sum);
  }
  order<HardEvent::S_V>();
#endif
}

// The blocks of `to` become the maximum of each of `count` rows of scores, 8 times.
// `compact` holds `count` rounded up to 8 floats.
__aicore__ inline void row_maxima(const AscendC::LocalTensor<float>& to,
                                  const AscendC::LocalTensor<float>& scores,
                                  [[maybe_unused]] const AscendC::LocalTensor<float>& compact,
                                  int32_t count, int32_t lanes) {
#if PAGEDJAX_ASCEND_ARCH == 2201
  AscendC::WholeReduceMax(compact, scores, lanes, count, 1, 1, kMaxTile / kLanes,
                          AscendC::ReduceOrder::ORDER_ONLY_VALUE);
  settle();
  AscendC::Brcb(to, compact, static_cast<uint8_t>(round_up(count, 8) / 8),
                AscendC::BrcbRepeatParams(1, 8));
  settle();
#else
  order<HardEvent::V_S>();
  for (int32_t i = 0; i < count; ++i) {
    float most = kLowest;
    for (int32_t j = 0; j < lanes; ++j) {
      const float score = scores.GetValue(i * kMaxTile + j);
      most = score > most ? score : most;
    }
    AscendC::Duplicate(to[i * kLanes], most, kLanes);
  }
  order<HardEvent::S_V>();
  settle();
#endif
}

// As row_maxima, with sums.
__aicore__ inline void row_sums(const AscendC::LocalTensor<float>& to,
                                const AscendC::LocalTensor<float>& weights,
                                [[maybe_unused]] const AscendC::LocalTensor<float>& compact,
                                int32_t count, int32_t lanes) {
#if PAGEDJAX_ASCEND_ARCH == 2201
  AscendC::WholeReduceSum(compact, weights, lanes, count, 1, 1, kMaxTile / kLanes);
  settle();
  AscendC::Brcb(to, compact, static_cast<uint8_t>(round_up(count, 8) / 8),
                AscendC::BrcbRepeatParams(1, 8));
  settle();
#else
  order<HardEvent::V_S>();
  for (int32_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int32_t j = 0; j < lanes; ++j) sum += weights.GetValue(i * kMaxTile + j);
    AscendC::Duplicate(to[i * kLanes], sum, kLanes);
  }
  settle();
#endif
}

// to[i][0..8) = from[i], i < count. On 2201 up to the next multiple of 8.
__aicore__ inline void spread(const AscendC::LocalTensor<float>& to,
                              const AscendC::LocalTensor<float>& from, int32_t count) {
#if PAGEDJAX_ASCEND_ARCH == 2201
  AscendC::Brcb(to, from, static_cast<uint8_t>(round_up(count, 8) / 8),
                AscendC::BrcbRepeatParams(1, 8));
#else
  for (int32_t i = 0; i < count; ++i) {
    AscendC::Duplicate(to[i * kLanes], from.GetValue(i), kLanes);
  }
#endif
  settle();
}

}  // namespace pagedjax_ascend
