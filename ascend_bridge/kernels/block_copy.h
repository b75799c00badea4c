// Copies whole pages of K and V, each source to any number of destinations: what a
// copy-on-write plan asks for. A page is read once, in chunks, whatever its copies.
//
//   src    [7,    2]        7 -> 11, 12
//   dst    [11, 12, 30]     2 -> 30
//   cumsum [2,    3]
//
// A source or destination outside the pool (the NULL page) is skipped.
#pragma once

#include "common.h"

namespace pagedjax_ascend {

class BlockCopy {
 public:
  __aicore__ inline void init(AscendC::TPipe* pipe, GM_ADDR k, GM_ADDR v, GM_ADDR src,
                              GM_ADDR dst, GM_ADDR cumsum, GM_ADDR tiling) {
    const auto* t = reinterpret_cast<__gm__ const BlockCopyTiling*>(tiling);
    page_ = t->page_elements;
    num_pages_ = t->num_pages;
    num_sources_ = t->num_sources;
    num_dests_ = t->num_dests;
    chunk_ = t->chunk_elements;
    chunks_ = t->chunks;
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(k), num_pages_ * page_);
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v), num_pages_ * page_);
    src_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(src), num_sources_);
    dst_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(dst), num_dests_);
    cumsum_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(cumsum), num_sources_);
    pipe->InitBuffer(through_, 2, chunk_ * sizeof(half));
  }

  // An item is a chunk of a source page, in K or in V.
  __aicore__ inline void process() {
    const int64_t items = int64_t{2} * num_sources_ * chunks_;
    for (int64_t item = AscendC::GetBlockIdx(); item < items;
         item += AscendC::GetBlockNum()) {
      const int32_t source = static_cast<int32_t>(item / 2 / chunks_);
      const int32_t page = src_.GetValue(source);
      const int32_t first = source > 0 ? larger(0, cumsum_.GetValue(source - 1)) : 0;
      const int32_t last = smaller(num_dests_, cumsum_.GetValue(source));
      if (page < 0 || page >= num_pages_ || first >= last) continue;
      const int64_t at = item / 2 % chunks_ * chunk_;
      copy(item % 2 == 0 ? k_ : v_, page, first, last, at);
    }
  }

 private:
  __aicore__ inline void copy(const AscendC::GlobalTensor<half>& pool, int32_t page,
                              int32_t first, int32_t last, int64_t at) {
    const int32_t size = page_ - at < chunk_ ? static_cast<int32_t>(page_ - at) : chunk_;
    AscendC::LocalTensor<half> some = through_.AllocTensor<half>();
    AscendC::DataCopy(some, pool[page * page_ + at], size);
    through_.EnQue(some);
    some = through_.DeQue<half>();
    for (int32_t i = first; i < last; ++i) {
      const int32_t to = dst_.GetValue(i);
      if (to < 0 || to >= num_pages_) continue;
      AscendC::DataCopy(pool[to * page_ + at], some, size);
    }
    through_.FreeTensor(some);
  }

  AscendC::GlobalTensor<half> k_, v_;
  AscendC::GlobalTensor<int32_t> src_, dst_, cumsum_;
  AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through_;
  int64_t page_;
  int32_t num_pages_, num_sources_, num_dests_, chunk_, chunks_;
};

}  // namespace pagedjax_ascend
