// Tests of the executor without XLA: every instruction set of this processor against a
// plain loop in double precision. Exits with 1 and a line per failure.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "pages.h"
#include "prefixes.h"

namespace {

using namespace pagedjax;

int failures = 0;

void expect(bool fine, const std::string& what) {
  if (fine) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// --- element formats, the slow way ---------------------------------------------------

double widen(DType dtype, const void* at, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(at)[i];
  if (dtype == DType::kI8) return static_cast<const int8_t*>(at)[i];
  if (dtype == DType::kF8E4M3) {
    const int x = static_cast<const uint8_t*>(at)[i], e = (x >> 3) & 15, m = x & 7;
    if ((x & 0x7f) == 0x7f) return std::nan("");
    const double size = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
    return x & 0x80 ? -size : size;
  }
  const int x = static_cast<const uint16_t*>(at)[i];
  if (dtype == DType::kBF16) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const int e = (x >> 10) & 31, m = x & 1023;
  const double size = e == 0    ? std::ldexp(m, -24)
                      : e == 31 ? (m ? std::nan("") : HUGE_VAL)
                                : std::ldexp(1024 + m, e - 25);
  return x & 0x8000 ? -size : size;
}

// Puts a random value of the format, |x| < 4, at place i.
void put_random(DType dtype, void* at, int64_t i, std::mt19937& rng) {
  const float x = std::normal_distribution<float>(0, 1)(rng);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(at)[i] = x;
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(at)[i] = bits >> 16;
      break;
    case DType::kF16:  // any bits with an exponent up to 2^1, denormals included
      static_cast<uint16_t*>(at)[i] = (rng() & 0x8000) | (rng() % (17 << 10));
      break;
    case DType::kI8:
      static_cast<int8_t*>(at)[i] = static_cast<int8_t>(rng() % 255 - 127);
      break;
    case DType::kF8E4M3:  // up to 2, denormals included
      static_cast<uint8_t*>(at)[i] = (rng() & 0x80) | (rng() % 0x41);
      break;
  }
}

// --- a case ----------------------------------------------------------------------------

struct Options {
  int64_t heads = 4, kv_heads = 2, dim = 16, page_size = 4;
  DType q_dtype = DType::kF32, kv_dtype = DType::kF32;
  std::vector<int32_t> lens;
  std::vector<int32_t> q_lens;  // empty: decode
  int64_t window = 0;
  float soft_cap = 0;
  int64_t shared_pages = 0;  // leading pages that all slots share
  unsigned seed = 0;
};

std::string text(const Options& o) {
  return "H" + std::to_string(o.heads) + " K" + std::to_string(o.kv_heads) + " D" +
         std::to_string(o.dim) + " page" + std::to_string(o.page_size) + " q" +
         std::to_string(int(o.q_dtype)) + " kv" + std::to_string(int(o.kv_dtype)) + " window" +
         std::to_string(o.window) + " cap" + std::to_string(o.soft_cap) + " shared" +
         std::to_string(o.shared_pages) + (o.q_lens.empty() ? " decode" : " ragged");
}

// Memory whose end is guarded by what the sanitizers know of the heap.
struct Case {
  explicit Case(const Options& options);
  Problem problem(bool share = true) const;

