// The XLA FFI targets on an XLA backend whose arrays are in the memory of the NPU: no
// copies, the backend's own stream. There is no such backend here: tests call them through
// the FFI's C interface, on the mock.
//
// The names are those of the host's targets. The operands are too, but for what no kernel
// computes: `npu.py` turns pages and offsets into places, and spells out the layers.
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../kernels/plan.h"
#include "acl.h"
#include "kernel_library.h"
#include "page_store.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
namespace plans = pagedjax_ascend;
using namespace pagedjax::device;
using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::DataType::S32, 1>;
using Table = ffi::Buffer<ffi::DataType::S32, 2>;
using Stream = ffi::PlatformStream<void*>;

struct Device {
  const pagedjax::acl::Table* acl;
  const KernelTable* kernels;
  int32_t arch, cores, id;
};

// What was found out or put on a device once, and serves every later call.
struct Kept {
  std::mutex mutex;
  std::map<int32_t, Device> devices;
  std::map<std::string, void*> tilings;
};

// Never destroyed: calls may come as late as the end of the process.
Kept& kept() {
  static Kept* const it = new Kept;
  return *it;
}

// The device that the backend made the current one of this thread.
Device current_device() {
  Device device{};
  std::string why;
  device.acl = pagedjax::acl::load(&why);
  require(device.acl != nullptr, why, Kind::kState);
  device.kernels = load_kernels(&why);
  require(device.kernels != nullptr, why, Kind::kState);
  const int rc = device.acl->aclrtGetDevice(&device.id);
  require(rc == 0, "aclrtGetDevice failed with " + std::to_string(rc), Kind::kDevice);
  const std::lock_guard<std::mutex> lock(kept().mutex);
  const auto known = kept().devices.find(device.id);
  if (known != kept().devices.end()) return known->second;
  const Probe probe = probe_npu(device.id);
  require(probe.usable, probe.text, Kind::kState);
  device.arch = probe.arch;
  device.cores = probe.cores;
  return kept().devices[device.id] = device;
}

// A tiling in device memory. It depends on shapes and options only, so there is one for
// each compiled call; they are copied once and kept.
template <class Tiling>
void* on_device(const Device& device, const Tiling& tiling) {
  const std::string key = std::to_string(device.id) + ":" +
                          std::string(reinterpret_cast<const char*>(&tiling), sizeof tiling);
  const std::lock_guard<std::mutex> lock(kept().mutex);
  void*& memory = kept().tilings[key];
  if (memory == nullptr) {
    void* fresh = nullptr;
    const size_t room = (sizeof tiling + 31) / 32 * 32;
    int rc = device.acl->aclrtMalloc(&fresh, room, pagedjax::acl::kHugePagesFirst);
    require(rc == 0, "aclrtMalloc failed with " + std::to_string(rc), Kind::kMemory);
    rc = device.acl->aclrtMemcpy(fresh, room, &tiling, sizeof tiling,
                                 pagedjax::acl::kHostToDevice);
    if (rc != 0) device.acl->aclrtFree(fresh);
    require(rc == 0, "aclrtMemcpy failed with " + std::to_string(rc), Kind::kDevice);
    memory = fresh;
  }
  return memory;
}

int32_t plan_dtype(const Any& array) {
  switch (array.element_type()) {
    case ffi::DataType::F16:
      return plans::kFloat16;
    case ffi::DataType::BF16:
      return plans::kBFloat16;
    default:
      throw Trouble{Kind::kInvalid, "the kernels take float16 and bfloat16 only"};
  }
}

int32_t size(const Any& array, size_t axis) {
  require(axis < array.dimensions().size(), "an array has too few axes");
  return static_cast<int32_t>(array.dimensions()[axis]);
}

template <class Call>
ffi::Error guarded(const char* target, Call call) {
  try {
    call();
    return ffi::Error::Success();
  } catch (const Trouble& trouble) {
    return ffi::Error(trouble.kind == Kind::kInvalid ? ffi::ErrorCode::kInvalidArgument
                                                     : ffi::ErrorCode::kInternal,
                      std::string(target) + ": " + trouble.message);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(target) + ": " + error.what());
  }
}

void launched(int rc) {
  require(rc == 0, "the launch of a kernel failed with " + std::to_string(rc), Kind::kDevice);
}

