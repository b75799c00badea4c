// One simulated AI core: its unified buffer, its pipes, the flags between them, and the
// errors it has found. Nothing here is a template; sources in ../src.
//
// Every instruction is seen twice. When the scalar unit issues it, it is checked, and
// its accesses are compared by vector clocks with all earlier ones: this finds a
// missing wait whatever the order of execution. Then it is queued on its pipe, and runs
// when the schedule says, but no later than a wait demands.
//
//   scalar unit --issue--> [V:    Add | Exp | set flag ] --> unified buffer
//   (in order)        \--> [MTE2: copy | copy          ] --> unified buffer
//                      \-> [MTE3: wait flag | copy     ] --> global memory
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim_types.h"

namespace simulator {

using AscendC::HardEvent;
using AscendC::TPosition;

// A place in the kernel's source: the default argument `Where at = Where::here()` is
// evaluated where the call is written.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
    return Where{file, line};
  }
};

struct Product {
  const char* name;
  int64_t ub_bytes;  // usable by kernels
  int events;        // event ids of a pair of pipes; queue buffers of a position
};

constexpr Product kProduct = __NPU_ARCH__ == 2201 ? Product{"arch 2201", 184 * 1024, 8}
                                                  : Product{"arch 1001", 248 * 1024, 4};
constexpr int64_t kBlock = 32;    // bytes of a UB block
constexpr int64_t kRepeat = 256;  // bytes of one repeat of a vector instruction
constexpr int kMaxBuffers = 64;   // of one kernel

enum Pipe : uint8_t { kScalar, kVector, kMte2, kMte3, kPipes };
constexpr int kCache = kPipes;  // scalar stores to GM, until the cache is cleaned
using Clock = std::array<uint32_t, kPipes + 1>;

// One operand of an instruction in the unified buffer.
struct View {
  int64_t at;        // UB byte address
  int64_t lo, hi;    // the buffer it belongs to
  int64_t esize;     // bytes of an element
  int64_t blk, rep;  // strides in blocks
  int buffer;        // of a queue, or -1
  uint32_t generation;
  TPosition position;
  const char* role;  // "dst", "src0", ...
  int64_t align;     // bytes the address must be a multiple of
};

// The elements of a vector instruction that take part.
struct Lanes {
  int64_t per_repeat;
  int64_t repeats;
  int64_t count;     // counter mode: elements in all; -1: the mask says
  uint64_t bits[2];  // mask of each repeat
};

inline int64_t total_repeats(const Lanes& lanes) {
  if (lanes.count < 0) return lanes.repeats;
  return (lanes.count + lanes.per_repeat - 1) / lanes.per_repeat;
}

inline bool is_active(const Lanes& lanes, int64_t repeat, int64_t lane) {
  if (lanes.count >= 0) return repeat * lanes.per_repeat + lane < lanes.count;
  return lanes.bits[lane >> 6] >> (lane & 63) & 1;
}

inline int64_t address(const View& view, int64_t repeat, int64_t lane) {
  const int64_t per_block = kBlock / view.esize;
  return view.at + (repeat * view.rep + lane / per_block * view.blk) * kBlock +
         lane % per_block * view.esize;
}

// Blocks of bytes in global memory.
struct Blocks {
  uintptr_t at;
  int64_t bytes, count, step;  // of a block; blocks; from one to the next
};

struct GmAccess {
  Blocks blocks;
  uint32_t tick;
  uint8_t pipe;
  int core;
  Where at;
};

struct QueueBuffer {
  int64_t lo, hi;
  enum State : uint8_t { kFree, kTaken, kQueued } state = kFree;
  uint32_t generation = 0;
  int queued_event = -1;  // set when it was queued
  int freed_event = -1;   // set when it was freed
  Where taken{"", 0};
};

struct Queue {
  TPosition from, to;
  int depth;
  std::vector<int> buffers;
  std::deque<int> waiting;
  size_t next = 0;
};

struct Flag {
  bool taken = false;  // by AllocEventID or a queue
  bool set = false;
  bool of_queue = false;
  Clock clock{};
  Where at{"", 0};
};

struct MaskState {
  bool counter = false;
  uint64_t bits[2] = {~uint64_t(0), ~uint64_t(0)};
};

// SplitMix64: https://prng.di.unimi.it/splitmix64.c.
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

// Thrown to leave a kernel that cannot go on; the error is already recorded.
struct Stopped {};

struct Launch;

// What an instruction does when its pipe runs it.
struct Action {
  virtual ~Action() = default;
  virtual void run() = 0;
};

class Core {
 public:
  Core(Launch* launch, int index, uint64_t seed);
  ~Core();
  Core(const Core&) = delete;

  // Errors: rule is a short name such as "ub-align".
  void error(Where at, const char* api, const char* rule, const std::string& text);
  [[noreturn]] void stop(Where at, const char* api, const char* rule,
                         const std::string& text);

