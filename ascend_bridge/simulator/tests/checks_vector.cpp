// Masks, repeats, overlaps, and what a product lacks.
#include "harness.h"

KERNEL(mask_all) {
  Bench t(arrays);
  Exp(t.x, t.y, 64, 4, UnaryRepeatParams());
  Exp(t.h, t.h, 128, 2, UnaryRepeatParams());
}
KERNEL(mask_too_wide) {
  Bench t(arrays);
  Exp(t.x, t.y, 65, 1, UnaryRepeatParams());  // ! mask
  Exp(t.h, t.h, 129, 1, UnaryRepeatParams());  // ! mask
}
KERNEL(mask_of_nothing) {
  Bench t(arrays);
  Exp(t.x, t.y, uint64_t(0), 1, UnaryRepeatParams());  // ! mask
}
KERNEL(mask_bits) {
  Bench t(arrays);
  uint64_t mask[1] = {0x8000000000000001};  // 64 elements: one word
  Exp(t.x, t.y, mask, 1, UnaryRepeatParams());
}
KERNEL(mask_no_bits) {
  Bench t(arrays);
  uint64_t mask[2] = {0, 0};
  Exp(t.x, t.y, mask, 1, UnaryRepeatParams());  // ! mask
}
KERNEL(mask_of_reductions) {
  Bench t(arrays);
  WholeReduceSum(t.h, t.h[128], 129, 1, 1, 1, 8);  // ! mask
}

KERNEL(repeat_most) {
  Bench t(arrays);
  Exp(t.x, t.y, 8, 255, UnaryRepeatParams(1, 1, 0, 0));
}
KERNEL(repeat_too_often) {
  Bench t(arrays);
  Exp(t.x, t.y, 8, 256, UnaryRepeatParams(1, 1, 0, 0));  // ! repeat
  Duplicate(t.x, 0.0f, 64, 256, 1, 0);  // ! repeat
}
KERNEL(repeat_stride_negative) {
  Bench t(arrays);
  Exp(t.x, t.y, 8, 2, UnaryRepeatParams(1, 1, 8, -8));  // ! repeat
}
KERNEL(repeat_none) {
  Bench t(arrays);
  Exp(t.x, t.y, 8, 0, UnaryRepeatParams());
}
KERNEL(reduction_too_often) {
  Bench t(arrays);
  WholeReduceSum(t.h, t.h[128], 16, 256, 0, 1, 0);  // ! repeat
}

// Overlaps ----------------------------------------------------------------------------

KERNEL(overlap_whole) {
  Bench t(arrays);
  Add(t.x, t.x, t.x, 128);
  PipeBarrier<PIPE_V>();
  Add(t.x, t.x, t.y, 64, 2, BinaryRepeatParams());
}
KERNEL(overlap_in_part) {
  Bench t(arrays);
  Exp(t.x[8], t.x, 64);  // ! overlap
}
KERNEL(overlap_next_to) {
  Bench t(arrays);
  Exp(t.x[64], t.x, 64);
}
KERNEL(overlap_of_other_widths) {
  Bench t(arrays);
  Cast(t.x, t.x.ReinterpretCast<half>(), RoundMode::CAST_NONE, 64);  // ! overlap
}
KERNEL(overlap_reads_an_earlier_repeat) {
  Bench t(arrays);
  Exp(t.x[64], t.x, 64, 2, UnaryRepeatParams());  // ! overlap
}
KERNEL(overlap_writes_what_an_earlier_repeat_read) {
  Bench t(arrays);
  Exp(t.x, t.x[64], 64, 2, UnaryRepeatParams());
}
KERNEL(overlap_sums_in_second_source) {
  Bench t(arrays);
  Add(t.x, t.y, t.x, 64, 4, BinaryRepeatParams(1, 1, 1, 0, 8, 0));
}
KERNEL(overlap_sums_in_first_source) {
  Bench t(arrays);
  Add(t.x, t.x, t.y, 64, 4, BinaryRepeatParams(1, 1, 1, 0, 0, 8));  // ! overlap
}
KERNEL(overlap_divides_in_second_source) {
  Bench t(arrays);
  Div(t.x, t.y, t.x, 64, 4, BinaryRepeatParams(1, 1, 1, 0, 8, 0));  // ! overlap
}
KERNEL(overlap_of_narrow_repeats) {
  Bench t(arrays);
  Exp(t.x, t.x, 16, 8, UnaryRepeatParams(1, 1, 2, 2));
}
KERNEL(overlap_of_reductions) {
  Bench t(arrays);
  WholeReduceSum(t.h, t.h, 64, 2, 1, 1, 4);  // ! overlap
  WholeReduceSum(t.h[64], t.h, 64, 3, 1, 1, 4);  // ! overlap
}
KERNEL(overlap_of_sums_with_what_was_read) {
  Bench t(arrays);
  WholeReduceSum(t.h, t.h[16], 16, 4, 16, 1, 1);
}

