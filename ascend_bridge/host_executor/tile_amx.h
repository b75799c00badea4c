// Several queries against the same keys, for one kv head, by AMX: what tile_kernel.h
// does, with the same results to float32 rounding. Included by kernels.cc only.
//
// Scores are held with a query per lane: the maximum, the sum and the mask of a softmax
// are then whole vectors, and nothing is added up across lanes.
//
//     keys (64)      queries (32)          values        weights           out
//     [t0: dims]  x  [dims, in pairs]  ->  [d0: t's]  x  [t's, in pairs] -> [d0: queries]
//     [t1: dims]                           [d1: t's]                        [d1: queries]
//
// Keys and values are split into bfloat16 parts (amx.h) once for all query rows. The
// softmax of one pair of tiles runs between the products of the next:
//
//     products    scores 0 | scores 1  values 0 | scores 2  values 1 | ... values n
//     vectors              | weights 0  mask 1  | weights 1  mask 2  | ...
#pragma once

#include "ahead.h"
#include "tile_amx_pack.h"

namespace {

// What each of a block's tokens multiplies its scores and its weights by.
struct AmxFactors {
  float keys[kTileKeys];
  float values[kTileKeys];
};

// One or two tiles of query rows against one block of keys.
struct AmxUnit {
  int64_t tile, columns;  // the first tile, and their number
  int64_t begin, end;     // the keys that count, multiples of 32
  bool whole;             // every query sees all of them
  VI low[2], high[2];     // what each sees
  VF top[2];              // the largest score; later what is taken off the scores
  VF sum[2];
  float* scores;  // [columns][kTileKeys][16]
};

// Finds what of the block [begin, begin + count) the queries see: false if nothing.
PJ_INLINE bool amx_sight(const AmxBuffers& b, int64_t begin, int64_t count, AmxUnit* unit) {
  const VI none = {}, all = VI{} + (int32_t)count;
  VI first = all, last = none, least = none, most = all;
  for (int64_t n = 0; n < unit->columns; ++n) {
    VI low, high;
    memcpy(&low, b.low + (unit->tile + n) * W, sizeof low);
    memcpy(&high, b.high + (unit->tile + n) * W, sizeof high);
    low -= VI{} + (int32_t)begin;
    high -= VI{} + (int32_t)begin;
    unit->low[n] = low = low > none ? low : none;
    unit->high[n] = high = high < all ? high : all;
    unit->top[n] = splat(kLowest);
    first = (low < high) & (low < first) ? low : first;
    last = high > last ? high : last;
    least = low > least ? low : least;
    most = high < most ? high : most;
  }
  const int64_t from = _mm512_reduce_min_epi32((__m512i)first);
  const int64_t to = _mm512_reduce_max_epi32((__m512i)last);
  if (from >= to) return false;
  unit->begin = from / kTileDepth * kTileDepth;
  unit->end = round_up(to, kTileDepth);
  unit->whole = _mm512_reduce_max_epi32((__m512i)least) <= unit->begin &&
                _mm512_reduce_min_epi32((__m512i)most) >= unit->end;
  return true;
}

// Four rows of scores, scaled and masked; piece < amx_mask_pieces.
PJ_INLINE int64_t amx_mask_pieces(const AmxUnit& u) {
  return u.columns * (u.end - u.begin) / 4;
}
PJ_INLINE void amx_mask(const Problem& p, const AmxFactors& factors, uint64_t piece,
                        AmxUnit* u) {
  const uint64_t each = (uint64_t)(u->end - u->begin) / 4, n = piece >= each;
  const int64_t first = u->begin + (piece - n * each) * 4;
  VF top = u->top[n];
  PJ_UNROLL for (int64_t t = first; t < first + 4; ++t) {
    float* at = u->scores + (n * kTileKeys + t) * W;
    VF s = load(at) * splat(factors.keys[t]);
    if (p.soft_cap > 0) s = splat(p.soft_cap) * tanh_all(s);
    if (!u->whole) {
      const VI here = VI{} + (int32_t)t;
      s = (here >= u->low[n]) & (here < u->high[n]) ? s : splat(kLowest);
    }
    store(at, s);
    top = vmax(s, top);
  }
  u->top[n] = top;
}

// The new maximum; what was summed so far shrinks to it.
PJ_INLINE void amx_settle(const AmxSizes& s, const AmxBuffers& b, AmxUnit* u) {
  for (int64_t n = 0; n < u->columns; ++n) {
    VF* max = b.max + u->tile + n;
    const VF top = vmax(*max, u->top[n]);
    const VF base = top > splat(kLowest) ? top : zero();
    const VF shrink = exp_negative(*max - base);
    *max = top;
    u->top[n] = base;
    u->sum[n] = b.sum[u->tile + n] * shrink;
    if (_mm512_cmp_ps_mask((__m512)shrink, (__m512)splat(1.0f), _CMP_NEQ_UQ) == 0) continue;
    float* out = b.out + (u->tile + n) * s.dims * W;
    for (int64_t d = 0; d < s.dims; ++d) store(out + d * W, load(out + d * W) * shrink);
  }
}

// Two rows of scores become weights; piece < amx_weigh_pieces.
PJ_INLINE int64_t amx_weigh_pieces(const AmxUnit& u) {
  return u.columns * (u.end - u.begin) / 2;
}
PJ_INLINE void amx_weigh(const Problem& p, const AmxFactors& factors, char* weights,
                         uint64_t piece, AmxUnit* u) {
  const uint64_t each = (uint64_t)(u->end - u->begin) / 2;
  const uint64_t n = piece >= each, i = piece - n * each;
  const uint64_t t = u->begin + i / W * kTileDepth + i % W;
  const float* at = u->scores + (n * kTileKeys + t) * W;
  VF x = exp_negative(load(at) - u->top[n]);
  VF y = exp_negative(load(at + W * W) - u->top[n]);
  u->sum[n] += x + y;
  if (p.v_scales != nullptr) {
    x *= splat(factors.values[t]);
    y *= splat(factors.values[t + W]);
  }
  const uint64_t step = n * (kTileKeys / kTileDepth) + t / kTileDepth;
  split_pair<kFloatParts>(x, y, weights + step * kFloatParts * kTileBytes + i % W * 64);
}

// Adds the values that were taken out, for the queries that see them.
static void amx_put_back(const Problem& p, const AmxFactors& factors, uint64_t tokens,
                         const int64_t* rows, int64_t head, const AmxUnit& u, int64_t n,
                         float* row, float* out) {
  for (; tokens != 0; tokens &= tokens - 1) {
    const int64_t t = __builtin_ctzll(tokens);
    const VI at = VI{} + (int32_t)t;
    const VI seen = (at >= u.low[n]) & (at < u.high[n]);
    const VF score = load(u.scores + (n * kTileKeys + t) * W);
    const VF weight = exp_negative(score - u.top[n]) * splat(factors.values[t]);
    widen_kv(p.kv_dtype, p.v_pages, nullptr, rows[t] * p.num_kv_heads + head, p.head_dim, row);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const VF before = load(out + d * W);
      store(out + d * W, seen ? before + weight * splat(row[d]) : before);
    }
  }
}

