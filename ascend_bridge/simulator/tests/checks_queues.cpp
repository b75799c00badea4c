// Queues and events.
#include <stdexcept>

#include "harness.h"

// Queues ------------------------------------------------------------------------------

KERNEL(queue_buffers_all) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> first, second;
  pipe.InitBuffer(first, 2, 32);
  pipe.InitBuffer(second, __NPU_ARCH__ == 2201 ? 6 : 2, 32);
}
KERNEL(queue_buffers_too_many) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> first, second;
  pipe.InitBuffer(first, 4, 32);
  pipe.InitBuffer(second, __NPU_ARCH__ == 2201 ? 5 : 1, 32);  // ! queue-buffers
}
KERNEL(queue_buffers_of_910a) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> first;
  pipe.InitBuffer(first, 5, 32);  // ! 1001 queue-buffers
}
KERNEL(buffers_of_a_kernel) {
  TPipe pipe;
  for (int i = 0; i < 64; ++i) {
    TBuf<TPosition::VECCALC> work;
    pipe.InitBuffer(work, 32);
  }
  TBuf<TPosition::VECCALC> more;
  pipe.InitBuffer(more, 32);  // ! queue-buffers
}
KERNEL(queue_without_buffers) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  in.AllocTensor<float>();  // ! queue-protocol
}
KERNEL(work_buffer_without_memory) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  work.Get<float>();  // ! queue-protocol
}
KERNEL(queue_allocated_twice) {
  Bench t(arrays);
  auto zero = t.in.AllocTensor<float>();
  t.in.FreeTensor(zero);
  auto first = t.in.AllocTensor<float>();
  auto second = t.in.AllocTensor<float>();
  t.in.FreeTensor(second);
  t.in.FreeTensor(first);
}
KERNEL(queue_allocated_too_often) {
  Bench t(arrays);
  t.in.AllocTensor<float>();
  t.in.AllocTensor<float>();
  t.in.AllocTensor<float>();  // ! queue-protocol
}
KERNEL(queue_without_enque) {
  Bench t(arrays);
  t.in.AllocTensor<float>();
  t.in.DeQue<float>();  // ! queue-protocol
}
KERNEL(queue_enqued_twice) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  t.in.EnQue(x);
  t.in.EnQue(x);  // ! queue-protocol
}
KERNEL(queue_enqued_elsewhere) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  t.out.EnQue(x);  // ! queue-protocol
}
KERNEL(queue_enqued_after_free) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  t.in.FreeTensor(x);
  t.in.EnQue(x);  // ! queue-protocol
}
KERNEL(queue_of_depth_two) {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  pipe.InitBuffer(in, 2, 32);
  in.EnQue(in.AllocTensor<float>());
  in.EnQue(in.AllocTensor<float>());
  auto first = in.DeQue<float>();
  auto second = in.DeQue<float>();
  in.FreeTensor(first);
  in.FreeTensor(second);
}
KERNEL(queue_too_deep) {
  Bench t(arrays);
  t.in.EnQue(t.in.AllocTensor<float>());
  t.in.EnQue(t.in.AllocTensor<float>());  // ! queue-depth
  auto first = t.in.DeQue<float>();
  auto second = t.in.DeQue<float>();
  t.in.FreeTensor(first);
  t.in.FreeTensor(second);
}
KERNEL(queue_used_while_enqued) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 8);
  t.in.EnQue(x);
  Adds(t.x, x, 1.0f, 8);  // ! queue-protocol
  x = t.in.DeQue<float>();
  t.in.FreeTensor(x);
}
KERNEL(queue_used_after_free) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 8);
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  t.in.FreeTensor(x);
  Adds(t.x, x, 1.0f, 8);  // ! use-after-free
}
KERNEL(queue_old_tensor) {
  Bench t(arrays);
  auto old = t.in.AllocTensor<float>();
  t.in.FreeTensor(old);
  auto other = t.in.AllocTensor<float>();
  t.in.FreeTensor(other);
  auto x = t.in.AllocTensor<float>();
  DataCopy(old, t.a, 8);  // ! use-after-free
  t.in.FreeTensor(x);
}
KERNEL(queue_freed_twice) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  t.in.FreeTensor(x);
  t.in.FreeTensor(x);  // ! queue-protocol
}
KERNEL(queue_freed_while_enqued) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  t.in.EnQue(x);
  t.in.FreeTensor(x);  // ! queue-protocol
}
KERNEL(queue_never_freed) {
  Bench t(arrays);
  t.in.AllocTensor<float>();  // ! leak
}
KERNEL(queue_never_dequed) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();  // ! leak
  t.in.EnQue(x);
}
KERNEL(tensor_of_nothing) {
  Bench t(arrays);
  LocalTensor<float> x;
  Adds(t.x, x, 1.0f, 8);  // ! queue-protocol
}
KERNEL(no_pipe) {
  GetTPipePtr();  // ! queue-protocol
}

