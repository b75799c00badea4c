// The factors of a tile task by AMX: queries, keys and values as bfloat16 parts in the
// order of tiles. Included by kernels.cc only.
//
//     queries  [tile of 16][32 dims][part]   pairs of dims d, d + 16; a query per column
//     keys     [tile of 16][32 dims][part]   a token per row
//     values   [tile of 16 dims][32 tokens][part]   transposed: a dim per row
#pragma once

#include "amx.h"
#include "softmax.h"

namespace {

constexpr int64_t kTileKeys = 64;  // keys at a time: their parts fit the second cache

// Sizes of a tile task. Weights always have three parts: a result near 0 is a difference
// of large numbers, whatever its format.
struct AmxSizes {
  int64_t dims, steps;  // D, padded to tiles; tiles of 32 of it
  int64_t tiles;        // of 16 query rows
  int64_t q_parts, kv_parts;
};

PJ_INLINE AmxSizes amx_sizes(const Problem& p, int64_t num_rows) {
  AmxSizes s;
  s.dims = round_up(p.head_dim, kTileDepth);
  s.steps = s.dims / kTileDepth;
  s.tiles = round_up(num_rows * p.group(), kTileSide) / kTileSide;
  s.q_parts = amx_parts(p.q_dtype);
  s.kv_parts = amx_parts(p.kv_dtype);
  return s;
}

struct AmxBuffers {
  char* q;          // tiles [query tile][step][part]
  char* keys;       // tiles [key tile][step][part]
  char* values;     // tiles [dim tile][32 keys][part]
  char* weights;    // tiles [2][32 keys][part]
  float* out;       // [query tile][dims][16]
  float* scores;    // [2 turns][2][kTileKeys][16]
  float* staging;   // [32][dims]
  VF* max;          // [query tile]
  VF* sum;          // [query tile]
  int32_t* low;     // [query tile][16]: the keys that a query sees
  int32_t* high;    // [query tile][16]
  size_t bytes;
};

PJ_INLINE AmxBuffers amx_buffers(const AmxSizes& s, void* scratch) {
  AmxBuffers b;
  char* at = (char*)scratch;
  const auto take = [&](int64_t bytes) {
    char* taken = at;
    at += bytes;
    return taken;
  };
  b.q = take(s.tiles * s.steps * s.q_parts * kTileBytes);
  b.keys = take(kTileKeys / kTileSide * s.steps * s.kv_parts * kTileBytes);
  b.values = take(s.dims / kTileSide * (kTileKeys / kTileDepth) * s.kv_parts * kTileBytes);
  b.weights = take(2 * (kTileKeys / kTileDepth) * kFloatParts * kTileBytes);
  b.out = (float*)take(s.tiles * s.dims * 64);
  b.scores = (float*)take(2 * 2 * kTileKeys * 64);
  b.staging = (float*)take(kTileDepth * s.dims * 4);
  b.max = (VF*)take(s.tiles * 64);
  b.sum = (VF*)take(s.tiles * 64);
  b.low = (int32_t*)take(s.tiles * 64);
  b.high = (int32_t*)take(s.tiles * 64);
  b.bytes = (size_t)(at - (char*)scratch);
  return b;
}

size_t tile_scratch(const Problem& p, int64_t num_rows) {
  return amx_buffers(amx_sizes(p, num_rows), nullptr).bytes;
}

// The rows of 16 queries as the second factor of scores; no row gives zeros.
PJ_INLINE void amx_pack_queries(const Problem& p, const TileTask& task, const AmxSizes& s,
                                int64_t tile, const AmxBuffers& b) {
  const int64_t group = p.group(), live = task.num_rows * group;
  memset(b.staging, 0, (size_t)(kTileSide * s.dims * 4));
  for (int64_t i = 0; i < kTileSide; ++i) {
    const int64_t r = tile * kTileSide + i;
    b.low[r] = b.high[r] = 0;
    if (r >= live) continue;
    const TileRow& row = task.rows[r / group];
    b.low[r] = (int32_t)row.low;
    b.high[r] = (int32_t)row.high;
    load_query(p, row.token, task.head * group + r % group, 1.0f, b.staging + i * s.dims);
  }
  for (int64_t step = 0; step < s.steps; ++step) {
    VF square[2][W];
    for (int half = 0; half < 2; ++half) {
      const float* from = b.staging + step * kTileDepth + half * W;
      PJ_UNROLL for (int i = 0; i < W; ++i) square[half][i] = load(from + i * s.dims);
      transpose(square[half]);
    }
    char* to = b.q + (tile * s.steps + step) * s.q_parts * kTileBytes;
    for (int i = 0; i < W; ++i) {
      const VF x = square[0][i], y = square[1][i];
      s.q_parts == 3   ? split_pair<3>(x, y, to + i * 64)
      : s.q_parts == 2 ? split_pair<2>(x, y, to + i * 64)
                       : split_pair<1>(x, y, to + i * 64);
    }
  }
}

// Keys or values of 32 tokens as float32, with zeros up to `dims` and after the last
// token; where the pages hold just that, they are read in place.
PJ_INLINE void amx_stage(const Problem& p, const void* pages, const int64_t* rows,
                         int64_t count, int64_t head, int64_t dims, float* staging,
                         const float** tokens) {
  const bool in_place = p.kv_dtype == DType::kF32 && p.head_dim == dims;
  for (int64_t i = 0; i < kTileDepth; ++i) {
    const int64_t at = i < count ? rows[i] * p.num_kv_heads + head : 0;
    tokens[i] = staging + i * dims;
    if (i >= count) {
      memset(staging + i * dims, 0, (size_t)(dims * 4));
    } else if (in_place) {
      tokens[i] = (const float*)pages + at * dims;
    } else {
      widen_kv(p.kv_dtype, pages, nullptr, at, p.head_dim, staging + i * dims);
    }
  }
}

template <int Parts>
PJ_INLINE void amx_pack_keys_as(const AmxSizes& s, const float* const* tokens, char* to) {
  for (int64_t i = 0; i < kTileDepth; ++i) {
    char* row = to + i / kTileSide * s.steps * Parts * kTileBytes + i % kTileSide * 64;
    for (int64_t step = 0; step < s.steps; ++step) {
      const float* from = tokens[i] + step * kTileDepth;
      split_pair<Parts>(load(from), load(from + W), row + step * Parts * kTileBytes);
    }
  }
}

template <int Parts>
PJ_INLINE void amx_pack_values_as(const AmxSizes& s, const float* const* tokens, char* to) {
  const int64_t outer = kTileKeys / kTileDepth * Parts * kTileBytes;
  for (int64_t d = 0; d < s.dims; d += W, to += outer) {
    VF square[2][W];
    PJ_UNROLL for (int half = 0; half < 2; ++half) {
      PJ_UNROLL for (int i = 0; i < W; ++i) square[half][i] = load(tokens[half * W + i] + d);
      transpose(square[half]);
    }
    PJ_UNROLL for (int i = 0; i < W; ++i) {
      split_pair<Parts>(square[0][i], square[1][i], to + i * 64);
    }
  }
}

// Takes out the tokens with a value that is not finite, and returns them, a bit each: 0
// times such a value is not 0, and there are queries that may not see it.
PJ_INLINE uint32_t amx_take_out(int64_t dims, int64_t count, float* staging,
                                const float** tokens) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    VF odd = zero();
    for (int64_t d = 0; d < dims; d += W) odd += load(tokens[i] + d) * splat(0.0f);
    if (_mm512_cmp_ps_mask((__m512)odd, (__m512)odd, _CMP_UNORD_Q) == 0) continue;
    found |= 1u << i;
    memset(staging + i * dims, 0, (size_t)(dims * 4));
    tokens[i] = staging + i * dims;
  }
  return found;
}

