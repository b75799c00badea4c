// Pages in the memory of an NPU. One context and one stream; one call is
//
//   pack into pinned memory --copy--> [q | table | lens | k v places | tilings]
//                                        kernels, on the same stream
//   XLA's buffers <-- pinned memory <--copy-- [out | lse]
//   then one wait for the stream
//
// so that only these cross the bus, in one copy each way.
#include <algorithm>
#include <cstring>

#include "../kernels/plan.h"
#include "acl.h"
#include "kernel_library.h"
#include "page_store.h"

namespace pagedjax::device {
namespace {

using acl::Table;
namespace plans = pagedjax_ascend;

constexpr int64_t kAlign = 512;  // of every piece: what the device's allocator aligns to

int64_t aligned(int64_t bytes) {
  return (std::max<int64_t>(bytes, 32) + kAlign - 1) / kAlign * kAlign;
}

// Throws what a failed call of the runtime means.
void check(const Table& acl, int rc, const char* doing) {
  if (rc == acl::kSuccess) return;
  const bool memory = rc == acl::kNoDeviceMemory || rc == acl::kDeviceOutOfMemory ||
                      rc == acl::kNoHostMemory;
  throw Trouble{memory ? Kind::kMemory : Kind::kDevice,
                std::string(doing) + " failed with " + std::to_string(rc) +
                    acl::recent_message(acl)};
}

// Makes the current context of this thread the current one again at its end: others may
// use the device from the same thread. Not the one that is destroyed meanwhile.
class Keep {
 public:
  explicit Keep(const Table& acl, const void* destroyed = nullptr) : acl_(acl) {
    const int rc = acl.aclrtGetCurrentContext(&former_);
    if (rc != acl::kSuccess || former_ == destroyed) former_ = nullptr;
  }
  ~Keep() {
    if (former_ != nullptr) acl_.aclrtSetCurrentContext(former_);
  }
  Keep(const Keep&) = delete;
  Keep& operator=(const Keep&) = delete;

 private:
  const Table& acl_;
  void* former_ = nullptr;
};

// Makes a context the current one of this thread for a while: XLA calls from any of its
// threads.
class Enter {
 public:
  Enter(const Table& acl, void* context) : former_(acl) {
    check(acl, acl.aclrtSetCurrentContext(context), "aclrtSetCurrentContext");
  }

 private:
  const Keep former_;
};

plans::DType plan_dtype(DType dtype) {
  return dtype == DType::kBF16 ? plans::kBFloat16 : plans::kFloat16;
}

plans::PagedAttentionProblem problem_of(const Shape& s, int32_t arch, int32_t cores) {
  plans::PagedAttentionProblem p{};
  p.arch = arch;
  p.cores = cores;
  p.dtype = plan_dtype(s.dtype);
  p.slots = std::max(1, s.max_slots);
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = s.head_dim;
  p.num_pages = static_cast<int32_t>(s.rows());
  p.page_size = s.page_size;
  p.pages_per_slot = s.pages_per_slot;
  p.return_lse = 1;
  p.scale = 1.0f;
  return p;
}

class NpuStore : public PageStore {
 public:
  NpuStore(const Shape& shape, int32_t device, int32_t timeout_ms)
      : shape_(shape), timeout_ms_(timeout_ms) {
    std::string why;
    acl_ = acl::load(&why);
    require(acl_ != nullptr, why, Kind::kState);
    kernels_ = load_kernels(&why);
    require(kernels_ != nullptr, why, Kind::kState);
    const Probe probe = probe_npu(device);
    require(probe.usable, probe.text, Kind::kState);
    arch_ = probe.arch;
    cores_ = probe.cores;
    const std::string refusal = npu_refuses(shape, arch_, cores_, 1.0f, 0, 0.0f);
    require(refusal.empty(), refusal);
    try {
      open(device);
    } catch (...) {
      close();
      throw;
    }
  }

  ~NpuStore() override { close(); }

  int64_t bytes() const override { return bytes_; }

