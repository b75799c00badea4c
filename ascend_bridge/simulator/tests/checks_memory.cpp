// Global memory, the unified buffer, and copies between them.
#include "harness.h"

KERNEL(copy_through) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 256);
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  auto y = t.out.AllocTensor<float>();
  DataCopy(y, x, 256);
  t.out.EnQue(y);
  t.in.FreeTensor(x);
  y = t.out.DeQue<float>();
  if (GetBlockIdx() == 0) DataCopy(t.c, y, 256);
  t.out.FreeTensor(y);
}

// Bounds of global memory -------------------------------------------------------------

KERNEL(gm_last_bytes) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a[kBytes / 4 - 8], 8);
  t.in.FreeTensor(x);
}
KERNEL(gm_past_the_end) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a[kBytes / 4 - 7], 8);  // ! gm-bounds
  t.in.FreeTensor(x);
}
KERNEL(gm_before_the_start) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a[-64], 8);  // ! gm-bounds
  t.in.FreeTensor(x);
}
KERNEL(gm_blocks_to_the_end) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, DataCopyParams(2, 1, kBytes / 32 - 2, 0));
  t.in.FreeTensor(x);
}
KERNEL(gm_blocks_past_the_end) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, DataCopyParams(2, 1, kBytes / 32 - 1, 0));  // ! gm-bounds
  t.in.FreeTensor(x);
}
KERNEL(gm_inside_the_tensor) {
  Bench t(arrays);
  t.a.SetGlobalBuffer(reinterpret_cast<float*>(arrays.a), 64);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a[8], 56);
  t.in.FreeTensor(x);
}
KERNEL(gm_past_the_tensor) {
  Bench t(arrays);
  t.a.SetGlobalBuffer(reinterpret_cast<float*>(arrays.a), 64);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a[16], 56);  // ! gm-bounds
  t.in.FreeTensor(x);
}
KERNEL(gm_scalar_read) { arrays.tensor<float>(arrays.a).GetValue(kBytes / 4 - 1); }
KERNEL(gm_scalar_past_the_end) {
  arrays.tensor<float>(arrays.a).GetValue(kBytes / 4);  // ! gm-bounds
}
KERNEL(gm_scalar_write_past_the_end) {
  arrays.tensor<float>(arrays.c).SetValue(kBytes / 4, 1.0f);  // ! gm-bounds
}
KERNEL(gm_write_past_the_end) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 16);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  DataCopy(t.c[kBytes / 4 - 8], y, 16);  // ! gm-bounds
  t.out.FreeTensor(y);
}
KERNEL(gm_aligned_to_elements) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<half>();
  DataCopy(x, arrays.tensor<half>(arrays.a + 2), 16);
  t.in.FreeTensor(x);
}
KERNEL(gm_not_aligned_to_elements) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, arrays.tensor<float>(arrays.a + 2), 8);  // ! gm-align
  t.in.FreeTensor(x);
}

// The unified buffer ------------------------------------------------------------------

