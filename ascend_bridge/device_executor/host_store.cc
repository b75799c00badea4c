// Pages in the memory of this process, for machines without an NPU: the host executor's
// kernels behind the same pool.
#include <cstring>

#include "page_store.h"

namespace pagedjax::device {
namespace {

class HostStore : public PageStore {
 public:
  explicit HostStore(const Shape& shape)
      : shape_(shape),
        k_(static_cast<size_t>(shape.rows() * shape.row_bytes())),
        v_(k_.size()) {}

  int64_t bytes() const override { return static_cast<int64_t>(k_.size() + v_.size()); }

  void run(const Write* write, const Attention* attention, const Executor& on) override {
    if (write != nullptr) put(*write);
    if (attention == nullptr) return;
    const Attention& a = *attention;
    Problem p;
    p.num_tokens = p.num_slots = a.slots;
    p.pages_per_slot = a.pages_per_slot;
    p.num_pages = shape_.rows();
    p.page_size = shape_.page_size;
    p.num_heads = shape_.heads;
    p.num_kv_heads = shape_.kv_heads;
    p.head_dim = shape_.head_dim;
    p.q_dtype = p.kv_dtype = shape_.dtype;
    p.q = a.q;
    p.k_pages = k_.data();
    p.v_pages = v_.data();
    p.page_indices = a.table;
    p.seq_lens = a.lens;
    p.scale = a.scale;
    p.window = a.window;
    p.soft_cap = a.soft_cap;
    p.out = a.out;
    p.lse = a.lse;
    const char* wrong = run_attention(p, on);
    require(wrong == nullptr, wrong != nullptr ? wrong : "");
  }

  void copy(const std::vector<std::pair<int32_t, int32_t>>& pairs) override {
    const int64_t size = shape_.row_bytes();
    for (const auto& [from, to] : pairs) {
      std::memcpy(k_.data() + to * size, k_.data() + from * size, size);
      std::memcpy(v_.data() + to * size, v_.data() + from * size, size);
    }
  }

  void read(const std::vector<int32_t>& rows, void* k, void* v) override {
    const int64_t size = shape_.row_bytes();
    for (size_t i = 0; i < rows.size(); ++i) {
      for (auto [out, held] : {std::pair{k, k_.data()}, {v, v_.data()}}) {
        char* to = static_cast<char*>(out) + i * size;
        rows[i] < 0 ? std::memset(to, 0, size)
                    : std::memcpy(to, held + rows[i] * size, size);
      }
    }
  }

  void load(const std::vector<int32_t>& rows, const void* k, const void* v) override {
    const int64_t size = shape_.row_bytes();
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(k_.data() + rows[i] * size, static_cast<const char*>(k) + i * size, size);
      std::memcpy(v_.data() + rows[i] * size, static_cast<const char*>(v) + i * size, size);
    }
  }

 private:
  void put(const Write& w) {
    const int64_t size = shape_.token_bytes();
    for (int32_t t = 0; t < w.tokens; ++t) {
      if (w.places[t] < 0) continue;
      const int64_t at = w.places[t] * size;
      std::memcpy(k_.data() + at, static_cast<const char*>(w.k) + t * size, size);
      std::memcpy(v_.data() + at, static_cast<const char*>(w.v) + t * size, size);
    }
  }

  const Shape shape_;
  std::vector<char> k_, v_;
};

}  // namespace

std::unique_ptr<PageStore> open_host_store(const Shape& shape) {
  return std::make_unique<HostStore>(shape);
}

}  // namespace pagedjax::device
