// One query against many keys: decode. Included by kernels.cc only.
//
// Works on blocks of tokens. In a block each kv head takes its keys, its softmax and
// its values, for up to 4 query heads at once; meanwhile the next block is prefetched
// in the order in which it lies in memory, so the memory sees one long read although
// a head's rows are K * D elements apart:
//
//     block       token 0:  head 0 | head 1 | ...       scores[token][query head]
//     (K*D rows)  token 1:  head 0 | head 1 | ...   ->  p = exp(score - running max)
//                  ...                              ->  out[query head] += p * value
#pragma once

#include "ahead.h"
#include "softmax.h"

namespace {

#if PJ_LANES == 16
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 8;
#endif
constexpr int64_t kMaxBlock = 64;             // tokens
constexpr int64_t kMinBlock = 16;             // tokens; a multiple of kAccumulators
constexpr int64_t kBlockBytes = 128 * 1024;   // keys and values of a block
constexpr int64_t kGroup = 4;                 // query heads at once

// How a head's row is read in the inner loops: kVectors vectors of W per step. What a
// step yields fixes the order of the elements inside the kernel ("step order").
template <class E, bool Scaled>
struct OneVector {
  static constexpr int kVectors = 1;
  static constexpr int kBytes = E::kBytes;
  static constexpr bool kScaled = Scaled;
  PJ_INLINE void load_step(const char* p, VF* to) { to[0] = E::load_w(p); }
};
using F32Steps = OneVector<F32, false>;
using F16Steps = OneVector<F16, false>;
using I8Steps = OneVector<I8, true>;
using F8Steps = OneVector<F8E4M3, true>;
// bfloat16 in pairs: the even elements are the low halves of 32-bit words, the odd ones
// the high halves; that is one shift or one mask a vector, and no permutation.
struct BF16Steps {
  static constexpr int kVectors = 2;
  static constexpr int kBytes = 2;
  static constexpr bool kScaled = false;
  PJ_INLINE void load_step(const char* p, VF* to) {
    VU pairs;
    memcpy(&pairs, p, sizeof pairs);
    to[0] = (VF)(pairs << 16);
    to[1] = (VF)(pairs & 0xffff0000u);
  }
};

struct HeadState {
  VF max;  // running maximum; lane i belongs to query head i % heads of the chunk
  VF sum;  // per lane; added up at the end
};

struct Block {
  const char* const* keys;    // kMaxBlock row pointers; past `count` the last row
  const char* const* values;  // likewise
  int64_t offset;             // bytes from a row pointer to the kv head
  int64_t count;              // tokens, >= 1
  const float* key_scales;    // kMaxBlock + W floats, or null
  const float* value_scales;  // likewise
  Ahead* next_keys;
  Ahead* next_values;
};

constexpr int padded_heads(int heads) { return heads == 3 ? 4 : heads; }

// scores[token * padded_heads + head] for all tokens, in groups that fill registers.
template <class E, int Heads>
PJ_INLINE void span_scores(const Block& block, const float* q, int64_t dim, int64_t stride,
                           float* scores) {
  constexpr int kPadded = padded_heads(Heads), kRows = kAccumulators / kPadded;
  constexpr int kStepBytes = E::kVectors * W * E::kBytes;
  Ahead ahead = *block.next_keys;
  for (int64_t t = 0; t < block.count; t += kRows) {
    const char* rows[kRows];
    PJ_UNROLL for (int r = 0; r < kRows; ++r) rows[r] = block.keys[t + r] + block.offset;
    VF acc[kAccumulators];
    PJ_UNROLL for (int i = 0; i < kAccumulators; ++i) acc[i] = zero();
    for (int64_t d = 0; d < dim; d += E::kVectors * W) {
      VF query[E::kVectors][Heads];
      PJ_UNROLL for (int v = 0; v < E::kVectors; ++v) {
        PJ_UNROLL for (int g = 0; g < Heads; ++g) {
          query[v][g] = load(q + g * stride + d + v * W);
        }
      }
      if (kStepBytes >= 64 || d * E::kBytes % 64 == 0) Ahead::ask<kRows>(&ahead);
      PJ_UNROLL for (int r = 0; r < kRows; ++r) {
        VF key[E::kVectors];
        E::load_step(rows[r] + d * E::kBytes, key);
        PJ_UNROLL for (int v = 0; v < E::kVectors; ++v) {
          PJ_UNROLL for (int g = 0; g < Heads; ++g) {
            acc[r * kPadded + g] += key[v] * query[v][g];
          }
        }
      }
    }
    PJ_UNROLL for (int i = 0; i < kAccumulators; i += W) {
      store(scores + t * kPadded + i, sum_each(acc + i));
    }
  }
  *block.next_keys = ahead;
}

// Turns the scores, times the factor, into weights in place, updates the running state,
// and returns the factor by which what was summed so far shrinks.
template <int Heads>
PJ_INLINE VF span_weights(const Problem& p, int64_t count, float factor, float* scores,
                          HeadState* state) {
  constexpr int kPadded = padded_heads(Heads);
  const int64_t live = count * kPadded;
  // Two chains: one would wait for the latency of every maximum and every sum.
  VF tops[2] = {splat(kLowest), splat(kLowest)};
  for (int64_t i = 0; i < live; i += 2 * W) {
    PJ_UNROLL for (int j = 0; j < 2; ++j) {
      VF s = load(scores + i + j * W) * splat(factor);
      if (p.soft_cap > 0) s = splat(p.soft_cap) * tanh_all(s);
      if (i + 2 * W > live) {
        s = iota() < VI{} + (int32_t)(live - i - j * W) ? s : splat(kLowest);
      }
      store(scores + i + j * W, s);
      tops[j] = vmax(s, tops[j]);
    }
  }
  const VF top = vmax(state->max, max_modulo<kPadded>(vmax(tops[0], tops[1])));
  const VF base = top > splat(kLowest) ? top : zero();
  const VF shrink = exp_negative(state->max - base);
  VF sums[2] = {state->sum * shrink, zero()};
  for (int64_t i = 0; i < live; i += 2 * W) {
    PJ_UNROLL for (int j = 0; j < 2; ++j) {
      const VF weight = exp_negative(load(scores + i + j * W) - base);
      store(scores + i + j * W, weight);
      sums[j] += weight;
    }
  }
  state->max = top;
  state->sum = sums[0] + sums[1];
  return shrink;
}

// out[head][...] = out * shrink + sum over tokens of weight * value, some vectors wide.
template <class E, int Heads, int Steps>
PJ_INLINE void span_values_some(const Block& block, const float* weights, const float* shrink,
                                int64_t d, int64_t stride, float* out) {
  constexpr int kPadded = padded_heads(Heads), kVectors = Steps * E::kVectors;
  VF acc[Heads][kVectors];
  PJ_UNROLL for (int g = 0; g < Heads; ++g) {
    PJ_UNROLL for (int v = 0; v < kVectors; ++v) {
      acc[g][v] = load(out + g * stride + d + v * W) * splat(shrink[g]);
    }
  }
  const int64_t offset = block.offset + d * E::kBytes;
  constexpr int kLines = (Steps * E::kVectors * W * E::kBytes + 63) / 64;
  Ahead ahead = *block.next_values;
  for (int64_t t = 0; t < block.count; ++t) {
    const char* row = block.values[t] + offset;
    VF value[kVectors];
    PJ_UNROLL for (int s = 0; s < Steps; ++s) {
      E::load_step(row + s * E::kVectors * W * E::kBytes, value + s * E::kVectors);
    }
    Ahead::ask<kLines>(&ahead);
    PJ_UNROLL for (int g = 0; g < Heads; ++g) {
      const VF weight = splat(weights[t * kPadded + g]);
      PJ_UNROLL for (int v = 0; v < kVectors; ++v) acc[g][v] += weight * value[v];
    }
  }
  *block.next_values = ahead;
  PJ_UNROLL for (int g = 0; g < Heads; ++g) {
    PJ_UNROLL for (int v = 0; v < kVectors; ++v) store(out + g * stride + d + v * W, acc[g][v]);
  }
}

template <class E, int Heads>
PJ_INLINE void span_values(const Block& block, const float* weights, const float* shrink,
                           int64_t dim, int64_t stride, float* out) {
  constexpr int kStep = E::kVectors * W;
  constexpr int kWide = kAccumulators / padded_heads(Heads) / E::kVectors;
  int64_t d = 0;
  if constexpr (kWide >= 8) {
    for (; d + 8 * kStep <= dim; d += 8 * kStep) {
      span_values_some<E, Heads, 8>(block, weights, shrink, d, stride, out);
    }
  }
  if constexpr (kWide >= 4) {
    for (; d + 4 * kStep <= dim; d += 4 * kStep) {
      span_values_some<E, Heads, 4>(block, weights, shrink, d, stride, out);
    }
  }
  if constexpr (kWide >= 2) {
    for (; d + 2 * kStep <= dim; d += 2 * kStep) {
      span_values_some<E, Heads, 2>(block, weights, shrink, d, stride, out);
    }
  }
  for (; d < dim; d += kStep) {
    span_values_some<E, Heads, 1>(block, weights, shrink, d, stride, out);
  }
}

// Lane i of the result is p[i / Each].
template <int Each>
PJ_INLINE VF repeat(const float* p) {
  const VF x = load(p);
  if constexpr (Each == 1) return x;
  const VF twice = PJ_ZIP_LOW(x, x);
  if constexpr (Each == 2) return twice;
  return PJ_ZIP_LOW(twice, twice);
}

// Multiplies what each token has for each head by the token's scale: cheaper than
// scaling its row, and the same.
template <int Heads>
PJ_INLINE void span_scale(const float* scales, int64_t count, float* each) {
  constexpr int kPadded = padded_heads(Heads);
  for (int64_t i = 0; i < count * kPadded; i += W) {
    store(each + i, load(each + i) * repeat<kPadded>(scales + i / kPadded));
  }
}

// One block, one kv head, `Heads` query heads.
template <class E, int Heads>
static void span_block(const Problem& p, const Block& block, const float* q, int64_t dim,
                       int64_t stride, HeadState* state, float* out) {
  alignas(64) float scores[kMaxBlock * kGroup];
  alignas(64) float shrink[W];
  span_scores<E, Heads>(block, q, dim, stride, scores);
  if (E::kScaled) span_scale<Heads>(block.key_scales, block.count, scores);
  store(shrink, span_weights<Heads>(p, block.count, query_factor(p), scores, state));
  if (E::kScaled) span_scale<Heads>(block.value_scales, block.count, scores);
  span_values<E, Heads>(block, scores, shrink, dim, stride, out);
}

template <class E>
PJ_INLINE void span_block_any(int64_t heads, const Problem& p, const Block& block,
                              const float* q, int64_t dim, int64_t stride, HeadState* state,
                              float* out) {
  switch (heads) {
    case 1:
      return span_block<E, 1>(p, block, q, dim, stride, state, out);
    case 2:
      return span_block<E, 2>(p, block, q, dim, stride, state, out);
    case 3:
      return span_block<E, 3>(p, block, q, dim, stride, state, out);
    default:
      return span_block<E, 4>(p, block, q, dim, stride, state, out);
  }
}

// The sums of a chunk of query heads, one float each.
template <int Heads>
PJ_INLINE void unpack_state(const HeadState& state, float* max, float* sum) {
  alignas(64) float maxes[W], sums[W];
  store(maxes, state.max);
  store(sums, sum_modulo<padded_heads(Heads)>(state.sum));
  for (int g = 0; g < Heads; ++g) {
    max[g] = maxes[g];
    sum[g] = sums[g];
  }
}

enum class Path { kF32, kBF16, kF16, kI8, kF8, kWiden };

// The direct paths need whole steps; everything else is widened to float32 first.
PJ_INLINE Path span_path(const Problem& p) {
  if (p.kv_dtype == DType::kF32 && p.head_dim % W == 0) return Path::kF32;
  if (p.kv_dtype == DType::kBF16 && p.head_dim % (2 * W) == 0) return Path::kBF16;
  if (p.head_dim % W == 0) {
    if (p.kv_dtype == DType::kF16) return Path::kF16;
    if (p.kv_dtype == DType::kI8) return Path::kI8;
    if (p.kv_dtype == DType::kF8E4M3) return Path::kF8;
  }
  return Path::kWiden;
}

// Puts a row in natural order into step order, or back; only pairs differ.
PJ_INLINE void split_pairs(float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    float t[2 * W];
    memcpy(t, row + d, sizeof t);
    for (int i = 0; i < W; ++i) {
      row[d + i] = t[2 * i];
      row[d + W + i] = t[2 * i + 1];
    }
  }
}

