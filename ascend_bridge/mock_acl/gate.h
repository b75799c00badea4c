#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

// Where a wait for a stream stands still while the gate is shut. The mock's own mutex is
// not held there: other calls go on.
struct Gate {
  std::mutex mutex;
  std::condition_variable opened;
  bool shut = false;
  int waiting = 0;

  void pass() {
    std::unique_lock<std::mutex> lock(mutex);
    ++waiting;
    opened.wait_for(lock, std::chrono::seconds(30), [this] { return !shut; });
    --waiting;
  }

  void set(bool closed) {
    const std::lock_guard<std::mutex> lock(mutex);
    shut = closed;
    opened.notify_all();
  }

  int count() {
    const std::lock_guard<std::mutex> lock(mutex);
    return waiting;
  }
};

inline Gate& mock_gate() {
  static Gate* const it = new Gate;
  return *it;
}
