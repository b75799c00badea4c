// Flags and barriers, accesses to global memory, and the order in which pipes run.
#include <algorithm>
#include <stdexcept>

#include "launch.h"
#include "sim_core.h"

namespace simulator {

namespace {

struct EventPipes {
  Pipe from, to;
  const char* name;
};

constexpr EventPipes kEvents[] = {
    {kMte2, kVector, "MTE2_V"},  {kVector, kMte2, "V_MTE2"},
    {kMte3, kVector, "MTE3_V"},  {kVector, kMte3, "V_MTE3"},
    {kVector, kScalar, "V_S"},   {kScalar, kVector, "S_V"},
    {kMte2, kScalar, "MTE2_S"},  {kScalar, kMte2, "S_MTE2"},
    {kMte3, kScalar, "MTE3_S"},  {kScalar, kMte3, "S_MTE3"},
    {kMte2, kMte3, "MTE2_MTE3"}, {kMte3, kMte2, "MTE3_MTE2"},
    {kVector, kVector, "V_V"},
};

void join(Clock* into, const Clock& other) {
  for (size_t i = 0; i < into->size(); ++i) (*into)[i] = std::max((*into)[i], other[i]);
}

}  // namespace

void pipes_of(HardEvent event, Pipe* from, Pipe* to) {
  *from = kEvents[size_t(event)].from;
  *to = kEvents[size_t(event)].to;
}

const char* name_of(HardEvent event) { return kEvents[size_t(event)].name; }

const char* name_of(Pipe pipe) {
  constexpr const char* kNames[] = {"the scalar unit", "V", "MTE2", "MTE3"};
  return kNames[pipe];
}

// Flags -------------------------------------------------------------------------------

int Core::flag_key(HardEvent event, int id) const { return int(event) * 8 + id; }

int Core::fetch_event(HardEvent event, Where at) {
  for (int id = 0; id < kProduct.events; ++id) {
    if (!flags_[size_t(flag_key(event, id))].taken) return id;
  }
  stop(at, "FetchEventID", "event-id",
       std::string("all ") + number(kProduct.events) + " ids of " + name_of(event) +
           " are taken by AllocEventID and queues");
}

int Core::take_event(HardEvent event, Where at) {
  const int id = fetch_event(event, at);
  flags_[size_t(flag_key(event, id))].taken = true;
  return id;
}

void Core::give_event(HardEvent event, int id, Where at) {
  if (id < 0 || id >= kProduct.events || !flags_[size_t(flag_key(event, id))].taken) {
    error(at, "ReleaseEventID", "event-id",
          number(id) + " of " + name_of(event) + " was not taken by AllocEventID");
    return;
  }
  flags_[size_t(flag_key(event, id))].taken = false;
}

void Core::set_flag(HardEvent event, int id, bool of_queue, const char* api, Where at) {
  if (id < 0 || id >= kProduct.events) {
    error(at, api, "event-id",
          "id " + number(id) + " of " + name_of(event) + ", but " + kProduct.name +
              " has ids 0 to " + number(kProduct.events - 1));
    return;
  }
  Flag& flag = flags_[size_t(flag_key(event, id))];
  if (flag.set) {
    error(at, api, "event-unpaired",
          std::string(name_of(event)) + " " + number(id) + " is already set, at " +
              place_of(flag.at) + ", and nothing has waited for it");
    return;
  }
  Pipe from, to;
  pipes_of(event, &from, &to);
  begin(from, api, at);
  flag.set = true;
  flag.of_queue = of_queue;
  flag.at = at;
  flag.clock = clocks_[from];
  flag.clock[from] = tick_;
  push(from, Operation{Operation::kSet, flag_key(event, id), nullptr});
}

void Core::wait_flag(HardEvent event, int id, const char* api, Where at) {
  if (id < 0 || id >= kProduct.events) {
    error(at, api, "event-id",
          "id " + number(id) + " of " + name_of(event) + ", but " + kProduct.name +
              " has ids 0 to " + number(kProduct.events - 1));
    return;
  }
  Flag& flag = flags_[size_t(flag_key(event, id))];
  if (!flag.set) {
    error(at, api, "event-unpaired",
          std::string("waits for ") + name_of(event) + " " + number(id) +
              ", which nothing has set: the device hangs");
    return;
  }
  Pipe from, to;
  pipes_of(event, &from, &to);
  begin(to, api, at);
  join(&clocks_[to], flag.clock);
  flag.set = false;
  push(to, Operation{Operation::kWait, flag_key(event, id), nullptr});
}

void Core::barrier(pipe_t pipe, Where at) {
  switch (pipe) {
    case PIPE_V:
    case PIPE_MTE2:
    case PIPE_MTE3: {
      const Pipe own = pipe == PIPE_V ? kVector : pipe == PIPE_MTE2 ? kMte2 : kMte3;
      begin(own, "PipeBarrier", at);
      clocks_[own][own] = tick_;  // pipes run in order: there is nothing to queue
      return;
    }
    case PIPE_ALL: {
      Clock all{};
      for (int p = 0; p < kPipes; ++p) {
        join(&all, clocks_[p]);
        all[size_t(p)] = ticks_[p];
      }
      for (Clock& clock : clocks_) join(&clock, all);
      drain();
      return;
    }
    default:
      error(at, "PipeBarrier", "product",
            "orders V, MTE2, MTE3 or ALL here; the scalar unit is in order by itself");
  }
}

void Core::clean_cache() { clocks_[kScalar][kCache] = ticks_[kCache]; }

// Global memory -----------------------------------------------------------------------

namespace {

uintptr_t end_of(const Blocks& blocks) {
  return blocks.at + uintptr_t((blocks.count - 1) * blocks.step + blocks.bytes);
}

bool meet(const Blocks& a, const Blocks& b) {
  if (a.at >= end_of(b) || b.at >= end_of(a)) return false;
  bool found = false;
  for_pieces(a, [&](uintptr_t lo, uintptr_t hi) {
    for_pieces(b, [&](uintptr_t from, uintptr_t to) { found |= lo < to && from < hi; });
  });
  return found;
}

}  // namespace

bool Core::gm(const Blocks& blocks, int64_t esize, bool write) {
  if (blocks.count <= 0 || blocks.bytes <= 0) return true;
  const Region* region = launch_->find(blocks.at);
  if (blocks.at % uintptr_t(esize) != 0) {
    error(at_, api_, "gm-align",
          "a global address is not a multiple of the element's " + number(esize) +
              " bytes");
    return false;
  }
  if (region == nullptr || end_of(blocks) > region->at + region->bytes) {
    std::string text = "no global memory at this address";
    if (region != nullptr) {
      text = "bytes " + number(int64_t(blocks.at - region->at)) + " to " +
             number(int64_t(end_of(blocks) - region->at)) + " of " + region->name +
             ", which has " + number(int64_t(region->bytes));
    }
    error(at_, api_, "gm-bounds", (write ? "writes " : "reads ") + text);
    return false;
  }
  const uint8_t pipe = write && pipe_ == kScalar ? uint8_t(kCache) : uint8_t(pipe_);
  const uint32_t tick = pipe == kCache ? ++ticks_[kCache] : tick_;
  const GmAccess access{blocks, tick, pipe, index_, at_};
  (write ? launch_->writes : launch_->reads).push_back(access);
  bool good = true;
  for_pieces(blocks, [&](uintptr_t lo, uintptr_t hi) {
    auto it = gm_writes_.upper_bound(lo);
    if (it != gm_writes_.begin() && std::prev(it)->second.first > lo) --it;
    for (; good && it != gm_writes_.end() && it->first < hi; ++it) {
      const GmAccess& earlier = it->second.second;
      if (earlier.tick <= clocks_[pipe_][earlier.pipe]) continue;
      if (earlier.pipe == kCache && pipe == kCache) continue;
      error(at_, api_, "race-gm",
            std::string(name_of(pipe_)) + (write ? " writes" : " reads") +
                " global memory that " +
                (earlier.pipe == kCache
                     ? std::string("the scalar unit stores")
                     : std::string(name_of(Pipe(earlier.pipe))) + " writes") +
                " at " + place_of(earlier.at) +
                (earlier.pipe == kCache ? ", with no DataCacheCleanAndInvalid and wait"
                                        : ", with no wait or barrier between"));
      good = false;
    }
  });
  if (!write) {
    if (pipe_ == kMte2) gm_reads_.push_back(access);
    return true;
  }
  while (!gm_reads_.empty() && gm_reads_.front().tick <= clocks_[pipe_][kMte2]) {
    gm_reads_.pop_front();
  }
  for (const GmAccess& read : gm_reads_) {
    if (read.tick <= clocks_[pipe_][kMte2] || !meet(read.blocks, blocks)) continue;
    error(at_, api_, "race-gm",
          std::string(name_of(pipe_)) +
              " writes global memory that MTE2 may still read, at " +
              place_of(read.at) + ": no wait between");
    break;
  }
  for_pieces(blocks, [&](uintptr_t lo, uintptr_t hi) {
    auto it = gm_writes_.upper_bound(lo);
    if (it != gm_writes_.begin()) {
      auto before = std::prev(it);
      const auto held = before->second;
      if (held.first > lo) {
        if (held.first > hi) gm_writes_[hi] = held;
        if (before->first == lo) {
          gm_writes_.erase(before);
        } else {
          before->second.first = lo;
        }
      }
    }
    it = gm_writes_.lower_bound(lo);
    while (it != gm_writes_.end() && it->first < hi) {
      const auto held = it->second;
      it = gm_writes_.erase(it);
      if (held.first > hi) {
        gm_writes_[hi] = held;
        break;
      }
    }
    gm_writes_[lo] = {hi, access};
  });
  return true;
}

bool Core::scalar_gm(uintptr_t at, int64_t bytes, int64_t esize, bool write,
                     const char* api, Where where) {
  begin(kScalar, api, where);
  return gm(Blocks{at, bytes, 1, bytes}, esize, write);
}

// The schedule ------------------------------------------------------------------------

void Core::issue_action(std::unique_ptr<Action> action) {
  push(pipe_, Operation{Operation::kRun, 0, std::move(action)});
}

void Core::push(Pipe pipe, Operation op) {
  if (pipe == kScalar) {
    if (op.kind == Operation::kSet) ++raised_[size_t(op.flag)];
    if (op.kind == Operation::kWait) {
      Pipe from, to;
      pipes_of(HardEvent(op.flag / 8), &from, &to);
      while (raised_[size_t(op.flag)] == 0) advance(from);
      --raised_[size_t(op.flag)];
    }
    return;
  }
  pending_[pipe].push_back(std::move(op));
  if (in_order_) {
    run_one(pipe);
  } else {
    run_some();
  }
}

bool Core::ready(Pipe pipe) const {
  if (pending_[pipe].empty()) return false;
  const Operation& op = pending_[pipe].front();
  return op.kind != Operation::kWait || raised_[size_t(op.flag)] > 0;
}

void Core::run_one(Pipe pipe) {
  const Operation op = std::move(pending_[pipe].front());
  pending_[pipe].pop_front();
  if (op.kind == Operation::kSet) ++raised_[size_t(op.flag)];
  if (op.kind == Operation::kWait) --raised_[size_t(op.flag)];
  if (op.kind == Operation::kRun) op.action->run();
}

// Runs the next operation of a pipe, and before it what it waits for. A flag is waited
// for only after it was set, so this ends.
void Core::advance(Pipe pipe) {
  while (!ready(pipe)) {
    if (pending_[pipe].empty()) throw std::logic_error("a pipe waits for nothing");
    Pipe from, to;
    pipes_of(HardEvent(pending_[pipe].front().flag / 8), &from, &to);
    advance(from);
  }
  run_one(pipe);
}

// A seed's laziness is how often the pipes stay behind: always, mostly, or half the
// time.
void Core::run_some() {
  while (int(random_() % 8) >= laziness_) {
    Pipe able[kPipes];
    int count = 0;
    for (int p = kVector; p < kPipes; ++p) {
      if (ready(Pipe(p))) able[count++] = Pipe(p);
    }
    if (count == 0) return;
    run_one(able[random_() % uint64_t(count)]);
  }
}

void Core::drain() {
  for (;;) {
    Pipe able[kPipes];
    int count = 0;
    for (int p = kVector; p < kPipes; ++p) {
      if (!pending_[p].empty()) able[count++] = Pipe(p);
    }
    if (count == 0) return;
    advance(able[random_() % uint64_t(count)]);
  }
}

void Core::finish() {
  drain();
  for (const Queue& queue : queues_) {
    for (const int index : queue.buffers) {
      const QueueBuffer& buffer = buffers_[size_t(index)];
      if (buffer.state == QueueBuffer::kFree) continue;
      error(buffer.taken, "AllocTensor", "leak",
            buffer.state == QueueBuffer::kQueued
                ? "the tensor is still in its queue when the kernel ends: no DeQue"
                : "the tensor is never given back: no FreeTensor");
    }
  }
  for (size_t key = 0; key < flags_.size(); ++key) {
    const Flag& flag = flags_[key];
    const HardEvent event = HardEvent(key / 8);
    if (flag.set && !flag.of_queue) {
      error(flag.at, "SetFlag", "event-unpaired",
            std::string(name_of(event)) + " " + number(int64_t(key % 8)) +
                " is set when the kernel ends: no WaitFlag");
    }
  }
}

}  // namespace simulator