  void run(const Write* write, const Attention* attention, const Executor&) override {
    const Enter enter(*acl_, context_);
    plans::ReshapeAndCachePlan writing{};
    plans::PagedAttentionPlan attending{};
    const bool writes = write != nullptr && write->tokens > 0;
    if (writes) plan_write(*write, &writing);
    if (attention != nullptr) plan_attention(*attention, &attending);
    pack_at_ = 0;
    void *k = nullptr, *v = nullptr, *places = nullptr, *write_tiling = nullptr;
    if (writes) {
      const int64_t bytes = write->tokens * shape_.token_bytes();
      k = pack(write->k, bytes);
      v = pack(write->v, bytes);
      places = pack(write->places, write->tokens * 4);
      write_tiling = pack(&writing.tiling, sizeof writing.tiling);
    }
    void *q = nullptr, *table = nullptr, *lens = nullptr, *tiling = nullptr;
    int64_t out_bytes = 0, lse_at = 0, lse_bytes = 0;
    if (attention != nullptr) {
      const Attention& a = *attention;
      out_bytes = int64_t{a.slots} * shape_.heads * shape_.head_dim * 2;
      lse_at = aligned(out_bytes);
      lse_bytes = int64_t{a.slots} * shape_.heads * 4;
      q = pack(a.q, out_bytes);
      table = pack(a.table, int64_t{a.slots} * a.pages_per_slot * 4);
      lens = pack(a.lens, int64_t{a.slots} * 4);
      tiling = pack(&attending.tiling, sizeof attending.tiling);
    }
    if (pack_at_ == 0) return;
    queue([&] {
      send();
      if (writes) {
        launched(kernels_->pagedjax_ascend_reshape_and_cache(
            writing.blocks, stream_, k, v, k_pages_, v_pages_, places, write_tiling));
      }
      if (attention == nullptr) return;
      const int32_t dtype = plan_dtype(shape_.dtype);
      char* out = static_cast<char*>(out_device_);
      launched(kernels_->pagedjax_ascend_paged_attention(dtype, attending.blocks, stream_, q,
                                                         k_pages_, v_pages_, table, lens,
                                                         workspace_, tiling));
      launched(kernels_->pagedjax_ascend_combine(dtype, attending.combine_blocks, stream_,
                                                 workspace_, out, out + lse_at, tiling));
      fetch(out_host_, out, lse_at + lse_bytes);
    });
    if (attention == nullptr) return;
    std::memcpy(attention->out, out_host_, out_bytes);
    std::memcpy(attention->lse, static_cast<char*>(out_host_) + lse_at, lse_bytes);
  }

  void copy(const std::vector<std::pair<int32_t, int32_t>>& pairs) override {
    if (pairs.empty()) return;
    const Enter enter(*acl_, context_);
    // One source and all its destinations at a time: sources, running counts.
    auto sorted = pairs;
    std::sort(sorted.begin(), sorted.end());
    std::vector<int32_t> from, to, ends;
    for (const auto& [source, target] : sorted) {
      if (from.empty() || from.back() != source) {
        from.push_back(source);
        ends.push_back(0);
      }
      to.push_back(target);
      ends.back() = static_cast<int32_t>(to.size());
    }
    plans::BlockCopyPlan plan;
    require(plans::plan_block_copy(arch_, cores_, plan_dtype(shape_.dtype),
                                   static_cast<int32_t>(from.size()),
                                   static_cast<int32_t>(to.size()),
                                   static_cast<int32_t>(shape_.rows()), shape_.page_size,
                                   shape_.kv_heads, shape_.head_dim, &plan),
            plan.error);
    pack_at_ = 0;
    void* sources = pack(from.data(), from.size() * 4);
    void* targets = pack(to.data(), to.size() * 4);
    void* counts = pack(ends.data(), ends.size() * 4);
    void* tiling = pack(&plan.tiling, sizeof plan.tiling);
    queue([&] {
      send();
      launched(kernels_->pagedjax_ascend_block_copy(plan.blocks, stream_, k_pages_, v_pages_,
                                                    sources, targets, counts, tiling));
    });
  }

