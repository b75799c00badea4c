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

bool find(void* library, const std::string& path, KernelTable* table, std::string* why) {
#define PAGEDJAX_KERNEL_FIND(name)                                              \
  table->name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name));     \
  if (table->name == nullptr) {                                                 \
    *why = path + " is no kernel library: it has no function " #name;            \
    return false;                                                               \
  }
  PAGEDJAX_ASCEND_FUNCTIONS(PAGEDJAX_KERNEL_FIND)
#undef PAGEDJAX_KERNEL_FIND
  const int version = table->pagedjax_ascend_version();
  if (version != PAGEDJAX_ASCEND_VERSION) {
    *why = path + " has interface " + std::to_string(version) + ", not " +
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
      s.loaded = find(library, path, &s.table, &s.reason);
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
  std::string name;
  for (char letter : soc) {
    name += 'A' <= letter && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  }
  const std::string brand = "ascend", family = "910";
  if (name.compare(0, brand.size(), brand) == 0) name.erase(0, brand.size());
  if (name.compare(0, family.size(), family) != 0) return 0;
  const std::string model = name.substr(family.size());
  if (model.compare(0, 3, "_93") == 0) return 2201;
  if (model.size() > 1 && model[0] == 'b' && '1' <= model[1] && model[1] <= '4') return 2201;
  for (const char* old : {"a", "b", "proa", "prob", "premiuma"}) {
    if (model == old) return 1001;
  }
  return 0;
}

}  // namespace pagedjax::device
