// What must be ordered: within a core and between cores.
#include "harness.h"

// One pipe ----------------------------------------------------------------------------

KERNEL(vector_after_vector) {
  Bench t(arrays);
  Adds(t.x, t.y, 1.0f, 64);
  PipeBarrier<PIPE_V>();
  Adds(t.z, t.x, 1.0f, 64);
}
KERNEL(vector_reads_unfinished) {
  Bench t(arrays);
  Adds(t.x, t.y, 1.0f, 64);
  Adds(t.z, t.x, 1.0f, 64);  // ! race-ub
}
KERNEL(vector_writes_unfinished) {
  Bench t(arrays);
  Adds(t.x, t.y, 1.0f, 64);
  Adds(t.x, t.z, 1.0f, 64);  // ! race-ub
}
KERNEL(vector_writes_what_was_read) {
  Bench t(arrays);
  Adds(t.x, t.y, 1.0f, 64);
  Adds(t.y, t.z, 1.0f, 64);
}
KERNEL(vector_writes_beside) {
  Bench t(arrays);
  Adds(t.x, t.y, 1.0f, 9);
  Duplicate(t.x[16], 1.0f, 8);
  Adds(t.z, t.x[16], 1.0f, 8);  // ! race-ub
}
KERNEL(vector_results_side_by_side) {
  Bench t(arrays);
  WholeReduceSum(t.h, t.h[128], 32, 1, 1, 1, 8);
  WholeReduceSum(t.h[1], t.h[128], 32, 1, 1, 1, 8);
  PipeBarrier<PIPE_V>();
  Adds(t.z.ReinterpretCast<half>(), t.h, half(1), 2);
}
KERNEL(copies_in_to_one_place) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 8);
  PipeBarrier<PIPE_MTE2>();
  DataCopy(x, t.b, 8);
  DataCopy(x, t.b, 8);  // ! race-ub
  t.in.FreeTensor(x);
}
KERNEL(copies_out_to_one_place) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 8);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  if (GetBlockIdx() == 0) {
    DataCopy(t.c, y, 8);
    PipeBarrier<PIPE_MTE3>();
    DataCopy(t.c, y, 8);
    DataCopy(t.c[8], y, 8);
    DataCopy(t.c[4], y, 8);  // ! race-gm
  }
  t.out.FreeTensor(y);
}

// Between pipes -----------------------------------------------------------------------

KERNEL(vector_waits_for_copy) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(t.x, x, 1.0f, 64);
  t.in.FreeTensor(x);
}
KERNEL(vector_before_copy) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  Adds(t.x, x, 1.0f, 64);  // ! race-ub
  t.in.FreeTensor(x);
}
KERNEL(flag_set_too_early) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  SetFlag<HardEvent::MTE2_V>(0);
  DataCopy(x, t.a, 64);
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(t.x, x, 1.0f, 64);  // ! race-ub
  t.in.FreeTensor(x);
}
KERNEL(flag_through_another_pipe) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  SetFlag<HardEvent::V_S>(0);
  WaitFlag<HardEvent::V_S>(0);
  x.GetValue(0);
  t.in.FreeTensor(x);
}
KERNEL(scalar_after_deque) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  x.GetValue(0);  // ! race-ub
  t.in.FreeTensor(x);
}
KERNEL(copy_over_what_is_read) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(t.x, x, 1.0f, 64);
  DataCopy(x, t.b, 64);  // ! race-ub
  t.in.FreeTensor(x);
}
KERNEL(copy_over_after_the_read) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(t.x, x, 1.0f, 64);
  SetFlag<HardEvent::V_MTE2>(0);
  WaitFlag<HardEvent::V_MTE2>(0);
  DataCopy(x, t.b, 64);
  t.in.FreeTensor(x);
}
KERNEL(copy_out_before_vector) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 8);
  if (GetBlockIdx() == 0) DataCopy(t.c, y, 8);  // ! race-ub
  t.out.FreeTensor(y);
}
KERNEL(vector_over_what_is_copied_out) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 8);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  if (GetBlockIdx() == 0) DataCopy(t.c, y, 8);
  if (GetBlockIdx() == 0) Duplicate(y, 1.0f, 8);  // ! race-ub
  t.out.FreeTensor(y);
}
KERNEL(freed_before_its_last_use) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(in, 1, 256);
  pipe.InitBuffer(work, 256);
  for (int i = 0; i < 2; ++i) {
    auto x = in.AllocTensor<float>();
    DataCopy(x, arrays.tensor<float>(arrays.a), 64);
    in.EnQue(x);
    x = in.DeQue<float>();
    Adds(work.Get<float>(), x, 1.0f, 64);
    in.FreeTensor(x);
    PipeBarrier<PIPE_V>();
  }
}
KERNEL(scalar_waits_for_vector) {
  Bench t(arrays);
  SetFlag<HardEvent::V_S>(0);
  WaitFlag<HardEvent::V_S>(0);
  t.x.GetValue(0);
}
KERNEL(scalar_before_vector) {
  Bench t(arrays);
  Duplicate(t.x, 1.0f, 8);
  t.x.GetValue(0);  // ! race-ub
}
KERNEL(vector_waits_for_scalar) {
  Bench t(arrays);
  PipeBarrier<PIPE_ALL>();
  t.x.SetValue(0, 1.0f);
  SetFlag<HardEvent::S_V>(0);
  WaitFlag<HardEvent::S_V>(0);
  Adds(t.y, t.x, 1.0f, 8);
}
KERNEL(vector_before_scalar) {
  Bench t(arrays);
  PipeBarrier<PIPE_ALL>();
  t.x.SetValue(0, 1.0f);
  Adds(t.y, t.x, 1.0f, 8);  // ! race-ub
}
KERNEL(scalar_over_what_vector_reads) {
  Bench t(arrays);
  PipeBarrier<PIPE_ALL>();
  Adds(t.y, t.x, 1.0f, 8);
  t.x.SetValue(0, 1.0f);  // ! race-ub
}
KERNEL(barrier_of_all_pipes) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 64);
  PipeBarrier<PIPE_ALL>();
  Adds(t.x, x, 1.0f, 64);
  PipeBarrier<PIPE_ALL>();
  t.x.GetValue(0);
  DataCopy(x, t.a, 64);
  t.in.FreeTensor(x);
}

