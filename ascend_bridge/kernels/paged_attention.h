// Decode attention over paged keys and values, first half: one partial result for each
// (slot, kv head, split), by the online softmax (Milakov and Gimelshein, 2018,
// arXiv:1805.02867) in the manner of FlashDecoding: a second kernel, combine.h, merges.
//
//   item: slot s, kv head k, split     G query heads share each key that is read
//
//   GM pages --MTE2--> [K tile|V tile] x 2 --V--> widen, scores, weights, sums
//                      while one is computed with, the next is copied
//
// Vector unit only: at decode, G rows of a 16 x 16 cube fractal would be used, and K and V
// are read once either way.
#pragma once

#include "lanes.h"

namespace pagedjax_ascend {

template <typename T>
class PagedAttention {
 public:
  __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR q, GM_ADDR k, GM_ADDR v,
                              GM_ADDR table, GM_ADDR lens, GM_ADDR workspace,
                              GM_ADDR tiling) {
    const auto* t = reinterpret_cast<__gm__ const PagedAttentionTiling*>(tiling);
    slots_ = t->slots;
    heads_ = t->heads;
    kv_heads_ = t->kv_heads;
    group_ = t->group;
    dim_ = t->head_dim;
    num_pages_ = t->num_pages;
    page_size_ = t->page_size;
    pages_per_slot_ = t->pages_per_slot;
    window_ = t->window;
    tile_ = t->tile_tokens;
    splits_ = t->splits;
    split_tokens_ = t->split_tokens;
    rows_ = t->rows;
    query_scale_ = t->query_scale;
    soft_cap_ = t->soft_cap;

    const int64_t pool = int64_t{num_pages_} * page_size_ * kv_heads_ * dim_;
    const int64_t row_stats = int64_t{rows_} * kLanes;
    q_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(q), int64_t{slots_} * heads_ * dim_);
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(k), pool);
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(v), pool);
    lens_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(lens), slots_);
    auto* floats = reinterpret_cast<__gm__ float*>(workspace);
    partial_.SetGlobalBuffer(floats, t->stats_offset);
    stats_.SetGlobalBuffer(floats + t->stats_offset, int64_t{splits_} * 3 * row_stats);

    // The same list as attention_ub_bytes in plan.h.
    const int32_t fresh = round_up(group_, kLanes) * kLanes;
    pipe->InitBuffer(tiles_, 2, 2 * tile_ * dim_ * sizeof(T));
    pipe->InitBuffer(wide_buffer_, tile_ * dim_ * sizeof(float));
    pipe->InitBuffer(products_buffer_, tile_ * dim_ * sizeof(float));
    pipe->InitBuffer(results_, 2, (group_ * dim_ + 3 * group_ * kLanes) * sizeof(float));
    pipe->InitBuffer(query_in_, 1, group_ * dim_ * sizeof(T));
    pipe->InitBuffer(query_buffer_, group_ * dim_ * sizeof(float));
    pipe->InitBuffer(scores_buffer_, group_ * kMaxTile * sizeof(float));
    pipe->InitBuffer(spread_buffer_, kMaxTile * kLanes * sizeof(float));
    pipe->InitBuffer(compact_buffer_, round_up(group_, kLanes) * sizeof(float));
    pipe->InitBuffer(fresh_buffer_, fresh * sizeof(float));
    pipe->InitBuffer(decay_buffer_, fresh * sizeof(float));
    pipe->InitBuffer(cap_buffer_, 3 * kLanes * sizeof(float));
    ids_.init(pipe, table, int64_t{slots_} * pages_per_slot_);
    wide_ = wide_buffer_.Get<float>();
    products_ = products_buffer_.Get<float>();
    query_ = query_buffer_.Get<float>();
    scores_ = scores_buffer_.Get<float>();
    spread_ = spread_buffer_.Get<float>();
    compact_ = compact_buffer_.Get<float>();
    fresh_ = fresh_buffer_.Get<float>();
    decay_ = decay_buffer_.Get<float>();
    cap_ = cap_buffer_.Get<float>();
    // Lanes that instructions read in whole blocks, and never use, hold a number.
    AscendC::Duplicate(scores_, 0.0f, group_ * kMaxTile);
    AscendC::Duplicate(compact_, 0.0f, round_up(group_, kLanes));
    const float end = soft_cap_ < -kLowest / kTanhEnd ? kTanhEnd * soft_cap_ : -kLowest;
    AscendC::Duplicate(cap_, soft_cap_, kLanes);
    AscendC::Duplicate(cap_[kLanes], end, kLanes);
    AscendC::Duplicate(cap_[2 * kLanes], -end, kLanes);
  }

  __aicore__ inline void process() {
    const int64_t items = int64_t{slots_} * kv_heads_ * splits_;
    for (int64_t item = AscendC::GetBlockIdx(); item < items;
         item += AscendC::GetBlockNum()) {
      split_ = static_cast<int32_t>(item % splits_);
      head_ = static_cast<int32_t>(item / splits_ % kv_heads_);
      slot_ = static_cast<int32_t>(item / splits_ / kv_heads_);
      find_span();
      attend();
    }
    ids_.release();
  }

 private:
  // The keys [low_, high_) of this item. Those before a window are not looked at, and a
  // length past the table row is that of the row.
  __aicore__ inline void find_span() {
    const int32_t length = smaller(lens_.GetValue(slot_), pages_per_slot_ * page_size_);
    fault_ = false;
    low_ = 0;
    high_ = 0;
    if (length <= 0) return;
    const int32_t start = window_ > 0 ? larger(0, length - window_) : 0;
    const int32_t base = start / page_size_ * page_size_;
    // In int64: a split past the end of a long row would overflow.
    const int64_t begin = base + int64_t{split_} * split_tokens_;
    const int64_t end = split_ == splits_ - 1 ? length : begin + split_tokens_;
    low_ = begin < start ? start : begin < length ? static_cast<int32_t>(begin) : length;
    high_ = end < length ? static_cast<int32_t>(end) : length;
  }

  __aicore__ inline void attend() {
    result_ = results_.AllocTensor<float>();
    const int32_t dims = group_ * dim_, lanes = group_ * kLanes;
    maxima_ = result_[dims];
    sums_ = result_[dims + lanes];
    AscendC::Duplicate(result_, 0.0f, dims);
    AscendC::Duplicate(maxima_, kLowest, lanes);
    AscendC::Duplicate(sums_, 0.0f, lanes);
    if (low_ < high_) {
      load_query();
      load_tile(low_);
      for (int32_t at = low_; at < high_; at += tile_) {
        // The copy of the next tile runs while this one is computed with.
        if (at + tile_ < high_) load_tile(at + tile_);
        visit_tile(smaller(tile_, high_ - at));
      }
    }
    AscendC::Duplicate(result_[dims + 2 * lanes], fault_ ? 1.0f : 0.0f, lanes);
    results_.EnQue(result_);
    store();
  }

  // q of the G heads, widened and scaled.
  __aicore__ inline void load_query() {
    const int32_t dims = group_ * dim_;
    AscendC::LocalTensor<T> q = query_in_.template AllocTensor<T>();
    AscendC::DataCopy(q, q_[(int64_t{slot_} * heads_ + head_ * group_) * dim_], dims);
    query_in_.EnQue(q);
    q = query_in_.template DeQue<T>();
    AscendC::Cast(query_, q, AscendC::RoundMode::CAST_NONE, dims);
    query_in_.FreeTensor(q);
    settle();
    AscendC::Muls(query_, query_, query_scale_, dims);
  }

  // Starts the copy of the K and V rows [begin, begin + tile_) of one head: a run of each
  // page that holds some of them. A page id outside the pool voids the row, and page 0 is
  // read in its place: no address outside the pool is ever made.
  __aicore__ inline void load_tile(int32_t begin) {
    const int32_t end = smaller(begin + tile_, high_);
    const int64_t row = int64_t{slot_} * pages_per_slot_;
    const int64_t last = row + (high_ - 1) / page_size_ + 1;
    AscendC::LocalTensor<T> tile = tiles_.template AllocTensor<T>();
    for (int32_t token = begin; token < end;) {
      const int32_t offset = token % page_size_;
      const int32_t count = smaller(page_size_ - offset, end - token);
      int32_t page = ids_.get(row + token / page_size_, last);
      if (page < 0 || page >= num_pages_) {
        fault_ = true;
        page = 0;
      }
      const int64_t from = ((int64_t{page} * page_size_ + offset) * kv_heads_ + head_) * dim_;
      const AscendC::DataCopyParams rows(
          static_cast<uint16_t>(count), static_cast<uint16_t>(dim_ / kHalfBlock),
          static_cast<uint16_t>((kv_heads_ - 1) * dim_ / kHalfBlock), 0);
      AscendC::DataCopy(tile[(token - begin) * dim_], k_[from], rows);
      AscendC::DataCopy(tile[(tile_ + token - begin) * dim_], v_[from], rows);
      token += count;
    }
    tiles_.EnQue(tile);
  }

  // Takes `count` keys into the running result. Rows past them are never looked at, so
  // what lies there does not matter. A step has no settle behind its last instruction
  // where the next begins with other operands and settles before it comes back to these.
  __aicore__ inline void visit_tile(int32_t count) {
    AscendC::LocalTensor<T> tile = tiles_.template DeQue<T>();
    AscendC::Cast(wide_, tile, AscendC::RoundMode::CAST_NONE, count * dim_);
    settle();
    for (int32_t g = 0; g < group_; ++g) score(g, count);
    if (soft_cap_ > 0) cap_scores(count);
    weigh(count);
    AscendC::Cast(wide_, tile[tile_ * dim_], AscendC::RoundMode::CAST_NONE, count * dim_);
    tiles_.FreeTensor(tile);
    for (int32_t g = 0; g < group_; ++g) gather_values(g, count);
  }

  // scores[g][t] = q[g] . k[t]
  __aicore__ inline void score(int32_t g, int32_t count) {
    const uint8_t stride = static_cast<uint8_t>(dim_ / kLanes);
    const uint8_t repeats = static_cast<uint8_t>(count);
    for (int32_t at = 0; at < dim_; at += kRepeatFloats) {
      const uint64_t lanes = smaller(kRepeatFloats, dim_ - at);
      AscendC::Mul(products_[at], wide_[at], query_[g * dim_ + at], lanes, repeats,
                   AscendC::BinaryRepeatParams(1, 1, 1, stride, stride, 0));
    }
    settle();
    // Halves of each row are added until one instruction can sum what is left.
    int32_t left = dim_;
    while (left > kReduceLanes) {
      const int32_t fold = left / (2 * kLanes) * kLanes;
      for (int32_t at = 0; at < fold; at += kRepeatFloats) {
        const uint64_t lanes = smaller(kRepeatFloats, fold - at);
        AscendC::Add(products_[at], products_[at], products_[left - fold + at], lanes,
                     repeats, AscendC::BinaryRepeatParams(1, 1, 1, stride, stride, stride));
      }
      settle();
      left -= fold;
    }
    lane_sums(scores_[g * kMaxTile], products_, count, left, dim_);
  }

  // s = cap * tanh(x / cap) = x / (z coth z) with z = x / cap, by Lambert's continued
  // fraction (1761) for a quarter of z, and the doubling of the hyperbolic cotangent:
  //
  //   f(a) = a coth a = 1 + a^2 / (3 + a^2 / (5 + ...))      f(2 a) = f(a) + a^2 / f(a)
  //
  // All terms are positive, so no digit is lost however far the cap is above the scores,
  // where a difference of exponentials would cancel. The room of the widened tile and of
  // the products is free here: it takes some rows at once.
  __aicore__ inline void cap_scores(int32_t count) {
    const int32_t room = larger(1, tile_ * dim_ / 2 / kMaxTile);
    for (int32_t g = 0; g < group_; g += room) {
      cap_rows(scores_[g * kMaxTile], count, static_cast<uint8_t>(smaller(room, group_ - g)));
    }
  }

  __aicore__ inline void cap_rows(const AscendC::LocalTensor<float>& scores, uint64_t lanes,
                                  uint8_t rows) {
    const AscendC::UnaryRepeatParams each(1, 1, 8, 8);
    const AscendC::BinaryRepeatParams both(1, 1, 1, 8, 8, 8);
    const AscendC::BinaryRepeatParams by_one(1, 1, 0, 8, 8, 0);
    const AscendC::LocalTensor<float> square = products_;
    const AscendC::LocalTensor<float> part = products_[tile_ * dim_ / 2];
    const AscendC::LocalTensor<float> ratio = wide_;
    AscendC::Min(scores, scores, cap_[kLanes], lanes, rows, by_one);
    settle();
    AscendC::Max(scores, scores, cap_[2 * kLanes], lanes, rows, by_one);
    settle();
    AscendC::Div(square, scores, cap_, lanes, rows, by_one);
    settle();
    AscendC::Muls(square, square, 0.25f, lanes, rows, each);
    settle();
    AscendC::Mul(square, square, square, lanes, rows, both);
    AscendC::Duplicate(ratio, 9.0f, lanes, rows, 1, 8);
    settle();
    for (int32_t term = 7; term > 0; term -= 2) {
      AscendC::Div(ratio, square, ratio, lanes, rows, both);
      settle();
      AscendC::Adds(ratio, ratio, static_cast<float>(term), lanes, rows, each);
      settle();
    }
    for (int32_t times = 0; times < 2; ++times) {
      AscendC::Div(part, square, ratio, lanes, rows, both);
      AscendC::Muls(square, square, 4.0f, lanes, rows, each);
      settle();
      AscendC::Add(ratio, ratio, part, lanes, rows, both);
      settle();
    }
    AscendC::Div(scores, scores, ratio, lanes, rows, both);
    settle();
  }

  // Scores become weights relative to the new maximum; what there is decays to it.
  __aicore__ inline void weigh(int32_t count) {
    const int32_t all = group_ * kLanes;
    const uint64_t lanes = count;
    const uint8_t rows = static_cast<uint8_t>(group_);
    row_maxima(fresh_, scores_, compact_, group_, count);
    AscendC::Max(fresh_, fresh_, maxima_, all);
    settle();
    AscendC::Sub(decay_, maxima_, fresh_, all);
    AscendC::Sub(scores_, scores_, fresh_, lanes, rows,
                 AscendC::BinaryRepeatParams(1, 1, 0, 8, 8, 1));
    settle();
    AscendC::Max(maxima_, maxima_, fresh_, all);
    AscendC::Exp(decay_, decay_, all);
    AscendC::Exp(scores_, scores_, lanes, rows, AscendC::UnaryRepeatParams(1, 1, 8, 8));
    settle();
    AscendC::Mul(sums_, sums_, decay_, all);
    scale_rows(result_, decay_, group_, dim_);
    row_sums(fresh_, scores_, compact_, group_, count);
    AscendC::Add(sums_, sums_, fresh_, all);
  }

  // result[g] += sum of weights[g][t] * v[t]
  __aicore__ inline void gather_values(int32_t g, int32_t count) {
    const uint8_t stride = static_cast<uint8_t>(dim_ / kLanes);
    spread(spread_, scores_[g * kMaxTile], count);
    for (int32_t at = 0; at < dim_; at += kRepeatFloats) {
      const uint64_t lanes = smaller(kRepeatFloats, dim_ - at);
      AscendC::Mul(products_[at], wide_[at], spread_, lanes, static_cast<uint8_t>(count),
                   AscendC::BinaryRepeatParams(1, 1, 0, stride, stride, 1));
    }
    settle();
    for (int32_t left = count; left > 1;) {
      const int32_t fold = left / 2;
      AscendC::Add(products_, products_, products_[(left - fold) * dim_], fold * dim_);
      settle();
      left -= fold;
    }
    AscendC::Add(result_[g * dim_], result_[g * dim_], products_, dim_);
  }

  __aicore__ inline void store() {
    const int32_t dims = group_ * dim_, lanes = group_ * kLanes;
    const int64_t row = int64_t{slot_} * heads_ + head_ * group_;
    result_ = results_.DeQue<float>();
    AscendC::DataCopy(partial_[(int64_t{split_} * rows_ + row) * dim_], result_, dims);
    for (int32_t kind = 0; kind < 3; ++kind) {
      const int64_t to = ((int64_t{split_} * 3 + kind) * rows_ + row) * kLanes;
      AscendC::DataCopy(stats_[to], result_[dims + kind * lanes], lanes);
    }
    results_.FreeTensor(result_);
  }

  // The hyperbolic tangent of it is 1 in float32.
  static constexpr float kTanhEnd = 9.5f;

  AscendC::GlobalTensor<T> q_, k_, v_;
  AscendC::GlobalTensor<int32_t> lens_;
  AscendC::GlobalTensor<float> partial_, stats_;
  IdList ids_;
  // One buffer holds the K tile and the V tile behind it; two of them may be in flight.
  AscendC::TQue<TPosition::VECIN, 2> tiles_;
  AscendC::TQue<TPosition::VECIN, 1> query_in_;
  // Sums of weighted values [G][D], then maxima, sums, fault marks [3][G][8].
  AscendC::TQue<TPosition::VECOUT, 1> results_;
  AscendC::TBuf<TPosition::VECCALC> wide_buffer_, products_buffer_, query_buffer_,
      scores_buffer_, spread_buffer_, compact_buffer_, fresh_buffer_, decay_buffer_,
      cap_buffer_;
  AscendC::LocalTensor<float> result_, maxima_, sums_;
  AscendC::LocalTensor<float> wide_, products_, query_, scores_, spread_, compact_, fresh_,
      decay_, cap_;
  int32_t slots_, heads_, kv_heads_, group_, dim_, num_pages_, page_size_, pages_per_slot_;
  int32_t window_, tile_, splits_, split_tokens_, rows_;
  float query_scale_, soft_cap_;
  int32_t slot_ = 0, head_ = 0, split_ = 0, low_ = 0, high_ = 0;
  bool fault_ = false;
};

}  // namespace pagedjax_ascend
