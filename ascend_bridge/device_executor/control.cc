// The C functions that Python calls without XLA: open, watch and close a pool, and ask what
// an NPU and its kernels can do. Messages go into a buffer of the caller.
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "acl.h"
#include "kernel_library.h"
#include "pool.h"

namespace {

using namespace pagedjax::device;

void say(const std::string& text, char* message, size_t size) {
  if (size > 0) std::snprintf(message, size, "%s", text.c_str());
}

// 0, or 1 + Kind with the message.
template <class Call>
int guarded(char* message, size_t size, Call call) {
  try {
    say("", message, size);
    call();
    return 0;
  } catch (const Trouble& trouble) {
    say(trouble.message, message, size);
    return 1 + static_cast<int>(trouble.kind);
  } catch (const std::bad_alloc&) {
    say("no memory on the host", message, size);
    return 1 + static_cast<int>(Kind::kMemory);
  } catch (const std::exception& error) {
    say(error.what(), message, size);
    return 1 + static_cast<int>(Kind::kDevice);
  }
}

}  // namespace

extern "C" {

int pagedjax_pool_open(const Shape* shape, int npu, int32_t device, int32_t timeout_ms,
                       int32_t* handle, char* message, size_t size) {
  return guarded(message, size,
                 [&] { *handle = open_pool(*shape, npu != 0, device, timeout_ms); });
}

int pagedjax_pool_close(int32_t handle, char* message, size_t size) {
  return guarded(message, size, [&] { close_pool(handle); });
}

int pagedjax_pool_status(int32_t handle, Status* status, char* message, size_t size) {
  return guarded(message, size, [&] {
    std::string poison;
    try {
      *status = find_pool(handle)->status(&poison);
    } catch (const Trouble&) {
      *status = {2, 0, 0};
    }
    say(poison, message, size);
  });
}

// Closes every pool and leaves the runtime.
void pagedjax_pool_shutdown() {
  close_all();
  forget_npu_handlers();
  forget_kernels();
  pagedjax::acl::finalize();
}

void pagedjax_npu_look_in(const char* folder) { look_for_kernels_in(folder); }

// 1 and what there is, or 0 and why it cannot be used.
int pagedjax_npu_probe(int32_t device, int32_t* arch, int32_t* cores, char* message,
                       size_t size) {
  const Probe probe = probe_npu(device);
  *arch = probe.arch;
  *cores = probe.cores;
  say(probe.text, message, size);
  return probe.usable;
}

// The same for each part alone: the runtime, and the kernels (then what they are for).
int pagedjax_npu_has_runtime(char* message, size_t size) {
  std::string why;
  const bool there = pagedjax::acl::load(&why) != nullptr;
  say(there ? "loaded" : why, message, size);
  return there;
}

int pagedjax_npu_has_kernels(char* message, size_t size) {
  std::string why;
  const KernelTable* kernels = load_kernels(&why);
  if (kernels != nullptr) {
    why = "for arch " + std::to_string(kernels->arch) +
          (kernels->simulated ? ", simulated" : "");
  }
  say(why, message, size);
  return kernels != nullptr;
}

int pagedjax_npu_arch_of(const char* soc) { return arch_of(soc); }

// 1, or 0 and what the kernels cannot do, with the numbers.
int pagedjax_npu_supports(const Shape* shape, int32_t arch, int32_t cores, float scale,
                          int32_t window, float soft_cap, char* message, size_t size) {
  const std::string refusal = npu_refuses(*shape, arch, cores, scale, window, soft_cap);
  say(refusal, message, size);
  return refusal.empty();
}

}  // extern "C"
