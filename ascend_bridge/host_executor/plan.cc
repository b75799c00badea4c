// Cuts a call into tasks and runs them.
//
//   slots with one query     -> span tasks: (query, kv heads, split of the keys), and
//                               tile tasks for leading pages that several queries share
//   slots with more queries  -> tile tasks: (some queries, kv head), all their keys, or
//                               split where few queries see many keys
//
// The cut depends on shapes, lengths and page ids only, never on the number of threads,
// and the parts of a query are merged in a fixed order by whoever finishes last: results
// are the same bits on any number of threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "prefixes.h"

namespace pagedjax {
namespace {

constexpr int64_t kSplitBytes = 1 << 20;       // keys and values of a span task
constexpr int64_t kMinSplit = 64;              // tokens
constexpr int64_t kMaxSplit = 256;             // tokens
constexpr int64_t kHeadBytes = 4096;           // of one token, read by a span task
constexpr int64_t kTileQueries = 192;          // query rows times heads of a tile task
constexpr int64_t kMaxTileQueries = 512;
constexpr int64_t kSharedTokens = 1024;        // keys of a tile task over shared pages
constexpr int64_t kMinShared = 256;            // tokens that sharing must save
constexpr int64_t kMaxTileSplits = 8;          // of the keys of few queries
constexpr int64_t kRunsPerWorker = 8;          // runs of span tasks: small against idling
constexpr int64_t kMaxRun = 8;                 // span tasks in a run
constexpr int64_t kAloneWork = 256 * 1024;     // bytes not worth waking a thread for

// Memory that is kept for the next call of the thread; only ever grows.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct Span {
  int64_t row, part;
  SpanTask task;
};

struct Tile {
  int64_t first_row;  // into Plan::tile_rows
  TileTask task;
};

struct Plan {
  std::vector<QueryRow> rows;        // queries that are merged from parts
  std::vector<int64_t> num_parts;    // per row
  std::vector<int64_t> num_tasks;    // per row: tasks that write one of its parts
  std::vector<Span> spans;
  std::vector<Tile> tiles;           // of both kinds
  std::vector<TileRow> tile_rows;
  std::vector<int64_t> tile_row_of;  // row of each tile row, -1 in a finishing task
  std::vector<int64_t> tile_part_of;
  std::vector<int64_t> empty;        // tokens without a visible key
  int64_t work = 0;                  // bytes, roughly
};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t head_bytes(const Problem& p) { return p.head_dim * dtype_bytes(p.kv_dtype); }

bool pages_exist(const Problem& p, const int32_t* pages, int64_t low, int64_t high) {
  for (int64_t i = low / p.page_size; i * p.page_size < high; ++i) {
    if (pages[i] < 0 || pages[i] >= p.num_pages) return false;
  }
  return true;
}

// A slot with several queries.
struct Several {
  const int32_t* pages;
  int64_t first_token, queries, length;
};

// The keys that a query sees: those before `high`, at most `window` of them.
int64_t lowest(const Problem& p, int64_t high) {
  return p.window > 0 ? std::max<int64_t>(0, high - p.window) : 0;
}

// The queries of a slot as tile tasks that finish them.
void plan_tiles(const Problem& p, const int32_t* pages, int64_t first_token, int64_t queries,
                int64_t length, Plan& plan) {
  // Keys are packed once a task: few tasks, but enough to share out.
  const int64_t tasks = std::max<int64_t>(4, 16 / p.num_kv_heads);
  const int64_t some = std::clamp(queries * p.group() / tasks, kTileQueries, kMaxTileQueries);
  const int64_t step = std::max<int64_t>(1, round_up(some, 32) / p.group());
  for (int64_t end = queries; end > 0; end -= step) {  // the longest first
    const int64_t begin = std::max<int64_t>(0, end - step);
    const int64_t at = plan.tile_rows.size();
    int64_t low = length, high = 0;
    for (int64_t i = begin; i < end; ++i) {
      TileRow row = {};
      row.token = first_token + i;
      row.high = std::max<int64_t>(0, length - queries + i + 1);
      row.low = lowest(p, row.high);
      low = std::min(low, row.low);
      high = std::max(high, row.high);
      plan.tile_rows.push_back(row);
      plan.tile_row_of.push_back(-1);
      plan.tile_part_of.push_back(0);
    }
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      Tile tile = {at, {pages, std::min(low, high), high, head, nullptr, end - begin, true}};
      plan.tiles.push_back(tile);
    }
    plan.work += (high - low) * (end - begin) * p.num_heads * p.head_dim / 4;
  }
}

