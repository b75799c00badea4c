// Where the pages of a pool are, and what can be done with them there.
//
//   PageStore --+-- on an NPU: device memory, Ascend C kernels     (npu_store.cc)
//               +-- on the host: memory of this process            (host_store.cc)
//
// A store knows rows, not layers: page p of layer l is row l * N + p. It keeps no version
// and does no locking: that is the pool's (pool.h), the same for both.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../host_executor/attention.h"
#include "trouble.h"

namespace pagedjax::device {

// Sizes that a pool is opened with. The last four bound what one call may bring, so that
// its working space is there before the first call.
struct Shape {
  int32_t num_layers = 1;  // L
  int32_t num_pages = 0;   // N, of one layer
  int32_t page_size = 0;
  int32_t kv_heads = 0;  // K
  int32_t head_dim = 0;  // D
  DType dtype = DType::kF16;
  int32_t heads = 0;           // H
  int32_t max_slots = 0;       // S at most
  int32_t pages_per_slot = 0;  // P at most
  int32_t max_tokens = 0;      // T at most

  int64_t rows() const { return int64_t{num_layers} * num_pages; }
  int64_t token_bytes() const { return int64_t{kv_heads} * head_dim * dtype_bytes(dtype); }
  int64_t row_bytes() const { return page_size * token_bytes(); }
};

// Keys and values of some tokens, each for place row * page_size + offset; -1: nowhere.
struct Write {
  const void* k;  // [T, K, D]
  const void* v;
  const int32_t* places;  // [T]
  int32_t tokens;
};

// Decode attention: one query a slot.
struct Attention {
  const void* q;         // [S, H, D]
  const int32_t* table;  // [S, P], rows; outside 0 .. rows - 1: none
  const int32_t* lens;   // [S], within 0 .. P * page_size
  int32_t slots;
  int32_t pages_per_slot;
  float scale;
  int32_t window;  // 0: none
  float soft_cap;  // 0: none
  void* out;       // [S, H, D]
  float* lse;      // [S, H]
};

class PageStore {
 public:
  virtual ~PageStore() = default;
  // Bytes held where the pages are, working space included.
  virtual int64_t bytes() const = 0;
  // Writes, then attends; either may be null. Returns when all of it is done.
  virtual void run(const Write* write, const Attention* attention, const Executor& on) = 0;
  // Copies rows, (from, to); no row is on both sides, and none is written twice.
  virtual void copy(const std::vector<std::pair<int32_t, int32_t>>& pairs) = 0;
  // Whole rows to and from arrays [count, page_size, K, D]; row -1 reads as zeros.
  virtual void read(const std::vector<int32_t>& rows, void* k, void* v) = 0;
  virtual void load(const std::vector<int32_t>& rows, const void* k, const void* v) = 0;
};

// Throws Trouble where it cannot be had, having freed what it took.
std::unique_ptr<PageStore> open_host_store(const Shape& shape);
std::unique_ptr<PageStore> open_npu_store(const Shape& shape, int32_t device,
                                          int32_t timeout_ms);

// What stands in the way of an NPU, or which there is.
struct Probe {
  bool usable = false;
  std::string text;  // the reason, or the device
  int32_t arch = 0;  // 1001 or 2201
  int32_t cores = 0;
};
Probe probe_npu(int32_t device);

// Frees what the handlers for arrays on an NPU keep between calls. None may be under way.
void forget_npu_handlers();

// Whether the kernels of an architecture can do it; empty, or why not, with the numbers.
std::string npu_refuses(const Shape& shape, int32_t arch, int32_t cores, float scale,
                        int32_t window, float soft_cap);

}  // namespace pagedjax::device
