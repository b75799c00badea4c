// Decode attention, second half: merges the partial results of the splits of each row,
// in order, with the rule of the online softmax; divides, narrows, and gives the lse.
//
//   item: 8 rows (slot, query head)
//
// It runs for one split too, so that one kernel alone ends a row, and the 32 bytes of 8
// lse values are written by one core whatever the number of heads.
#pragma once

#include "common.h"

namespace pagedjax_ascend {

template <typename T>
class Combine {
 public:
  __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR workspace, GM_ADDR out,
                              GM_ADDR lse, GM_ADDR tiling) {
    const auto* t = reinterpret_cast<__gm__ const PagedAttentionTiling*>(tiling);
    used_rows_ = t->slots * t->heads;
    rows_ = t->rows;
    dim_ = t->head_dim;
    splits_ = t->splits;
    return_lse_ = t->return_lse != 0;
    auto* floats = reinterpret_cast<__gm__ float*>(workspace);
    partial_.SetGlobalBuffer(floats, t->stats_offset);
    stats_.SetGlobalBuffer(floats + t->stats_offset, int64_t{splits_} * 3 * rows_ * kLanes);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), int64_t{used_rows_} * dim_);
    if (return_lse_) lse_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(lse), rows_);

    // The same list as combine_ub_bytes in plan.h.
    pipe->InitBuffer(parts_, 2, (kCombineRows * dim_ + 3 * kSpan) * sizeof(float));
    pipe->InitBuffer(results_, 2, kCombineRows * dim_ * sizeof(T));
    pipe->InitBuffer(lses_, 1, kCombineRows * sizeof(float));
    pipe->InitBuffer(total_buffer_, kCombineRows * dim_ * sizeof(float));
    pipe->InitBuffer(small_buffer_, 7 * kSpan * sizeof(float));
    total_ = total_buffer_.Get<float>();
    AscendC::LocalTensor<float> small = small_buffer_.Get<float>();
    top_ = small;
    sum_ = small[kSpan];
    fault_ = small[2 * kSpan];
    fresh_ = small[3 * kSpan];
    decay_ = small[4 * kSpan];
    weight_ = small[5 * kSpan];
    tiny_ = small[6 * kSpan];
    AscendC::Duplicate(tiny_, kTiny, kSpan);
  }

  __aicore__ inline void process() {
    for (int32_t item = AscendC::GetBlockIdx(); item < rows_ / kCombineRows;
         item += AscendC::GetBlockNum()) {
      row_ = item * kCombineRows;
      count_ = smaller(kCombineRows, used_rows_ - row_);
      AscendC::Duplicate(total_, 0.0f, count_ * dim_);
      AscendC::Duplicate(top_, kLowest, kSpan);
      AscendC::Duplicate(sum_, 0.0f, 2 * kSpan);  // and fault_
      settle();
      load(0);
      for (int32_t split = 0; split < splits_; ++split) {
        if (split + 1 < splits_) load(split + 1);
        merge();
      }
      finish();
    }
  }

 private:
  static constexpr int32_t kSpan = kCombineRows * kLanes;
  // A sum of weights is 0, or at least the 1 of the greatest score.
  static constexpr float kTiny = 1.0e-30f;

  // Starts the copy of one split: sums of values, then maxima, sums, fault marks.
  __aicore__ inline void load(int32_t split) {
    AscendC::LocalTensor<float> part = parts_.AllocTensor<float>();
    const int64_t row = int64_t{split} * rows_ + row_;
    AscendC::DataCopy(part, partial_[row * dim_], count_ * dim_);
    for (int32_t kind = 0; kind < 3; ++kind) {
      const int64_t from = ((int64_t{split} * 3 + kind) * rows_ + row_) * kLanes;
      AscendC::DataCopy(part[kCombineRows * dim_ + kind * kSpan], stats_[from],
                        count_ * kLanes);
    }
    parts_.EnQue(part);
  }

  __aicore__ inline void merge() {
    const int32_t all = count_ * kLanes;
    AscendC::LocalTensor<float> part = parts_.DeQue<float>();
    AscendC::LocalTensor<float> top = part[kCombineRows * dim_];
    AscendC::LocalTensor<float> sum = part[kCombineRows * dim_ + kSpan];
    AscendC::Max(fault_, fault_, part[kCombineRows * dim_ + 2 * kSpan], all);
    AscendC::Max(fresh_, top_, top, all);
    settle();
    AscendC::Sub(decay_, top_, fresh_, all);
    AscendC::Sub(weight_, top, fresh_, all);
    settle();
    AscendC::Max(top_, top_, fresh_, all);
    AscendC::Exp(decay_, decay_, all);
    AscendC::Exp(weight_, weight_, all);
    settle();
    AscendC::Mul(sum_, sum_, decay_, all);
    AscendC::Mul(sum, sum, weight_, all);
    scale_rows(total_, decay_, count_, dim_);
    scale_rows(part, weight_, count_, dim_);
    settle();
    AscendC::Add(sum_, sum_, sum, all);
    AscendC::Add(total_, total_, part, count_ * dim_);
    parts_.FreeTensor(part);
    settle();
  }

  __aicore__ inline void finish() {
    const int32_t all = count_ * kLanes;
    const uint8_t stride = static_cast<uint8_t>(dim_ / kLanes);
    AscendC::Max(fresh_, sum_, tiny_, all);
    settle();
    for (int32_t at = 0; at < dim_; at += kRepeatFloats) {
      const uint64_t lanes = smaller(kRepeatFloats, dim_ - at);
      AscendC::Div(total_[at], total_[at], fresh_, lanes, static_cast<uint8_t>(count_),
                   AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
    }
    AscendC::Ln(decay_, fresh_, all);
    settle();
    AscendC::Add(top_, top_, decay_, all);
    // A few scalars for 8 rows: which of them are void, and their lse side by side.
    order<HardEvent::V_S>();
    for (int32_t i = 0; i < count_; ++i) {
      if (fault_.GetValue(i * kLanes) != 0) AscendC::Duplicate(total_[i * dim_], 0.0f, dim_);
    }
    settle();
    AscendC::LocalTensor<T> result = results_.template AllocTensor<T>();
    AscendC::Cast(result, total_, kNarrow, count_ * dim_);
    results_.EnQue(result);
    result = results_.template DeQue<T>();
    AscendC::DataCopy(out_[int64_t{row_} * dim_], result, count_ * dim_);
    results_.FreeTensor(result);
    if (return_lse_) store_lse();
    order<HardEvent::S_V>();
  }

  __aicore__ inline void store_lse() {
    AscendC::LocalTensor<float> lse = lses_.AllocTensor<float>();
    // The scalar unit writes where the last copy may still read.
    order<HardEvent::MTE3_S>();
    for (int32_t i = 0; i < kCombineRows; ++i) {
      float value = -__builtin_inff();
      if (i < count_ && fault_.GetValue(i * kLanes) == 0 && sum_.GetValue(i * kLanes) != 0) {
        value = top_.GetValue(i * kLanes);
      }
      lse.SetValue(i, value);
    }
    lses_.EnQue(lse);
    lse = lses_.DeQue<float>();
    order<HardEvent::S_MTE3>();
    AscendC::DataCopy(lse_[row_], lse, kCombineRows);
    lses_.FreeTensor(lse);
  }

  AscendC::GlobalTensor<float> partial_, stats_, lse_;
  AscendC::GlobalTensor<T> out_;
  AscendC::TQue<TPosition::VECIN, 2> parts_;
  AscendC::TQue<TPosition::VECOUT, 1> results_;
  AscendC::TQue<TPosition::VECOUT, 1> lses_;
  AscendC::TBuf<TPosition::VECCALC> total_buffer_, small_buffer_;
  // Per row 8 equal lanes.
  AscendC::LocalTensor<float> total_, top_, sum_, fault_, fresh_, decay_, weight_, tiny_;
  int32_t used_rows_, rows_, dim_, splits_;
  bool return_lse_;
  int32_t row_ = 0, count_ = 0;
};

}  // namespace pagedjax_ascend