// Packs the keys and values of `count` tokens, zeros after them; returns the tokens whose
// values were taken out.
static uint64_t amx_pack(const Problem& p, const AmxSizes& s, int64_t head,
                         const int64_t* rows, int64_t count, const AmxBuffers& b) {
  uint64_t out = 0;
  const float* tokens[kTileDepth];
  for (int64_t t = 0; t < count; t += kTileDepth) {
    const int64_t some = count - t < kTileDepth ? count - t : kTileDepth;
    amx_stage(p, p.k_pages, rows + t, some, head, s.dims, b.staging, tokens);
    char* keys = b.keys + t / kTileSide * s.steps * s.kv_parts * kTileBytes;
    s.kv_parts == 3   ? amx_pack_keys_as<3>(s, tokens, keys)
    : s.kv_parts == 2 ? amx_pack_keys_as<2>(s, tokens, keys)
                     : amx_pack_keys_as<1>(s, tokens, keys);
    amx_stage(p, p.v_pages, rows + t, some, head, s.dims, b.staging, tokens);
    out |= (uint64_t)amx_take_out(s.dims, some, b.staging, tokens) << t;
    char* values = b.values + t / kTileDepth * s.kv_parts * kTileBytes;
    s.kv_parts == 3   ? amx_pack_values_as<3>(s, tokens, values)
    : s.kv_parts == 2 ? amx_pack_values_as<2>(s, tokens, values)
                     : amx_pack_values_as<1>(s, tokens, values);
  }
  return out;
}

}  // namespace
