// One query against many keys by AMX, for pages of int8 and float8. Included by
// kernels.cc only; see span_kernel.h for the order of the work.
//
// bfloat16 holds their elements exactly, and takes fewer instructions to make than
// float32. A row of queries fills few columns of a tile, so a score and a weight can
// have the parts that float32 precision needs (amx.h) at little cost.
//
//     keys [16 tokens, 32 dims] x queries [32 dims, 4 heads]  -> scores [token][head]
//     weights [4 heads, 32 tokens] x values [32 tokens, 16 dims] -> out [head][dims]
//
// Values are paired as they lie, by interleaving two rows of 32: that splits a row into
// a low and a high half in blocks of 4, and `out` is held in that order to the end.
#pragma once

#include "amx.h"
#include "span_kernel.h"

namespace {

struct alignas(64) SpanShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  //                        scores  keys queries  out  weights values
  uint16_t row_bytes[16] = {16, 16, 64, 16, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 4, 4, 4, 16};
};
const SpanShapes kSpanShapes;

constexpr int64_t kThinTile = 256;  // bytes of a tile of queries or of weights

PJ_INLINE bool span_fits(const Problem& p) {
  return dtype_bytes(p.kv_dtype) == 1 && p.head_dim % kTileDepth == 0;
}

struct SpanSizes {
  int64_t dims, steps, chunks, q_parts;
};

PJ_INLINE SpanSizes span_sizes(const Problem& p) {
  return {p.head_dim, p.head_dim / kTileDepth, chunk_count(p), amx_parts(p.q_dtype)};
}

struct SpanBuffers {
  HeadState* states;  // [heads][chunk]
  char* q;            // tiles [heads][chunk][step][part]
  float* out;         // [heads][chunk][4][dims]
  char* weights;      // tiles [32 tokens][part]
  char* values;       // tiles [32 tokens][step][low, high]
  char* keys;         // bfloat16 [kMaxBlock][dims]
  char* rows;         // likewise, of values
  size_t bytes;
};

PJ_INLINE SpanBuffers span_buffers(const SpanSizes& s, int64_t heads, void* scratch) {
  SpanBuffers b;
  char* at = (char*)scratch;
  const auto take = [&](int64_t bytes) {
    char* taken = at;
    at += bytes;
    return taken;
  };
  const int64_t columns = heads * s.chunks, row = s.dims * 2;
  b.states = (HeadState*)take(columns * (int64_t)sizeof(HeadState));
  b.q = take(columns * s.steps * s.q_parts * kThinTile);
  b.out = (float*)take(columns * kGroup * s.dims * 4);
  b.weights = take(kMaxBlock / kTileDepth * kFloatParts * kThinTile);
  b.values = take(kMaxBlock / kTileDepth * s.steps * 2 * kTileBytes);
  b.keys = take(kMaxBlock * row);
  b.rows = take(kMaxBlock * row);
  b.bytes = (size_t)(at - (char*)scratch);
  return b;
}

size_t amx_span_scratch(const Problem& p) {
  if (!span_fits(p)) return span_scratch(p);
  return span_buffers(span_sizes(p), p.num_kv_heads, nullptr).bytes;
}

// The query heads of one chunk as tiles [step][part] of 16 pairs by 4 heads.
PJ_INLINE void span_pack_queries(const Problem& p, const SpanSizes& s, int64_t token,
                                 int64_t head, int64_t count, float* row, char* to) {
  memset(to, 0, (size_t)(s.steps * s.q_parts * kThinTile));
  for (int64_t g = 0; g < count; ++g) {
    load_query(p, token, head + g, 1.0f, row);
    for (int64_t step = 0; step < s.steps; ++step) {
      const VF low = load(row + step * kTileDepth), high = load(row + step * kTileDepth + W);
      const VF even = PJ_SHUFFLE(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26,
                                 28, 30);
      const VF odd = PJ_SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27,
                                29, 31);
      alignas(64) uint32_t pairs[kFloatParts][W];
      s.q_parts == 3   ? split_pair<3>(even, odd, (char*)pairs, 64)
      : s.q_parts == 2 ? split_pair<2>(even, odd, (char*)pairs, 64)
                       : split_pair<1>(even, odd, (char*)pairs, 64);
      for (int64_t part = 0; part < s.q_parts; ++part) {
        uint32_t* tile = (uint32_t*)(to + (step * s.q_parts + part) * kThinTile);
        for (int64_t i = 0; i < W; ++i) tile[i * kGroup + g] = pairs[part][i];
      }
    }
  }
}