// Events ------------------------------------------------------------------------------

KERNEL(event_last_of_910a) {
  SetFlag<HardEvent::MTE2_V>(3);
  WaitFlag<HardEvent::MTE2_V>(3);
}
KERNEL(event_past_910a) {
  SetFlag<HardEvent::MTE2_V>(7);  // ! 1001 event-id
  WaitFlag<HardEvent::MTE2_V>(7);  // ! 1001 event-id
}
KERNEL(event_past_all) {
  SetFlag<HardEvent::MTE2_V>(8);  // ! event-id
  WaitFlag<HardEvent::MTE2_V>(-1);  // ! event-id
}
KERNEL(event_never_set) {
  WaitFlag<HardEvent::V_S>(0);  // ! event-unpaired
}
KERNEL(event_of_another_id) {
  SetFlag<HardEvent::V_S>(0);  // ! event-unpaired
  WaitFlag<HardEvent::V_S>(1);  // ! event-unpaired
}
KERNEL(event_of_another_pair) {
  SetFlag<HardEvent::V_S>(0);  // ! event-unpaired
  WaitFlag<HardEvent::S_V>(0);  // ! event-unpaired
}
KERNEL(event_set_twice) {
  SetFlag<HardEvent::V_S>(0);
  SetFlag<HardEvent::V_S>(0);  // ! event-unpaired
  WaitFlag<HardEvent::V_S>(0);
}
KERNEL(event_allocated) {
  TPipe pipe;
  const auto first = pipe.AllocEventID<HardEvent::V_S>();
  const auto second = pipe.AllocEventID<HardEvent::V_S>();
  SetFlag<HardEvent::V_S>(first);
  SetFlag<HardEvent::V_S>(second);
  WaitFlag<HardEvent::V_S>(first);
  WaitFlag<HardEvent::V_S>(second);
  pipe.ReleaseEventID<HardEvent::V_S>(first);
  pipe.ReleaseEventID<HardEvent::V_S>(second);
}
KERNEL(event_fetched_twice) {
  TPipe pipe;
  SetFlag<HardEvent::V_S>(pipe.FetchEventID(HardEvent::V_S));
  SetFlag<HardEvent::V_S>(pipe.FetchEventID<HardEvent::V_S>());  // ! event-unpaired
  WaitFlag<HardEvent::V_S>(0);
}
KERNEL(event_ids_used_up) {
  TPipe pipe;
  for (int i = 0; i < (__NPU_ARCH__ == 2201 ? 8 : 4); ++i) {
    pipe.AllocEventID<HardEvent::MTE2_V>();
  }
  pipe.FetchEventID(HardEvent::V_MTE2);
  pipe.FetchEventID(HardEvent::MTE2_V);  // ! event-id
}
KERNEL(event_released_twice) {
  TPipe pipe;
  const auto id = pipe.AllocEventID<HardEvent::V_S>();
  pipe.ReleaseEventID<HardEvent::V_S>(id);
  pipe.ReleaseEventID<HardEvent::V_S>(id);  // ! event-id
}
KERNEL(barrier_of_the_scalar_unit) {
  PipeBarrier<PIPE_S>();  // ! product
}

// The other cores still run.
KERNEL(exception_in_a_kernel) {
  if (GetBlockIdx() == 0) throw std::runtime_error("out of luck");
}
