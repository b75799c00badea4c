// Products of bfloat16 matrices by Intel AMX, and float32 numbers as sums of bfloat16
// ones. Included by kernels.cc only, where PJ_AMX says that the compiler knows AMX.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to a tile of 16 x 16
// floats the product of 16 x 32 by 32 x 16 bfloat16 numbers, the second factor in pairs:
//
//        a: row m         b: row i              c: row m
//     16 [k0 k1 .. k31]   16 [n0: k i, k i']    16 [n0 n1 .. n15]
//                            [n1: k i, k i']
//
// Which two numbers make pair i does not matter so long as a and b agree; here they are
// i and i + 16, which costs no shuffles.
//
// A float32 number is the exact sum of three bfloat16 numbers, each of 8 bits, and a
// product of two bfloat16 numbers is exact in float32. So x * y is, to float32's own
// precision, the six products of parts i and j with i + j < 3:
// https://arxiv.org/abs/1904.06376.
#pragma once

#include "attention.h"
#include "simd.h"

namespace {

using namespace pagedjax;

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileSide = 16;
constexpr int64_t kTileDepth = 32;
constexpr int kFloatParts = 3;

// bfloat16 parts that hold a value of the format.
PJ_INLINE int64_t amx_parts(DType dtype) {
  return dtype == DType::kF32 ? kFloatParts : dtype == DType::kF16 ? 2 : 1;
}

struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const AmxShapes kAmxShapes;

// The tile registers belong to the thread between these two. Left in use they would
// make every switch of threads save 8 KiB.
PJ_INLINE void amx_begin() { _tile_loadconfig(&kAmxShapes); }
PJ_INLINE void amx_end() { _tile_release(); }

// One factor of a product: tiles [outer][step][part], each 1024 bytes in a row.
struct AmxFactor {
  const char* tiles;
  int64_t outer;  // bytes from one outer tile to the next
};

// c(m, n) = a(m) b(n), or with `add` c(m, n) + a(m) b(n), for m < 2 and n < Columns,
// where c(m, n) lies at c + m * c_row + n * c_column. Parts i, j with i + j < 3 count;
// their order loads few tiles anew. Callers walk a and come back to b: a is loaded past
// the first cache, which is too small for both and for what between() writes.
//
// The products keep their own unit of the processor busy for 64 cycles at a time; in
// that time between() does something else with the vectors.
template <int AParts, int BParts, int Columns, class Between>
PJ_INLINE void amx_multiply(AmxFactor a, AmxFactor b, int64_t steps, bool add, char* c,
                            int64_t c_row, int64_t c_column, Between between) {
  // The tile loads do not tell the compiler what they read.
  __asm__ volatile("" ::: "memory");
  if (add) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + c_row, 64);
    if (Columns == 2) {
      _tile_loadd(2, c + c_column, 64);
      _tile_loadd(3, c + c_row + c_column, 64);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (Columns == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    const char* a_tile = a.tiles + step * AParts * kTileBytes;
    const char* b_tile = b.tiles + step * BParts * kTileBytes;
    int held = -1;  // the part of b in the registers
    PJ_UNROLL for (int i = AParts - 1; i >= 0; --i) {
      _tile_stream_loadd(4, a_tile + i * kTileBytes, 64);
      _tile_stream_loadd(5, a_tile + i * kTileBytes + a.outer, 64);
      const int some = BParts < kFloatParts - i ? BParts : kFloatParts - i;
      const int first = held < 0 ? 0 : held;
      PJ_UNROLL for (int n = 0; n < some; ++n) {
        const int j = (first + n) % some;
        if (j != held) _tile_loadd(6, b_tile + j * kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (Columns == 2) {
          if (j != held) _tile_loadd(7, b_tile + j * kTileBytes + b.outer, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
        held = j;
        between();
      }
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + c_row, 64);
  if (Columns == 2) {
    _tile_stored(2, c + c_column, 64);
    _tile_stored(3, c + c_row + c_column, 64);
  }
}

// How often amx_multiply calls between() in a step.
constexpr int64_t amx_products(int64_t a_parts, int64_t b_parts) {
  int64_t products = 0;
  for (int64_t i = 0; i < a_parts; ++i) {
    products += b_parts < kFloatParts - i ? b_parts : kFloatParts - i;
  }
  return products;
}

// The bfloat16 part of x in its own place: the upper half of each lane.
PJ_INLINE VF upper_half(VF x) { return (VF)((VU)x & 0xffff0000u); }

// Writes x (low halves) and y (high halves) as the pairs of a row, as sums of `Parts`
// that are cut: exact where they have 8 bits per part. Part i goes to `to` + i * stride.
template <int Parts>
PJ_INLINE void split_pair(VF x, VF y, char* to, int64_t stride = kTileBytes) {
  PJ_UNROLL for (int i = 0; i < Parts; ++i) {
    const VU pair = (VU)x >> 16 | ((VU)y & 0xffff0000u);
    memcpy(to + i * stride, &pair, sizeof pair);
    x -= upper_half(x);
    y -= upper_half(y);
  }
}

}  // namespace