// Spreads `pieces` of something evenly over `calls`.
struct Pace {
  int64_t pieces, calls, credit = 0, done = 0;

  template <class Piece>
  PJ_INLINE void call(Pace* pace, Piece piece) {
    pace->credit += pace->pieces;
    for (; pace->credit >= pace->calls; pace->credit -= pace->calls) piece(pace->done++);
  }
};

// How often the two functions below call between() for some keys.
PJ_INLINE int64_t amx_score_calls(const AmxSizes& s, int64_t keys) {
  return keys / kTileDepth * amx_products(s.steps, s.kv_parts, s.q_parts);
}
PJ_INLINE int64_t amx_value_calls(const AmxSizes& s, int64_t keys) {
  return s.steps * amx_products(keys / kTileDepth, s.kv_parts, kFloatParts);
}

template <class Between>
PJ_INLINE void amx_scores(const AmxSizes& s, const AmxBuffers& b, const AmxUnit& u,
                          Between between) {
  const int64_t key_tile = s.steps * s.kv_parts * kTileBytes;
  const int64_t q_tile = s.steps * s.q_parts * kTileBytes;
  const AmxFactor queries = {b.q + u.tile * q_tile, q_tile, s.q_parts};
  for (int64_t t = u.begin; t < u.end; t += kTileDepth) {
    const AmxFactor keys = {b.keys + t / kTileSide * key_tile, key_tile, s.kv_parts};
    char* scores = (char*)(u.scores + t * W);
    if (u.columns == 2) {
      amx_multiply<2>(keys, queries, s.steps, false, scores, kTileBytes, kTileKeys * 64,
                      between);
    } else {
      amx_multiply<1>(keys, queries, s.steps, false, scores, kTileBytes, 0, between);
    }
  }
}

