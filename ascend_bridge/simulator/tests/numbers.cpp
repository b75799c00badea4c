// What instructions compute: the tests read array a, run one, and look at array c.
#include "harness.h"

namespace {

constexpr int kLength = 1024;  // of an array: 4 KiB

// Array a in the unified buffer, a result of as many bytes, and the result in array c.
struct Numbers {
  explicit Numbers(Arrays arrays) : to(arrays.tensor<float>(arrays.c)) {
    pipe.InitBuffer(in, 1, kLength * 4);
    pipe.InitBuffer(out, 1, kLength * 4);
    pipe.InitBuffer(work, 4096);
    f = in.AllocTensor<float>();
    DataCopy(f, arrays.tensor<float>(arrays.a), kLength);
    in.EnQue(f);
    f = in.DeQue<float>();
    h = f.ReinterpretCast<half>();
    r = out.AllocTensor<float>();
    Duplicate(r, -1.0f, kLength);
    PipeBarrier<PIPE_V>();
    rh = r.ReinterpretCast<half>();
    rb = r.ReinterpretCast<uint8_t>();
    temporary = work.Get<float>();
  }
  ~Numbers() {
    out.EnQue(r);
    in.FreeTensor(f);
    r = out.DeQue<float>();
    if (GetBlockIdx() == 0) DataCopy(to, r, kLength);
    out.FreeTensor(r);
  }
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<TPosition::VECCALC> work;
  GlobalTensor<float> to;
  LocalTensor<float> f, r, temporary;
  LocalTensor<half> h, rh;
  LocalTensor<uint8_t> rb;
};

}  // namespace

KERNEL(number_counts) {
  Numbers n(arrays);
  Add(n.r, n.f, n.f[512], 100);
}
KERNEL(number_masks) {
  Numbers n(arrays);
  uint64_t bits[2] = {0x00ff00ff00000005, 0};
  Adds(n.r, n.f, 0.0f, 10, 3, UnaryRepeatParams());
  Adds(n.r[256], n.f[256], 0.0f, bits, 1, UnaryRepeatParams());
  uint64_t wide[2] = {1, 0x8000000000000000};
  Adds(n.rh[1024], n.h[1024], half(0), wide, 1, UnaryRepeatParams());
}
KERNEL(number_strides) {
  Numbers n(arrays);
  // A row of 64 times every row; then every second block.
  Mul(n.r, n.f, n.f[512], 64, 4, BinaryRepeatParams(1, 1, 1, 8, 8, 0));
  Adds(n.r[512], n.f, 0.0f, 64, 2, UnaryRepeatParams(1, 2, 8, 16));
  Adds(n.r[768], n.f, 0.0f, 64, 1, UnaryRepeatParams(1, 0, 8, 8));
}
KERNEL(number_half) {
  Numbers n(arrays);
  Mul(n.rh, n.h, n.h[512], 512);
  Add(n.rh[512], n.h, n.h[512], 512);
  Sub(n.rh[1024], n.h, n.h[512], 512);
  Div(n.rh[1536], n.h, n.h[512], 512);
}
KERNEL(number_largest) {
  Numbers n(arrays);
  Max(n.r, n.f, n.f[512], 512);
  Min(n.r[512], n.f, n.f[512], 512);
}
KERNEL(number_unary) {
  Numbers n(arrays);
  Exp(n.r, n.f, 128);
  Ln(n.r[128], n.f, 128);
  Abs(n.r[256], n.f, 128);
  Sqrt(n.r[384], n.f, 128);
  Reciprocal(n.r[512], n.f, 128);
  Muls(n.r[640], n.f, 3.0f, 128);
  Rsqrt(n.r[768], n.f, 128);
}
KERNEL(number_sums_in_place) {
  Numbers n(arrays);
  Duplicate(n.r, 0.0f, 64);
  PipeBarrier<PIPE_V>();
  Add(n.r, n.f, n.r, 64, 8, BinaryRepeatParams(1, 1, 1, 0, 8, 0));
  Duplicate(n.r[64], 1.0f, 64);
  PipeBarrier<PIPE_V>();
  Axpy(n.r[64], n.f, 2.5f, 64);
  Duplicate(n.r[128], 1.0f, 64);
  PipeBarrier<PIPE_V>();
  Axpy(n.r[128], n.h, half(2.5f), 64);
}
KERNEL(number_half_to_float) {
  Numbers n(arrays);
  Cast(n.r, n.h, RoundMode::CAST_NONE, 1024);
}
KERNEL(number_float_to_half) {
  Numbers n(arrays);
  Cast(n.rh, n.f, RoundMode::CAST_NONE, 1000);
}
KERNEL(number_float_to_half_odd) {
  Numbers n(arrays);
  Cast(n.rh, n.f, RoundMode::CAST_ODD, 1000);
}
KERNEL(number_cast_by_repeats) {
  Numbers n(arrays);
  Cast(n.r, n.h, RoundMode::CAST_NONE, 64, 4, UnaryRepeatParams(1, 1, 8, 8));
}
KERNEL(number_half_to_integers) {
  Numbers n(arrays);
  auto r = n.r.ReinterpretCast<int32_t>();
  Cast(r, n.h, RoundMode::CAST_RINT, 128);
  Cast(r[128], n.h, RoundMode::CAST_FLOOR, 128);
  Cast(r[256], n.h, RoundMode::CAST_CEIL, 128);
  Cast(r[384], n.h, RoundMode::CAST_ROUND, 128);
  Cast(r[512], n.h, RoundMode::CAST_TRUNC, 128);
}
KERNEL(number_half_sums) {
  Numbers n(arrays);
  WholeReduceSum(n.rh, n.h, 128, 8, 1, 1, 8);
  WholeReduceSum(n.rh[64], n.h, 100, 4, 2, 1, 8);
  BlockReduceSum(n.rh[128], n.h, 2, 128, 1, 1, 8);
  BlockReduceMax(n.rh[192], n.h, 2, 40, 1, 1, 8);
  ReduceSum(n.rh[256], n.h, n.temporary.ReinterpretCast<half>(), 1000);
}
KERNEL(number_half_maxima) {
  Numbers n(arrays);
  WholeReduceMax(n.rh, n.h, 128, 8, 1, 1, 8);
  WholeReduceMin(n.rh[64], n.h, 100, 8, 1, 1, 8);
  ReduceMax(n.rh[128], n.h, n.temporary.ReinterpretCast<half>(), 1000, true);
}
KERNEL(number_selects) {
  Numbers n(arrays);
  Compare(n.rb[2048], n.f, n.f[64], CMPMODE::GE, 64);
  PipeBarrier<PIPE_V>();
  Select(n.r, n.rb[2048], n.f, n.f[128], SELMODE::VSEL_CMPMASK_SPR, 64, 2,
         BinaryRepeatParams());
}
KERNEL(number_integers) {
  Numbers n(arrays);
  auto f = n.f.ReinterpretCast<int32_t>();
  auto r = n.r.ReinterpretCast<int32_t>();
  Add(r, f, f[256], 256);
  Mul(r[256], f, f[256], 256);
  Max(r[512], f, f[256], 256);
}

