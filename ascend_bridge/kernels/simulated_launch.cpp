#include "simulated_launch.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "launch.h"
#include "simulator.h"

namespace pagedjax_ascend {
namespace {

struct Job {
  uint32_t blocks;
  std::function<void()> kernel;
};

std::atomic<pagedjax_sim_enqueue_fn> enqueuer{nullptr};
thread_local std::vector<const void*>* added = nullptr;

// A function of the runtime that this process has loaded, or nullptr.
void* find_in_runtime(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  const char* path = std::getenv("PAGEDJAX_ACL_LIBRARY");
  void* runtime = path != nullptr ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
  if (runtime == nullptr) return nullptr;
  void* found = dlsym(runtime, name);
  dlclose(runtime);  // the count of this look-up; whoever loaded it keeps it
  return found;
}

void call(void* kernel) { (*static_cast<std::function<void()>*>(kernel))(); }

void add_region(const void* start, size_t bytes) {
  pagedjax_sim_add_region(start, bytes, "device memory");
  added->push_back(start);
}

int run(void* job, char* message, size_t size) {
  const std::unique_ptr<Job> mine(static_cast<Job*>(job));
  std::vector<const void*> regions;
  added = &regions;
  using Provider = void (*)(void (*)(const void*, size_t));
  if (void* provider = find_in_runtime("pagedjax_sim_regions")) {
    reinterpret_cast<Provider>(provider)(add_region);
  }
  const int errors = pagedjax_sim_launch(mine->blocks, call, &mine->kernel);
  for (const void* start : regions) pagedjax_sim_remove_region(start);
  if (errors > 0 && size > 0) {
    const int first = pagedjax_sim_error_count() - errors;
    std::snprintf(message, size, "%s", pagedjax_sim_error(first));
  }
  return errors;
}

void drop(void* job) { delete static_cast<Job*>(job); }

}  // namespace

int start_simulated(uint32_t blocks, void* stream, std::function<void()> kernel) {
  pagedjax_sim_enqueue_fn enqueue = enqueuer.load();
  if (enqueue == nullptr) {
    void* found = find_in_runtime("pagedjax_sim_enqueue");
    enqueue = reinterpret_cast<pagedjax_sim_enqueue_fn>(found);
  }
  Job* job = new Job{blocks, std::move(kernel)};
  if (enqueue == nullptr) return run(job, nullptr, 0) == 0 ? 0 : 2;
  const int refused = enqueue(stream, run, drop, job);
  if (refused != 0) drop(job);
  return refused;
}

}  // namespace pagedjax_ascend

void pagedjax_sim_set_enqueue(pagedjax_sim_enqueue_fn enqueue) {
  pagedjax_ascend::enqueuer = enqueue;
}
