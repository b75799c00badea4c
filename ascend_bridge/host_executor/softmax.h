// What the kernels share: one score becoming a weight, one head becoming a result.
#pragma once

#include "attention.h"
#include "convert.h"

namespace {

using namespace pagedjax;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

PJ_INLINE float exp_one(float x) { return exp_negative(splat(x))[0]; }

// exp(a - b) where both may be -inf: 0 if a is.
PJ_INLINE float decay_one(float a, float b) { return a == kLowest ? 0.0f : exp_one(a - b); }

// The factor of q. With a soft cap the scores are needed divided by it.
PJ_INLINE float query_factor(const Problem& p) {
  return p.soft_cap > 0 ? p.scale / p.soft_cap : p.scale;
}

// float32 copy of query head `head` of `token`, times `factor`, zero-padded to W.
PJ_INLINE void load_query(const Problem& p, int64_t token, int64_t head, float factor,
                          float* to) {
  const int64_t at = (token * p.num_heads + head) * p.head_dim;
  const char* q = (const char*)p.q + at * dtype_bytes(p.q_dtype);
  if (p.q_dtype == DType::kF32) {
    widen_row<F32>(q, factor, p.head_dim, to);
  } else if (p.q_dtype == DType::kBF16) {
    widen_row<BF16>(q, factor, p.head_dim, to);
  } else {
    widen_row<F16>(q, factor, p.head_dim, to);
  }
}

// Divides by the sum and writes out and lse; no visible key gives 0 and -inf.
PJ_INLINE void finish_head(const Problem& p, int64_t token, int64_t head,
                           const float* total, float max, float sum) {
  const int64_t row = token * p.num_heads + head, dim = p.head_dim;
  const bool some = !(sum == 0.0f);
  const float inverse = some ? 1.0f / sum : 0.0f;
  p.lse[row] = some ? max + __builtin_logf(sum) : kLowest;
  if (p.q_dtype == DType::kF32) {
    float* out = (float*)p.out + row * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] = some ? total[d] * inverse : 0.0f;
  } else if (p.q_dtype == DType::kBF16) {
    uint16_t* out = (uint16_t*)p.out + row * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] = f32_to_bf16(some ? total[d] * inverse : 0.0f);
  } else {
    uint16_t* out = (uint16_t*)p.out + row * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] = f32_to_f16(some ? total[d] * inverse : 0.0f);
  }
}

// rows[i] = pool row of position begin + i, i < count.
PJ_INLINE void find_rows(const int32_t* pages, int64_t page_size, int64_t begin,
                         int64_t count, int64_t* rows) {
  int64_t page = begin / page_size, offset = begin - page * page_size;
  int64_t i = 0;
  while (i < count) {
    const int64_t base = (int64_t)pages[page] * page_size;
    for (; i < count && offset < page_size; ++i, ++offset) rows[i] = base + offset;
    ++page;
    offset = 0;
  }
}

// Widens one (row, kv head) of quantised or odd-sized pages to float32.
PJ_INLINE void widen_kv(DType dtype, const void* pages, const float* scales, int64_t at,
                        int64_t dim, float* to) {
  const char* from = (const char*)pages + at * dim * dtype_bytes(dtype);
  const float scale = scales != nullptr ? scales[at] : 1.0f;
  switch (dtype) {
    case DType::kF32:
      return widen_row<F32>(from, 1.0f, dim, to);
    case DType::kBF16:
      return widen_row<BF16>(from, 1.0f, dim, to);
    case DType::kF16:
      return widen_row<F16>(from, 1.0f, dim, to);
    case DType::kI8:
      return widen_row<I8>(from, scale, dim, to);
    case DType::kF8E4M3:
      return widen_row<F8E4M3>(from, scale, dim, to);
  }
}

}  // namespace