// The keys [begin, end) of rows with the same pages as tile tasks that write parts.
void plan_parts(const Problem& p, const std::vector<int64_t>& rows, int64_t begin, int64_t end,
                int64_t split, Plan& plan) {
  const int64_t step = std::max<int64_t>(1, kTileQueries / p.group());
  const int64_t count = rows.size();
  const int32_t* pages = plan.rows[rows[0]].pages;
  for (int64_t t = begin; t < end; t += split) {
    const int64_t stop = std::min(end, t + split);
    for (int64_t first = 0; first < count; first += step) {
      const int64_t size = std::min(step, count - first), at = plan.tile_rows.size();
      for (int64_t i = first; i < first + size; ++i) {
        const QueryRow& row = plan.rows[rows[i]];
        plan.tile_rows.push_back({row.token, row.low, row.high, {}});
        plan.tile_row_of.push_back(rows[i]);
        plan.tile_part_of.push_back(plan.num_parts[rows[i]]++);
        plan.num_tasks[rows[i]] += p.num_kv_heads;
      }
      for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        plan.tiles.push_back({at, {pages, t, stop, head, nullptr, size, false}});
      }
    }
    plan.work += (stop - t) * 2 * p.num_kv_heads * head_bytes(p);
  }
}

// The keys [begin, end) of a row as span tasks.
void plan_spans(const Problem& p, int64_t row, int64_t begin, int64_t end, Plan& plan) {
  const int64_t heads =
      std::max<int64_t>(1, std::min(p.num_kv_heads, kHeadBytes / head_bytes(p)));
  const int64_t token_bytes = 2 * heads * head_bytes(p);
  const int64_t split = std::clamp(kSplitBytes / token_bytes / kMinSplit * kMinSplit, kMinSplit,
                                   kMaxSplit);
  for (int64_t t = begin; t < end; t += split) {
    const int64_t part = plan.num_parts[row]++;
    for (int64_t head = 0; head < p.num_kv_heads; head += heads) {
      Span span = {row, part, {}};
      span.task.token = plan.rows[row].token;
      span.task.pages = plan.rows[row].pages;
      span.task.begin = t;
      span.task.end = std::min(end, t + split);
      span.task.head_begin = head;
      span.task.head_end = std::min(p.num_kv_heads, head + heads);
      plan.spans.push_back(span);
      ++plan.num_tasks[row];
    }
  }
  plan.work += (end - begin) * 2 * p.num_kv_heads * head_bytes(p);
}

// Adds the queries of a slot as rows, and their keys as tile tasks in splits.
void plan_split(const Problem& p, const Several& slot, Plan& plan) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < slot.queries; ++i) {
    const int64_t high = std::max<int64_t>(0, slot.length - slot.queries + i + 1);
    rows.push_back(plan.rows.size());
    plan.rows.push_back({slot.first_token + i, slot.pages, lowest(p, high), high});
    plan.num_parts.push_back(0);
    plan.num_tasks.push_back(0);
  }
  const int64_t begin = plan.rows[rows[0]].low, keys = slot.length - begin;
  const int64_t split = std::max(kSharedTokens, round_up(keys / kMaxTileSplits, kMinSplit));
  plan_parts(p, rows, begin, slot.length, split, plan);
}

Plan make_plan(const Problem& p) {
  Plan plan;
  std::vector<Several> splits;
  const auto add_empty = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) plan.empty.push_back(t);
  };
  if (p.cu_q_lens != nullptr) {
    add_empty(0, p.cu_q_lens[0]);
    add_empty(p.cu_q_lens[p.num_slots], p.num_tokens);
  }
  for (int64_t s = 0; s < p.num_slots; ++s) {
    const int64_t first = p.cu_q_lens != nullptr ? p.cu_q_lens[s] : s;
    const int64_t queries = p.cu_q_lens != nullptr ? p.cu_q_lens[s + 1] - first : 1;
    if (queries == 0) continue;
    const int32_t* pages = p.page_indices + s * p.pages_per_slot;
    const int64_t length =
        std::clamp<int64_t>(p.seq_lens[s], 0, p.pages_per_slot * p.page_size);
    const int64_t oldest = std::max<int64_t>(0, length - queries + 1);  // sight of query 0
    const int64_t low = lowest(p, oldest);
    if (length == 0 || !pages_exist(p, pages, low, length)) {
      add_empty(first, first + queries);
    } else if (queries > 1 && queries * p.group() <= kTileQueries &&
               length - low >= 2 * kSharedTokens) {
      splits.push_back({pages, first, queries, length});
    } else if (queries > 1) {
      plan_tiles(p, pages, first, queries, length, plan);
    } else {
      plan.rows.push_back({first, pages, low, length});
    }
  }
  plan.num_parts.assign(plan.rows.size(), 0);
  plan.num_tasks.assign(plan.rows.size(), 0);
  std::vector<int64_t> reached(plan.rows.size());  // keys up to here have a task
  for (size_t i = 0; i < plan.rows.size(); ++i) reached[i] = plan.rows[i].low;
  if (p.share_prefixes && p.window == 0 && plan.rows.size() > 1) {
    for (const SharedRun& run : find_shared_runs(plan.rows, p.page_size)) {
      const int64_t begin = run.begin * p.page_size, end = run.end * p.page_size;
      const int64_t saved = ((int64_t)run.rows.size() - 1) * (end - begin);
      if (saved < kMinShared) continue;
      for (int64_t row : run.rows) {
        if (reached[row] < begin) plan_spans(p, row, reached[row], begin, plan);
        reached[row] = end;
      }
      plan_parts(p, run.rows, begin, end, kSharedTokens, plan);
    }
  }
  for (size_t i = 0; i < reached.size(); ++i) {
    plan_spans(p, i, reached[i], plan.rows[i].high, plan);
  }
  for (const Several& slot : splits) plan_split(p, slot, plan);
  return plan;
}

