#include "mock_acl.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../device_executor/acl_functions.h"
#include "../kernels/launch.h"
#include "gate.h"

namespace {

namespace acl = pagedjax::acl;

// What the mock answers besides the codes of acl_functions.h.
constexpr int kInvalidParameter = 107000;
constexpr int kInvalidDevice = 107001;
constexpr int kNotInitialized = 100001;
constexpr int kInvalidHandle = 107017;
constexpr int kKernelException = 507015;
constexpr int kDeviceLost = 507053;
constexpr int kInternalError = 500000;

struct Allocation {
  size_t size;  // as asked for
  size_t room;  // whole pages of the system
};

struct Task {
  std::function<int()> run;
  std::function<void()> drop;
};

struct Context {
  int32_t device;
};

struct Stream {
  Context* context;
  std::vector<Task> tasks;
};

struct Failure {
  const char* kind;
  int in = 0;  // calls from now; 0 = never
};

struct Mock {
  std::recursive_mutex mutex;
  bool initialized = false, lost = false;
  std::map<char*, Allocation> device, pinned;
  std::set<Context*> contexts;
  std::set<Stream*> streams;
  Failure failures[7] = {{"malloc"}, {"malloc_host"}, {"copy"}, {"launch"},
                         {"kernel"}, {"timeout"},     {"lost"}};
  int64_t copied[4] = {};
  int launches = 0, waits = 0, allocations = 0;
  std::string kernel_error;
};

Mock& mock() {
  static Mock* const it = new Mock;
  return *it;
}

thread_local Context* current = nullptr;
thread_local std::string recent;

int fail(int code, const std::string& message) {
  recent = message;
  return code;
}

// Whether the call of this kind is the one that was to fail.
bool strikes(const char* kind) {
  for (Failure& failure : mock().failures) {
    if (std::strcmp(failure.kind, kind) == 0 && failure.in > 0) return --failure.in == 0;
  }
  return false;
}

// 0 where a call may go on.
int enter() {
  if (!mock().initialized) return fail(kNotInitialized, "aclInit was not called");
  if (current == nullptr) return fail(acl::kNoContext, "this thread has no context");
  if (mock().contexts.count(current) == 0) {
    return fail(acl::kNoContext, "the context of this thread was destroyed");
  }
  return mock().lost ? fail(kDeviceLost, "the device is lost") : 0;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// The allocation that holds all of [start, start + size), or nullptr.
const Allocation* holder(const std::map<char*, Allocation>& all, const void* start,
                         size_t size) {
  char* const address = static_cast<char*>(const_cast<void*>(start));
  auto after = all.upper_bound(address);
  if (after == all.begin()) return nullptr;
  --after;
  const size_t offset = static_cast<size_t>(address - after->first);
  return offset + size <= after->second.size ? &after->second : nullptr;
}

int64_t bytes_of(const std::map<char*, Allocation>& all) {
  const Lock lock(mock().mutex);
  int64_t total = 0;
  for (const auto& [start, allocation] : all) total += allocation.size;
  return total;
}

// Lets the "device" into its memory while work is done for it.
class Open {
 public:
  Open() { protect(PROT_READ | PROT_WRITE); }
  ~Open() { protect(PROT_NONE); }

 private:
  static void protect(int access) {
    for (const auto& [start, allocation] : mock().device) {
      mprotect(start, allocation.room, access);
    }
  }
};

int check_copy(void* to, size_t room, const void* from, size_t size, int kind) {
  if (size > room) return fail(kInvalidParameter, "a copy of more than there is room for");
  const bool in = kind == acl::kHostToDevice, out = kind == acl::kDeviceToHost;
  if (!in && !out && kind != acl::kDeviceToDevice) {
    return fail(kInvalidParameter, "a copy of an unknown kind");
  }
  const bool to_fine = out || holder(mock().device, to, size) != nullptr;
  const bool from_fine = in || holder(mock().device, from, size) != nullptr;
  if (!to_fine || !from_fine) {
    return fail(kInvalidParameter, "a copy out of the bounds of device memory");
  }
  return 0;
}

int finish(Stream* stream) {
  std::vector<Task> tasks;
  tasks.swap(stream->tasks);
  const Open open;
  int rc = 0;
  for (Task& task : tasks) {
    if (rc == 0) {
      rc = task.run();
    } else {
      task.drop();
    }
  }
  return rc;
}

void forget(Stream* stream) {
  for (Task& task : stream->tasks) task.drop();
  mock().streams.erase(stream);
  delete stream;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int aclInit(const char*) {
  const Lock lock(mock().mutex);
  if (mock().initialized) return acl::kRepeatedInit;
  if (const char* wish = std::getenv("PAGEDJAX_MOCK_ACL_FAIL")) {
    const std::string text = wish;
    const size_t colon = text.find(':');
    const std::string number = colon == std::string::npos ? "1" : text.substr(colon + 1);
    const int nth = number.find_first_not_of("0123456789") == std::string::npos
                        ? std::atoi(number.c_str()) : 0;
    if (nth < 1 || mock_acl_fail(text.substr(0, colon).c_str(), nth) == 0) {
      return fail(kInvalidParameter,
                  "PAGEDJAX_MOCK_ACL_FAIL='" + text + "' is not kind:n of a known kind");
    }
  }
  mock().initialized = true;
  return 0;
}

EXPORT int aclFinalize() {
  const Lock lock(mock().mutex);
  if (!mock().initialized) return fail(kNotInitialized, "aclInit was not called");
  if (!mock().contexts.empty()) return fail(kInternalError, "contexts are still open");
  mock().initialized = false;
  return 0;
}

EXPORT const char* aclGetRecentErrMsg() {
  thread_local std::string shown;
  shown.swap(recent);
  recent.clear();
  return shown.empty() ? nullptr : shown.c_str();
}

EXPORT const char* aclrtGetSocName() {
  const char* name = std::getenv("PAGEDJAX_MOCK_SOC");
  return name != nullptr ? name : "Ascend910B3";
}

EXPORT int aclrtGetDeviceCount(uint32_t* count) {
  const char* devices = std::getenv("PAGEDJAX_MOCK_DEVICES");
  *count = devices != nullptr ? static_cast<uint32_t>(std::atoi(devices)) : 1;
  return 0;
}

EXPORT int aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
  // A 910A has no vector cores of their own.
  const bool old = std::string(aclrtGetSocName()) == "Ascend910A";
  if (attribute == acl::kVectorCores && !old) {
    *value = 4;
  } else if (attribute == acl::kAiCores) {
    *value = 2;
  } else {
    return fail(kInvalidParameter, "an attribute that this device does not have");
  }
  return 0;
}

EXPORT int aclrtGetDevice(int32_t* device) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  *device = current->device;
  return 0;
}

EXPORT int aclrtCreateContext(void** context, int32_t device) {
  const Lock lock(mock().mutex);
  if (!mock().initialized) return fail(kNotInitialized, "aclInit was not called");
  uint32_t count = 0;
  aclrtGetDeviceCount(&count);
  if (device < 0 || static_cast<uint32_t>(device) >= count) {
    return fail(kInvalidDevice, "no such device");
  }
  if (mock().lost) return fail(kDeviceLost, "the device is lost");
  auto* made = new Context{device};
  mock().contexts.insert(made);
  *context = current = made;  // as the real one does
  return 0;
}

EXPORT int aclrtDestroyContext(void* context) {
  const Lock lock(mock().mutex);
  auto* const it = static_cast<Context*>(context);
  if (mock().contexts.erase(it) == 0) return fail(kInvalidHandle, "no such context");
  if (current == it) current = nullptr;
  delete it;
  return 0;
}

EXPORT int aclrtSetCurrentContext(void* context) {
  const Lock lock(mock().mutex);
  auto* const it = static_cast<Context*>(context);
  if (mock().contexts.count(it) == 0) return fail(kInvalidHandle, "no such context");
  current = it;
  return 0;
}

EXPORT int aclrtGetCurrentContext(void** context) {
  const Lock lock(mock().mutex);
  if (current == nullptr || mock().contexts.count(current) == 0) {
    return fail(acl::kNoContext, "this thread has no context");
  }
  *context = current;
  return 0;
}

EXPORT int aclrtCreateStream(void** stream) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  auto* made = new Stream{current, {}};
  mock().streams.insert(made);
  *stream = made;
  return 0;
}

