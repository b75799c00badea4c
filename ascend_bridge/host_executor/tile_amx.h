// Several queries against the same keys, for one kv head, by AMX: what tile_kernel.h
// does, with the same results to float32 rounding. Included by kernels.cc only.
//
// Scores are held with a query per lane: the maximum, the sum and the mask of a softmax
// are then whole vectors, and nothing is added up across lanes.
//
//     keys (128)     queries (32)          values        weights           out
//     [t0: dims]  x  [dims, in pairs]  ->  [d0: t's]  x  [t's, in pairs] -> [d0: queries]
//     [t1: dims]                           [d1: t's]                        [d1: queries]
//
// Keys and values are split into bfloat16 parts (amx.h) once for all query rows. The
// softmax of one pair of tiles runs between the products of the pairs around it, evenly:
// the processor has free vector slots there, but a limited number at a time.
//
//     products    scores 0 | scores 1   | scores 2  values 0 | scores 3  values 1 | ...
//     vectors              | softmax 0  | softmax 1          | softmax 2          | ...
#pragma once

#include "ahead.h"
#include "tile_amx_pack.h"

namespace {

// Scores are in units of log 2, so that a weight is a power of 2.
constexpr float kLog2E = 1.44269504f, kLog2 = 0.693147181f;

// What each of the packed tokens multiplies its scores and its weights by.
struct AmxFactors {
  float keys[kTileKeys];
  float values[kTileKeys];
};

// One or two tiles of query rows against the packed keys.
struct AmxUnit {
  int64_t tile, columns;  // the first tile, and their number
  int64_t begin, end;     // the keys that count, multiples of 32
  bool whole;             // every query sees all of them
  VI low[2], high[2];     // what each sees
  VF top[2];              // the largest score; later what is taken off the scores
  VF sum[2];
  VF shrink[2];           // the factor for what was summed before
  bool raw;               // the scores are still to be multiplied by their factors
  float* scores;          // [columns][kTileKeys][16]
  char* weights;
};

// 2^x for x <= 0 to 1 ulp; exactly 0 below -126, -inf included; NaN stays NaN. Sixteenths
// of the exponent come from a table, the rest from a series.
PJ_INLINE VF exp2_negative(VF x) {
  const VF table = {1.0f,        1.04427378f, 1.09050773f, 1.13878863f,
                    1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
                    1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f,
                    1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
  const VF shifter = splat(786432.0f);  // 1.5 * 2^19: rounds to sixteenths
  const VF shifted = x + shifter;
  const VF n = shifted - shifter, r = x - n;
  VF p = splat(5.5504109e-2f) * r + splat(2.4022651e-1f);
  p = p * r + splat(6.9314718e-1f);
  const VF whole = (VF)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);
  p = (whole * r) * p + whole;
  const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);
  return (VF)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
}

// Finds what of the keys [begin, begin + count) the queries see: false if nothing.
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

// The largest of 16 rows of scores; where they are masked or capped, they are put down
// so, times their factors.
PJ_INLINE void amx_mask(const Problem& p, const AmxFactors& factors, uint64_t piece,
                        AmxUnit* u) {
  const uint64_t each = (uint64_t)(u->end - u->begin) / W, n = piece >= each;
  const int64_t first = u->begin + (piece - n * each) * W;
  float* at = u->scores + (n * kTileKeys + first) * W;
  const float* factor = factors.keys + first;
  VF tops[4] = {u->top[n], splat(kLowest), splat(kLowest), splat(kLowest)};
  if (!u->raw) {
    for (int i = 0; i < W; ++i) {
      VF s = load(at + i * W) * splat(factor[i]);
      if (p.soft_cap > 0) s = splat(p.soft_cap * kLog2E) * tanh_all(s);
      const VI here = VI{} + (int32_t)(first + i);
      s = (here >= u->low[n]) & (here < u->high[n]) ? s : splat(kLowest);
      store(at + i * W, s);
      tops[0] = vmax(s, tops[0]);
    }
  } else {
    PJ_UNROLL for (int i = 0; i < W; ++i) {
      tops[i % 4] = vmax(load(at + i * W) * splat(factor[i]), tops[i % 4]);
    }
  }
  u->top[n] = vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3]));
}