const char* check(const Problem& p) {
  if (p.cu_q_lens == nullptr) return nullptr;
  int64_t last = 0;
  for (int64_t s = 0; s <= p.num_slots; ++s) {
    if (p.cu_q_lens[s] < last || p.cu_q_lens[s] > p.num_tokens) {
      return "cu_q_lens must ascend from 0 to at most the number of queries";
    }
    last = p.cu_q_lens[s];
  }
  return nullptr;
}

}  // namespace

const char* run_attention(const Problem& p, const Executor& executor, const Kernels& k) {
  if (const char* wrong = check(p)) return wrong;
  Plan plan = make_plan(p);

  const int64_t num_rows = plan.rows.size(), num_tiles = plan.tiles.size();
  const int64_t num_spans = plan.spans.size();
  const int64_t out_floats = p.num_heads * p.head_dim;
  const int64_t part_floats = (out_floats + 2 * p.num_heads + 15) / 16 * 16;
  std::vector<int64_t> first_part(num_rows + 1, 0);
  for (int64_t i = 0; i < num_rows; ++i) {
    first_part[i + 1] = first_part[i] + plan.num_parts[i];
  }
  Executor hands = executor;
  if (plan.work < kAloneWork) hands.num_threads = 1;
  // Runs of consecutive spans go to one thread, which prefetches from one to the next.
  const int64_t run = std::clamp<int64_t>(num_spans / (hands.num_threads * kRunsPerWorker), 1,
                                          kMaxRun);
  const int64_t count = num_tiles + (num_spans + run - 1) / run;
  const int64_t workers = std::max<int64_t>(1, std::min(hands.num_threads, count));
  size_t scratch_bytes = plan.spans.empty() ? 0 : k.span_scratch(p);
  for (const Tile& tile : plan.tiles) {
    scratch_bytes = std::max(scratch_bytes, k.tile_scratch(p, tile.task.num_rows));
  }
  scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096;
  thread_local Scratch scratch;
  char* const memory = scratch.get(workers * scratch_bytes +
                                   first_part[num_rows] * part_floats * sizeof(float));
  float* const part_memory = reinterpret_cast<float*>(memory + workers * scratch_bytes);

  std::vector<Part> parts(first_part[num_rows]);
  for (size_t i = 0; i < parts.size(); ++i) {
    float* at = part_memory + i * part_floats;
    parts[i] = {at, at + out_floats, at + out_floats + p.num_heads};
  }
  for (int64_t i = 0; i < num_spans; ++i) {
    Span& span = plan.spans[i];
    span.task.part = parts[first_part[span.row] + span.part];
    const bool last = (i + 1) % run == 0 || i + 1 == num_spans;
    span.task.next = last ? nullptr : &plan.spans[i + 1].task;
  }
  for (size_t i = 0; i < plan.tile_rows.size(); ++i) {
    const int64_t row = plan.tile_row_of[i];
    if (row >= 0) plan.tile_rows[i].part = parts[first_part[row] + plan.tile_part_of[i]];
  }
  for (Tile& tile : plan.tiles) tile.task.rows = plan.tile_rows.data() + tile.first_row;

  std::unique_ptr<std::atomic<int64_t>[]> pending(new std::atomic<int64_t>[num_rows]);
  for (int64_t i = 0; i < num_rows; ++i) pending[i].store(plan.num_tasks[i]);
  const auto finished = [&](int64_t row) {
    if (pending[row].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    k.merge(p, plan.rows[row].token, parts.data() + first_part[row], plan.num_parts[row]);
  };
  for (int64_t token : plan.empty) k.merge(p, token, nullptr, 0);
  for (int64_t i = 0; i < num_rows; ++i) {
    if (plan.num_tasks[i] == 0) k.merge(p, plan.rows[i].token, nullptr, 0);
  }
  parallel_for(count, hands, [&](int64_t i, int64_t worker) {
    void* mine = memory + worker * scratch_bytes;
    if (i >= num_tiles) {
      const int64_t begin = (i - num_tiles) * run;
      for (int64_t j = begin; j < std::min(begin + run, num_spans); ++j) {
        k.span(p, plan.spans[j].task, mine);
        finished(plan.spans[j].row);
      }
      return;
    }
    const Tile& tile = plan.tiles[i];
    k.tile(p, tile.task, mine);
    if (tile.task.finish) return;
    for (int64_t r = 0; r < tile.task.num_rows; ++r) {
      finished(plan.tile_row_of[tile.first_row + r]);
    }
  });
  return nullptr;
}

}  // namespace pagedjax