EXPORT int aclrtDestroyStream(void* stream) {
  const Lock lock(mock().mutex);
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0) return fail(kInvalidHandle, "no such stream");
  const int rc = it->tasks.empty() ? 0 : finish(it);
  forget(it);
  return rc;
}

EXPORT int aclrtDestroyStreamForce(void* stream) {
  const Lock lock(mock().mutex);
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0) return fail(kInvalidHandle, "no such stream");
  forget(it);
  return 0;
}

EXPORT int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  mock_gate().pass();
  const Lock lock(mock().mutex);
  ++mock().waits;
  if (const int rc = enter()) return rc;
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0 || it->context != current) {
    return fail(kInvalidHandle, "a stream of another context");
  }
  if (strikes("timeout")) return fail(acl::kSyncTimeout, "the wait for the stream timed out");
  if (strikes("lost")) {
    mock().lost = true;
    return fail(kDeviceLost, "the device is lost");
  }
  return finish(it);
}

EXPORT int aclrtMalloc(void** memory, size_t size, int policy) {
  const Lock lock(mock().mutex);
  ++mock().allocations;
  if (const int rc = enter()) return rc;
  if (size == 0 || policy != acl::kHugePagesFirst) {
    return fail(kInvalidParameter, "an allocation of nothing, or of an unknown kind");
  }
  if (strikes("malloc")) return fail(acl::kNoDeviceMemory, "out of device memory");
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t room = (size + page - 1) / page * page;
  void* const made = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
  if (made == MAP_FAILED) return fail(acl::kNoDeviceMemory, "out of memory");
  std::memset(made, 0xff, room);  // NaN: nothing may rely on zeros
  mprotect(made, room, PROT_NONE);
  mock().device[static_cast<char*>(made)] = {size, room};
  *memory = made;
  return 0;
}