KERNEL(ub_full) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, __NPU_ARCH__ == 2201 ? 184 * 1024 : 248 * 1024);
}
KERNEL(ub_too_small) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work, more;
  pipe.InitBuffer(work, __NPU_ARCH__ == 2201 ? 184 * 1024 : 248 * 1024);
  pipe.InitBuffer(more, 1);  // ! ub-capacity
}
KERNEL(ub_between_the_products) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 200 * 1024);  // ! 2201 ub-capacity
}
KERNEL(ub_far_too_small) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 1 << 30);  // ! ub-capacity
}
KERNEL(ub_empty_buffer) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 0);  // ! ub-capacity
}
KERNEL(ub_rounded_up) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> first, second;
  pipe.InitBuffer(first, 33);
  pipe.InitBuffer(second, 32);
  Duplicate(second.Get<float>(), 0.0f, 8);
  Duplicate(first.Get<float>(), 0.0f, 16);
}
KERNEL(ub_aligned) {
  Bench t(arrays);
  Duplicate(t.x[8], 0.0f, 8);
}
KERNEL(ub_not_aligned) {
  Bench t(arrays);
  Duplicate(t.x[4], 0.0f, 8);  // ! ub-align
}
KERNEL(ub_source_not_aligned) {
  Bench t(arrays);
  Add(t.z, t.x, t.y[1], 8);  // ! ub-align
}
KERNEL(ub_copy_not_aligned) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x[2], t.a, 8);  // ! ub-align
  t.in.FreeTensor(x);
}
KERNEL(ub_to_the_end) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x[248], t.a, 8);
  t.in.FreeTensor(x);
}
KERNEL(ub_copy_past_the_buffer) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x[248], t.a, 16);  // ! ub-bounds
  t.in.FreeTensor(x);
}
KERNEL(ub_copy_out_past_the_buffer) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 256);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  DataCopy(t.c, y[248], 16);  // ! ub-bounds
  t.out.FreeTensor(y);
}
KERNEL(ub_local_copy_past_the_buffer) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  DataCopy(y, t.x, 264);  // ! ub-bounds
  t.out.FreeTensor(y);
}
KERNEL(ub_vector_past_the_buffer) {
  Bench t(arrays);
  Exp(t.x[960], t.x, 72);  // ! ub-bounds
}
KERNEL(ub_repeat_past_the_buffer) {
  Bench t(arrays);
  Exp(t.x, t.y, 64, 2, UnaryRepeatParams(1, 1, 121, 8));  // ! ub-bounds
}
KERNEL(ub_scalar_inside) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 64);
  work.Get<float>().SetValue(15, 1.0f);
  work.Get<float>().GetValue(15);
}
KERNEL(ub_scalar_outside) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 64);
  work.Get<float>().SetValue(16, 1.0f);  // ! ub-bounds
  work.Get<float>().GetValue(16);  // ! ub-bounds
}
KERNEL(ub_part_of_a_buffer) {
  Bench t(arrays);
  t.work.GetWithOffset<float>(8, 4064);
}
KERNEL(ub_more_than_the_buffer) {
  Bench t(arrays);
  t.work.GetWithOffset<float>(8, 4080);  // ! ub-bounds
}
KERNEL(ub_written_then_read) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 1024);
  auto x = work.Get<float>();
  Duplicate(x, 1.0f, 9);
  PipeBarrier<PIPE_V>();
  Exp(x[64], x, 9);
}
KERNEL(ub_never_written) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 1024);
  auto x = work.Get<float>();
  Duplicate(x, 1.0f, 9);
  PipeBarrier<PIPE_V>();
  Exp(x[64], x, 10);  // ! uninitialised
}
KERNEL(ub_scalar_never_written) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> work;
  pipe.InitBuffer(work, 64);
  work.Get<float>().GetValue(0);  // ! uninitialised
}
KERNEL(ub_left_by_the_last_tensor) {
  Bench t(arrays);
  for (int i = 0; i < 3; ++i) {
    auto y = t.out.AllocTensor<float>();
    if (i < 2) Duplicate(y, 0.0f, 8);
    t.out.EnQue(y);
    y = t.out.DeQue<float>();
    if (GetBlockIdx() == 0) DataCopy(t.c[i * 8], y, 8);  // ! uninitialised
    t.out.FreeTensor(y);
  }
}

// Copies ------------------------------------------------------------------------------

