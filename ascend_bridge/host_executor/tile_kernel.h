// Several queries against the same keys, for one kv head: prefill, and decode rows
// that share pages. Included by kernels.cc only.
//
// The queries of all G heads are rows of one matrix. Keys are packed transposed, a
// block at a time, so that a register tile is a plain outer product:
//
//             keys t .. t + 63              The weights of kTileRows rows stay in
//     rows  [ q . K^T ]  -> weights ->      cache and are multiplied with the packed
//      r..  [         ]   [ . V ] -> out    value rows at once.
//
// A block that no row of a group of kTileRows rows sees is skipped: with a causal
// mask that halves the work.
#pragma once

#include "softmax.h"

namespace {

#if PJ_LANES == 16 || defined(__aarch64__)
constexpr int kTileVectors = 4;
constexpr int kTileRows = 6;
#elif PJ_LANES == 8
constexpr int kTileVectors = 2;
constexpr int kTileRows = 6;
#else
constexpr int kTileVectors = 2;
constexpr int kTileRows = 4;
#endif
constexpr int64_t kTileKeys = 64;

struct TileBuffers {
  float* q;        // [rows, stride]
  float* out;      // [rows, stride]
  float* max;      // [rows]
  float* sum;      // [rows]
  float* keys;     // [stride, kTileKeys]
  float* values;   // [kTileKeys, stride]
  float* weights;  // [kTileRows, kTileKeys]
};

PJ_INLINE int64_t tile_padded_rows(const Problem& p, int64_t num_rows) {
  return round_up(num_rows * p.group(), kTileRows);
}

size_t tile_scratch(const Problem& p, int64_t num_rows) {
  const int64_t stride = round_up(p.head_dim, W), rows = tile_padded_rows(p, num_rows);
  return (size_t)(4 * (2 * rows * stride + 2 * round_up(rows, 16) + 2 * kTileKeys * stride +
                       kTileRows * kTileKeys + W * stride) + 64);
}

PJ_INLINE TileBuffers tile_buffers(const Problem& p, int64_t rows, void* scratch) {
  const int64_t stride = round_up(p.head_dim, W);
  TileBuffers b;
  b.q = (float*)scratch;
  b.out = b.q + rows * stride;
  b.keys = b.out + rows * stride;
  b.values = b.keys + kTileKeys * stride;
  b.weights = b.values + kTileKeys * stride;
  b.max = b.weights + kTileRows * kTileKeys;
  b.sum = b.max + round_up(rows, 16);
  return b;
}

// Whether some value of a row is infinite or NaN.
PJ_INLINE bool has_odd_values(const float* row, int64_t stride) {
  VF odd = zero();
  for (int64_t d = 0; d < stride; d += W) odd += load(row + d) * splat(0.0f);
  return !(sum_modulo<1>(odd)[0] == 0.0f);
}

// Packs the keys of `count` tokens transposed and the values as rows; zeros after them.
// A token with values that are not finite gets zeros too and is returned, a bit each: 0
// times such a value is not 0, and there are queries that may not see it.
PJ_INLINE uint64_t tile_pack(const Problem& p, const TileTask& task, const int64_t* rows,
                             int64_t count, float* staging, const TileBuffers& b) {
  const int64_t stride = round_up(p.head_dim, W);
  uint64_t taken_out = 0;
  for (int64_t t = 0; t < kTileKeys; t += W) {
    for (int64_t i = 0; i < W; ++i) {
      float* value = b.values + (t + i) * stride;
      float* key = staging + i * stride;
      if (t + i < count) {
        const int64_t at = rows[t + i] * p.num_kv_heads + task.head;
        widen_kv(p.kv_dtype, p.v_pages, p.v_scales, at, p.head_dim, value);
        widen_kv(p.kv_dtype, p.k_pages, p.k_scales, at, p.head_dim, key);
        if (!has_odd_values(value, stride)) continue;
        taken_out |= (uint64_t)1 << (t + i);
        memset(value, 0, (size_t)(stride * 4));
      } else {
        memset(value, 0, (size_t)(stride * 4));
        memset(key, 0, (size_t)(stride * 4));
      }
    }
    for (int64_t d = 0; d < stride; d += W) {
      VF square[W];
      PJ_UNROLL for (int i = 0; i < W; ++i) square[i] = load(staging + i * stride + d);
      transpose(square);
      PJ_UNROLL for (int i = 0; i < W; ++i) store(b.keys + (d + i) * kTileKeys + t, square[i]);
    }
  }
  return taken_out;
}

// Adds the values that were taken out to the row of a query that sees them.
PJ_INLINE void tile_put_back(const Problem& p, uint64_t tokens, const int64_t* rows,
                             int64_t head, int64_t low, int64_t high, const float* weights,
                             float* value, float* out) {
  for (; tokens != 0; tokens &= tokens - 1) {
    const int64_t t = __builtin_ctzll(tokens);
    if (t < low || t >= high) continue;
    const int64_t at = rows[t] * p.num_kv_heads + head;
    widen_kv(p.kv_dtype, p.v_pages, p.v_scales, at, p.head_dim, value);
    for (int64_t d = 0; d < p.head_dim; ++d) out[d] += weights[t] * value[d];
  }
}

// c[row][0 .. Vectors) = init * c + a[row][k] * b[k][...], k < depth, in registers.
template <int Rows, int Vectors>
PJ_INLINE void outer_product(const float* a, int64_t a_stride, const float* b,
                             int64_t b_stride, int64_t depth, const float* shrink, float* c,
                             int64_t c_stride) {
  VF acc[Rows][Vectors];
  PJ_UNROLL for (int r = 0; r < Rows; ++r) {
    PJ_UNROLL for (int v = 0; v < Vectors; ++v) {
      acc[r][v] = shrink == nullptr ? zero() : load(c + r * c_stride + v * W) * splat(shrink[r]);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    VF row[Vectors];
    PJ_UNROLL for (int v = 0; v < Vectors; ++v) row[v] = load(b + k * b_stride + v * W);
    PJ_UNROLL for (int r = 0; r < Rows; ++r) {
      const VF x = splat(a[r * a_stride + k]);
      PJ_UNROLL for (int v = 0; v < Vectors; ++v) acc[r][v] += x * row[v];
    }
  }
  PJ_UNROLL for (int r = 0; r < Rows; ++r) {
    PJ_UNROLL for (int v = 0; v < Vectors; ++v) store(c + r * c_stride + v * W, acc[r][v]);
  }
}

static void tile_scores(const float* q, int64_t stride, const float* keys, int64_t vectors,
                        float* weights) {
  for (int64_t v = 0; v < vectors; v += kTileVectors) {
    outer_product<kTileRows, kTileVectors>(q, stride, keys + v * W, kTileKeys, stride, nullptr,
                                           weights + v * W, kTileKeys);
  }
}

static void tile_values(const float* weights, int64_t keys, const float* values, int64_t stride,
                        const float* shrink, float* out) {
  int64_t d = 0;
  for (; d + kTileVectors * W <= stride; d += kTileVectors * W) {
    outer_product<kTileRows, kTileVectors>(weights, kTileKeys, values + d, stride, keys, shrink,
                                           out + d, stride);
  }
  for (; d < stride; d += W) {
    outer_product<kTileRows, 1>(weights, kTileKeys, values + d, stride, keys, shrink, out + d,
                                stride);
  }
}

// Scores of one row become weights; returns the factor for what was summed before.
PJ_INLINE float tile_weights(const Problem& p, float* scores, int64_t vectors, int64_t low,
                             int64_t high, float* max, float* sum) {
  VF top = splat(kLowest);
  const bool whole = low <= 0 && high >= vectors * W;
  for (int64_t v = 0; v < vectors; ++v) {
    VF s = load(scores + v * W);
    if (p.soft_cap > 0) s = splat(p.soft_cap) * tanh_all(s);
    if (!whole) {
      const VI at = iota() + (int32_t)(v * W);
      s = (at >= VI{} + (int32_t)low) & (at < VI{} + (int32_t)high) ? s : splat(kLowest);
    }
    store(scores + v * W, s);
    top = vmax(s, top);
  }
  const float new_max = vmax(splat(*max), max_modulo<1>(top))[0];
  const float base = new_max > kLowest ? new_max : 0.0f;
  VF total = zero();
  for (int64_t v = 0; v < vectors; ++v) {
    const VF weight = exp_negative(load(scores + v * W) - splat(base));
    store(scores + v * W, weight);
    total += weight;
  }
  const float shrink = decay_one(*max, base);
  *max = new_max;
  *sum = *sum * shrink + sum_modulo<1>(total)[0];
  return shrink;
}

PJ_INLINE int64_t clip(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

void tile(const Problem& p, const TileTask& task, void* scratch) {
  const int64_t dim = p.head_dim, stride = round_up(dim, W), group = p.group();
  const int64_t live = task.num_rows * group, padded = tile_padded_rows(p, task.num_rows);
  const TileBuffers b = tile_buffers(p, padded, scratch);
  float* staging = b.sum + round_up(padded, 16);
  memset(b.out, 0, (size_t)(padded * stride * 4));
  memset(b.q + live * stride, 0, (size_t)((padded - live) * stride * 4));
  for (int64_t r = 0; r < padded; ++r) {
    b.max[r] = kLowest;
    b.sum[r] = 0.0f;
    if (r >= live) continue;
    load_query(p, task.rows[r / group].token, task.head * group + r % group, query_factor(p),
               b.q + r * stride);
  }
  for (int64_t t = task.begin; t < task.end; t += kTileKeys) {
    const int64_t count = task.end - t < kTileKeys ? task.end - t : kTileKeys;
    int64_t places[kTileKeys];
    find_rows(task.pages, p.page_size, t, count, places);
    const uint64_t taken_out = tile_pack(p, task, places, count, staging, b);
    for (int64_t r = 0; r < padded; r += kTileRows) {
      int64_t low[kTileRows], high[kTileRows], last = 0;
      bool seen = false;
      for (int64_t i = 0; i < kTileRows; ++i) {
        const bool real = r + i < live;
        const TileRow& row = task.rows[real ? (r + i) / group : 0];
        low[i] = real ? clip(row.low - t, 0, count) : 0;
        high[i] = real ? clip(row.high - t, 0, count) : 0;
        seen = seen || high[i] > low[i];
        last = high[i] > last ? high[i] : last;
      }
      if (!seen) continue;
      const int64_t vectors = round_up(round_up(last, W) / W, kTileVectors);
      float shrink[kTileRows];
      tile_scores(b.q + r * stride, stride, b.keys, vectors, b.weights);
      for (int64_t i = 0; i < kTileRows; ++i) {
        shrink[i] = tile_weights(p, b.weights + i * kTileKeys, vectors, low[i], high[i],
                                 b.max + r + i, b.sum + r + i);
      }
      tile_values(b.weights, last, b.values, stride, shrink, b.out + r * stride);
      for (int64_t i = 0; taken_out != 0 && i < kTileRows; ++i) {
        tile_put_back(p, taken_out, places, task.head, low[i], high[i],
                      b.weights + i * kTileKeys, staging, b.out + (r + i) * stride);
      }
    }
  }
  for (int64_t r = 0; r < live; ++r) {
    const TileRow& row = task.rows[r / group];
    const int64_t head = task.head * group + r % group;
    if (task.finish) {
      finish_head(p, row.token, head, b.out + r * stride, b.max[r], b.sum[r]);
    } else {
      memcpy(row.part.out + head * dim, b.out + r * stride, (size_t)(dim * 4));
      row.part.max[head] = b.max[r];
      row.part.sum[head] = b.sum[r];
    }
  }
}

}  // namespace
