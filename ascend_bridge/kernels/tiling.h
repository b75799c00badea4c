// What the host tells a kernel about one call: plain numbers, passed by a GM pointer.
//
// The host fills these with plan.h, copies them to the device, and passes the address as
// the last argument of the kernel. Fixed layout: no padding, 8-byte fields first.
//
// Axis letters: S slots, H query heads, K kv heads, G = H / K, D head dim, P pages per
// slot, N pages of the pool (of all layers: a pool is flat over layers).
#pragma once

#include <cstdint>

namespace pagedjax_ascend {

enum DType : int32_t { kFloat16 = 0, kBFloat16 = 1 };

// Tokens of a K/V tile at most: one repeat of a float vector instruction holds 64 lanes,
// so a row of scores is one repeat.
constexpr int32_t kMaxTile = 64;
// Rows (slot, query head) that one step of the combine merges: their 8 lse values are
// the 32 bytes that the smallest copy to GM writes.
constexpr int32_t kCombineRows = 8;
// Floats of one row's maximum, sum or fault mark in the workspace: the value, 8 times,
// so that a vector instruction can use it as one broadcast block.
constexpr int32_t kLanes = 8;
// Page ids (or slots) that are brought on-chip at once.
constexpr int32_t kIds = 1024;

// Workspace of one call, float32, `rows` = S * H rounded up to kCombineRows:
//
//   partial [splits][rows][D]         sums of weights times V, not divided
//   stats   [splits][3][rows][8]      maximum, sum of weights, fault mark (0 or 1)
struct PagedAttentionTiling {
  int64_t stats_offset;    // floats from the start of the workspace to stats
  int32_t slots;           // S
  int32_t heads;           // H
  int32_t kv_heads;        // K
  int32_t group;           // G
  int32_t head_dim;        // D, a multiple of 16
  int32_t num_pages;       // N; an id outside [0, N) in a visible place voids the row
  int32_t page_size;       // a multiple of 16
  int32_t pages_per_slot;  // P
  int32_t window;          // keys a query sees at most, counted back; 0 = all
  int32_t tile_tokens;     // tokens of a tile, at most kMaxTile
  int32_t splits;          // parts of the keys of a slot
  int32_t split_tokens;    // tokens of a part, a multiple of page_size
  int32_t rows;            // S * H rounded up to kCombineRows
  int32_t return_lse;      // 0: the lse argument is not touched
  float query_scale;       // factor of q
  float soft_cap;          // 0 = none
};

struct ReshapeAndCacheTiling {
  int64_t num_places;       // N * page_size: slots outside [0, num_places) are skipped
  int64_t row_elements;     // K * D of one token, a multiple of 16
  int32_t tokens;           // T
  int32_t tokens_per_core;  // a run of tokens for each core
  int32_t rows_per_copy;    // tokens that one copy brings in
  int32_t chunk_elements;   // of a row, when a row does not fit; else row_elements
};

struct BlockCopyTiling {
  int64_t page_elements;   // page_size * K * D
  int32_t num_pages;       // N: a source or destination outside [0, N) is skipped
  int32_t num_sources;     // entries of src and of cumsum
  int32_t num_dests;       // entries of dst
  int32_t chunk_elements;  // of a page, brought in by one copy
  int32_t chunks;          // of a page
  int32_t unused;
};

static_assert(sizeof(PagedAttentionTiling) == 72, "the layout is an interface");
static_assert(sizeof(ReshapeAndCacheTiling) == 32, "the layout is an interface");
static_assert(sizeof(BlockCopyTiling) == 32, "the layout is an interface");

}  // namespace pagedjax_ascend
