// A page pool outside of XLA's memory, seen as a value: (handle, version).
//
//   version 3 --write--> 4 --write--> 5          a write of any version but the last is
//      |                                          refused: that branch is gone
//      +-- read of version 3: fine while the pages it sees are as they were then
//
// Every row remembers the version that wrote it last; a read of an old version checks the
// rows it sees. So an old value of the pool can be read exactly as long as it is whole,
// which copy-on-write guarantees for pages that are shared, and never gives wrong numbers.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "page_store.h"

namespace pagedjax::device {

// Keys and values of one layer as a call brings them; a token without a page is skipped.
struct NewTokens {
  const void* k;           // [T, K, D]
  const void* v;
  const int32_t* pages;    // [T], of one layer
  const int32_t* offsets;  // [T]
  int32_t tokens;
};

struct Status {
  int32_t state;  // 0 open, 1 poisoned, 2 closed or never there
  int32_t version;
  int64_t bytes;  // held where the pages are
};

class Pool {
 public:
  Pool(int32_t handle, const Shape& shape, std::unique_ptr<PageStore> store);

  const Shape& shape() const { return shape_; }

  // Each takes the version the call was made for and returns the one after it. `layer`
  // counts from 0. All throw Trouble.
  int32_t write(int32_t version, int32_t layer, const NewTokens& tokens);
  int32_t copy(int32_t version, const int32_t* from, const int32_t* to, int32_t count);
  // `attention.table` holds pages of one layer, and its lengths may be anything.
  int32_t attend(int32_t version, int32_t layer, Attention attention, const Executor& on);
  // Writes, then attends to what is there then: one exchange with the device.
  int32_t step(int32_t version, int32_t layer, const NewTokens& tokens, Attention attention,
               const Executor& on);
  // Pages that do not exist give zeros.
  int32_t read(int32_t version, int32_t layer, const int32_t* pages, int32_t count, void* k,
               void* v);

  // Fills whole rows; for pools that are made for one call, so without a version.
  void load(const std::vector<int32_t>& rows, const void* k, const void* v);

  Status status(std::string* message) const;
  // Waits for the call in flight and frees everything. Later calls are refused.
  void close();

 private:
  template <class Call>
  int32_t with_store(Call call);
  int32_t change(int32_t version, const std::vector<int32_t>& rows);
  void require_current(int32_t version) const;
  void require_known(int32_t version) const;
  void require_layer(int32_t layer) const;
  void require_untouched(int32_t version, int32_t row) const;
  std::vector<int32_t> places_of(int32_t layer, const NewTokens& tokens,
                                 std::vector<int32_t>* rows) const;
  void localize(int32_t layer, Attention* attention, int32_t read_version);
  int32_t row_of(int32_t layer, int32_t page) const;

  const int32_t handle_;
  const Shape shape_;
  const int64_t process_;  // that opened it: a fork has no device
  mutable std::mutex mutex_;
  std::unique_ptr<PageStore> store_;  // null once closed
  std::string poison_;                // why no call can be trusted any more
  int32_t version_ = 0;
  std::vector<int32_t> row_versions_;  // [L * N]
  std::vector<int32_t> table_, lens_;  // of the call in flight
};

// How long a device may take for one call.
constexpr int32_t kTimeoutMs = 60'000;

// The pools of the process by handle. Handles are never used twice.
int32_t open_pool(const Shape& shape, bool npu, int32_t device, int32_t timeout_ms);
std::shared_ptr<Pool> find_pool(int32_t handle);  // throws Trouble
void close_pool(int32_t handle);                  // throws Trouble if it never was
void close_all();

}  // namespace pagedjax::device
