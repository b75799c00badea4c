// Asking for memory before it is needed. Included by kernels.cc only.
#pragma once

#include "simd.h"

namespace {

// The lines of the next block in the order of memory, asked for one at a time between
// multiplications: a burst of prefetches would fill the line buffers and stall.
struct Ahead {
  const char* pages;
  const int64_t* rows;  // pool rows still to come
  int64_t left;         // their number
  int64_t row_bytes, offset, bytes;  // of a row: its stride, and the part that is read
  const char* at;
  const char* stop;

  template <int Lines>
  PJ_INLINE void ask(Ahead* a) {
    if (a->stop - a->at >= Lines * 64) {
      PJ_UNROLL for (int i = 0; i < Lines; ++i) __builtin_prefetch(a->at + i * 64, 0, 2);
      a->at += Lines * 64;
      return;
    }
    for (int i = 0; i < Lines; ++i) {
      if (a->at >= a->stop) {
        if (a->left == 0) return;
        a->at = a->pages + *a->rows++ * a->row_bytes + a->offset;
        a->stop = a->at + a->bytes;
        --a->left;
      }
      __builtin_prefetch(a->at, 0, 2);
      a->at += 64;
    }
  }
};

}  // namespace
