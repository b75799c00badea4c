// Scatters the rows of new tokens into the pages: row t of K and V goes to place
// slots[t] = page * page_size + offset. A place outside the pool is skipped: -1, or that
// of a NULL page. Bits are moved, not numbers: any 16-bit dtype.
//
//   k_new [T, K, D] --one copy for some rows--> UB --one copy per row--> k [N, page, K, D]
#pragma once

#include "common.h"

namespace pagedjax_ascend {

class ReshapeAndCache {
 public:
  __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR k_new, GM_ADDR v_new, GM_ADDR k,
                              GM_ADDR v, GM_ADDR slots, GM_ADDR tiling) {
    const auto* t = reinterpret_cast<__gm__ const ReshapeAndCacheTiling*>(tiling);
    places_ = t->num_places;
    row_ = t->row_elements;
    rows_per_copy_ = t->rows_per_copy;
    chunk_ = t->chunk_elements;
    begin_ = AscendC::GetBlockIdx() * t->tokens_per_core;
    end_ = smaller(begin_ + t->tokens_per_core, t->tokens);
    k_new_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(k_new), t->tokens * row_);
    v_new_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v_new), t->tokens * row_);
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(k), places_ * row_);
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v), places_ * row_);
    pipe->InitBuffer(through_, 2, rows_per_copy_ * chunk_ * sizeof(half));
    slots_.init(pipe, slots, t->tokens);
  }

  __aicore__ inline void process() {
    for (int32_t token = begin_; token < end_; token += rows_per_copy_) {
      const int32_t rows = smaller(rows_per_copy_, end_ - token);
      for (int64_t at = 0; at < row_; at += chunk_) {
        move(k_new_, k_, token, rows, at);
        move(v_new_, v_, token, rows, at);
      }
    }
    slots_.release();
  }

 private:
  // Elements [at, at + chunk) of some rows. A row in several chunks comes alone.
  __aicore__ inline void move(const AscendC::GlobalTensor<half>& from,
                              const AscendC::GlobalTensor<half>& to, int32_t token,
                              int32_t rows, int64_t at) {
    const int32_t size = row_ - at < chunk_ ? static_cast<int32_t>(row_ - at) : chunk_;
    AscendC::LocalTensor<half> some = through_.AllocTensor<half>();
    AscendC::DataCopy(some, from[token * row_ + at], rows * size);
    through_.EnQue(some);
    some = through_.DeQue<half>();
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t place = slots_.get(token + i, end_);
      if (place < 0 || place >= places_) continue;
      AscendC::DataCopy(to[place * row_ + at], some[i * size], size);
    }
    through_.FreeTensor(some);
  }

  AscendC::GlobalTensor<half> k_new_, v_new_, k_, v_;
  AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through_;
  IdList slots_;
  int64_t places_, row_;
  int32_t rows_per_copy_, chunk_, begin_, end_;
};

}  // namespace pagedjax_ascend