ffi::Error attend(void* stream, ffi::ScratchAllocator scratch, Any q, Any k_pages, Any v_pages,
                  Table table, Ints lens, ffi::Result<Any> out, ffi::Result<Any> lse,
                  float scale, int64_t window, float soft_cap, bool) {
  return guarded("paged_attention", [&] {
    const Device device = current_device();
    plans::PagedAttentionProblem p{};
    p.arch = device.arch;
    p.cores = device.cores;
    p.dtype = plan_dtype(q);
    require(plan_dtype(k_pages) == p.dtype && plan_dtype(v_pages) == p.dtype,
            "q, k_pages and v_pages must have one dtype");
    p.slots = size(q, 0);
    p.heads = size(q, 1);
    p.head_dim = size(q, 2);
    p.num_pages = size(k_pages, 0);
    p.page_size = size(k_pages, 1);
    p.kv_heads = size(k_pages, 2);
    p.pages_per_slot = static_cast<int32_t>(table.dimensions()[1]);
    require(size(k_pages, 3) == p.head_dim && table.dimensions()[0] == p.slots &&
                lens.dimensions()[0] == p.slots,
            "q, k_pages, page_indices and seq_lens do not go together");
    p.window = static_cast<int32_t>(window);
    p.scale = scale;
    p.soft_cap = soft_cap;
    p.return_lse = 1;
    plans::PagedAttentionPlan plan;
    require(plans::plan_paged_attention(p, &plan), plan.error);
    const auto workspace = scratch.Allocate(plan.workspace_bytes, 512);
    require(workspace.has_value(), "no memory for the workspace", Kind::kMemory);
    void* const tiling = on_device(device, plan.tiling);
    // The kernel writes 8 values at a time: past the end of XLA's buffer, where they are no
    // multiple of that.
    const size_t lse_bytes = size_t{4} * p.slots * p.heads;
    void* lse_memory = lse->untyped_data();
    if (lse_bytes % 32 != 0) {
      const auto whole = scratch.Allocate((lse_bytes + 31) / 32 * 32, 512);
      require(whole.has_value(), "no memory for the log-sum-exps", Kind::kMemory);
      lse_memory = *whole;
    }
    launched(device.kernels->pagedjax_ascend_paged_attention(
        p.dtype, plan.blocks, stream, q.untyped_data(), k_pages.untyped_data(),
        v_pages.untyped_data(), table.untyped_data(), lens.untyped_data(), *workspace, tiling));
    launched(device.kernels->pagedjax_ascend_combine(p.dtype, plan.combine_blocks, stream,
                                                     *workspace, out->untyped_data(),
                                                     lse_memory, tiling));
    if (lse_memory == lse->untyped_data()) return;
    const int rc = device.acl->aclrtMemcpyAsync(lse->untyped_data(), lse_bytes, lse_memory,
                                                lse_bytes, pagedjax::acl::kDeviceToDevice,
                                                stream);
    require(rc == 0, "aclrtMemcpyAsync failed with " + std::to_string(rc), Kind::kDevice);
  });
}

// The results take the place of the pages: the compiler sees to that, by a copy if it must.
void require_in_place(const Any& held, const Any& out) {
  require(held.untyped_data() == out.untyped_data(),
          "the backend did not give the pages and the result one buffer");
}

ffi::Error write_kv(void* stream, Any k_pages, Any v_pages, Any k, Any v, Ints places,
                    ffi::Result<Any> k_out, ffi::Result<Any> v_out) {
  return guarded("write_kv", [&] {
    const Device device = current_device();
    require_in_place(k_pages, *k_out);
    require_in_place(v_pages, *v_out);
    plans::ReshapeAndCachePlan plan;
    require(plans::plan_reshape_and_cache(device.arch, device.cores, plan_dtype(k_pages),
                                          size(k, 0), size(k_pages, 0), size(k_pages, 1),
                                          size(k_pages, 2), size(k_pages, 3), &plan),
            plan.error);
    launched(device.kernels->pagedjax_ascend_reshape_and_cache(
        plan.blocks, stream, k.untyped_data(), v.untyped_data(), k_out->untyped_data(),
        v_out->untyped_data(), places.untyped_data(), on_device(device, plan.tiling)));
  });
}

ffi::Error copy_pages(void* stream, Any k_pages, Any v_pages, Ints from, Ints to, Ints counts,
                      ffi::Result<Any> k_out, ffi::Result<Any> v_out) {
  return guarded("copy_pages", [&] {
    const Device device = current_device();
    require_in_place(k_pages, *k_out);
    require_in_place(v_pages, *v_out);
    plans::BlockCopyPlan plan;
    require(plans::plan_block_copy(device.arch, device.cores, plan_dtype(k_pages),
                                   static_cast<int32_t>(from.dimensions()[0]),
                                   static_cast<int32_t>(to.dimensions()[0]), size(k_pages, 0),
                                   size(k_pages, 1), size(k_pages, 2), size(k_pages, 3), &plan),
            plan.error);
    launched(device.kernels->pagedjax_ascend_block_copy(
        plan.blocks, stream, k_out->untyped_data(), v_out->untyped_data(), from.untyped_data(),
        to.untyped_data(), counts.untyped_data(), on_device(device, plan.tiling)));
  });
}

}  // namespace

namespace pagedjax::device {

void forget_npu_handlers() {
  const std::lock_guard<std::mutex> lock(kept().mutex);
  std::string why;
  const acl::Table* acl = kept().tilings.empty() ? nullptr : acl::load(&why);
  for (const auto& [key, memory] : kept().tilings) {
    if (acl != nullptr && memory != nullptr) acl->aclrtFree(memory);
  }
  kept().tilings.clear();
  kept().devices.clear();
}

}  // namespace pagedjax::device

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_on_npu_paged_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Table>()
                                  .Arg<Ints>()
                                  .Ret<Any>()
                                  .Ret<Any>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("share_prefixes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_on_npu_write_kv, write_kv,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Ret<Any>()
                                  .Ret<Any>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_on_npu_copy_pages, copy_pages,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Any>()
                                  .Ret<Any>());
