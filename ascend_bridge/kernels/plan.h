// Host side: cuts a call into tiles, splits and blocks, or refuses it with the numbers.
//
// Header only, C++17: what has this header has the plans, and the library has them as C
// functions too. Lengths may
// stay on the device: a plan needs only the longest length that can occur, so one plan
// serves every step whose lengths stay below it.
#pragma once

#include <cfloat>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "launch.h"
#include "tiling.h"

namespace pagedjax_ascend {

// What the plans know about a chip, by its compiler architecture.
struct Chip {
  int32_t arch;      // 1001: 910A; 2201: 910B1 to 910B4, 910_93
  int64_t ub_bytes;  // of the unified buffer that a kernel may use
  bool bfloat16;
};

inline const Chip* find_chip(int32_t arch) {
  static constexpr Chip kChips[] = {{1001, 248 * 1024 - 256, false},
                                    {2201, 184 * 1024 - 256, true}};
  for (const Chip& chip : kChips) {
    if (chip.arch == arch) return &chip;
  }
  return nullptr;
}

constexpr int32_t kMaxSplits = 64;
constexpr int64_t kMinSplitTokens = 256;
constexpr int64_t kCopyBytes = 32 * 1024;  // of one buffer of the copying kernels
constexpr int32_t kErrorChars = 256;

struct PagedAttentionProblem {
  int32_t arch;
  int32_t cores;  // vector cores of the device
  int32_t dtype;  // DType of q, pages and out
  int32_t slots, heads, kv_heads, head_dim;
  int32_t num_pages, page_size, pages_per_slot;
  int32_t max_tokens;   // the longest length that can occur; 0 = the whole table row
  int32_t window;       // 0 = none
  int32_t return_lse;   // 0 or 1
  int32_t tile_tokens;  // 0 = choose
  int32_t splits;       // 0 = choose
  float scale;
  float soft_cap;  // 0 = none
};

struct PagedAttentionPlan {
  PagedAttentionTiling tiling;
  int64_t workspace_bytes;
  int64_t ub_bytes;          // of the unified buffer that the first kernel takes
  int32_t blocks;            // cores of the first kernel
  int32_t combine_blocks;    // cores of the second kernel
  char error[kErrorChars];   // empty, or why there is no plan
};

struct ReshapeAndCachePlan {
  ReshapeAndCacheTiling tiling;
  int64_t ub_bytes;
  int32_t blocks;
  char error[kErrorChars];
};

struct BlockCopyPlan {
  BlockCopyTiling tiling;
  int64_t ub_bytes;
  int32_t blocks;
  char error[kErrorChars];
};

namespace plan_detail {

inline int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
inline int64_t round_up(int64_t n, int64_t unit) { return divide_up(n, unit) * unit; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline bool
refuse(char* error, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(error, kErrorChars, format, values);
  va_end(values);
  return false;
}

// What every kernel asks of the pages.
inline bool check_pages(char* error, int32_t num_pages, int32_t page_size, int32_t kv_heads,
                        int32_t head_dim) {
  if (num_pages < 1 || kv_heads < 1) {
    return refuse(error, "num_pages %d and kv_heads %d must be at least 1", num_pages,
                  kv_heads);
  }
  if (page_size < 16 || page_size % 16 != 0) {
    return refuse(error, "page_size %d is not a multiple of 16", page_size);
  }
  if (head_dim < 16 || head_dim % 16 != 0) {
    return refuse(error, "head_dim %d is not a multiple of 16", head_dim);
  }
  return true;
}

inline bool check_chip(char* error, const Chip* chip, int32_t arch, int32_t cores,
                       int32_t dtype) {
  if (chip == nullptr) return refuse(error, "arch %d is neither 1001 nor 2201", arch);
  if (cores < 1) return refuse(error, "cores %d is less than 1", cores);
  if (dtype != kFloat16 && dtype != kBFloat16) {
    return refuse(error, "dtype %d is neither float16 (0) nor bfloat16 (1)", dtype);
  }
  if (dtype == kBFloat16 && !chip->bfloat16) {
    return refuse(error, "bfloat16 is not computed on arch %d", arch);
  }
  return true;
}

}  // namespace plan_detail

// Bytes of the unified buffer that the attention kernel's buffers take; its Init is the
// same list.
inline int64_t attention_ub_bytes(int64_t group, int64_t head_dim, int64_t tile) {
  const int64_t rows = plan_detail::round_up(group, kLanes);
  return 2 * (2 * tile * head_dim * 2)                        // K and V, two tiles
         + 2 * (tile * head_dim * 4)                          // widened tile, products
         + 2 * (group * head_dim + 3 * group * kLanes) * 4    // results, two items
         + group * head_dim * 2 + group * head_dim * 4        // q and widened q
         + group * kMaxTile * 4                               // scores
         + kMaxTile * kLanes * 4                              // spread weights
         + rows * 4 + 2 * rows * kLanes * 4 + 3 * kLanes * 4  // small
         + kIds * 4;                                          // page ids
}

// Bytes that the combining kernel's buffers take; its Init is the same list. What fits has
// head_dim / 8 below 256, as the strides of instructions have to be.
inline int64_t combine_ub_bytes(int64_t head_dim) {
  const int64_t values = kCombineRows * head_dim, lanes = kCombineRows * kLanes;
  return 2 * (values + 3 * lanes) * 4 + 2 * values * 2 + kCombineRows * 4 + values * 4 +
         7 * lanes * 4;
}

// Cuts decode attention. False: plan->error says why not.
inline bool plan_paged_attention(const PagedAttentionProblem& p, PagedAttentionPlan* plan) {
  using namespace plan_detail;
  *plan = {};
  const Chip* chip = find_chip(p.arch);
  if (!check_chip(plan->error, chip, p.arch, p.cores, p.dtype) ||
      !check_pages(plan->error, p.num_pages, p.page_size, p.kv_heads, p.head_dim)) {
    return false;
  }
  if (p.slots < 1 || p.pages_per_slot < 1) {
    return refuse(plan->error, "slots %d and pages_per_slot %d must be at least 1", p.slots,
                  p.pages_per_slot);
  }
  if (p.heads < 1 || p.heads % p.kv_heads != 0) {
    return refuse(plan->error, "heads %d is not a multiple of kv_heads %d", p.heads,
                  p.kv_heads);
  }
  const int64_t stride = int64_t{p.kv_heads - 1} * p.head_dim / 16;
  if (stride > 65535) {
    return refuse(plan->error, "kv_heads %d with head_dim %d: the gap between the rows of a "
                  "head is %lld blocks of 32 bytes, a copy takes 65535",
                  p.kv_heads, p.head_dim, (long long)stride);
  }
  if (combine_ub_bytes(p.head_dim) > chip->ub_bytes) {
    return refuse(plan->error, "head_dim %d takes %lld bytes of the unified buffer to merge "
                  "%d rows, arch %d has %lld",
                  p.head_dim, (long long)combine_ub_bytes(p.head_dim), kCombineRows, p.arch,
                  (long long)chip->ub_bytes);
  }
  if (p.window < 0 || !(p.soft_cap >= 0)) {
    return refuse(plan->error, "window %d and soft_cap %g must be 0 (none) or more", p.window,
                  (double)p.soft_cap);
  }
  const int64_t row_tokens = int64_t{p.pages_per_slot} * p.page_size;
  if (row_tokens > INT32_MAX || int64_t{p.slots} * p.heads > INT32_MAX - kCombineRows) {
    return refuse(plan->error, "pages_per_slot %d x page_size %d or slots %d x heads %d "
                  "does not fit int32",
                  p.pages_per_slot, p.page_size, p.slots, p.heads);
  }
  const int64_t group = p.heads / p.kv_heads;
  if (group > 255) {
    return refuse(plan->error, "%lld query heads per kv head: an instruction takes 255 rows",
                  (long long)group);
  }
  int64_t tile = p.tile_tokens;
  if (tile == 0) {
    tile = kMaxTile;
    while (tile > 16 && attention_ub_bytes(group, p.head_dim, tile) > chip->ub_bytes) {
      tile -= 16;
    }
  }
  if (tile < 1 || tile > kMaxTile) {
    return refuse(plan->error, "tile_tokens %lld is not in [1, %d]", (long long)tile, kMaxTile);
  }
  plan->ub_bytes = attention_ub_bytes(group, p.head_dim, tile);
  if (plan->ub_bytes > chip->ub_bytes) {
    return refuse(plan->error, "%lld query heads per kv head with head_dim %d and tiles of "
                  "%lld tokens take %lld bytes of the unified buffer, arch %d has %lld",
                  (long long)group, p.head_dim, (long long)tile, (long long)plan->ub_bytes,
                  p.arch, (long long)chip->ub_bytes);
  }
  int64_t longest = p.max_tokens > 0 ? smaller(p.max_tokens, row_tokens) : row_tokens;
  // A window starts anywhere in a page, and splits start at pages.
  if (p.window > 0) longest = smaller(longest, int64_t{p.window} + p.page_size);
  const int64_t items = int64_t{p.slots} * p.kv_heads;
  int64_t splits = p.splits;
  if (splits == 0) {
    // Few items: cut the keys until all cores have one, in parts worth a start.
    splits = smaller(p.cores / items, divide_up(longest, kMinSplitTokens));
    splits = larger(1, smaller(splits, kMaxSplits));
  }
  if (splits < 1 || splits > kMaxSplits) {
    return refuse(plan->error, "splits %lld is not in [1, %d]", (long long)splits, kMaxSplits);
  }
  const int64_t span = round_up(divide_up(longest, splits), p.page_size);
  if (p.splits == 0) splits = divide_up(longest, span);
  const int64_t rows = round_up(int64_t{p.slots} * p.heads, kCombineRows);

  PagedAttentionTiling& t = plan->tiling;
  t.stats_offset = splits * rows * p.head_dim;
  t.slots = p.slots;
  t.heads = p.heads;
  t.kv_heads = p.kv_heads;
  t.group = (int32_t)group;
  t.head_dim = p.head_dim;
  t.num_pages = p.num_pages;
  t.page_size = p.page_size;
  t.pages_per_slot = p.pages_per_slot;
  t.window = p.window;
  t.tile_tokens = (int32_t)tile;
  t.splits = (int32_t)splits;
  t.split_tokens = (int32_t)span;
  t.rows = (int32_t)rows;
  t.return_lse = p.return_lse;
  t.query_scale = p.scale;
  // Denormal numbers count as 0 on some devices.
  t.soft_cap = p.soft_cap > 0 && p.soft_cap < FLT_MIN ? FLT_MIN : p.soft_cap;
  plan->workspace_bytes = (t.stats_offset + splits * 3 * rows * kLanes) * 4;
  plan->blocks = (int32_t)smaller(p.cores, items * splits);
  plan->combine_blocks = (int32_t)smaller(p.cores, rows / kCombineRows);
  return true;
}

// Cuts the write of `tokens` rows of K and V into the pages.
inline bool plan_reshape_and_cache(int32_t arch, int32_t cores, int32_t dtype, int32_t tokens,
                                   int32_t num_pages, int32_t page_size, int32_t kv_heads,
                                   int32_t head_dim, ReshapeAndCachePlan* plan) {
  using namespace plan_detail;
  *plan = {};
  if (!check_chip(plan->error, find_chip(arch), arch, cores, kFloat16) ||
      !check_pages(plan->error, num_pages, page_size, kv_heads, head_dim)) {
    return false;
  }
  if (dtype != kFloat16 && dtype != kBFloat16) {
    return refuse(plan->error, "dtype %d is neither float16 (0) nor bfloat16 (1)", dtype);
  }
  if (tokens < 1) return refuse(plan->error, "tokens %d is less than 1", tokens);
  const int64_t places = int64_t{num_pages} * page_size;
  if (places > INT32_MAX) {
    return refuse(plan->error, "num_pages %d x page_size %d does not fit an int32 slot",
                  num_pages, page_size);
  }
  ReshapeAndCacheTiling& t = plan->tiling;
  t.num_places = places;
  t.row_elements = int64_t{kv_heads} * head_dim;
  t.tokens = tokens;
  t.tokens_per_core = (int32_t)divide_up(tokens, smaller(cores, tokens));
  t.chunk_elements = (int32_t)smaller(t.row_elements, kCopyBytes / 2);
  const int64_t rows = kCopyBytes / (int64_t{t.chunk_elements} * 2);
  t.rows_per_copy = t.chunk_elements < t.row_elements
                        ? 1
                        : (int32_t)smaller(larger(rows, 1), t.tokens_per_core);
  plan->blocks = (int32_t)divide_up(tokens, t.tokens_per_core);
  plan->ub_bytes = 2 * int64_t{t.rows_per_copy} * t.chunk_elements * 2 + kIds * 4;
  return true;
}

// Cuts the copy of whole pages, `num_sources` of them to `num_dests` places.
inline bool plan_block_copy(int32_t arch, int32_t cores, int32_t dtype, int32_t num_sources,
                            int32_t num_dests, int32_t num_pages, int32_t page_size,
                            int32_t kv_heads, int32_t head_dim, BlockCopyPlan* plan) {
  using namespace plan_detail;
  *plan = {};
  if (!check_chip(plan->error, find_chip(arch), arch, cores, kFloat16) ||
      !check_pages(plan->error, num_pages, page_size, kv_heads, head_dim)) {
    return false;
  }
  if (dtype != kFloat16 && dtype != kBFloat16) {
    return refuse(plan->error, "dtype %d is neither float16 (0) nor bfloat16 (1)", dtype);
  }
  if (num_sources < 1 || num_dests < 1) {
    return refuse(plan->error, "num_sources %d and num_dests %d must be at least 1",
                  num_sources, num_dests);
  }
  BlockCopyTiling& t = plan->tiling;
  t.page_elements = int64_t{page_size} * kv_heads * head_dim;
  t.num_pages = num_pages;
  t.num_sources = num_sources;
  t.num_dests = num_dests;
  t.chunk_elements = (int32_t)smaller(t.page_elements, kCopyBytes / 2);
  t.chunks = (int32_t)divide_up(t.page_elements, t.chunk_elements);
  plan->blocks = (int32_t)smaller(cores, int64_t{2} * num_sources * t.chunks);
  plan->ub_bytes = 2 * int64_t{t.chunk_elements} * 2;
  return true;
}

}  // namespace pagedjax_ascend

// The same as C functions: 1, or 0 with plan->error set.
PAGEDJAX_ASCEND_API int pagedjax_ascend_plan_paged_attention(
    const pagedjax_ascend::PagedAttentionProblem* problem,
    pagedjax_ascend::PagedAttentionPlan* plan);
PAGEDJAX_ASCEND_API int pagedjax_ascend_plan_reshape_and_cache(
    int32_t arch, int32_t cores, int32_t dtype, int32_t tokens, int32_t num_pages,
    int32_t page_size, int32_t kv_heads, int32_t head_dim,
    pagedjax_ascend::ReshapeAndCachePlan* plan);
PAGEDJAX_ASCEND_API int pagedjax_ascend_plan_block_copy(
    int32_t arch, int32_t cores, int32_t dtype, int32_t num_sources, int32_t num_dests,
    int32_t num_pages, int32_t page_size, int32_t kv_heads, int32_t head_dim,
    pagedjax_ascend::BlockCopyPlan* plan);
