#include <atomic>
#include <memory>
#include <thread>

#include "attention.h"

namespace pagedjax {
namespace {

struct Loop {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<int64_t> workers{1};  // the caller is worker 0
  int64_t count = 0;
  // Lives in the caller's frame; touched only with a claimed index, which the caller
  // waits for.
  const LoopBody* body = nullptr;
};

void work(Loop& loop, int64_t worker) {
  int64_t finished = 0;
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
    (*loop.body)(i, worker);
    ++finished;
  }
  loop.done.fetch_add(finished, std::memory_order_release);
}

}  // namespace

void parallel_for(int64_t count, const Executor& executor, const LoopBody& body) {
  const int64_t helpers = std::min(executor.num_threads, count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->count = count;
  loop->body = &body;
  for (int64_t i = 0; i < helpers; ++i) {
    executor.schedule([loop] {
      // A late starter finds no work, and must not take a worker number then: there
      // are only as many as threads, and `body` is gone.
      if (loop->next.load(std::memory_order_relaxed) >= loop->count) return;
      work(*loop, loop->workers.fetch_add(1, std::memory_order_relaxed));
    });
  }
  work(*loop, 0);
  while (loop->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace pagedjax