PJ_INLINE int64_t span_block_tokens(const Problem& p, int64_t heads) {
  const int64_t bytes = 2 * heads * p.head_dim * dtype_bytes(p.kv_dtype);
  const int64_t tokens = kBlockBytes / bytes / kMinBlock * kMinBlock;
  return tokens < kMinBlock ? kMinBlock : tokens > kMaxBlock ? kMaxBlock : tokens;
}

PJ_INLINE int64_t chunk_count(const Problem& p) { return (p.group() + kGroup - 1) / kGroup; }

size_t span_scratch(const Problem& p) {
  const int64_t stride = round_up(p.head_dim, W);
  const int64_t states = p.num_kv_heads * chunk_count(p);
  return (size_t)(2 * p.num_heads * stride * 4 + states * (int64_t)sizeof(HeadState) +
                  2 * kMaxBlock * stride * 4 + 64);
}

void span(const Problem& p, const SpanTask& task, void* scratch) {
  const int64_t dim = p.head_dim, stride = round_up(dim, W), group = p.group();
  const int64_t heads = task.head_end - task.head_begin, chunks = chunk_count(p);
  const int64_t element = dtype_bytes(p.kv_dtype);
  const int64_t head_bytes = dim * element, row_bytes = p.num_kv_heads * head_bytes;
  const int64_t first_head = task.head_begin * group;
  const Path path = span_path(p);

  HeadState* states = (HeadState*)scratch;
  float* q = (float*)(states + heads * chunks);
  float* out = q + heads * group * stride;
  float* wide_keys = out + heads * group * stride;
  float* wide_values = wide_keys + kMaxBlock * stride;
  for (int64_t i = 0; i < heads * chunks; ++i) {
    states[i].max = splat(kLowest);
    states[i].sum = zero();
  }
  for (int64_t i = 0; i < heads * group; ++i) {
    load_query(p, task.token, first_head + i, 1.0f, q + i * stride);
    if (path == Path::kBF16) split_pairs(q + i * stride, dim);
  }
  memset(out, 0, (size_t)(heads * group * stride * 4));

  const int64_t block_tokens = span_block_tokens(p, heads);
  const char* k_pages = (const char*)p.k_pages;
  const char* v_pages = (const char*)p.v_pages;
  int64_t rows[2][kMaxBlock];
  const char* keys[kMaxBlock];
  const char* values[kMaxBlock];
  alignas(64) float scales[2][kMaxBlock + W] = {};
  int64_t count = task.end - task.begin < block_tokens ? task.end - task.begin : block_tokens;
  find_rows(task.pages, p.page_size, task.begin, count, rows[0]);
  int turn = 0;
  for (int64_t t = task.begin; t < task.end; turn ^= 1) {
    const int64_t next = t + count, left = task.end - next;
    const int64_t next_count = left < block_tokens ? left : block_tokens;
    // After the last block comes the first one of what this thread does next.
    int64_t to_come = next_count, next_head = task.head_begin;
    if (next_count > 0) {
      find_rows(task.pages, p.page_size, next, next_count, rows[turn ^ 1]);
    } else if (task.next != nullptr) {
      const int64_t all = task.next->end - task.next->begin;
      to_come = all < block_tokens ? all : block_tokens;
      next_head = task.next->head_begin;
      find_rows(task.next->pages, p.page_size, task.next->begin, to_come, rows[turn ^ 1]);
    }
    for (int64_t i = 0; i < kMaxBlock && path != Path::kWiden; ++i) {
      const int64_t row = rows[turn][i < count ? i : count - 1];
      keys[i] = k_pages + row * row_bytes;
      values[i] = v_pages + row * row_bytes;
    }
    const int64_t skip = next_head * head_bytes, bytes = heads * head_bytes;
    const int64_t* next_rows = rows[turn ^ 1];
    Ahead next_keys = {k_pages, next_rows, to_come, row_bytes, skip, bytes, nullptr, nullptr};
    Ahead next_values = {v_pages, next_rows, to_come, row_bytes, skip, bytes, nullptr, nullptr};
    for (int64_t h = 0; h < heads; ++h) {
      Block block = {keys,      values,    (task.head_begin + h) * head_bytes, count,
                     scales[0], scales[1], &next_keys, &next_values};
      if (path == Path::kI8 || path == Path::kF8) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = rows[turn][i] * p.num_kv_heads + task.head_begin + h;
          scales[0][i] = p.k_scales[at];
          scales[1][i] = p.v_scales[at];
        }
      }
      if (path == Path::kWiden) {
        for (int64_t i = 0; i < kMaxBlock; ++i) {
          const int64_t j = i < count ? i : count - 1;
          keys[i] = (const char*)(wide_keys + j * stride);
          values[i] = (const char*)(wide_values + j * stride);
          if (i >= count) continue;
          const int64_t at = rows[turn][i] * p.num_kv_heads + task.head_begin + h;
          widen_kv(p.kv_dtype, p.k_pages, p.k_scales, at, dim, wide_keys + i * stride);
          widen_kv(p.kv_dtype, p.v_pages, p.v_scales, at, dim, wide_values + i * stride);
        }
        block.offset = 0;
      }
      int64_t g = 0;
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t chunk = (group - g + chunks - c - 1) / (chunks - c);
        const float* chunk_q = q + (h * group + g) * stride;
        float* chunk_out = out + (h * group + g) * stride;
        HeadState* state = states + h * chunks + c;
        if (path == Path::kBF16) {
          span_block_any<BF16Steps>(chunk, p, block, chunk_q, dim, stride, state, chunk_out);
        } else if (path == Path::kF16) {
          span_block_any<F16Steps>(chunk, p, block, chunk_q, dim, stride, state, chunk_out);
        } else if (path == Path::kI8) {
          span_block_any<I8Steps>(chunk, p, block, chunk_q, dim, stride, state, chunk_out);
        } else if (path == Path::kF8) {
          span_block_any<F8Steps>(chunk, p, block, chunk_q, dim, stride, state, chunk_out);
        } else {
          span_block_any<F32Steps>(chunk, p, block, chunk_q, stride, stride, state, chunk_out);
        }
        g += chunk;
      }
    }
    t = next;
    count = next_count;
  }

  for (int64_t h = 0; h < heads; ++h) {
    int64_t g = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t chunk = (group - g + chunks - c - 1) / (chunks - c);
      const HeadState& state = states[h * chunks + c];
      float* max = task.part.max + first_head + h * group + g;
      float* sum = task.part.sum + first_head + h * group + g;
      switch (chunk) {
        case 1:
          unpack_state<1>(state, max, sum);
          break;
        case 2:
          unpack_state<2>(state, max, sum);
          break;
        case 3:
          unpack_state<3>(state, max, sum);
          break;
        default:
          unpack_state<4>(state, max, sum);
      }
      g += chunk;
    }
  }
  for (int64_t i = 0; i < heads * group; ++i) {
    float* to = task.part.out + (first_head + i) * dim;
    const float* from = out + i * stride;
    if (path == Path::kBF16) {
      for (int64_t d = 0; d < dim; d += 2 * W) {
        VF low = load(from + d), high = load(from + d + W);
        store(to + d, PJ_ZIP_LOW(low, high));
        store(to + d + W, PJ_ZIP_HIGH(low, high));
      }
    } else {
      memcpy(to, from, (size_t)(dim * 4));
    }
  }
}

}  // namespace