EXPORT int aclrtFree(void* memory) {
  const Lock lock(mock().mutex);
  const auto found = mock().device.find(static_cast<char*>(memory));
  if (found == mock().device.end()) return fail(kInvalidParameter, "not allocated");
  munmap(memory, found->second.room);
  mock().device.erase(found);
  return 0;
}

EXPORT int aclrtMallocHost(void** memory, size_t size) {
  const Lock lock(mock().mutex);
  ++mock().allocations;
  if (const int rc = enter()) return rc;
  if (strikes("malloc_host")) return fail(acl::kNoHostMemory, "out of pinned memory");
  *memory = std::aligned_alloc(64, (size + 63) / 64 * 64);
  if (*memory == nullptr) return fail(acl::kNoHostMemory, "out of memory");
  mock().pinned[static_cast<char*>(*memory)] = {size, size};
  return 0;
}

EXPORT int aclrtFreeHost(void* memory) {
  const Lock lock(mock().mutex);
  if (mock().pinned.erase(static_cast<char*>(memory)) == 0) {
    return fail(kInvalidParameter, "not allocated");
  }
  std::free(memory);
  return 0;
}

EXPORT int aclrtMemcpy(void* to, size_t room, const void* from, size_t size, int kind) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  if (const int rc = check_copy(to, room, from, size, kind)) return rc;
  const Open open;
  std::memcpy(to, from, size);
  mock().copied[kind] += size;
  return 0;
}

EXPORT int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int kind,
                            void* stream) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0 || it->context != current) {
    return fail(kInvalidHandle, "a stream of another context");
  }
  if (const int rc = check_copy(to, room, from, size, kind)) return rc;
  const void* const host = kind == acl::kHostToDevice ? from
                           : kind == acl::kDeviceToHost ? to
                                                        : nullptr;
  if (host != nullptr && holder(mock().pinned, host, size) == nullptr) {
    return fail(kInvalidParameter, "a copy that does not wait needs pinned memory");
  }
  if (strikes("copy")) return fail(kInternalError, "the copy was refused");
  it->tasks.push_back({[=] {
                         std::memcpy(to, from, size);
                         mock().copied[kind] += size;
                         return 0;
                       },
                       [] {}});
  return 0;
}

