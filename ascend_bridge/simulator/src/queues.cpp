// Buffers of the unified buffer, and queues of them.
#include <algorithm>

#include "launch.h"
#include "sim_core.h"

namespace simulator {

namespace {
constexpr int64_t kArena = 1 << 20;  // beyond this a kernel that overflows is stopped
}  // namespace

// Buffers -----------------------------------------------------------------------------

int64_t Core::init_buffer(int64_t bytes, Where at) {
  if (bytes <= 0) {
    stop(at, "InitBuffer", "ub-capacity", "a buffer of " + number(bytes) + " bytes");
  }
  const int64_t place = used_;
  used_ += (bytes + kBlock - 1) / kBlock * kBlock;
  if (++buffers_made_ > kMaxBuffers) {
    error(at, "InitBuffer", "queue-buffers",
          number(buffers_made_) + " buffers, of at most " + number(kMaxBuffers));
  }
  if (used_ > kProduct.ub_bytes) {
    error(at, "InitBuffer", "ub-capacity",
          number(used_) + " bytes in all, but " + kProduct.name + " has " +
              number(kProduct.ub_bytes));
  }
  if (used_ > int64_t(ub_.size())) {
    if (used_ > kArena) throw Stopped{};
    ub_.resize(size_t(used_), 0xff);
    written_.resize(size_t(used_), 0);
    records_.resize(size_t(used_ / kBlock));
    parts_.resize(size_t(used_ / kBlock));
  }
  return place;
}

int Core::add_queue(TPosition from, TPosition to, int depth) {
  queues_.push_back(Queue{from, to, depth, {}, {}, 0});
  return int(queues_.size()) - 1;
}

bool Core::init_queue(int index, int64_t num, int64_t bytes, Where at) {
  Queue& queue = queues_[size_t(index)];
  int& of_position = per_position_[size_t(queue.from)];
  of_position += int(num);
  if (num < 1 || of_position > kProduct.events) {
    error(at, "InitBuffer", "queue-buffers",
          number(of_position) + " queue buffers of one position, but " + kProduct.name +
              " has event ids for 1 to " + number(kProduct.events));
  }
  for (int64_t i = 0; i < num; ++i) {
    QueueBuffer buffer;
    buffer.lo = init_buffer(bytes, at);
    buffer.hi = used_;
    queue.buffers.push_back(int(buffers_.size()));
    buffers_.push_back(buffer);
  }
  return true;
}

// Queues ------------------------------------------------------------------------------

namespace {

HardEvent event_between(TPosition from, TPosition to, bool freed) {
  const bool copies_in = from == TPosition::VECIN;
  const bool copies_out = to == TPosition::VECOUT;
  if (copies_in && copies_out) {
    return freed ? HardEvent::MTE3_MTE2 : HardEvent::MTE2_MTE3;
  }
  if (copies_in) return freed ? HardEvent::V_MTE2 : HardEvent::MTE2_V;
  if (copies_out) return freed ? HardEvent::MTE3_V : HardEvent::V_MTE3;
  return HardEvent::V_V;
}

}  // namespace

int Core::take(int index, Where at) {
  Queue& queue = queues_[size_t(index)];
  for (size_t i = 0; i < queue.buffers.size(); ++i) {
    const int chosen = queue.buffers[queue.next];
    queue.next = (queue.next + 1) % queue.buffers.size();
    QueueBuffer& buffer = buffers_[size_t(chosen)];
    if (buffer.state != QueueBuffer::kFree) continue;
    const HardEvent freed = event_between(queue.from, queue.to, true);
    if (buffer.freed_event >= 0) {
      wait_flag(freed, buffer.freed_event, "AllocTensor", at);
      give_event(freed, buffer.freed_event, at);
      buffer.freed_event = -1;
    }
    buffer.state = QueueBuffer::kTaken;
    ++buffer.generation;
    buffer.taken = at;
    // What the last user left is not this one's to read.
    forget(buffer.lo, buffer.hi);
    return chosen;
  }
  stop(at, "AllocTensor", "queue-protocol",
       "none of the queue's " + number(int64_t(queue.buffers.size())) +
           " buffers is free: a FreeTensor is missing, or InitBuffer needs more");
}

void Core::put(int index, int chosen, uint32_t generation, Where at) {
  Queue& queue = queues_[size_t(index)];
  const auto& own = queue.buffers;
  if (chosen < 0 || std::find(own.begin(), own.end(), chosen) == own.end()) {
    stop(at, "EnQue", "queue-protocol",
         "the tensor is not of this queue's AllocTensor");
  }
  QueueBuffer& buffer = buffers_[size_t(chosen)];
  if (buffer.generation != generation || buffer.state != QueueBuffer::kTaken) {
    stop(at, "EnQue", "queue-protocol",
         buffer.state == QueueBuffer::kQueued ? "the tensor is already in the queue"
                                              : "the tensor is not allocated");
  }
  const int depth = std::max(queue.depth, 1);
  if (int(queue.waiting.size()) >= depth) {
    error(at, "EnQue", "queue-depth",
          number(int64_t(queue.waiting.size()) + 1) + " tensors in a queue of depth " +
              number(queue.depth));
  }
  const HardEvent event = event_between(queue.from, queue.to, false);
  if (event != HardEvent::V_V) {
    buffer.queued_event = take_event(event, at);
    set_flag(event, buffer.queued_event, true, "EnQue", at);
  }
  buffer.state = QueueBuffer::kQueued;
  queue.waiting.push_back(chosen);
}

int Core::get(int index, Where at) {
  Queue& queue = queues_[size_t(index)];
  if (queue.waiting.empty()) {
    stop(at, "DeQue", "queue-protocol", "nothing is in the queue: EnQue is missing");
  }
  const int chosen = queue.waiting.front();
  queue.waiting.pop_front();
  QueueBuffer& buffer = buffers_[size_t(chosen)];
  const HardEvent event = event_between(queue.from, queue.to, false);
  if (event == HardEvent::V_V) {
    barrier(PIPE_V, at);
  } else {
    wait_flag(event, buffer.queued_event, "DeQue", at);
    give_event(event, buffer.queued_event, at);
    buffer.queued_event = -1;
  }
  buffer.state = QueueBuffer::kTaken;
  return chosen;
}

void Core::give(int index, int chosen, uint32_t generation, Where at) {
  Queue& queue = queues_[size_t(index)];
  const auto& own = queue.buffers;
  if (chosen < 0 || std::find(own.begin(), own.end(), chosen) == own.end()) {
    stop(at, "FreeTensor", "queue-protocol",
         "the tensor is not of this queue's AllocTensor");
  }
  QueueBuffer& buffer = buffers_[size_t(chosen)];
  if (buffer.generation != generation || buffer.state != QueueBuffer::kTaken) {
    stop(at, "FreeTensor", "queue-protocol",
         buffer.state == QueueBuffer::kQueued
             ? "the tensor is in the queue: DeQue it first"
             : "the tensor is already free");
  }
  const HardEvent event = event_between(queue.from, queue.to, true);
  if (event != HardEvent::V_V) {
    buffer.freed_event = take_event(event, at);
    set_flag(event, buffer.freed_event, true, "FreeTensor", at);
  }
  buffer.state = QueueBuffer::kFree;
}

}  // namespace simulator
