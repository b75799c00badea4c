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

constexpr int64_t kTileKeys = 128;  // keys at a time: their parts fit the second cache
constexpr int64_t kWord = 64;       // tokens that a number holds a bit of

// Sizes of a tile task. Weights always have three parts: a result near 0 is a difference
// of large numbers, whatever its format.
struct AmxSizes {
  int64_t dims, steps;  // D, padded to tiles; tiles of 32 of it
  int64_t tiles;        // of 16 query rows
  int64_t q_parts, kv_parts;
  bool plain;  // pages that hold whole steps of bfloat16: read as they are
};

PJ_INLINE AmxSizes amx_sizes(const Problem& p, int64_t num_rows) {
  AmxSizes s;
  s.dims = round_up(p.head_dim, kTileDepth);
  s.steps = s.dims / kTileDepth;
  s.tiles = round_up(num_rows * p.group(), kTileSide) / kTileSide;
  s.kv_parts = amx_parts(p.kv_dtype);
  // More parts than a format needs are zeros; five combinations are enough.
  s.q_parts = amx_parts(p.q_dtype);
  if (s.q_parts < s.kv_parts) s.q_parts = s.kv_parts;
  if (s.kv_parts == 1 && s.q_parts == 2) s.q_parts = kFloatParts;
  s.plain = p.kv_dtype == DType::kBF16 && p.head_dim == s.dims;
  return s;
}

struct AmxBuffers {
  char* q;          // tiles [query tile][step][part]
  char* keys;       // tiles [key tile][step][part]
  char* values;     // tiles [dim tile][32 keys][part]
  char* weights;    // tiles [2 turns][2][32 keys][part]
  float* out;       // [query tile][dims][16]
  float* scores;    // [3 turns][2][kTileKeys][16]
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
  b.weights = take(2 * 2 * (kTileKeys / kTileDepth) * kFloatParts * kTileBytes);
  b.out = (float*)take(s.tiles * s.dims * 64);
  b.scores = (float*)take(3 * 2 * kTileKeys * 64);
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
      // Keys that are copied have neighbours as pairs.
      const VF x = s.plain ? square[i / 8][2 * i % W] : square[0][i];
      const VF y = s.plain ? square[i / 8][2 * i % W + 1] : square[1][i];
      s.q_parts == 3   ? split_pair<3>(x, y, to + i * 64)
      : s.q_parts == 2 ? split_pair<2>(x, y, to + i * 64)
                       : split_pair<1>(x, y, to + i * 64);
    }
  }
}

// Where the keys or values of 32 tokens lie as float32, or as bfloat16 in plain pages, with
// zeros up to `dims` and after the last token; where the pages hold just that, in place.
PJ_INLINE void amx_stage(const Problem& p, const AmxSizes& s, const void* pages,
                         const int64_t* rows, int64_t count, int64_t head, float* staging,
                         const char** tokens) {
  const bool in_place = s.plain || (p.kv_dtype == DType::kF32 && p.head_dim == s.dims);
  const int64_t bytes = s.dims * dtype_bytes(p.kv_dtype);
  for (int64_t i = 0; i < kTileDepth; ++i) {
    const int64_t at = i < count ? rows[i] * p.num_kv_heads + head : 0;
    tokens[i] = (const char*)(staging + i * s.dims);
    if (i >= count) {
      memset(staging + i * s.dims, 0, (size_t)(s.dims * 4));
    } else if (in_place) {
      tokens[i] = (const char*)pages + at * bytes;
    } else {
      widen_kv(p.kv_dtype, pages, nullptr, at, p.head_dim, staging + i * s.dims);
    }
  }
}

template <int Parts>
PJ_INLINE void amx_pack_keys(const AmxSizes& s, const char* const* tokens, char* to) {
  for (int64_t i = 0; i < kTileDepth; ++i) {
    char* row = to + i / kTileSide * s.steps * Parts * kTileBytes + i % kTileSide * 64;
    for (int64_t step = 0; step < s.steps; ++step, row += Parts * kTileBytes) {
      if (Parts == 1 && s.plain) {
        memcpy(row, tokens[i] + step * 64, 64);
      } else {
        const float* from = (const float*)tokens[i] + step * kTileDepth;
        split_pair<Parts>(load(from), load(from + W), row);
      }
    }
  }
}

