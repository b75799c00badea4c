// The executor without XLA and without Python, on the mock: for the sanitizers.
//
// The environment names the mock and the simulated kernels; run.py sets it.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../../mock_acl/mock_acl.h"
#include "../acl.h"
#include "../pool.h"

namespace {

using namespace pagedjax::device;

int failures = 0;

void expect(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  ++failures;
}

template <class F>
F* of_mock(const char* name) {
  static void* const library = dlopen(std::getenv("PAGEDJAX_ACL_LIBRARY"), RTLD_NOW);
  void* const found = library != nullptr ? dlsym(library, name) : nullptr;
  if (found == nullptr) {
    std::fprintf(stderr, "no mock: %s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<F*>(found);
}

#define MOCK(name) of_mock<decltype(name)>(#name)

int64_t held() {
  return MOCK(mock_acl_device_bytes)() + MOCK(mock_acl_pinned_bytes)() +
         MOCK(mock_acl_contexts)() + MOCK(mock_acl_streams)();
}

Shape small() {
  Shape s;
  s.num_layers = 2;
  s.num_pages = 5;
  s.page_size = 16;
  s.kv_heads = 1;
  s.head_dim = 16;
  s.heads = 2;
  s.max_slots = 3;
  s.pages_per_slot = 3;
  s.max_tokens = 3;
  return s;
}

// The message of what a call throws, or "".
template <class Call>
std::string thrown(Call call) {
  try {
    call();
    return "";
  } catch (const Trouble& trouble) {
    return trouble.message.empty() ? "?" : trouble.message;
  }
}

bool has(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// A few steps: three slots of one page each, a copy, a read. The sum of what came out.
double decode(int32_t handle, int steps) {
  const auto pool = find_pool(handle);
  const uint16_t one = 0x3c00;  // float16
  std::vector<uint16_t> kv(3 * 16, one), q(3 * 2 * 16, one), out(q.size());
  std::vector<float> lse(6);
  const int32_t pages[] = {0, 1, 9};  // the last one does not exist
  const int32_t table[] = {0, 3, 3, 1, -7, 3, 9, 9, 9};
  double total = 0;
  int32_t version = 0;
  for (int step = 0; step < steps; ++step) {
    const int32_t offsets[] = {step, step, step}, lens[] = {step + 1, step + 1, 1};
    for (int32_t layer = 0; layer < 2; ++layer) {
      Attention a{};
      a.q = q.data();
      a.table = table;
      a.lens = lens;
      a.slots = a.pages_per_slot = 3;
      a.scale = 0.25f;
      a.out = out.data();
      a.lse = lse.data();
      version = pool->step(version, layer, {kv.data(), kv.data(), pages, offsets, 3}, a, {});
      expect(out[0] == one && out[2 * 16] == one && out[4 * 16] == 0, "ones give ones");
      total += lse[0];
    }
  }
  const int32_t from[] = {0, 5}, to[] = {2, 4};
  version = pool->copy(version, from, to, 2);
  std::vector<uint16_t> k(3 * 16 * 16), v(k.size());
  const int32_t wanted[] = {2, -1, 4};
  pool->read(version, 1, wanted, 3, k.data(), v.data());
  expect(k[0] == one && v[15] == one && k[16 * 16] == 0 && k[2 * 16 * 16] == 0, "the copy");
  expect(version == 2 * steps + 1, "a version for each change");
  return total;
}

void test_both_places() {
  const int32_t npu = open_pool(small(), true, 0, kTimeoutMs);
  const int32_t host = open_pool(small(), false, 0, kTimeoutMs);
  const double difference = decode(npu, 6) - decode(host, 6);
  expect(difference < 1e-3 && difference > -1e-3, "the same log-sum-exps");
  expect(has(thrown([&] { find_pool(npu)->copy(0, nullptr, nullptr, 0); }), "stale"), "stale");
  close_pool(npu);
  close_pool(host);
  expect(has(thrown([&] { find_pool(npu); }), "is closed"), "closed");
  expect(held() == 0, "nothing is left");
}

void test_faults() {
  for (const char* kind :
       {"malloc", "malloc_host", "copy", "launch", "kernel", "timeout", "lost"}) {
    for (int nth = 1; nth < 9; ++nth) {
      MOCK(mock_acl_fail)(kind, nth);
      int32_t handle = 0;
      std::string said = thrown([&] {
        handle = open_pool(small(), true, 0, kTimeoutMs);
        decode(handle, 2);
      });
      if (handle != 0) {
        std::string poison;
        const Status status = find_pool(handle)->status(&poison);
        expect(said.empty() == (status.state == 0), "poisoned exactly if it failed");
        close_pool(handle);
      } else {
        expect(!said.empty(), "an error where nothing was opened");
      }
      MOCK(mock_acl_restore)();
      expect(held() == 0, kind);
    }
  }
}

// Calls of many threads while the pool is closed: each is done or refused.
void test_closing_under_way() {
  for (int round = 0; round < 5; ++round) {
    const int32_t handle = open_pool(small(), true, 0, kTimeoutMs);
    std::atomic<int> done{0}, refused{0};
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n) {
      threads.emplace_back([&] {
        std::vector<uint16_t> k(16 * 16), v(k.size());
        const int32_t page = 1;
        for (int i = 0; i < 20; ++i) {
          const std::string said = thrown(
              [&] { find_pool(handle)->read(0, 0, &page, 1, k.data(), v.data()); });
          if (said.empty()) {
            ++done;
          } else {
            expect(has(said, "is closed"), said.c_str());
            ++refused;
          }
        }
      });
    }
    while (done.load() < 10) std::this_thread::yield();
    close_pool(handle);
    expect(held() == 0, "nothing is left after closing");
    for (std::thread& thread : threads) thread.join();
    expect(done + refused == 80, "every call is answered");
  }
}

}  // namespace

int main() {
  test_both_places();
  test_faults();
  test_closing_under_way();
  close_all();
  pagedjax::acl::finalize();
  std::printf(failures == 0 ? "device executor: fine\n" : "device executor: FAILED\n");
  return failures == 0 ? 0 : 1;
}