template <class Between>
PJ_INLINE void amx_values(const AmxSizes& s, const AmxBuffers& b, const AmxUnit& u,
                          Between between) {
  constexpr int64_t kSteps = kTileKeys / kTileDepth;
  const int64_t value_tile = kSteps * s.kv_parts * kTileBytes;
  const int64_t weight_tile = kSteps * kFloatParts * kTileBytes;
  const int64_t skip = u.begin / kTileDepth, steps = (u.end - u.begin) / kTileDepth;
  const AmxFactor weights = {b.weights + skip * kFloatParts * kTileBytes, weight_tile,
                             kFloatParts};
  char* out = (char*)(b.out + u.tile * s.dims * W);
  for (int64_t d = 0; d < s.dims; d += 2 * kTileSide) {
    const char* from = b.values + d / kTileSide * value_tile + skip * s.kv_parts * kTileBytes;
    const AmxFactor values = {from, value_tile, s.kv_parts};
    if (u.columns == 2) {
      amx_multiply<2>(values, weights, steps, true, out + d * 64, kTileBytes, s.dims * 64,
                      between);
    } else {
      amx_multiply<1>(values, weights, steps, true, out + d * 64, kTileBytes, 0, between);
    }
  }
}

// One block of keys, packed, for all query rows; meanwhile the next block is prefetched.
static void amx_block(const Problem& p, const TileTask& task, const AmxSizes& s,
                      const AmxBuffers& b, const AmxFactors& factors, const int64_t* rows,
                      int64_t begin, int64_t count, uint64_t taken_out, Ahead ahead[2]) {
  AmxUnit units[2];
  AmxUnit* last = nullptr;  // the unit whose scores are masked and settled
  const int64_t calls =
      amx_score_calls(s, kTileKeys) + (s.tiles + 1) / 2 * amx_value_calls(s, kTileKeys);
  const int64_t lines = kTileKeys * ((ahead[0].bytes + 63) / 64);
  const int64_t twos = (lines + 2 * calls - 1) / (2 * calls);
  const auto fetch = [&] {
    for (int64_t i = 0; i < twos; ++i) {
      Ahead::ask<2>(&ahead[0]);
      Ahead::ask<2>(&ahead[1]);
    }
  };
  const auto weigh = [&](int64_t piece) { amx_weigh(p, factors, b.weights, piece, last); };
  const auto close = [&] {
    for (int64_t n = 0; n < last->columns; ++n) b.sum[last->tile + n] = last->sum[n];
    for (int64_t n = 0; taken_out != 0 && n < last->columns; ++n) {
      amx_put_back(p, factors, taken_out, rows, task.head, *last, n, b.staging,
                   b.out + (last->tile + n) * s.dims * W);
    }
  };
  int turn = 0;
  for (int64_t i = 0; i < s.tiles; i += 2) {
    AmxUnit& unit = units[turn];
    unit.tile = i;
    unit.columns = s.tiles - i < 2 ? 1 : 2;
    unit.scores = b.scores + turn * 2 * kTileKeys * W;
    if (!amx_sight(b, begin, count, &unit)) continue;
    const auto mask = [&](int64_t piece) { amx_mask(p, factors, piece, &unit); };
    if (last == nullptr) {
      amx_scores(s, b, unit, fetch);
      for (int64_t j = 0; j < amx_mask_pieces(unit); ++j) mask(j);
    } else {
      Pace weighing = {amx_weigh_pieces(*last), amx_score_calls(s, unit.end - unit.begin)};
      amx_scores(s, b, unit, [&] { Pace::call(&weighing, weigh); });
      Pace masking = {amx_mask_pieces(unit), amx_value_calls(s, last->end - last->begin)};
      amx_values(s, b, *last, [&] {
        fetch();
        Pace::call(&masking, mask);
      });
      close();
    }
    amx_settle(s, b, &unit);
    last = &unit;
    turn ^= 1;
  }
  if (last == nullptr) return;
  for (int64_t j = 0; j < amx_weigh_pieces(*last); ++j) weigh(j);
  amx_values(s, b, *last, fetch);
  close();
}