  Options o;
  int64_t tokens, pages;
  std::vector<char> q, k, v;
  std::vector<float> k_scales, v_scales;
  std::vector<int32_t> table, cu;
  mutable std::vector<char> out;
  mutable std::vector<float> lse;
};

Case::Case(const Options& options) : o(options) {
  std::mt19937 rng(o.seed);
  int64_t width = 1;
  for (int32_t n : o.lens) width = std::max<int64_t>(width, (n + o.page_size - 1) / o.page_size);
  pages = width * o.lens.size() + 2;
  std::vector<int32_t> order(pages);
  for (int64_t i = 0; i < pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  const int32_t garbage[] = {static_cast<int32_t>(pages), -1, INT32_MAX, INT32_MIN, 0};
  int64_t taken = 0;
  for (size_t s = 0; s < o.lens.size(); ++s) {
    const int32_t n = o.lens[s];
    for (int64_t i = 0; i < width; ++i) {
      const bool live = i * o.page_size < n;
      const bool shared = live && s > 0 && i < o.shared_pages && o.lens[0] >= n;
      table.push_back(shared ? table[i] : live ? order[taken++] : garbage[rng() % 5]);
    }
  }
  tokens = o.lens.size();
  if (!o.q_lens.empty()) {
    cu.push_back(0);
    for (int32_t n : o.q_lens) cu.push_back(cu.back() + n);
    tokens = cu.back() + 2;  // two rows of padding
  }
  const int64_t rows = pages * o.page_size * o.kv_heads, bytes = dtype_bytes(o.kv_dtype);
  q.resize(tokens * o.heads * o.dim * dtype_bytes(o.q_dtype));
  for (int64_t i = 0; i < tokens * o.heads * o.dim; ++i) put_random(o.q_dtype, q.data(), i, rng);
  k.assign(rows * o.dim * bytes, char(0xff));  // NaN, where the format has it
  v = k;
  if (bytes == 1) k_scales.assign(rows, std::numeric_limits<float>::quiet_NaN());
  v_scales = k_scales;
  for (size_t s = 0; s < o.lens.size(); ++s) {
    for (int64_t t = 0; t < o.lens[s]; ++t) {
      const int64_t row = table[s * width + t / o.page_size] * o.page_size + t % o.page_size;
      for (int64_t i = row * o.kv_heads; i < (row + 1) * o.kv_heads; ++i) {
        if (bytes == 1) k_scales[i] = v_scales[i] = 0.01f + 0.001f * (rng() % 16);
        for (int64_t d = 0; d < o.dim; ++d) {
          put_random(o.kv_dtype, k.data(), i * o.dim + d, rng);
          put_random(o.kv_dtype, v.data(), i * o.dim + d, rng);
        }
      }
    }
  }
}

Problem Case::problem(bool share) const {
  out.assign(tokens * o.heads * o.dim * dtype_bytes(o.q_dtype), char(0x55));
  lse.assign(tokens * o.heads, 7.0f);
  Problem p;
  p.num_tokens = tokens;
  p.num_slots = o.lens.size();
  p.pages_per_slot = table.size() / o.lens.size();
  p.num_pages = pages;
  p.page_size = o.page_size;
  p.num_heads = o.heads;
  p.num_kv_heads = o.kv_heads;
  p.head_dim = o.dim;
  p.q_dtype = o.q_dtype;
  p.kv_dtype = o.kv_dtype;
  p.q = q.data();
  p.k_pages = k.data();
  p.v_pages = v.data();
  p.k_scales = k_scales.empty() ? nullptr : k_scales.data();
  p.v_scales = v_scales.empty() ? nullptr : v_scales.data();
  p.page_indices = table.data();
  p.seq_lens = o.lens.data();
  p.cu_q_lens = cu.empty() ? nullptr : cu.data();
  p.scale = 1.0f / std::sqrt(static_cast<float>(o.dim));
  p.window = o.window;
  p.soft_cap = o.soft_cap;
  p.share_prefixes = share;
  p.out = out.data();
  p.lse = lse.data();
  return p;
}

// --- the plain loop ----------------------------------------------------------------------

void oracle(const Problem& p, std::vector<double>& out, std::vector<double>& lse) {
  out.assign(p.num_tokens * p.num_heads * p.head_dim, 0);
  lse.assign(p.num_tokens * p.num_heads, -HUGE_VAL);
  for (int64_t s = 0; s < p.num_slots; ++s) {
    const int64_t first = p.cu_q_lens ? p.cu_q_lens[s] : s;
    const int64_t queries = p.cu_q_lens ? p.cu_q_lens[s + 1] - first : 1;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t high = p.seq_lens[s] - queries + i + 1;
      const int64_t low = p.window > 0 ? std::max<int64_t>(0, high - p.window) : 0;
      for (int64_t h = 0; h < p.num_heads && high > 0; ++h) {
        const int64_t at = (first + i) * p.num_heads + h;
        std::vector<double> scores;
        std::vector<int64_t> rows;
        double top = -HUGE_VAL, sum = 0;
        for (int64_t t = low; t < high; ++t) {
          const int64_t page = p.page_indices[s * p.pages_per_slot + t / p.page_size];
          const int64_t row =
              (page * p.page_size + t % p.page_size) * p.num_kv_heads + h / p.group();
          double score = 0;
          for (int64_t d = 0; d < p.head_dim; ++d) {
            score += widen(p.q_dtype, p.q, at * p.head_dim + d) *
                     widen(p.kv_dtype, p.k_pages, row * p.head_dim + d);
          }
          score *= p.scale * (p.k_scales ? p.k_scales[row] : 1.0);
          if (p.soft_cap > 0) score = p.soft_cap * std::tanh(score / p.soft_cap);
          top = std::max(top, score);
          scores.push_back(score);
          rows.push_back(row);
        }
        for (double score : scores) sum += std::exp(score - top);
        for (size_t j = 0; j < rows.size(); ++j) {
          const double weight = std::exp(scores[j] - top) / sum;
          for (int64_t d = 0; d < p.head_dim; ++d) {
            out[at * p.head_dim + d] += weight *
                                        widen(p.kv_dtype, p.v_pages, rows[j] * p.head_dim + d) *
                                        (p.v_scales ? p.v_scales[rows[j]] : 1.0);
          }
        }
        lse[at] = top + std::log(sum);
      }
    }
  }
}

// --- threads -------------------------------------------------------------------------------

// Runs every closure on a thread of its own, and joins them when it goes.
struct Threads {
  ~Threads() {
    for (std::thread& thread : started) thread.join();
  }
  Executor executor(int64_t count) {
    Executor e;
    e.num_threads = count;
    e.schedule = [this](std::function<void()> task) { started.emplace_back(std::move(task)); };
    return e;
  }
  std::vector<std::thread> started;
};

void test_case(const Options& o) {
  const Case c(o);
  std::vector<double> out, lse;
  oracle(c.problem(), out, lse);
  const double unit = o.q_dtype == DType::kF32    ? 0x1p-23
                      : o.q_dtype == DType::kBF16 ? 0x1p-8
                                                  : 0x1p-11;
  int count = 0;
  const Kernels* const* all = all_kernels(&count);
  for (int i = 0; i < count; ++i) {
    for (bool share : {true, false}) {
      const std::string name = std::string(all[i]->name) + ": " + text(o);
      Threads threads;
      const Problem p = c.problem(share);
      expect(run_attention(p, threads.executor(2), *all[i]) == nullptr, name);
      double worst = 0, worst_lse = 0;
      for (size_t j = 0; j < out.size(); ++j) {
        const double got = widen(o.q_dtype, c.out.data(), j);
        const double error = std::abs(got - out[j]) / (8 * 0x1p-23 + unit * std::abs(out[j]));
        worst = error <= worst ? worst : error;  // NaN counts as worst
      }
      for (size_t j = 0; j < lse.size(); ++j) {
        const bool same = c.lse[j] == lse[j];  // both -inf
        const double error = same ? 0 : std::abs(c.lse[j] - lse[j]) / (1 + std::abs(lse[j]));
        worst_lse = error <= worst_lse ? worst_lse : error;
      }
      expect(worst <= 8, name + " out is off by " + std::to_string(worst) + " units");
      expect(worst_lse <= 16 * 0x1p-23, name + " lse is off by " + std::to_string(worst_lse));
    }
  }
}

void test_against_the_loop() {
  const std::vector<std::pair<int64_t, int64_t>> heads = {{4, 4}, {8, 1}, {6, 2}, {9, 3},
                                                          {8, 4}, {10, 2}};
  const int64_t dims[] = {64, 128, 80, 5, 32};
  const DType kv[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI8, DType::kF8E4M3};
  const DType queries[] = {DType::kF32, DType::kBF16, DType::kF16};
  unsigned seed = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    for (size_t d = 0; d < 5; ++d) {
      for (bool ragged : {false, true}) {
        Options o;
        o.heads = heads[h].first;
        o.kv_heads = heads[h].second;
        o.dim = dims[d];
        o.kv_dtype = kv[(h + d) % 5];
        o.q_dtype = o.kv_dtype == DType::kF32 ? DType::kF32 : queries[(h + 2 * d) % 3];
        o.page_size = (int64_t[]){1, 5, 8, 16, 64}[(h + 3 * d) % 5];
        o.window = (int64_t[]){0, 0, 1, 70}[(h + d) % 4];
        o.soft_cap = (h * 5 + d) % 3 == 2 ? 3.0f : 0.0f;
        o.lens = {0, 1, 97, static_cast<int32_t>(o.page_size), 300, 130};
        if (ragged) o.q_lens = {0, 1, 97, 1, 40, 3};
        o.seed = ++seed;
        test_case(o);
      }
    }
  }
  Options late;  // more queries than tokens: the first ones see nothing
  late.lens = {3, 0};
  late.q_lens = {5, 2};
  test_case(late);
}