// Global memory -----------------------------------------------------------------------

KERNEL(gm_read_after_write) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> both;
  pipe.InitBuffer(both, 2, 256);
  auto c = arrays.tensor<float>(arrays.c)[GetBlockIdx() * 64];
  auto x = both.AllocTensor<float>();
  DataCopy(x, arrays.tensor<float>(arrays.a), 64);
  both.EnQue(x);
  x = both.DeQue<float>();
  DataCopy(c, x, 64);
  SetFlag<HardEvent::MTE3_MTE2>(5 - (__NPU_ARCH__ == 1001 ? 2 : 0));
  WaitFlag<HardEvent::MTE3_MTE2>(5 - (__NPU_ARCH__ == 1001 ? 2 : 0));
  auto y = both.AllocTensor<float>();
  DataCopy(y, c, 64);
  both.FreeTensor(y);
  both.FreeTensor(x);
}
KERNEL(gm_read_before_write_ends) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> both;
  pipe.InitBuffer(both, 2, 256);
  auto c = arrays.tensor<float>(arrays.c)[GetBlockIdx() * 64];
  auto x = both.AllocTensor<float>();
  DataCopy(x, arrays.tensor<float>(arrays.a), 64);
  both.EnQue(x);
  x = both.DeQue<float>();
  DataCopy(c, x, 64);
  auto y = both.AllocTensor<float>();
  DataCopy(y, c[32], 8);  // ! race-gm
  both.FreeTensor(y);
  both.FreeTensor(x);
}
KERNEL(gm_write_before_read_ends) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  pipe.InitBuffer(in, 1, 256);
  pipe.InitBuffer(out, 1, 256);
  auto c = arrays.tensor<float>(arrays.c)[GetBlockIdx() * 64];
  auto x = in.AllocTensor<float>();
  DataCopy(x, c, DataCopyParams(2, 1, 1, 0));
  auto y = out.AllocTensor<float>();
  Duplicate(y, 0.0f, 64);
  out.EnQue(y);
  y = out.DeQue<float>();
  DataCopy(c[8], y, 8);
  DataCopy(c[16], y, 8);  // ! race-gm
  out.FreeTensor(y);
  in.FreeTensor(x);
}
KERNEL(gm_scalar_store_then_copy) {
  Bench t(arrays);
  auto c = t.c[GetBlockIdx() * 64];
  c.SetValue(0, 1.0f);
  DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE>(c);
  SetFlag<HardEvent::S_MTE2>(0);
  WaitFlag<HardEvent::S_MTE2>(0);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, c, 64);
  t.in.FreeTensor(x);
}
KERNEL(gm_scalar_store_in_the_cache) {
  Bench t(arrays);
  auto c = t.c[GetBlockIdx() * 64];
  c.SetValue(0, 1.0f);
  SetFlag<HardEvent::S_MTE2>(0);
  WaitFlag<HardEvent::S_MTE2>(0);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, c, 64);  // ! race-gm
  t.in.FreeTensor(x);
}

// Cores -------------------------------------------------------------------------------

KERNEL(cores_write_apart) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 64);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  DataCopy(t.c[GetBlockIdx() * 8], y, DataCopyParams(2, 1, 0, 1));
  t.out.FreeTensor(y);
}
KERNEL(cores_write_the_same) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 64);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  DataCopy(t.c[GetBlockIdx() * 4], y, 8);  // ! race-cores
  t.out.FreeTensor(y);
}
KERNEL(core_reads_what_another_writes) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  if (GetBlockIdx() == 1) DataCopy(x, t.c, 64);  // ! race-cores
  t.in.FreeTensor(x);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 64);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  if (GetBlockIdx() == 0) DataCopy(t.c[56], y, 8);
  t.out.FreeTensor(y);
}
KERNEL(core_numbers) {
  Bench t(arrays);
  if (GetBlockNum() != 2 || GetBlockIdx() < 0 || GetBlockIdx() > 1) {
    t.in.AllocTensor<float>();
  }
}
KERNEL(cores_store_to_one_cache_line) {
  arrays.tensor<float>(arrays.c).SetValue(GetBlockIdx(), 1.0f);  // ! race-cores
}
KERNEL(cores_store_to_lines_of_their_own) {
  arrays.tensor<float>(arrays.c).SetValue(GetBlockIdx() * 32, 1.0f);
}