#if __NPU_ARCH__ == 2201
KERNEL(number_float_sums) {
  Numbers n(arrays);
  WholeReduceSum(n.r, n.f, 64, 8, 1, 1, 8);
  BlockReduceSum(n.r[64], n.f, 2, 64, 1, 1, 8);
  WholeReduceMax(n.r[128], n.f, 64, 8, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
  WholeReduceMax(n.r[192], n.f, 64, 8, 1, 1, 8, ReduceOrder::ORDER_ONLY_INDEX);
  WholeReduceMax(n.r[256], n.f, 64, 8, 1, 1, 8, ReduceOrder::ORDER_INDEX_VALUE);
  ReduceRepeat<ReduceType::MIN, float, float>(n.r[320], n.f, 64, 8, 1, 1, 8,
                                              ReduceOrder::ORDER_ONLY_VALUE);
  ReduceSum(n.r[384], n.f, n.temporary, 777);
  PipeBarrier<PIPE_V>();
  ReduceMax(n.r[448], n.f, n.temporary, 777, true);
  PipeBarrier<PIPE_V>();
  ReduceMin(n.r[512], n.f, n.temporary, 777);
}
KERNEL(number_float_to_half_modes) {
  Numbers n(arrays);
  Cast(n.rh, n.f, RoundMode::CAST_RINT, 200);
  Cast(n.rh[256], n.f, RoundMode::CAST_FLOOR, 200);
  Cast(n.rh[512], n.f, RoundMode::CAST_CEIL, 200);
  Cast(n.rh[768], n.f, RoundMode::CAST_ROUND, 200);
  Cast(n.rh[1024], n.f, RoundMode::CAST_TRUNC, 200);
}
KERNEL(number_bfloat16) {
  Numbers n(arrays);
  auto r = n.r.ReinterpretCast<bfloat16_t>();
  Cast(r, n.f, RoundMode::CAST_RINT, 512);
  Cast(r[512], n.f, RoundMode::CAST_TRUNC, 512);
  Cast(n.r[512], n.f.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, 512);
}
KERNEL(number_to_integers) {
  Numbers n(arrays);
  Cast(n.r.ReinterpretCast<int32_t>(), n.f, RoundMode::CAST_RINT, 512);
  Cast(n.r[512], n.f.ReinterpretCast<int32_t>(), RoundMode::CAST_NONE, 512);
}
KERNEL(number_counter) {
  Numbers n(arrays);
  SetMaskCount();
  SetVectorMask<float, MaskMode::COUNTER>(70);
  Adds<float, false>(n.r, n.f, 0.0f, MASK_PLACEHOLDER, 1,
                     UnaryRepeatParams(1, 1, 8, 16));
  SetMaskNorm();
  SetVectorMask<float>(0, 0xf0);
  Adds<float, false>(n.r[512], n.f, 0.0f, MASK_PLACEHOLDER, 2, UnaryRepeatParams());
  ResetMask();
}
KERNEL(number_spread) {
  Numbers n(arrays);
  Brcb(n.r, n.f, 2, BrcbRepeatParams(1, 8));
  Brcb(n.rh[512], n.h, 1, BrcbRepeatParams(2, 16));
  CreateVecIndex(n.r[512], 5.0f, 100);
  Copy(n.r[640], n.f, 64, 2, CopyRepeatParams(1, 1, 8, 16));
  Maxs(n.r[768], n.f, 0.5f, 64);
  Mins(n.r[832], n.f, 0.5f, 64);
  Duplicate(n.r[896], 1.0f, 64);
  PipeBarrier<PIPE_V>();
  MulAddDst(n.r[896], n.f, n.f[64], 64);
}
KERNEL(number_compares) {
  Numbers n(arrays);
  Compares(n.rb, n.f, 0.0f, CMPMODE::LT, 128);
  Compares(n.rb[32], n.f, 0.0f, CMPMODE::GT, 128);
  Compares(n.rb[64], n.f, 0.0f, CMPMODE::EQ, 128);
  Compares(n.rb[96], n.f, 0.0f, CMPMODE::LE, 128);
  Compares(n.rb[128], n.f, 0.0f, CMPMODE::GE, 128);
  Compares(n.rb[160], n.f, 0.0f, CMPMODE::NE, 128);
  PipeBarrier<PIPE_V>();
  Select(n.r[512], n.rb, n.f, 7.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 128);
  Select(n.r[640], n.rb, n.f, n.f[128], SELMODE::VSEL_TENSOR_TENSOR_MODE, 128);
}
KERNEL(number_padded_copies) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  pipe.InitBuffer(in, 1, 1024);
  pipe.InitBuffer(out, 1, 1024);
  auto x = in.AllocTensor<float>();
  // Three blocks of 5 floats, 2 apart, each after one float of padding and before two.
  DataCopyPad(x, arrays.tensor<float>(arrays.a), DataCopyExtParams(3, 20, 8, 1, 0),
              DataCopyPadExtParams<float>(true, 1, 2, 9.5f));
  in.EnQue(x);
  x = in.DeQue<float>();
  auto y = out.AllocTensor<float>();
  Duplicate(y, -1.0f, 256);
  PipeBarrier<PIPE_V>();
  for (int i = 0; i < 3; ++i) Adds(y[i * 16], x[i * 16], 0.0f, 8);
  out.EnQue(y);
  in.FreeTensor(x);
  y = out.DeQue<float>();
  if (GetBlockIdx() == 0) {
    DataCopyPad(arrays.tensor<float>(arrays.c), y, DataCopyExtParams(3, 28, 1, 5, 0));
  }
  out.FreeTensor(y);
}
#endif

KERNEL(number_strided_copies) {
  Numbers n(arrays);
  DataCopy(n.r, n.f, DataCopyParams(3, 2, 1, 4));
  auto row = arrays.tensor<float>(arrays.b);
  row.SetValue(GetBlockIdx() * 32, 8.0f);  // in cache lines of their own
}

// Without its wait the result depends on the schedule.
KERNEL(late_copy) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> both;
  pipe.InitBuffer(both, 1, 256);
  auto x = both.AllocTensor<float>();
  DataCopy(x, arrays.tensor<float>(arrays.a), 64);
  both.EnQue(x);
  x = both.DeQue<float>();
  if (GetBlockIdx() == 0) DataCopy(arrays.tensor<float>(arrays.c), x, 64);
  if (GetBlockIdx() == 0)
    DataCopy(x, arrays.tensor<float>(arrays.b), 64);  // ! copy-position  // ! race-ub
  both.FreeTensor(x);
}