void test_shared_prefixes() {
  for (int64_t window : {0, 100}) {
    Options o;
    o.heads = 9;
    o.kv_heads = 3;
    o.dim = 64;
    o.page_size = 16;
    o.lens = {1300, 1290, 1281, 1281, 70, 1280};
    o.shared_pages = 80;
    o.window = window;
    test_case(o);
  }
  const int32_t a[] = {4, 7, 2, 9}, b[] = {4, 7, 2, 5}, c[] = {4, 7, 8, 1}, d[] = {3, 7, 2, 9};
  const auto runs = find_shared_runs(
      {{0, a, 0, 16}, {1, b, 0, 15}, {2, c, 0, 12}, {3, d, 0, 16}, {4, a, 0, 3}}, 4);
  expect(runs.size() == 2, "two shared runs");
  if (runs.size() != 2) return;
  expect(runs[0].begin == 0 && runs[0].end == 2 && runs[0].rows == std::vector<int64_t>{0, 1, 2},
         "the outer run");
  expect(runs[1].begin == 2 && runs[1].end == 3 && runs[1].rows == std::vector<int64_t>{0, 1},
         "the inner run");
}

// Few queries over many keys: the keys are split, the parts merged.
void test_few_queries_over_many_keys() {
  for (int64_t window : {0, 2200}) {
    Options o;
    o.heads = 6;
    o.kv_heads = 2;
    o.dim = 32;
    o.page_size = 16;
    o.lens = {2700, 40, 2100};
    o.q_lens = {3, 5, 1};
    o.window = window;
    test_case(o);
  }
}

