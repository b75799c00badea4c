#include "acl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

namespace pagedjax::acl {
namespace {

// Never destroyed: calls may come as late as the end of the process.
struct State {
  std::mutex mutex;
  Table table;
  bool loaded = false;
  bool initialized = false;  // by us, so ours to finalize
  pid_t process = 0;         // that started it: the runtime does not outlive a fork
  std::string tried, reason;
};

State& state() {
  static State* const it = new State;
  return *it;
}

bool find(void* library, const std::string& path, Table* table, std::string* why) {
#define PAGEDJAX_ACL_FIND(result, name, arguments)                                \
  table->name = reinterpret_cast<result(*) arguments>(dlsym(library, #name));     \
  if (table->name == nullptr) {                                                   \
    *why = path + " is no such runtime: it has no function " #name;                \
    return false;                                                                 \
  }
  PAGEDJAX_ACL_FUNCTIONS(PAGEDJAX_ACL_FIND)
#undef PAGEDJAX_ACL_FIND
  return true;
}

}  // namespace

const Table* load(std::string* why) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.loaded && s.process != getpid()) {
    *why = "the runtime was started before a fork: start processes anew instead";
    return nullptr;
  }
  if (s.loaded) return &s.table;
  const char* named = std::getenv("PAGEDJAX_ACL_LIBRARY");
  const std::string path = named != nullptr && *named ? named : "libascendcl.so";
  if (path != s.tried) {
    s.tried = path;
    s.reason.clear();
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* said = dlerror();
      s.reason = said != nullptr ? said : path + " cannot be loaded";
    } else if (find(library, path, &s.table, &s.reason)) {
      const int rc = s.table.aclInit(nullptr);
      s.initialized = rc == kSuccess;
      s.loaded = rc == kSuccess || rc == kRepeatedInit;
      s.process = getpid();
      if (!s.loaded) {
        s.reason = "aclInit failed with " + std::to_string(rc) + recent_message(s.table);
      }
    }
  }
  if (!s.loaded) *why = s.reason;
  return s.loaded ? &s.table : nullptr;
}

std::string recent_message(const Table& acl) {
  const char* said = acl.aclGetRecentErrMsg();
  return said != nullptr && *said ? std::string(": ") + said : std::string();
}

void finalize() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.loaded || s.process != getpid()) return;
  if (s.initialized) s.table.aclFinalize();
  s.loaded = s.initialized = false;
  s.tried.clear();
}

}  // namespace pagedjax::acl