  void read(const std::vector<int32_t>& rows, void* k, void* v) override {
    const Enter enter(*acl_, context_);
    const int64_t size = shape_.row_bytes();
    char* const staged = static_cast<char*>(out_host_);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < 0) {
        std::memset(staged, 0, 2 * size);
      } else {
        queue([&] {
          fetch(staged, at(k_pages_, rows[i]), size);
          fetch(staged + size, at(v_pages_, rows[i]), size);
        });
      }
      std::memcpy(static_cast<char*>(k) + i * size, staged, size);
      std::memcpy(static_cast<char*>(v) + i * size, staged + size, size);
    }
  }

  void load(const std::vector<int32_t>& rows, const void* k, const void* v) override {
    const Enter enter(*acl_, context_);
    const int64_t size = shape_.row_bytes();
    char* const staged = static_cast<char*>(out_host_);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(staged, static_cast<const char*>(k) + i * size, size);
      std::memcpy(staged + size, static_cast<const char*>(v) + i * size, size);
      queue([&] {
        store(at(k_pages_, rows[i]), staged, size);
        store(at(v_pages_, rows[i]), staged + size, size);
      });
    }
  }

 private:
  void open(int32_t device) {
    const Keep former(*acl_);
    // A new context is the current one.
    check(*acl_, acl_->aclrtCreateContext(&context_, device), "aclrtCreateContext");
    check(*acl_, acl_->aclrtCreateStream(&stream_), "aclrtCreateStream");
    const int64_t pages = shape_.rows() * shape_.row_bytes();
    k_pages_ = device_memory(pages);
    v_pages_ = device_memory(pages);
    reserve();
    queue([&] {
      for (void* memory : {k_pages_, v_pages_}) {
        check(*acl_, acl_->aclrtMemsetAsync(memory, pages, 0, pages, stream_),
              "aclrtMemsetAsync");
      }
    });
  }

  // The working space of the largest call of each kind.
  void reserve() {
    const int64_t slots = shape_.max_slots, tokens = shape_.max_tokens;
    const int64_t q = slots * shape_.heads * shape_.head_dim * 2;
    const int64_t attend = aligned(q) + aligned(slots * shape_.pages_per_slot * 4) +
                           aligned(slots * 4) + aligned(sizeof(plans::PagedAttentionTiling));
    const int64_t write = 2 * aligned(tokens * shape_.token_bytes()) + aligned(tokens * 4) +
                          aligned(sizeof(plans::ReshapeAndCacheTiling));
    const int64_t copy = 3 * aligned(slots * shape_.num_layers * 4) +
                         aligned(sizeof(plans::BlockCopyTiling));
    in_size_ = std::max(attend + write, copy);
    const int64_t lse = (slots * shape_.heads + 7) / 8 * 8 * 4;
    out_size_ = std::max(aligned(q) + aligned(lse), 2 * shape_.row_bytes());
    in_device_ = device_memory(in_size_);
    out_device_ = device_memory(out_size_);
    for (auto [memory, size] : {std::pair{&in_host_, in_size_}, {&out_host_, out_size_}}) {
      check(*acl_, acl_->aclrtMallocHost(memory, size), "aclrtMallocHost");
    }
    workspace_size_ = most_workspace();
    workspace_ = device_memory(workspace_size_);
  }

  // The space of the largest call. Few slots are cut into more splits than many, and a
  // shorter length now and then into more than the whole row; but never into more than
  // give each core an item. With more slots than cores there is one split.
  int64_t most_workspace() const {
    plans::PagedAttentionProblem p = problem_of(shape_, arch_, cores_);
    int64_t most = 0;
    const auto count = [&](int32_t slots) {
      p.slots = slots;
      const int64_t items = int64_t{slots} * p.kv_heads;
      p.splits = static_cast<int32_t>(
          std::clamp<int64_t>(cores_ / items, 1, plans::kMaxSplits));
      plans::PagedAttentionPlan plan;
      require(plans::plan_paged_attention(p, &plan), plan.error);
      most = std::max(most, plan.workspace_bytes);
    };
    for (int32_t slots = 1; slots < std::min(cores_, shape_.max_slots); ++slots) count(slots);
    count(std::max(1, shape_.max_slots));
    return most;
  }

  // Frees all there is; nothing here may throw, and a lost device must not stop it.
  void close() noexcept {
    if (context_ == nullptr) return;
    const Keep former(*acl_, context_);
    acl_->aclrtSetCurrentContext(context_);
    if (stream_ != nullptr) {
      // After a failure the stream may hold work that never ends.
      broken_ ? acl_->aclrtDestroyStreamForce(stream_) : acl_->aclrtDestroyStream(stream_);
    }
    for (void* memory : {k_pages_, v_pages_, in_device_, out_device_, workspace_}) {
      if (memory != nullptr) acl_->aclrtFree(memory);
    }
    for (void* memory : {in_host_, out_host_}) {
      if (memory != nullptr) acl_->aclrtFreeHost(memory);
    }
    acl_->aclrtDestroyContext(context_);
    context_ = nullptr;
  }

  void* device_memory(int64_t size) {
    void* memory = nullptr;
    const std::string doing = "aclrtMalloc of " + std::to_string(size) + " bytes";
    check(*acl_, acl_->aclrtMalloc(&memory, aligned(size), acl::kHugePagesFirst),
          doing.c_str());
    bytes_ += aligned(size);
    return memory;
  }

  void plan_write(const Write& w, plans::ReshapeAndCachePlan* plan) {
    require(plans::plan_reshape_and_cache(arch_, cores_, plan_dtype(shape_.dtype), w.tokens,
                                          static_cast<int32_t>(shape_.rows()),
                                          shape_.page_size, shape_.kv_heads, shape_.head_dim,
                                          plan),
            plan->error);
  }

  void plan_attention(const Attention& a, plans::PagedAttentionPlan* plan) {
    plans::PagedAttentionProblem p = problem_of(shape_, arch_, cores_);
    p.slots = a.slots;
    p.pages_per_slot = a.pages_per_slot;
    p.max_tokens = std::max(1, *std::max_element(a.lens, a.lens + a.slots));
    p.window = a.window;
    p.scale = a.scale;
    p.soft_cap = a.soft_cap;
    require(plans::plan_paged_attention(p, plan), plan->error);
    require(plan->workspace_bytes <= workspace_size_,
            "the call takes " + text(plan->workspace_bytes) + " bytes of workspace, the pool has " +
                text(workspace_size_),
            Kind::kMemory);
  }

  // Puts a piece into the pinned block; its address on the device.
  void* pack(const void* from, int64_t bytes) {
    const int64_t at = pack_at_;
    pack_at_ += aligned(bytes);
    require(pack_at_ <= in_size_, "the call brings more than the pool was opened for");
    std::memcpy(static_cast<char*>(in_host_) + at, from, bytes);
    return static_cast<char*>(in_device_) + at;
  }

  // Queues work and waits for it. What fails from here on leaves the stream in doubt.
  template <class Work>
  void queue(Work work) {
    broken_ = true;
    try {
      work();
      check(*acl_, acl_->aclrtSynchronizeStreamWithTimeout(stream_, timeout_ms_),
            "waiting for the device");
    } catch (const Trouble& trouble) {
      throw Trouble{Kind::kDevice, trouble.message};
    }
    broken_ = false;
  }

  void send() { store(in_device_, in_host_, pack_at_); }

  void store(void* to, const void* from, int64_t bytes) {
    check(*acl_,
          acl_->aclrtMemcpyAsync(to, bytes, from, bytes, acl::kHostToDevice, stream_),
          "a copy to the device");
  }

  void fetch(void* to, const void* from, int64_t bytes) {
    check(*acl_,
          acl_->aclrtMemcpyAsync(to, bytes, from, bytes, acl::kDeviceToHost, stream_),
          "a copy from the device");
  }

  void launched(int rc) { check(*acl_, rc, "the launch of a kernel"); }

  void* at(void* pages, int32_t row) const {
    return static_cast<char*>(pages) + row * shape_.row_bytes();
  }

  const Shape shape_;
  const int32_t timeout_ms_;
  const Table* acl_ = nullptr;
  const KernelTable* kernels_ = nullptr;
  int32_t arch_ = 0, cores_ = 0;
  void *context_ = nullptr, *stream_ = nullptr;
  void *k_pages_ = nullptr, *v_pages_ = nullptr;
  void *in_host_ = nullptr, *in_device_ = nullptr, *out_host_ = nullptr, *out_device_ = nullptr;
  void* workspace_ = nullptr;
  int64_t in_size_ = 0, out_size_ = 0, workspace_size_ = 0, pack_at_ = 0, bytes_ = 0;
  bool broken_ = false;
};

}  // namespace

