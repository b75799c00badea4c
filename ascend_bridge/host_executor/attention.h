// Paged attention on the host: what one call is, and the kernels an instruction
// set provides for it. Nothing here depends on XLA.
//
//   problem  ->  plan.cc cuts it into tasks        (which rows, keys, heads)
//            ->  kernels.cc runs a task            (compiled once per instruction set)
//            ->  plan.cc merges the partial results of a row, in a fixed order
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace pagedjax {

enum class DType : int { kF32, kBF16, kF16, kI8, kF8E4M3 };

inline constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : (dtype == DType::kBF16 || dtype == DType::kF16) ? 2 : 1;
}

// One call. Pages are [N, page_size, K, D]; scales are [N, page_size, K].
struct Problem {
  int64_t num_tokens = 0;      // T
  int64_t num_slots = 0;       // S
  int64_t pages_per_slot = 0;  // P
  int64_t num_pages = 0;       // N
  int64_t page_size = 0;
  int64_t num_heads = 0;     // H
  int64_t num_kv_heads = 0;  // K
  int64_t head_dim = 0;      // D
  DType q_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  const void* q = nullptr;  // [T, H, D]
  const void* k_pages = nullptr;
  const void* v_pages = nullptr;
  const float* k_scales = nullptr;        // null unless quantised
  const float* v_scales = nullptr;        // null unless quantised
  const int32_t* page_indices = nullptr;  // [S, P]
  const int32_t* seq_lens = nullptr;      // [S]
  const int32_t* cu_q_lens = nullptr;     // [S + 1]; null: one query per slot
  float scale = 1.0f;
  int64_t window = 0;    // 0: none
  float soft_cap = 0.0f;  // 0: none
  bool share_prefixes = true;
  void* out = nullptr;   // [T, H, D], q_dtype
  float* lse = nullptr;  // [T, H]

  int64_t group() const { return num_heads / num_kv_heads; }
};

// Attention over a part of the keys: out is not yet divided by `sum`, and the true
// weights are exp(max) times what `out` and `sum` hold.
struct Part {
  float* out;  // [H, D]
  float* max;  // [H]
  float* sum;  // [H]
};

// One query against the keys [begin, end) for some kv heads.
struct SpanTask {
  int64_t token;        // row of q
  const int32_t* pages;  // the table row of its slot
  int64_t begin, end;
  int64_t head_begin, head_end;  // kv heads
  Part part;
  const SpanTask* next;  // what the same thread does next, to prefetch; may be null
};

// A row of a tile task: query `token` sees the keys [low, high).
struct TileRow {
  int64_t token;
  int64_t low, high;
  Part part;  // used when the task does not finish its rows
};

// Several queries against the same keys, for one kv head.
struct TileTask {
  const int32_t* pages;
  int64_t begin, end;
  int64_t head;  // kv head
  const TileRow* rows;
  int64_t num_rows;
  bool finish;  // true: write out and lse; false: write the rows' parts
};

// What one instruction set provides. `scratch` is 64-byte aligned.
struct Kernels {
  const char* name;
  size_t (*span_scratch)(const Problem&);
  void (*span)(const Problem&, const SpanTask&, void* scratch);
  size_t (*tile_scratch)(const Problem&, int64_t num_rows);
  void (*tile)(const Problem&, const TileTask&, void* scratch);
  // Merge the parts of a query, in order, into out and lse.
  void (*merge)(const Problem&, int64_t token, const Part* parts, int64_t num_parts);
};

// The best kernels of this processor; the environment variable
// PAGEDJAX_HOST_ISA=base|avx2|avx512|amx|neon asks for others (for tests).
const Kernels& kernels();

// All that run on this processor, the best first; `count` receives their number.
const Kernels* const* all_kernels(int* count);

// How to run closures elsewhere: the number of threads, the caller included, and a
// function that hands one closure to another thread. It may run late or in the caller.
struct Executor {
  int64_t num_threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// body(index, worker): worker < num_threads, and no two bodies with the same worker run
// at once.
using LoopBody = std::function<void(int64_t, int64_t)>;

// Calls body for every index in [0, count), the caller taking part. Never waits for a
// thread to start, only for bodies that have started.
void parallel_for(int64_t count, const Executor& executor, const LoopBody& body);

// Returns nullptr, or what is wrong with `problem`; then nothing was written.
//
// A slot whose visible keys include a page id outside [0, N) gives 0 and -inf in all its
// rows, as does a slot without keys: half an answer would look like an answer.
const char* run_attention(const Problem& problem, const Executor& executor,
                          const Kernels& with = kernels());

}  // namespace pagedjax