EXPORT int aclrtMemsetAsync(void* memory, size_t room, int32_t value, size_t size,
                            void* stream) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  if (size > room || holder(mock().device, memory, size) == nullptr) {
    return fail(kInvalidParameter, "out of the bounds of device memory");
  }
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0) return fail(kInvalidHandle, "no such stream");
  it->tasks.push_back({[=] {
                         std::memset(memory, value, size);
                         return 0;
                       },
                       [] {}});
  return 0;
}

// --- what the simulator build of the kernels looks for -------------------------------

EXPORT int pagedjax_sim_enqueue(void* stream, pagedjax_sim_run run, pagedjax_sim_drop drop,
                                void* job) {
  const Lock lock(mock().mutex);
  if (const int rc = enter()) return rc;
  auto* const it = static_cast<Stream*>(stream);
  if (mock().streams.count(it) == 0) return fail(kInvalidHandle, "no such stream");
  if (strikes("launch")) return fail(kInternalError, "the launch was refused");
  ++mock().launches;
  const bool breaks = strikes("kernel");
  it->tasks.push_back({[=] {
                         if (breaks) {
                           drop(job);
                           return fail(kKernelException, "an exception in the kernel");
                         }
                         char message[512] = "";
                         if (run(job, message, sizeof message) == 0) return 0;
                         if (mock().kernel_error.empty()) mock().kernel_error = message;
                         return fail(kKernelException, message);
                       },
                       [=] { drop(job); }});
  return 0;
}

EXPORT void pagedjax_sim_regions(void (*add)(const void* start, size_t bytes)) {
  // Whole units of 32 bytes, as the device's allocator gives them.
  for (const auto& [start, allocation] : mock().device) {
    add(start, (allocation.size + 31) / 32 * 32);
  }
}

// --- watching and disturbing ---------------------------------------------------------

EXPORT int mock_acl_fail(const char* kind, int nth) {
  const Lock lock(mock().mutex);
  for (Failure& failure : mock().failures) {
    if (std::strcmp(failure.kind, kind) != 0) continue;
    failure.in = nth;
    return 1;
  }
  return 0;
}

EXPORT void mock_acl_hold(int shut) { mock_gate().set(shut != 0); }
EXPORT int mock_acl_waiting() { return mock_gate().count(); }

EXPORT void mock_acl_restore() {
  mock_acl_hold(0);
  const Lock lock(mock().mutex);
  for (Failure& failure : mock().failures) failure.in = 0;
  mock().lost = false;
  mock().kernel_error.clear();
}

EXPORT int64_t mock_acl_device_bytes() { return bytes_of(mock().device); }
EXPORT int64_t mock_acl_pinned_bytes() { return bytes_of(mock().pinned); }

EXPORT int mock_acl_contexts() { return static_cast<int>(mock().contexts.size()); }
EXPORT int mock_acl_streams() { return static_cast<int>(mock().streams.size()); }
EXPORT int64_t mock_acl_copied(int kind) { return kind > 0 && kind < 4 ? mock().copied[kind] : 0; }
EXPORT int mock_acl_launches() { return mock().launches; }
EXPORT int mock_acl_waits() { return mock().waits; }
EXPORT int mock_acl_allocations() { return mock().allocations; }

EXPORT void mock_acl_reset_counts() {
  const Lock lock(mock().mutex);
  std::memset(mock().copied, 0, sizeof mock().copied);
  mock().launches = mock().waits = mock().allocations = 0;
}

EXPORT const char* mock_acl_kernel_error() {
  const Lock lock(mock().mutex);
  thread_local std::string shown;
  shown = mock().kernel_error;
  return shown.c_str();
}