std::unique_ptr<PageStore> open_npu_store(const Shape& shape, int32_t device,
                                          int32_t timeout_ms) {
  return std::make_unique<NpuStore>(shape, device, timeout_ms);
}

Probe probe_npu(int32_t device) {
  Probe probe;
  const Table* acl = acl::load(&probe.text);
  if (acl == nullptr) return probe;
  const KernelTable* kernels = load_kernels(&probe.text);
  if (kernels == nullptr) {
    probe.text = "no Ascend kernel library: " + probe.text;
    return probe;
  }
  uint32_t count = 0;
  const int rc = acl->aclrtGetDeviceCount(&count);
  if (rc != acl::kSuccess || count == 0) {
    probe.text = "no NPU: aclrtGetDeviceCount gives " + std::to_string(count) + ", status " +
                 std::to_string(rc) + acl::recent_message(*acl);
    return probe;
  }
  if (device < 0 || static_cast<uint32_t>(device) >= count) {
    probe.text = "no NPU " + std::to_string(device) + ": there are " + std::to_string(count);
    return probe;
  }
  const char* name = acl->aclrtGetSocName();
  const std::string soc = name != nullptr ? name : "";
  probe.arch = arch_of(soc);
  if (probe.arch == 0) {
    probe.text = "the NPU is '" + soc + "', neither a 910A, a 910B1 to 910B4 nor a 910_93";
    return probe;
  }
  if (probe.arch != kernels->arch) {
    probe.text = "the NPU is '" + soc + "', arch " + std::to_string(probe.arch) +
                 ", but the kernels were built for arch " + std::to_string(kernels->arch);
    return probe;
  }
  int64_t cores = 0;
  // The 910A has no vector cores of their own.
  if (acl->aclrtGetDeviceInfo(device, acl::kVectorCores, &cores) != acl::kSuccess ||
      cores < 1) {
    if (acl->aclrtGetDeviceInfo(device, acl::kAiCores, &cores) != acl::kSuccess) cores = 0;
  }
  if (cores < 1) {
    probe.text = "the NPU '" + soc + "' tells no number of cores";
    return probe;
  }
  probe.cores = static_cast<int32_t>(cores);
  probe.usable = true;
  probe.text = soc + " with " + std::to_string(cores) + " vector cores" +
               (kernels->simulated ? ", simulated" : "");
  return probe;
}

std::string npu_refuses(const Shape& shape, int32_t arch, int32_t cores, float scale,
                        int32_t window, float soft_cap) {
  if (shape.dtype != DType::kF16 && shape.dtype != DType::kBF16) {
    return "the kernels take float16 and bfloat16 only";
  }
  if (shape.rows() > INT32_MAX) {
    return text(shape.rows()) + " pages do not fit int32";
  }
  plans::PagedAttentionProblem p = problem_of(shape, arch, cores);
  p.scale = scale;
  p.window = window;
  p.soft_cap = soft_cap;
  plans::PagedAttentionPlan attention;
  if (!plans::plan_paged_attention(p, &attention)) return attention.error;
  plans::ReshapeAndCachePlan write;
  if (!plans::plan_reshape_and_cache(arch, cores, p.dtype, std::max(1, shape.max_tokens),
                                     p.num_pages, p.page_size, p.kv_heads, p.head_dim,
                                     &write)) {
    return write.error;
  }
  return "";
}

}  // namespace pagedjax::device