  // Buffers and queues.
  bool init_queue(int queue, int64_t num, int64_t bytes, Where at);
  int64_t init_buffer(int64_t bytes, Where at);  // UB address
  int add_queue(TPosition from, TPosition to, int depth);
  int take(int queue, Where at);  // AllocTensor: the buffer
  void put(int queue, int buffer, uint32_t generation, Where at);
  int get(int queue, Where at);
  void give(int queue, int buffer, uint32_t generation, Where at);
  const QueueBuffer& buffer(int index) const { return buffers_[index]; }
  const Queue& queue(int index) const { return queues_[index]; }

  // Flags.
  int fetch_event(HardEvent event, Where at);
  int take_event(HardEvent event, Where at);
  void give_event(HardEvent event, int id, Where at);
  void set_flag(HardEvent event, int id, bool of_queue, const char* api, Where at);
  void wait_flag(HardEvent event, int id, const char* api, Where at);
  void barrier(pipe_t pipe, Where at);
  void clean_cache();

  // Instructions: `begin`, then the accesses, then `issue` if all was well.
  void begin(Pipe pipe, const char* api, Where at);
  bool use(const View& view, int64_t lo, int64_t hi, bool write);
  void forget(int64_t lo, int64_t hi);  // written, but with nothing one may read
  bool check_view(const View& view);
  bool vector(const char* api, Where at, const Lanes& lanes, const View* dst, int dsts,
              const View* src, int srcs);
  bool gm(const Blocks& blocks, int64_t esize, bool write);
  template <class F>
  void issue(F run) {
    struct Held : Action {
      explicit Held(F run) : call(run) {}
      void run() override { call(); }
      F call;
    };
    issue_action(std::unique_ptr<Action>(new Held(run)));
  }
  void scalar_access(const View& view, int64_t at, int64_t bytes, bool write,
                     const char* api, Where where);
  bool scalar_gm(uintptr_t at, int64_t bytes, int64_t esize, bool write,
                 const char* api, Where where);
  void finish();

  uint8_t* ub() { return ub_.data(); }
  MaskState& mask() { return mask_; }
  int index() const { return index_; }
  void* pipe_object = nullptr;  // the kernel's TPipe

 private:
  void issue_action(std::unique_ptr<Action> action);
  struct Record {
    uint32_t write = 0;
    uint8_t writer = 0;
    uint16_t line = 0;  // index of the writer's place
    uint32_t read[kPipes] = {};
  };
  struct Operation {
    enum Kind : uint8_t { kRun, kSet, kWait } kind;
    int flag;
    std::unique_ptr<Action> action;  // of kRun
  };
  bool touch(Record& record, bool write, int64_t at);
  bool mark(int64_t lo, int64_t hi, bool write);
  bool overlap(const Lanes& lanes, const View& dst, const View& src);
  int flag_key(HardEvent event, int id) const;
  int place_index(Where at);
  void push(Pipe pipe, Operation op);
  bool ready(Pipe pipe) const;
  void run_one(Pipe pipe);
  void advance(Pipe pipe);
  void run_some();
  void drain();
  bool known(uint8_t pipe, uint32_t tick) const { return tick <= clocks_[pipe_][pipe]; }

  Launch* launch_;
  int index_;
  std::vector<uint8_t> ub_;
  std::vector<uint8_t> written_;                                // per byte
  std::vector<Record> records_;                                 // per block
  std::vector<std::unique_ptr<std::array<Record, 16>>> parts_;  // per 2 bytes
  int64_t used_ = 0;
  int buffers_made_ = 0;
  std::deque<QueueBuffer> buffers_;
  std::deque<Queue> queues_;
  std::array<int, 16> per_position_{};
  std::vector<Flag> flags_;
  MaskState mask_;

  uint32_t ticks_[kPipes + 1] = {};
  Clock clocks_[kPipes] = {};
  Pipe pipe_ = kScalar;  // of the instruction being issued
  const char* api_ = "";
  Where at_{"", 0};
  uint32_t tick_ = 0;
  uint16_t place_ = 0;
  std::vector<Where> places_;
  std::map<uintptr_t, std::pair<uintptr_t, GmAccess>> gm_writes_;  // lo -> hi
  std::deque<GmAccess> gm_reads_;

  bool in_order_;
  int laziness_;  // of 8
  Random random_;
  std::deque<Operation> pending_[kPipes];
  std::vector<int> raised_;  // flags that are set, as the pipes see them
};

Core& core();  // the one this thread runs; outside a launch this throws
void pipes_of(HardEvent event, Pipe* from, Pipe* to);
const char* name_of(Pipe pipe);
const char* name_of(HardEvent event);
std::string number(int64_t value);

}  // namespace simulator
