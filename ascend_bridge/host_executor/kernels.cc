// The attention kernels of one instruction set. The build compiles this file several
// times, each with its own flags and
//   PJ_ISA    name of the instruction set
//   PJ_LANES  floats in a vector: 16 (AVX-512), 8 (AVX2) or 4 (SSE2, NEON)
//   PJ_AMX    whether there are also tiles for bfloat16 products (Intel AMX)
//
// span_kernel.h: one query, many keys; bound by memory.
// tile_kernel.h: many queries, many keys, one kv head; bound by arithmetic.
// tile_amx.h:    the same by AMX.
//
// Softmax over blocks: https://arxiv.org/abs/1805.02867; attention by tiles:
// https://arxiv.org/abs/2205.14135.
#include "attention.h"
#include "convert.h"
#include "simd.h"
#include "span_kernel.h"
#ifdef PJ_AMX
#include "tile_amx.h"
#else
#include "tile_kernel.h"
#endif

#define PJ_JOIN_(a, b) a##b
#define PJ_JOIN(a, b) PJ_JOIN_(a, b)
#define PJ_TEXT_(x) #x
#define PJ_TEXT(x) PJ_TEXT_(x)

namespace {

// Merge the parts of a query in their order: https://arxiv.org/abs/2501.01005.
void merge(const Problem& p, int64_t token, const Part* parts, int64_t num_parts) {
  const int64_t dim = p.head_dim;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    float top = kLowest;
    for (int64_t i = 0; i < num_parts; ++i) {
      if (parts[i].max[h] > top) top = parts[i].max[h];
    }
    float* total = num_parts > 0 ? parts[0].out + h * dim : nullptr;
    float sum = 0;
    for (int64_t i = 0; i < num_parts; ++i) {
      const float weight = decay_one(parts[i].max[h], top);
      const float* out = parts[i].out + h * dim;
      sum += parts[i].sum[h] * weight;
      if (i == 0) {
        for (int64_t d = 0; d < dim; ++d) total[d] = out[d] * weight;
      } else {
        for (int64_t d = 0; d < dim; ++d) total[d] += out[d] * weight;
      }
    }
    finish_head(p, token, h, total, top, sum);
  }
}

}  // namespace

namespace pagedjax {
extern const Kernels PJ_JOIN(kernels_, PJ_ISA);
const Kernels PJ_JOIN(kernels_, PJ_ISA) = {
    PJ_TEXT(PJ_ISA),
    span_scratch, span, tile_scratch, tile, merge,
};
}  // namespace pagedjax
