// TPipe, TQue, TQueBind, TBuf, flags and barriers.
#pragma once

#include "sim_tensor.h"

namespace AscendC {

template <TPosition from, TPosition to, int32_t depth, int mask = 0>
class TQueBind {
 public:
  TQueBind() = default;

  template <typename T>
  LocalTensor<T> AllocTensor(simulator::Where at = simulator::Where::here()) {
    return tensor<T>(simulator::core().take(index(at), at), from);
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor,
             simulator::Where at = simulator::Where::here()) {
    const simulator::View view = tensor.view("");
    simulator::core().put(index(at), view.buffer, view.generation, at);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue(simulator::Where at = simulator::Where::here()) {
    return tensor<T>(simulator::core().get(index(at), at), to);
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor,
                  simulator::Where at = simulator::Where::here()) {
    const simulator::View view = tensor.view("");
    simulator::core().give(index(at), view.buffer, view.generation, at);
  }
  bool HasTensorInQue() const { return GetTensorCountInQue() > 0; }
  bool VacantInQue() const { return GetTensorCountInQue() < depth; }
  int32_t GetTensorCountInQue() const {
    if (index_ < 0) return 0;
    return int32_t(simulator::core().queue(index_).waiting.size());
  }

  // Of the simulator.
  int make() {
    if (index_ < 0) index_ = simulator::core().add_queue(from, to, depth);
    return index_;
  }

 private:
  int index(simulator::Where at) const {
    if (index_ < 0) {
      simulator::core().stop(at, "TQue", "queue-protocol",
                             "the queue was never given to InitBuffer");
    }
    return index_;
  }
  template <typename T>
  LocalTensor<T> tensor(int buffer, TPosition position) const {
    const auto& held = simulator::core().buffer(buffer);
    const simulator::View view{held.lo, held.lo,         held.hi,  sizeof(T), 1, 8,
                               buffer,  held.generation, position, "",        32};
    return LocalTensor<T>(view, (held.hi - held.lo) / int64_t(sizeof(T)));
  }
  int index_ = -1;
};

template <TPosition position, int32_t depth, int mask = 0>
class TQue : public TQueBind<position, position, depth, mask> {};

template <TPosition position = TPosition::LCM>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get(simulator::Where at = simulator::Where::here()) const {
    return GetWithOffset<T>(uint32_t(bytes_ / int64_t(sizeof(T))), 0, at);
  }
  template <typename T>
  LocalTensor<T> Get(uint32_t size,
                     simulator::Where at = simulator::Where::here()) const {
    return GetWithOffset<T>(size, 0, at);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t offset,
                               simulator::Where at = simulator::Where::here()) const {
    const int64_t bytes = int64_t(size) * int64_t(sizeof(T));
    if (bytes_ == 0) {
      simulator::core().stop(at, "TBuf::Get", "queue-protocol",
                             "the buffer was never given to InitBuffer");
    }
    if (offset + bytes > bytes_) {
      simulator::core().error(at, "TBuf::Get", "ub-bounds",
                              simulator::number(bytes) + " bytes at " +
                                  simulator::number(offset) + " of a buffer of " +
                                  simulator::number(bytes_));
    }
    const simulator::View view{at_ + offset, at_, at_ + bytes_, sizeof(T), 1, 8,
                               -1,           0,   position,     "",        32};
    return LocalTensor<T>(view, size);
  }

  // Of the simulator.
  void place(int64_t at, int64_t bytes) {
    at_ = at;
    bytes_ = bytes;
  }

 private:
  int64_t at_ = 0, bytes_ = 0;
};

class TPipe {
 public:
  TPipe() { Init(); }
  ~TPipe() {
    if (simulator::core().pipe_object == this) simulator::core().pipe_object = nullptr;
  }
  TPipe(const TPipe&) = delete;
  void Init() { simulator::core().pipe_object = this; }

  template <TPosition from, TPosition to, int32_t depth, int mask>
  bool InitBuffer(TQueBind<from, to, depth, mask>& queue, int64_t num, int64_t len,
                  simulator::Where at = simulator::Where::here()) {
    return simulator::core().init_queue(queue.make(), num, len, at);
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, int64_t len,
                  simulator::Where at = simulator::Where::here()) {
    const int64_t place = simulator::core().init_buffer(len, at);
    buffer.place(place, (len + 31) / 32 * 32);
    return true;
  }

  TEventID FetchEventID(HardEvent event,
                        simulator::Where at = simulator::Where::here()) {
    return simulator::core().fetch_event(event, at);
  }
  template <HardEvent event>
  TEventID FetchEventID(simulator::Where at = simulator::Where::here()) {
    return simulator::core().fetch_event(event, at);
  }
  template <HardEvent event>
  TEventID AllocEventID(simulator::Where at = simulator::Where::here()) {
    return simulator::core().take_event(event, at);
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, simulator::Where at = simulator::Where::here()) {
    simulator::core().give_event(event, id, at);
  }
};

inline TPipe* GetTPipePtr(simulator::Where at = simulator::Where::here()) {
  auto& core = simulator::core();
  if (core.pipe_object == nullptr) {
    core.stop(at, "GetTPipePtr", "queue-protocol", "the kernel has no TPipe");
  }
  return static_cast<TPipe*>(core.pipe_object);
}

template <HardEvent event>
inline void SetFlag(int32_t id, simulator::Where at = simulator::Where::here()) {
  simulator::core().set_flag(event, id, false, "SetFlag", at);
}
template <HardEvent event>
inline void WaitFlag(int32_t id, simulator::Where at = simulator::Where::here()) {
  simulator::core().wait_flag(event, id, "WaitFlag", at);
}
template <pipe_t pipe>
inline void PipeBarrier(simulator::Where at = simulator::Where::here()) {
  simulator::core().barrier(pipe, at);
}

// Writes the scalar unit's stores to global memory back, and forgets what it read.
template <typename T, CacheLine line, DcciDst dst = DcciDst::CACHELINE_OUT>
inline void DataCacheCleanAndInvalid(const GlobalTensor<T>&) {
  simulator::core().clean_cache();
}

int64_t GetBlockIdx();
int64_t GetBlockNum();
inline int64_t GetSubBlockIdx() { return 0; }
inline int64_t GetTaskRation() { return 1; }

}  // namespace AscendC