// Scores of up to 64 tokens.
PJ_INLINE void span_tile_scores(const SpanSizes& s, const char* keys, int64_t count,
                                const char* q, float* scores) {
  const int64_t stride = s.dims * 2;
  for (int64_t t = 0; t * kTileSide < count; t += 2) {
    const char* first = keys + t * kTileSide * stride;
    const char* second = first + kTileSide * stride;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < s.steps; ++step) {
      _tile_loadd(2, first + step * 64, stride);
      _tile_loadd(7, second + step * 64, stride);
      for (int64_t part = 0; part < s.q_parts; ++part) {
        _tile_loadd(3, q + (step * s.q_parts + part) * kThinTile, 16);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 7, 3);
      }
    }
    _tile_stored(0, scores + t * kTileSide * kGroup, 16);
    _tile_stored(1, scores + (t + 1) * kTileSide * kGroup, 16);
  }
}

// Weights [token][head] of 64 tokens become tiles [32 tokens][part] of 4 heads by 32
// tokens, in pairs i, i + 16 of span_token's order.
PJ_INLINE int64_t span_token(int64_t i) { return i % 4 * 4 + i / 4; }

PJ_INLINE void span_pack_weights(const float* weights, int64_t count, const float* scales,
                                 char* to) {
  for (int64_t t = 0; t < count; t += kTileDepth, to += kFloatParts * kThinTile) {
    VF heads[2][kGroup];
    PJ_UNROLL for (int half = 0; half < 2; ++half) {
      const float* from = weights + (t + half * W) * kGroup;
      const __m512 a = (__m512)load(from), b = (__m512)load(from + W);
      const __m512 c = (__m512)load(from + 2 * W), d = (__m512)load(from + 3 * W);
      const VF ab = (VF)_mm512_unpacklo_ps(a, b), cd = (VF)_mm512_unpacklo_ps(c, d);
      const VF ab_high = (VF)_mm512_unpackhi_ps(a, b), cd_high = (VF)_mm512_unpackhi_ps(c, d);
      heads[half][0] = (VF)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
      heads[half][1] = (VF)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
      heads[half][2] = (VF)_mm512_unpacklo_pd((__m512d)ab_high, (__m512d)cd_high);
      heads[half][3] = (VF)_mm512_unpackhi_pd((__m512d)ab_high, (__m512d)cd_high);
      const VF in_order = load(scales + t + half * W);
      const VF scale =
          PJ_SHUFFLE(in_order, in_order, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      PJ_UNROLL for (int g = 0; g < kGroup; ++g) heads[half][g] *= scale;
    }
    PJ_UNROLL for (int g = 0; g < kGroup; ++g) {
      split_pair<kFloatParts>(heads[0][g], heads[1][g], to + g * 64, kThinTile);
    }
  }
}

// Interleaves the values of 32 tokens into tiles [step][low, high].
PJ_INLINE void span_pack_values(const SpanSizes& s, const char* rows, char* to) {
  for (int64_t i = 0; i < W; ++i) {
    const char* first = rows + span_token(i) * s.dims * 2;
    const char* second = first + W * s.dims * 2;
    for (int64_t step = 0; step < s.steps; ++step) {
      const __m512i a = _mm512_loadu_si512(first + step * 64);
      const __m512i b = _mm512_loadu_si512(second + step * 64);
      char* tile = to + step * 2 * kTileBytes + i * 64;
      _mm512_store_si512(tile, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(tile + kTileBytes, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// out[head] += weights x values over `count` tokens, packed.
PJ_INLINE void span_tile_values(const SpanSizes& s, const char* weights, const char* values,
                                int64_t count, float* out) {
  for (int64_t step = 0; step < s.steps; ++step) {
    float* low = out + step * kTileDepth;
    _tile_loadd(4, low, s.dims * 4);
    _tile_loadd(5, low + W, s.dims * 4);
    for (int64_t t = 0; t * kTileDepth < count; ++t) {
      const char* tile = values + (t * s.steps + step) * 2 * kTileBytes;
      _tile_loadd(7, tile, 64);
      _tile_loadd(2, tile + kTileBytes, 64);
      for (int64_t part = 0; part < kFloatParts; ++part) {
        _tile_loadd(6, weights + (t * kFloatParts + part) * kThinTile, 64);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 2);
      }
    }
    _tile_stored(4, low, s.dims * 4);
    _tile_stored(5, low + W, s.dims * 4);
  }
}

// Widens keys and values of one kv head in a block; zeros after the last token.
PJ_INLINE void span_widen(const Problem& p, const SpanSizes& s, const int64_t* rows,
                          int64_t count, int64_t head, const SpanBuffers& b, Ahead ahead[2]) {
  for (int64_t i = 0; i < round_up(count, kTileDepth); ++i) {
    char* key = b.keys + i * s.dims * 2;
    char* value = b.rows + i * s.dims * 2;
    if (i >= count) {
      memset(key, 0, (size_t)(s.dims * 2));
      memset(value, 0, (size_t)(s.dims * 2));
      continue;
    }
    const int64_t at = (rows[i] * p.num_kv_heads + head) * s.dims;
    const char* from_key = (const char*)p.k_pages + at;
    const char* from_value = (const char*)p.v_pages + at;
    for (int64_t line = 0; line < s.dims; line += 64) {
      Ahead::ask<1>(&ahead[0]);
      Ahead::ask<1>(&ahead[1]);
    }
    if (p.kv_dtype == DType::kI8) {
      halve_row<I8>(from_key, s.dims, key);
      halve_row<I8>(from_value, s.dims, value);
    } else {
      halve_row<F8E4M3>(from_key, s.dims, key);
      halve_row<F8E4M3>(from_value, s.dims, value);
    }
  }
}

// Multiplies the scores of each token by its scale.
PJ_INLINE void span_scale(const float* scales, int64_t count, float* scores) {
  for (int64_t t = 0; t < count; t += 4) {
    float four[W];
    for (int64_t i = 0; i < W; ++i) four[i] = scales[t + i / kGroup];
    store(scores + t * kGroup, load(scores + t * kGroup) * load(four));
  }
}

// One block of one kv head for up to 4 of its query heads.
PJ_INLINE void span_tile_block(const Problem& p, const SpanSizes& s, const SpanBuffers& b,
                               int64_t count, const float* k_scales, const float* v_scales,
                               const char* q, HeadState* state, float* out) {
  alignas(64) float scores[kMaxBlock * kGroup], shrink[W];
  span_tile_scores(s, b.keys, count, q, scores);
  span_scale(k_scales, count, scores);
  const VF shrinks = span_weights<kGroup>(p, count, query_factor(p), scores, state);
  const int64_t written = round_up(count * kGroup, 2 * W);
  for (int64_t i = written; i < round_up(count, kTileDepth) * kGroup; i += W) {
    store(scores + i, zero());
  }
  span_pack_weights(scores, count, v_scales, b.weights);
  if (_mm512_cmp_ps_mask((__m512)shrinks, (__m512)splat(1.0f), _CMP_NEQ_UQ) != 0) {
    store(shrink, shrinks);
    for (int64_t i = 0; i < kGroup * s.dims; i += W) {
      store(out + i, load(out + i) * splat(shrink[i / s.dims]));
    }
  }
  __asm__ volatile("" ::: "memory");
  span_tile_values(s, b.weights, b.values, count, out);
}

void amx_span(const Problem& p, const SpanTask& task, void* scratch) {
  if (!span_fits(p)) return span(p, task, scratch);
  const SpanSizes s = span_sizes(p);
  const int64_t group = p.group(), heads = task.head_end - task.head_begin;
  const SpanBuffers b = span_buffers(s, heads, scratch);
  const int64_t q_tiles = s.steps * s.q_parts * kThinTile, out_tile = kGroup * s.dims;
  memset(b.out, 0, (size_t)(heads * s.chunks * out_tile * 4));
  for (int64_t i = 0; i < heads * s.chunks; ++i) {
    const int64_t head = task.head_begin + i / s.chunks, g = i % s.chunks * kGroup;
    const int64_t some = group - g < kGroup ? group - g : kGroup;
    b.states[i].max = splat(kLowest);
    b.states[i].sum = zero();
    span_pack_queries(p, s, task.token, head * group + g, some, (float*)b.values,
                      b.q + i * q_tiles);
  }

  const int64_t row_bytes = p.num_kv_heads * s.dims;
  int64_t rows[2][kMaxBlock];
  int64_t count = task.end - task.begin < kMaxBlock ? task.end - task.begin : kMaxBlock;
  find_rows(task.pages, p.page_size, task.begin, count, rows[0]);
  _tile_loadconfig(&kSpanShapes);
  int turn = 0;
  for (int64_t t = task.begin; t < task.end; turn ^= 1) {
    const int64_t next = t + count, left = task.end - next;
    const int64_t next_count = left < kMaxBlock ? left : kMaxBlock;
    // After the last block comes the first one of what this thread does next.
    int64_t to_come = next_count, next_head = task.head_begin;
    if (next_count > 0) {
      find_rows(task.pages, p.page_size, next, next_count, rows[turn ^ 1]);
    } else if (task.next != nullptr) {
      const int64_t all = task.next->end - task.next->begin;
      to_come = all < kMaxBlock ? all : kMaxBlock;
      next_head = task.next->head_begin;
      find_rows(task.next->pages, p.page_size, task.next->begin, to_come, rows[turn ^ 1]);
    }
    const auto lines = [&](const void* pages) {
      return Ahead{(const char*)pages, rows[turn ^ 1], to_come, row_bytes,
                   next_head * s.dims, heads * s.dims, nullptr, nullptr};
    };
    Ahead ahead[2] = {lines(p.k_pages), lines(p.v_pages)};
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = task.head_begin + h;
      alignas(64) float scales[2][kMaxBlock] = {};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = rows[turn][i] * p.num_kv_heads + head;
        scales[0][i] = p.k_scales[at];
        scales[1][i] = p.v_scales[at];
      }
      span_widen(p, s, rows[turn], count, head, b, ahead);
      for (int64_t i = 0; i < count; i += kTileDepth) {
        span_pack_values(s, b.rows + i * s.dims * 2,
                         b.values + i / kTileDepth * s.steps * 2 * kTileBytes);
      }
      __asm__ volatile("" ::: "memory");  // the tile loads do not tell what they read
      for (int64_t c = h * s.chunks; c < (h + 1) * s.chunks; ++c) {
        span_tile_block(p, s, b, count, scales[0], scales[1], b.q + c * q_tiles, b.states + c,
                        b.out + c * out_tile);
      }
    }
    t = next;
    count = next_count;
  }
  amx_end();

  for (int64_t i = 0; i < heads * s.chunks; ++i) {
    const int64_t first = (task.head_begin + i / s.chunks) * group + i % s.chunks * kGroup;
    const int64_t in_group = group - i % s.chunks * kGroup;
    float max[kGroup], sum[kGroup];
    unpack_state<kGroup>(b.states[i], max, sum);
    for (int64_t g = 0; g < kGroup && g < in_group; ++g) {
      task.part.max[first + g] = max[g];
      task.part.sum[first + g] = sum[g];
      const float* from = b.out + i * out_tile + g * s.dims;
      float* to = task.part.out + (first + g) * s.dims;
      for (int64_t d = 0; d < s.dims; d += kTileDepth) {
        const VF low = load(from + d), high = load(from + d + W);
        store(to + d, PJ_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22,
                                 23));
        store(to + d + W, PJ_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15,
                                     28, 29, 30, 31));
      }
    }
  }
}

}  // namespace