// Packs the values of 32 tokens; false if some are not finite.
template <int Parts>
PJ_INLINE bool amx_pack_values(const AmxSizes& s, const char* const* tokens, char* to) {
  const int64_t outer = kTileKeys / kTileDepth * Parts * kTileBytes;
  VF odd[2] = {zero(), zero()};
  for (int64_t d = 0; d < s.dims; d += W, to += outer) {
    VF square[2][W];
    PJ_UNROLL for (int half = 0; half < 2; ++half) {
      PJ_UNROLL for (int i = 0; i < W; ++i) {
        square[half][i] = load((const float*)tokens[half * W + i] + d);
        odd[half] += square[half][i] * splat(0.0f);
      }
      transpose(square[half]);
    }
    PJ_UNROLL for (int i = 0; i < W; ++i) {
      split_pair<Parts>(square[0][i], square[1][i], to + i * 64);
    }
  }
  odd[0] += odd[1];
  return _mm512_cmp_ps_mask((__m512)odd[0], (__m512)odd[0], _CMP_UNORD_Q) == 0;
}

// The same for plain bfloat16: pairs first, then half as much to transpose.
PJ_INLINE bool amx_pack_values_plain(const AmxSizes& s, const char* const* tokens, char* to) {
  const int64_t outer = kTileKeys / kTileDepth * kTileBytes;
  const __m512i size = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t d = 0; d < s.dims; d += kTileDepth, to += 2 * outer) {
    VF square[2][W];
    PJ_UNROLL for (int i = 0; i < W; ++i) {
      const __m512i x = _mm512_loadu_si512(tokens[i] + 2 * d);
      const __m512i y = _mm512_loadu_si512(tokens[i + W] + 2 * d);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(x, size));
      largest = _mm512_max_epu16(largest, _mm512_and_si512(y, size));
      square[0][i] = (VF)_mm512_unpacklo_epi16(x, y);
      square[1][i] = (VF)_mm512_unpackhi_epi16(x, y);
    }
    // The interleaving takes four dims of each eight: 0-3, 8-11, ... and 4-7, 12-15, ...
    PJ_UNROLL for (int half = 0; half < 2; ++half) {
      transpose(square[half]);
      PJ_UNROLL for (int i = 0; i < W; ++i) {
        char* row = to + i / 8 * outer + (i / 4 % 2 * 8 + half * 4 + i % 4) * 64;
        memcpy(row, &square[half][i], 64);
      }
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

// Takes out the tokens with a value that is not finite, and returns them, a bit each: 0
// times such a value is not 0, and there are queries that may not see it.
static uint64_t amx_take_out(const Problem& p, const AmxSizes& s, const int64_t* rows,
                             int64_t count, int64_t head, float* staging,
                             const char** tokens) {
  uint64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    float* row = staging + i * s.dims;
    widen_kv(p.kv_dtype, p.v_pages, nullptr, rows[i] * p.num_kv_heads + head, p.head_dim, row);
    VF odd = zero();
    for (int64_t d = 0; d < s.dims; d += W) odd += load(row + d) * splat(0.0f);
    if (_mm512_cmp_ps_mask((__m512)odd, (__m512)odd, _CMP_UNORD_Q) == 0) continue;
    found |= (uint64_t)1 << i;
    memset(row, 0, (size_t)(s.dims * 4));
    tokens[i] = (const char*)row;
  }
  return found;
}

// Packs the keys and values of `count` tokens, zeros after them; `out` receives the
// tokens whose values were taken out.
template <int Parts>
static void amx_pack(const Problem& p, const AmxSizes& s, int64_t head, const int64_t* rows,
                     int64_t count, const AmxBuffers& b, uint64_t* out) {
  const char* tokens[kTileDepth];
  for (int64_t t = 0; t < count; t += kTileDepth) {
    const int64_t some = count - t < kTileDepth ? count - t : kTileDepth;
    amx_stage(p, s, p.k_pages, rows + t, some, head, b.staging, tokens);
    amx_pack_keys<Parts>(s, tokens, b.keys + t / kTileSide * s.steps * Parts * kTileBytes);
    amx_stage(p, s, p.v_pages, rows + t, some, head, b.staging, tokens);
    char* to = b.values + t / kTileDepth * Parts * kTileBytes;
    const auto pack = [&] {
      return Parts == 1 && s.plain ? amx_pack_values_plain(s, tokens, to)
                                   : amx_pack_values<Parts>(s, tokens, to);
    };
    uint64_t found = 0;
    if (!pack()) {
      found = amx_take_out(p, s, rows + t, some, head, b.staging, tokens);
      pack();
    }
    if (t % kWord == 0) out[t / kWord] = 0;
    out[t / kWord] |= found << t % kWord;
  }
}

}  // namespace