// A value that is not finite reaches the queries that see it, and no other.
void test_odd_values_stay_where_they_are_seen() {
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF};
  int count = 0;
  const Kernels* const* all = all_kernels(&count);
  for (int round = 0; round < 16; ++round) {
    const bool infinite = round % 4 == 1, key = round % 4 == 2;
    const int32_t length = round & 4 ? 150 : 90;  // the bad token is the 29th last
    Options o;
    o.dim = 32;
    o.kv_dtype = round & 8 ? DType::kBF16 : DType::kF32;
    o.lens = {length};
    o.q_lens = {50};
    o.window = round % 4 == 3 ? 20 : 0;
    const Case c(o);
    const int64_t token = length - 29, page = c.table[token / o.page_size];
    const int64_t row = page * o.page_size + token % o.page_size;
    Case bad = c;
    const int64_t bytes = dtype_bytes(o.kv_dtype);
    char* at = (key ? bad.k : bad.v).data() + ((row * o.kv_heads + 1) * o.dim + 3) * bytes;
    // The upper half of a float32 is the bfloat16.
    std::memcpy(at, reinterpret_cast<const char*>(&odd[infinite]) + 4 - bytes, bytes);
    for (int i = 0; i < count; ++i) {
      Threads threads;
      run_attention(c.problem(), threads.executor(1), *all[i]);
      run_attention(bad.problem(), threads.executor(1), *all[i]);
      const float* want = reinterpret_cast<const float*>(c.out.data());
      const float* got = reinterpret_cast<const float*>(bad.out.data());
      for (int64_t t = 0; t < 50; ++t) {
        const int64_t position = length - 50 + t;
        const bool sees = position >= token && (o.window == 0 || position < token + o.window);
        for (int64_t h = 0; h < o.heads; ++h) {
          bool same = true, finite = true;
          for (int64_t d = (t * o.heads + h) * o.dim; d < (t * o.heads + h + 1) * o.dim; ++d) {
            same = same && got[d] == want[d];
            finite = finite && std::isfinite(got[d]);
          }
          const bool fine = sees && h >= 2 ? !finite : same;
          expect(fine, std::string(all[i]->name) + ": a value that is not finite, round " +
                           std::to_string(round) + " query " + std::to_string(t));
        }
      }
    }
  }
}