// The results of 16 query rows, a row each.
PJ_INLINE void amx_finish(const Problem& p, const TileTask& task, const AmxSizes& s,
                          const AmxBuffers& b, int64_t tile) {
  const int64_t group = p.group(), live = task.num_rows * group, dim = p.head_dim;
  const float* out = b.out + tile * s.dims * W;
  for (int64_t d = 0; d < s.dims; d += W) {
    VF square[W];
    PJ_UNROLL for (int i = 0; i < W; ++i) square[i] = load(out + (d + i) * W);
    transpose(square);
    PJ_UNROLL for (int i = 0; i < W; ++i) store(b.staging + i * s.dims + d, square[i]);
  }
  for (int64_t i = 0; i < W && tile * W + i < live; ++i) {
    const int64_t r = tile * W + i, head = task.head * group + r % group;
    const TileRow& row = task.rows[r / group];
    const float* total = b.staging + i * s.dims;
    if (task.finish) {
      finish_head(p, row.token, head, total, b.max[tile][i], b.sum[tile][i]);
    } else {
      memcpy(row.part.out + head * dim, total, (size_t)(dim * 4));
      row.part.max[head] = b.max[tile][i];
      row.part.sum[head] = b.sum[tile][i];
    }
  }
}

void tile(const Problem& p, const TileTask& task, void* scratch) {
  const AmxSizes s = amx_sizes(p, task.num_rows);
  const AmxBuffers b = amx_buffers(s, scratch);
  for (int64_t i = 0; i < s.tiles; ++i) {
    amx_pack_queries(p, task, s, i, b);
    b.max[i] = splat(kLowest);
    b.sum[i] = zero();
  }
  memset(b.out, 0, (size_t)(s.tiles * s.dims * 64));
  memset(b.staging, 0, (size_t)(kTileDepth * s.dims * 4));
  const float factor = query_factor(p);
  const int64_t head_bytes = p.head_dim * dtype_bytes(p.kv_dtype);
  const int64_t row_bytes = p.num_kv_heads * head_bytes, offset = task.head * head_bytes;
  int64_t rows[2][kTileKeys];
  int64_t count = task.end - task.begin < kTileKeys ? task.end - task.begin : kTileKeys;
  find_rows(task.pages, p.page_size, task.begin, count, rows[0]);
  AmxFactors factors;
  amx_begin();
  int turn = 0;
  for (int64_t t = task.begin; t < task.end; turn ^= 1) {
    const int64_t next = t + count, left = task.end - next;
    const int64_t next_count = left < kTileKeys ? left : kTileKeys;
    find_rows(task.pages, p.page_size, next, next_count, rows[turn ^ 1]);
    for (int64_t i = 0; i < kTileKeys; ++i) {
      const int64_t at = i < count ? rows[turn][i] * p.num_kv_heads + task.head : 0;
      factors.keys[i] = i < count && p.k_scales != nullptr ? factor * p.k_scales[at] : factor;
      factors.values[i] = i < count && p.v_scales != nullptr ? p.v_scales[at] : 1.0f;
    }
    const uint64_t taken_out = amx_pack(p, s, task.head, rows[turn], count, b);
    const auto lines = [&](const void* pages) {
      return Ahead{(const char*)pages, rows[turn ^ 1], next_count, row_bytes,
                   offset,             head_bytes,     nullptr,    nullptr};
    };
    Ahead ahead[2] = {lines(p.k_pages), lines(p.v_pages)};
    amx_block(p, task, s, b, factors, rows[turn], t, count, taken_out, ahead);
    t = next;
    count = next_count;
  }
  amx_end();
  for (int64_t i = 0; i < s.tiles; ++i) amx_finish(p, task, s, b, i);
}

}  // namespace