// The new maximum, and by how much what was summed so far shrinks to it.
PJ_INLINE void amx_settle(const AmxBuffers& b, AmxUnit* u) {
  for (int64_t n = 0; n < u->columns; ++n) {
    VF* max = b.max + u->tile + n;
    const VF top = vmax(*max, u->top[n]);
    const VF base = top > splat(kLowest) ? top : zero();
    u->shrink[n] = exp2_negative(*max - base);
    *max = top;
    u->top[n] = base;
    u->sum[n] = b.sum[u->tile + n] * u->shrink[n];
  }
}

// The weights of a row of scores.
PJ_INLINE VF amx_weights(const AmxFactors& factors, const AmxUnit& u, int64_t n, int64_t t) {
  const VF score = load(u.scores + (n * kTileKeys + t) * W);
  return exp2_negative(score * splat(u.raw ? factors.keys[t] : 1.0f) - u.top[n]);
}

// Two rows of scores become weights.
PJ_INLINE void amx_weigh(const Problem& p, const AmxFactors& factors, uint64_t piece,
                         AmxUnit* u) {
  const uint64_t each = (uint64_t)(u->end - u->begin) / 2;
  const uint64_t n = piece >= each, i = piece - n * each;
  const uint64_t t = u->begin + i / W * kTileDepth + i % W;
  VF x = amx_weights(factors, *u, n, t), y = amx_weights(factors, *u, n, t + W);
  u->sum[n] += x + y;
  if (p.v_scales != nullptr) {  // a scale may be NaN: not for those who do not see it
    x = x != zero() ? x * splat(factors.values[t]) : x;
    y = y != zero() ? y * splat(factors.values[t + W]) : y;
  }
  const uint64_t step = n * (kTileKeys / kTileDepth) + t / kTileDepth;
  split_pair<kFloatParts>(x, y, u->weights + step * kFloatParts * kTileBytes + i % W * 64);
}

// Adds the values that were taken out, for the queries that see them.
static void amx_put_back(const Problem& p, const AmxFactors& factors, const uint64_t* taken_out,
                         const int64_t* rows, int64_t head, const AmxUnit& u, int64_t n,
                         float* row, float* out) {
  for (int64_t t = u.begin; t < u.end; ++t) {
    if ((taken_out[t / kWord] >> t % kWord & 1) == 0) continue;
    const VI at = VI{} + (int32_t)t;
    const VI seen = (at >= u.low[n]) & (at < u.high[n]);
    const VF weight = amx_weights(factors, u, n, t) * splat(factors.values[t]);
    widen_kv(p.kv_dtype, p.v_pages, nullptr, rows[t] * p.num_kv_heads + head, p.head_dim, row);
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const VF before = load(out + d * W);
      store(out + d * W, seen ? before + weight * splat(row[d]) : before);
    }
  }
}

// The softmax of a unit in steps that take about as long: first the maximum, then the
// weights.
PJ_INLINE int64_t amx_steps(const AmxUnit& u) {
  const int64_t rows = u.columns * (u.end - u.begin);
  return rows / W + 1 + rows / 2;
}
PJ_INLINE void amx_step(const Problem& p, const AmxFactors& factors, const AmxBuffers& b,
                        int64_t step, AmxUnit* u) {
  const int64_t masks = u->columns * (u->end - u->begin) / W;
  if (step > masks) {
    amx_weigh(p, factors, step - masks - 1, u);
  } else if (step < masks) {
    amx_mask(p, factors, step, u);
  } else {
    amx_settle(b, u);
  }
}

// Spreads steps of something evenly over calls.
struct Pace {
  int64_t steps, calls, credit = 0, done = 0;

  template <class Step>
  PJ_INLINE void call(Pace* pace, Step step) {
    pace->credit += pace->steps;
    for (; pace->credit >= pace->calls; pace->credit -= pace->calls) step(pace->done++);
  }
};

// How often the two functions below call between() for some keys.
template <int QParts, int KvParts>
PJ_INLINE int64_t amx_score_calls(const AmxSizes& s, int64_t keys) {
  return keys / kTileDepth * s.steps * amx_products(KvParts, QParts);
}
template <int KvParts>
PJ_INLINE int64_t amx_value_calls(const AmxSizes& s, int64_t keys) {
  return s.steps * (keys / kTileDepth) * amx_products(KvParts, kFloatParts);
}