void test_thread_counts_give_the_same_bits() {
  for (bool ragged : {false, true}) {
    Options o;
    o.heads = 8;
    o.kv_heads = 2;
    o.dim = 64;
    o.page_size = 16;
    o.lens = {1500, 700, 3, 1500, 2500};
    o.shared_pages = 40;
    if (ragged) o.q_lens = {300, 1, 3, 1, 4};
    const Case c(o);
    std::vector<char> first;
    for (int64_t count : {1, 2, 3, 8}) {
      Threads threads;
      const Problem p = c.problem();
      run_attention(p, threads.executor(count));
      if (first.empty()) first = c.out;
      expect(first == c.out, "the same bits on " + std::to_string(count) + " threads");
    }
  }
}

// Closures that start after the loop is over must find nothing, and touch nothing.
void test_late_helpers() {
  std::vector<std::function<void()>> kept;
  {
    Executor late;
    late.num_threads = 4;
    late.schedule = [&](std::function<void()> task) { kept.push_back(std::move(task)); };
    std::atomic<int64_t> sum{0};
    parallel_for(100, late, [&](int64_t i, int64_t worker) { sum += i + worker; });
    expect(sum == 4950, "the caller does all the work");
  }
  for (auto& task : kept) task();
}

void test_bad_input() {
  std::mt19937 rng(1);
  Options o;
  o.lens = {40, 40, 40};
  o.q_lens = {1, 7, 1};
  const Case c(o);
  for (int round = 0; round < 300; ++round) {
    Case bad = c;
    const int32_t wild[] = {-1, static_cast<int32_t>(c.pages), INT32_MAX, INT32_MIN, 1000};
    const int64_t slot = rng() % 3;
    Problem p = bad.problem();
    std::vector<int32_t> lens = o.lens;
    const int kind = rng() % 3;
    if (kind == 0) bad.table[slot * p.pages_per_slot + rng() % 10] = wild[rng() % 5];
    if (kind == 1) lens[slot] = wild[rng() % 5];
    if (kind == 2) bad.cu[rng() % 4] = wild[rng() % 5];
    p.seq_lens = lens.data();
    p.page_indices = bad.table.data();
    p.cu_q_lens = bad.cu.data();
    Threads threads;
    const char* wrong = run_attention(p, threads.executor(2));
    expect((kind == 2) == (wrong != nullptr), "only bad cu_q_lens are an error");
    if (kind == 0) {  // the slot's rows are skipped, the others untouched
      for (int64_t s = 0; s < 3; ++s) {
        const float lse = bad.lse[bad.cu[s] * o.heads];
        expect((s == slot) == (lse == -HUGE_VAL), "exactly the bad slot is skipped");
      }
    }
  }
}

void test_pages() {
  std::vector<char> held(3 * 2 * 4, 0), rows(4 * 4);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = i + 1;
  const int32_t pages[] = {2, 3, -1, 0}, offsets[] = {1, 0, 0, 2};
  write_rows(held.data(), rows.data(), pages, offsets, 4, 3, 2, 4);
  for (size_t i = 0; i < held.size(); ++i) {
    expect(held[i] == (i >= 20 ? char(i - 19) : 0), "only the row with a place is written");
  }
  std::vector<char> pool = {1, 2, 3, 4, 5, 6};  // 2 layers of 3 pages of 1 byte
  const int32_t src[] = {0, 3, 1}, dst[] = {2, 0, -1};
  copy_pages(pool.data(), src, dst, 3, 2, 3, 1);
  expect(pool == std::vector<char>{1, 2, 1, 4, 5, 4}, "copies in both layers");
}

}  // namespace

int main() {
  int count = 0;
  const Kernels* const* all = all_kernels(&count);
  for (int i = 0; i < count; ++i) std::printf("kernels: %s\n", all[i]->name);
  test_against_the_loop();
  test_shared_prefixes();
  test_few_queries_over_many_keys();
  test_odd_values_stay_where_they_are_seen();
  test_thread_counts_give_the_same_bits();
  test_late_helpers();
  test_bad_input();
  test_pages();
  std::printf(failures == 0 ? "all passed\n" : "%d failures\n", failures);
  return failures != 0;
}
