#include "kernel_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace pagedjax::device {
namespace {

constexpr const char* kName = "libpagedjax_ascend_kernels.so";

struct State {
  std::mutex mutex;
  KernelTable table;
  bool loaded = false;
  std::string folder, tried, reason;
};

State& state() {
  static State* const it = new State;
  return *it;
}

bool find(void* library, KernelTable* table, std::string* why) {
#define PAGEDJAX_KERNEL_FIND(name)                                              \
  table->name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name));     \
  if (table->name == nullptr) {                                                 \
    *why = "the kernel library has no function " #name;                         \
    return false;                                                               \
  }
  PAGEDJAX_ASCEND_FUNCTIONS(PAGEDJAX_KERNEL_FIND)
#undef PAGEDJAX_KERNEL_FIND
  const int version = table->pagedjax_ascend_version();
  if (version != PAGEDJAX_ASCEND_VERSION) {
    *why = "the kernel library has interface " + std::to_string(version) + ", not " +
           std::to_string(PAGEDJAX_ASCEND_VERSION) + ": build it anew";
    return false;
  }
  table->arch = table->pagedjax_ascend_arch();
  table->simulated = table->pagedjax_ascend_is_simulated() != 0;
  return true;
}

std::string wanted(const std::string& folder) {
  const char* named = std::getenv("PAGEDJAX_ASCEND_KERNELS");
  if (named != nullptr && *named) return named;
  const std::string beside = folder + "/" + kName;
  return !folder.empty() && access(beside.c_str(), R_OK) == 0 ? beside : kName;
}

}  // namespace

const KernelTable* load_kernels(std::string* why) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.loaded) return &s.table;
  const std::string path = wanted(s.folder);
  if (path != s.tried) {
    s.tried = path;
    s.reason.clear();
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* said = dlerror();
      s.reason = said != nullptr ? said : path + " cannot be loaded";
    } else {
      s.loaded = find(library, &s.table, &s.reason);
    }
  }
  if (!s.loaded) *why = s.reason;
  return s.loaded ? &s.table : nullptr;
}

void forget_kernels() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.loaded = false;
  s.tried.clear();
}

void look_for_kernels_in(const std::string& folder) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.folder = folder;
}

int arch_of(const std::string& soc) {
  const std::string a2 = "Ascend910B", a3 = "Ascend910_93";
  if (soc.compare(0, a3.size(), a3) == 0) return 2201;
  if (soc.compare(0, a2.size(), a2) == 0) {
    return soc.size() > a2.size() && soc[a2.size()] >= '1' && soc[a2.size()] <= '9' ? 2201
                                                                                    : 1001;
  }
  if (soc == "Ascend910" || soc == "Ascend910A" || soc == "Ascend910ProA" ||
      soc == "Ascend910ProB" || soc == "Ascend910PremiumA") {
    return 1001;
  }
  return 0;
}

}  // namespace pagedjax::device