// Alignment of results ----------------------------------------------------------------

KERNEL(sum_at_any_element) {
  Bench t(arrays);
  WholeReduceSum(t.h[1], t.h[128], 64, 1, 1, 1, 8);
}
KERNEL(maximum_and_index_at_pairs) {
  Bench t(arrays);
  WholeReduceMax(t.h[2], t.h[128], 64, 1, 1, 1, 8);
}
KERNEL(maximum_and_index_between_pairs) {
  Bench t(arrays);
  WholeReduceMax(t.h[1], t.h[128], 64, 1, 1, 1, 8);  // ! ub-align
}
KERNEL(block_sums_at_blocks) {
  Bench t(arrays);
  BlockReduceSum(t.h[8], t.h[128], 1, 128, 1, 1, 8);
}
KERNEL(block_sums_between_blocks) {
  Bench t(arrays);
  BlockReduceSum(t.h[4], t.h[128], 1, 128, 1, 1, 8);  // ! ub-align
}
KERNEL(reduction_past_the_buffer) {
  Bench t(arrays);
  WholeReduceSum(t.h[128], t.h, 64, 2, 400, 1, 4);  // ! ub-bounds
}
KERNEL(work_space_of_a_reduction) {
  Bench t(arrays);
  ReduceSum(t.h, t.h[128], t.h[64], 128);
}
KERNEL(work_space_too_small) {
  Bench t(arrays);
  auto work = t.work.GetWithOffset<half>(16, 4064);
  ReduceMax(t.h, t.x.ReinterpretCast<half>(), work, 128 * 9);  // ! ub-bounds
}
KERNEL(work_space_of_an_index) {
  Bench t(arrays);
  auto work = t.work.GetWithOffset<half>(32, 4032);
  ReduceMax(t.h, t.x.ReinterpretCast<half>(), work, 256, true);
}
KERNEL(work_space_too_small_for_an_index) {
  Bench t(arrays);
  auto work = t.work.GetWithOffset<half>(16, 4064);
  ReduceMax(t.h, t.x.ReinterpretCast<half>(), work, 256, true);  // ! ub-bounds
}
KERNEL(work_space_not_aligned) {
  Bench t(arrays);
  ReduceSum(t.h, t.h[128], t.h[72], 128);  // ! ub-align
}

// Products ----------------------------------------------------------------------------