template <int QParts, int KvParts, class Between>
PJ_INLINE void amx_scores(const AmxSizes& s, const AmxBuffers& b, const AmxUnit& u,
                          Between between) {
  const int64_t key_tile = s.steps * KvParts * kTileBytes;
  const int64_t q_tile = s.steps * QParts * kTileBytes;
  const AmxFactor queries = {b.q + u.tile * q_tile, q_tile};
  for (int64_t t = u.begin; t < u.end; t += kTileDepth) {
    const AmxFactor keys = {b.keys + t / kTileSide * key_tile, key_tile};
    char* scores = (char*)(u.scores + t * W);
    if (u.columns == 2) {
      amx_multiply<KvParts, QParts, 2>(keys, queries, s.steps, false, scores, kTileBytes,
                                       kTileKeys * 64, between);
    } else {
      amx_multiply<KvParts, QParts, 1>(keys, queries, s.steps, false, scores, kTileBytes, 0,
                                       between);
    }
  }
}

template <int KvParts, class Between>
PJ_INLINE void amx_values(const AmxSizes& s, const AmxBuffers& b, const AmxUnit& u,
                          Between between) {
  constexpr int64_t kSteps = kTileKeys / kTileDepth;
  constexpr int64_t kValueTile = kSteps * KvParts * kTileBytes;
  constexpr int64_t kWeightTile = kSteps * kFloatParts * kTileBytes;
  const int64_t skip = u.begin / kTileDepth, steps = (u.end - u.begin) / kTileDepth;
  const AmxFactor weights = {u.weights + skip * kFloatParts * kTileBytes, kWeightTile};
  const char* from = b.values + skip * KvParts * kTileBytes;
  float* out = b.out + u.tile * s.dims * W;
  for (int64_t n = 0; n < u.columns; ++n, out += s.dims * W) {
    const __m512 shrink = (__m512)u.shrink[n];
    if (_mm512_cmp_ps_mask(shrink, (__m512)splat(1.0f), _CMP_NEQ_UQ) == 0) continue;
    for (int64_t d = 0; d < s.dims; ++d) store(out + d * W, load(out + d * W) * u.shrink[n]);
  }
  char* to = (char*)(b.out + u.tile * s.dims * W);
  for (int64_t d = 0; d < s.dims; d += 2 * kTileSide) {
    const AmxFactor values = {from + d / kTileSide * kValueTile, kValueTile};
    if (u.columns == 2) {
      amx_multiply<KvParts, kFloatParts, 2>(values, weights, steps, true, to + d * 64,
                                            kTileBytes, s.dims * 64, between);
    } else {
      amx_multiply<KvParts, kFloatParts, 1>(values, weights, steps, true, to + d * 64,
                                            kTileBytes, 0, between);
    }
  }
}