KERNEL(copy_whole_blocks) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<half>();
  DataCopy(x, arrays.tensor<half>(arrays.a), 48);
  t.in.FreeTensor(x);
}
KERNEL(copy_part_of_a_block) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<half>();
  DataCopy(x, arrays.tensor<half>(arrays.a), 40);  // ! copy-length
  t.in.FreeTensor(x);
}
KERNEL(copy_out_part_of_a_block) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 0.0f, 16);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  DataCopy(t.c, y, 12);  // ! copy-length
  t.out.FreeTensor(y);
}
KERNEL(copy_nothing) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 0);  // ! copy-length
  DataCopy(x, t.a, DataCopyParams(1, 0, 0, 0));  // ! copy-length
  t.in.FreeTensor(x);
}
KERNEL(copy_most_blocks) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  pipe.InitBuffer(in, 1, 4095 * 32);
  auto x = in.AllocTensor<float>();
  DataCopy(x, arrays.tensor<float>(arrays.a), DataCopyParams(255, 1, 0, 0));
  in.FreeTensor(x);
}
KERNEL(copy_too_many_blocks) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, DataCopyParams(4096, 1, 0, 0));  // ! block-count
  t.in.FreeTensor(x);
}
KERNEL(copy_stride_too_large) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, DataCopyParams(1, 1, 65536, 0));  // ! block-count
  t.in.FreeTensor(x);
}
KERNEL(copy_into_work_buffer) {
  Bench t(arrays);
  PipeBarrier<PIPE_ALL>();
  DataCopy(t.x, t.a, 8);  // ! copy-position
}
KERNEL(copy_into_output_tensor) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  DataCopy(y, t.a, 8);  // ! copy-position
  t.out.FreeTensor(y);
}
KERNEL(copy_out_of_work_buffer) {
  Bench t(arrays);
  PipeBarrier<PIPE_ALL>();
  if (GetBlockIdx() == 0) DataCopy(t.c, t.x, 8);  // ! copy-position
}
KERNEL(copy_out_of_input_tensor) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopy(x, t.a, 8);
  PipeBarrier<PIPE_ALL>();
  if (GetBlockIdx() == 0) DataCopy(t.c, x, 8);  // ! copy-position
  t.in.FreeTensor(x);
}
KERNEL(copy_through_a_bound_queue) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> both;
  pipe.InitBuffer(both, 2, 256);
  for (int i = 0; i < 5; ++i) {
    auto x = both.AllocTensor<float>();
    DataCopy(x, arrays.tensor<float>(arrays.a)[i * 64], 64);
    both.EnQue(x);
    x = both.DeQue<float>();
    if (GetBlockIdx() == 0) DataCopy(arrays.tensor<float>(arrays.c)[i * 64], x, 64);
    both.FreeTensor(x);
  }
}

// DataCopyPad -------------------------------------------------------------------------

KERNEL(pad_in) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopyPad(x, t.a, DataCopyExtParams(2, 12, 4, 0, 0), DataCopyPadExtParams<float>(true, 1, 0, 9.0f));  // ! 1001 product
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  Adds(t.x, x, 0.0f, 4);
  t.in.FreeTensor(x);
}
KERNEL(pad_rest_is_not_data) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopyPad(x, t.a, DataCopyExtParams(1, 12, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0.0f));  // ! 1001 product
  t.in.EnQue(x);
  x = t.in.DeQue<float>();
  Adds(t.x, x, 0.0f, 4);  // ! uninitialised
  t.in.FreeTensor(x);
}
KERNEL(pad_too_wide) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopyPad(x, t.a, DataCopyExtParams(1, 12, 0, 0, 0), DataCopyPadExtParams<float>(true, 9, 0, 0.0f));  // ! copy-length  // ! 1001 product
  t.in.FreeTensor(x);
}
KERNEL(pad_part_of_an_element) {
  Bench t(arrays);
  auto x = t.in.AllocTensor<float>();
  DataCopyPad(x, t.a, DataCopyExtParams(1, 10, 0, 0, 0), DataCopyPadExtParams<float>());  // ! copy-length  // ! 1001 product
  t.in.FreeTensor(x);
}
KERNEL(pad_out) {
  Bench t(arrays);
  auto y = t.out.AllocTensor<float>();
  Duplicate(y, 5.0f, 256);
  t.out.EnQue(y);
  y = t.out.DeQue<float>();
  if (GetBlockIdx() == 0) DataCopyPad(t.c, y, DataCopyExtParams(3, 20, 0, 4, 0));  // ! 1001 product
  t.out.FreeTensor(y);
}