KERNEL(types_of_arithmetic) {
  Bench t(arrays);
  auto n = t.x.ReinterpretCast<int32_t>();
  auto s = t.z.ReinterpretCast<int16_t>();
  Add(n, n, n, 8);
  Mul(t.h, t.h, t.h, 16);
  Sub(s, s, s, 16);  // ! 1001 product
}
KERNEL(types_of_division) {
  Bench t(arrays);
  auto n = t.x.ReinterpretCast<int32_t>();
  Div(n, n, n, 8);  // ! product
}
KERNEL(types_of_scalar_arithmetic) {
  Bench t(arrays);
  auto n = t.x.ReinterpretCast<int32_t>();
  Muls(n, n, 2, 8);  // ! 1001 product
}
KERNEL(scalar_maximum) {
  Bench t(arrays);
  Maxs(t.x, t.y, 1.0f, 8);  // ! 1001 product
  Mins(t.z, t.y, 1.0f, 8);  // ! 1001 product
}
KERNEL(multiply_and_add) {
  Bench t(arrays);
  Axpy(t.x, t.y, 1.0f, 8);
  MulAddDst(t.z, t.y, t.y, 8);  // ! 1001 product
}
KERNEL(index_vector) {
  Bench t(arrays);
  CreateVecIndex(t.x, 0.0f, 8);  // ! 1001 product
}
KERNEL(broadcast_to_blocks) {
  Bench t(arrays);
  Brcb(t.x, t.y, 1, BrcbRepeatParams(1, 8));  // ! 1001 product
}
KERNEL(broadcast_past_the_buffer) {
  Bench t(arrays);
  Brcb(t.z[256], t.y, 4, BrcbRepeatParams(1, 8));  // ! 1001 product
  PipeBarrier<PIPE_V>();
  Brcb(t.z[256], t.y, 5, BrcbRepeatParams(1, 8));  // ! ub-bounds  // ! 1001 product
}
KERNEL(broadcast_onto_itself) {
  Bench t(arrays);
  Brcb(t.x, t.x, 1, BrcbRepeatParams(1, 8));  // ! overlap  // ! 1001 product
}
KERNEL(broadcast_without_stride) {
  Bench t(arrays);
  Brcb(t.x, t.y, 1, BrcbRepeatParams(0, 8));  // ! repeat  // ! 1001 product
}
KERNEL(copy_by_mask) {
  Bench t(arrays);
  Copy(t.x, t.y, 64, 1, CopyRepeatParams(1, 1, 8, 8));  // ! 1001 product
}
KERNEL(sum_of_floats) {
  Bench t(arrays);
  WholeReduceSum(t.x, t.y, 64, 1, 1, 1, 8);  // ! 1001 product
  ReduceMax(t.z, t.y, t.z[64], 64);  // ! 1001 product
}
KERNEL(block_sum_of_floats) {
  Bench t(arrays);
  BlockReduceSum(t.x, t.y, 1, 64, 1, 1, 8);  // ! 1001 product
}
KERNEL(block_sums_to_one_place) {
  Bench t(arrays);
  BlockReduceSum(t.h, t.h[128], 1, 128, 0, 1, 8);  // ! 1001 product
}
KERNEL(maximum_alone) {
  Bench t(arrays);
  WholeReduceMax(t.h, t.h[128], 64, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);  // ! 1001 product
}
KERNEL(casts_of_both) {
  Bench t(arrays);
  Cast(t.x, t.h, RoundMode::CAST_NONE, 64);
  Cast(t.z.ReinterpretCast<half>(), t.y, RoundMode::CAST_NONE, 64);
}
KERNEL(cast_rounding_mode) {
  Bench t(arrays);
  Cast(t.z.ReinterpretCast<half>(), t.y, RoundMode::CAST_RINT, 64);  // ! 1001 product
  Cast(t.x, t.h, RoundMode::CAST_RINT, 64);  // ! product
}
KERNEL(cast_to_bfloat16) {
  Bench t(arrays);
  Cast(t.z.ReinterpretCast<bfloat16_t>(), t.y, RoundMode::CAST_RINT, 64);  // ! 1001 product
}
KERNEL(cast_to_bfloat16_without_mode) {
  Bench t(arrays);
  Cast(t.z.ReinterpretCast<bfloat16_t>(), t.y, RoundMode::CAST_NONE, 64);  // ! product
}
KERNEL(cast_to_integers) {
  Bench t(arrays);
  Cast(t.z.ReinterpretCast<int32_t>(), t.y, RoundMode::CAST_RINT, 64);  // ! 1001 product
}
KERNEL(arithmetic_of_bfloat16) {
  Bench t(arrays);
  auto x = t.x.ReinterpretCast<bfloat16_t>();
  Duplicate(x, bfloat16_t(1.0f), 16);  // ! 1001 product
  auto y = t.in.AllocTensor<bfloat16_t>();
  DataCopy(y, arrays.tensor<bfloat16_t>(arrays.a), 16);  // ! 1001 product
  t.in.FreeTensor(y);
}
KERNEL(compare_whole_repeats) {
  Bench t(arrays);
  Compare(t.z.ReinterpretCast<uint8_t>(), t.x, t.y, CMPMODE::LT, 64);
}
KERNEL(compare_part_of_a_repeat) {
  Bench t(arrays);
  Compare(t.z.ReinterpretCast<uint8_t>(), t.x, t.y, CMPMODE::LT, 60);  // ! copy-length
}
KERNEL(compare_integers) {
  Bench t(arrays);
  auto n = t.x.ReinterpretCast<int32_t>();
  Compare(t.z.ReinterpretCast<uint8_t>(), n, n, CMPMODE::EQ, 64);  // ! 1001 product
  Compare(t.y.ReinterpretCast<uint8_t>(), n, n, CMPMODE::LT, 64);  // ! product
}
KERNEL(compare_with_scalar) {
  Bench t(arrays);
  Compares(t.z.ReinterpretCast<uint8_t>(), t.x, 1.0f, CMPMODE::LT, 64);  // ! 1001 product
  CompareScalar(t.y.ReinterpretCast<uint8_t>(), t.x, 1.0f, CMPMODE::LT, 64);  // ! 1001 product
}
KERNEL(select_one_mask) {
  Bench t(arrays);
  Select(t.x, t.z.ReinterpretCast<uint8_t>(), t.x, t.y, SELMODE::VSEL_CMPMASK_SPR, 64);
}
KERNEL(select_more_masks) {
  Bench t(arrays);
  Select(t.x, t.z.ReinterpretCast<uint8_t>(), t.x, t.y, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);  // ! 1001 product
}
KERNEL(select_scalar) {
  Bench t(arrays);
  Select(t.x, t.z.ReinterpretCast<uint8_t>(), t.y, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);  // ! 1001 product
}
KERNEL(select_scalar_in_another_mode) {
  Bench t(arrays);
  Select(t.x, t.z.ReinterpretCast<uint8_t>(), t.y, 1.0f, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);  // ! product
}
KERNEL(select_past_the_mask) {
  Bench t(arrays);
  auto bits = t.work.GetWithOffset<uint8_t>(32, 4064);
  Select(t.x, bits[32], t.x, t.y, SELMODE::VSEL_CMPMASK_SPR, 64);  // ! ub-bounds
}
KERNEL(mask_registers) {
  Bench t(arrays);
  SetMaskCount();  // ! 1001 product
  SetVectorMask<float, MaskMode::COUNTER>(70);
  SetMaskNorm();  // ! 1001 product
  ResetMask();  // ! 1001 product
}