// The packed keys for all query rows; meanwhile the next ones are prefetched.
template <int QParts, int KvParts>
PJ_INLINE void amx_block(const Problem& p, const TileTask& task, const AmxSizes& s,
                         const AmxBuffers& b, const AmxFactors& factors, const int64_t* rows,
                         int64_t begin, int64_t count, const uint64_t* taken_out,
                         Ahead ahead[2]) {
  uint64_t odd = 0;
  for (int64_t t = 0; t < count; t += kWord) odd |= taken_out[t / kWord];
  const int64_t calls = (s.tiles + 1) / 2 * (amx_score_calls<QParts, KvParts>(s, kTileKeys) +
                                             amx_value_calls<KvParts>(s, kTileKeys));
  const int64_t lines = kTileKeys * ((ahead[0].bytes + 63) / 64);
  const int64_t twos = (lines + 2 * calls - 1) / (2 * calls);
  AmxUnit units[3];
  int64_t tile = 0;
  const auto take = [&](AmxUnit* unit) {  // the next unit that sees something
    for (; tile < s.tiles; tile += 2) {
      unit->tile = tile;
      unit->columns = s.tiles - tile < 2 ? 1 : 2;
      if (!amx_sight(b, begin, count, unit)) continue;
      unit->raw = unit->whole && !(p.soft_cap > 0);
      tile += 2;
      return true;
    }
    return false;
  };
  bool scored = false, weighed = false;  // whether there is a unit before, and before it
  for (int64_t turn = 0;; ++turn) {
    AmxUnit& now = units[turn % 3];
    AmxUnit& last = units[(turn + 2) % 3];
    AmxUnit& old = units[(turn + 1) % 3];
    now.scores = b.scores + turn % 3 * 2 * kTileKeys * W;
    now.weights = b.weights + turn % 2 * 2 * kTileKeys / kTileDepth * kFloatParts * kTileBytes;
    const bool more = take(&now);
    if (!more && !scored && !weighed) return;
    const int64_t scores = more ? amx_score_calls<QParts, KvParts>(s, now.end - now.begin) : 0;
    const int64_t values = weighed ? amx_value_calls<KvParts>(s, old.end - old.begin) : 0;
    Pace pace = {scored ? amx_steps(last) : 0, scores + values};
    const auto step = [&](int64_t i) { amx_step(p, factors, b, i, &last); };
    const auto between = [&] {
      for (int64_t i = 0; i < twos; ++i) {
        Ahead::ask<2>(&ahead[0]);
        Ahead::ask<2>(&ahead[1]);
      }
      Pace::call(&pace, step);
    };
    if (more) amx_scores<QParts, KvParts>(s, b, now, between);
    if (weighed) {
      amx_values<KvParts>(s, b, old, between);
      for (int64_t n = 0; odd != 0 && n < old.columns; ++n) {
        amx_put_back(p, factors, taken_out, rows, task.head, old, n, b.staging,
                     b.out + (old.tile + n) * s.dims * W);
      }
    }
    for (; pace.done < pace.steps; ++pace.done) step(pace.done);
    for (int64_t n = 0; scored && n < last.columns; ++n) b.sum[last.tile + n] = last.sum[n];
    weighed = scored;
    scored = more;
  }
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
    const float max = b.max[tile][i] * kLog2;
    if (task.finish) {
      finish_head(p, row.token, head, total, max, b.sum[tile][i]);
    } else {
      memcpy(row.part.out + head * dim, total, (size_t)(dim * 4));
      row.part.max[head] = max;
      row.part.sum[head] = b.sum[tile][i];
    }
  }
}

template <int QParts, int KvParts>
static void amx_tile(const Problem& p, const TileTask& task, const AmxSizes& s, void* scratch) {
  const AmxBuffers b = amx_buffers(s, scratch);
  for (int64_t i = 0; i < s.tiles; ++i) {
    amx_pack_queries(p, task, s, i, b);
    b.max[i] = splat(kLowest);
    b.sum[i] = zero();
  }
  memset(b.out, 0, (size_t)(s.tiles * s.dims * 64));
  memset(b.staging, 0, (size_t)(kTileDepth * s.dims * 4));
  const float factor = query_factor(p) * (p.soft_cap > 0 ? 1.0f : kLog2E);
  const int64_t head_bytes = p.head_dim * dtype_bytes(p.kv_dtype);
  const int64_t row_bytes = p.num_kv_heads * head_bytes, offset = task.head * head_bytes;
  int64_t rows[2][kTileKeys];
  uint64_t taken_out[kTileKeys / kWord];
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
    amx_pack<KvParts>(p, s, task.head, rows[turn], count, b, taken_out);
    const auto lines = [&](const void* pages) {
      return Ahead{(const char*)pages, rows[turn ^ 1], next_count, row_bytes,
                   offset,             head_bytes,     nullptr,    nullptr};
    };
    Ahead ahead[2] = {lines(p.k_pages), lines(p.v_pages)};
    amx_block<QParts, KvParts>(p, task, s, b, factors, rows[turn], t, count, taken_out, ahead);
    t = next;
    count = next_count;
  }
  amx_end();
  for (int64_t i = 0; i < s.tiles; ++i) amx_finish(p, task, s, b, i);
}

void tile(const Problem& p, const TileTask& task, void* scratch) {
  const AmxSizes s = amx_sizes(p, task.num_rows);
  if (s.kv_parts == 3) return amx_tile<3, 3>(p, task, s, scratch);
  if (s.kv_parts == 1 && s.q_parts == 1) return amx_tile<1, 1>(p, task, s, scratch);
  if (s.kv_parts == 1) return amx_tile<3, 1>(p, task, s, scratch);
  if (s.q_parts == 2) return amx_tile<2, 2>(p, task, s, scratch);
  amx_tile<3, 2>(p, task, s, scratch);
}

}  // namespace
