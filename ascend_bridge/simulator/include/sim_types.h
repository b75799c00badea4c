// Number formats, enumerations and parameter structures of the Ascend C API, from its
// public documentation: https://www.hiascend.com/document (Ascend C API reference).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef __NPU_ARCH__
#error "compile with -D__NPU_ARCH__=2201 (910B1..B4, 910_93) or 1001 (910A)"
#elif __NPU_ARCH__ != 2201 && __NPU_ARCH__ != 1001
#error "the simulator knows __NPU_ARCH__ 2201 and 1001"
#endif

#define __global__
#define __aicore__
#define __vector__
#define __gm__
#define __ubuf__
#define GM_ADDR uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(0)
#define PJ_SIMULATOR 1  // this is the simulator, not a device

namespace simulator {

uint16_t half_bits(float value);  // to nearest, ties to even
float half_value(uint16_t bits);
// The bits of a positive float cut to binary16, at most the largest finite one. `cut`
// is what was lost, in 2^-32 of the last place; it is 0 iff the value is exact.
uint16_t half_truncated(uint32_t magnitude, uint32_t* cut);

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_value(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace simulator

// IEEE binary16. Arithmetic goes through float and is rounded when it is stored, which
// is exact for one sum, difference, product or quotient.
class half {
 public:
  half() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value>>
  half(N value) : bits_(simulator::half_bits(static_cast<float>(value))) {}
  operator float() const { return simulator::half_value(bits_); }
  static half from_bits(uint16_t bits) {
    half made;
    made.bits_ = bits;
    return made;
  }

 private:
  uint16_t bits_;
};

// The upper half of a float. The product has no arithmetic on it, only `Cast`.
class bfloat16_t {
 public:
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits_(simulator::bfloat16_bits(value)) {}
  explicit operator float() const {
    return simulator::float_value(uint32_t(bits_) << 16);
  }
  static bfloat16_t from_bits(uint16_t bits) {
    bfloat16_t made;
    made.bits_ = bits;
    return made;
  }

 private:
  uint16_t bits_;
};

enum pipe_t {
  PIPE_S,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_ALL,
  PIPE_FIX
};

enum event_t {
  EVENT_ID0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7
};

namespace AscendC {

using TEventID = int32_t;

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM = VECCALC
};
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  V_S,
  S_V,
  MTE2_S,
  S_MTE2,
  MTE3_S,
  S_MTE3,
  MTE2_MTE3,
  MTE3_MTE2,
  V_V
};

enum class RoundMode : uint8_t {
  CAST_NONE,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD
};

enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };

enum class SELMODE : uint8_t {
  VSEL_CMPMASK_SPR,
  VSEL_TENSOR_SCALAR_MODE,
  VSEL_TENSOR_TENSOR_MODE
};

enum class MaskMode : uint8_t { NORMAL, COUNTER };

enum class ReduceType : uint8_t { SUM, MAX, MIN };

enum class ReduceOrder : uint8_t {
  ORDER_VALUE_INDEX,
  ORDER_INDEX_VALUE,
  ORDER_ONLY_VALUE,
  ORDER_ONLY_INDEX
};

enum class CacheLine : uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT };

constexpr uint64_t MASK_PLACEHOLDER = 0;

// The fields of the structures are wider here than on the device, where a value too
// large is cut silently: the calls that take them report it.
struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(int64_t count, int64_t len, int64_t src_gap, int64_t dst_gap)
      : blockCount(count), blockLen(len), srcStride(src_gap), dstStride(dst_gap) {}
  int64_t blockCount = 1;
  int64_t blockLen = 0;   // DataCopy: 32 bytes; DataCopyPad: bytes
  int64_t srcStride = 0;  // gap between blocks
  int64_t dstStride = 0;
};

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(int64_t count, int64_t len, int64_t src_gap, int64_t dst_gap,
                    uint32_t reserved)
      : blockCount(count),
        blockLen(len),
        srcStride(src_gap),
        dstStride(dst_gap),
        rsv(reserved) {}
  int64_t blockCount = 1;
  int64_t blockLen = 0;   // bytes
  int64_t srcStride = 0;  // gap between blocks: bytes in GM, 32 bytes in UB
  int64_t dstStride = 0;
  uint32_t rsv = 0;
};

struct DataCopyPadParams {
  DataCopyPadParams() = default;
  DataCopyPadParams(bool pad, int64_t left, int64_t right, uint64_t value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  int64_t leftPadding = 0;  // elements
  int64_t rightPadding = 0;
  uint64_t paddingValue = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, int64_t left, int64_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  int64_t leftPadding = 0;
  int64_t rightPadding = 0;
  T paddingValue = T(0);
};

// Strides in 32-byte blocks: between blocks of one repeat, and between repeats.
struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(int64_t dst_blk, int64_t src_blk, int64_t dst_rep, int64_t src_rep)
      : dstBlkStride(dst_blk),
        srcBlkStride(src_blk),
        dstRepStride(dst_rep),
        srcRepStride(src_rep) {}
  int64_t dstBlkStride = 1;
  int64_t srcBlkStride = 1;
  int64_t dstRepStride = 8;
  int64_t srcRepStride = 8;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() = default;
  BinaryRepeatParams(int64_t dst_blk, int64_t src0_blk, int64_t src1_blk,
                     int64_t dst_rep, int64_t src0_rep, int64_t src1_rep)
      : dstBlkStride(dst_blk),
        src0BlkStride(src0_blk),
        src1BlkStride(src1_blk),
        dstRepStride(dst_rep),
        src0RepStride(src0_rep),
        src1RepStride(src1_rep) {}
  int64_t dstBlkStride = 1;
  int64_t src0BlkStride = 1;
  int64_t src1BlkStride = 1;
  int64_t dstRepStride = 8;
  int64_t src0RepStride = 8;
  int64_t src1RepStride = 8;
};

struct CopyRepeatParams {
  CopyRepeatParams() = default;
  CopyRepeatParams(int64_t dst, int64_t src, int64_t dst_rep, int64_t src_rep)
      : dstStride(dst),
        srcStride(src),
        dstRepeatSize(dst_rep),
        srcRepeatSize(src_rep) {}
  int64_t dstStride = 1;
  int64_t srcStride = 1;
  int64_t dstRepeatSize = 8;
  int64_t srcRepeatSize = 8;
};

struct BrcbRepeatParams {
  BrcbRepeatParams() = default;
  BrcbRepeatParams(int64_t dst_blk, int64_t dst_rep)
      : dstBlkStride(dst_blk), dstRepStride(dst_rep) {}
  int64_t dstBlkStride = 1;
  int64_t dstRepStride = 8;
};

inline float ToFloat(const bfloat16_t& value) { return static_cast<float>(value); }
inline bfloat16_t ToBfloat16(const float& value) { return bfloat16_t(value); }

}  // namespace AscendC
