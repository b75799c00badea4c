// Vector instructions that work element by element.
//
// Every operation has a count form, over n elements one behind another, and two mask
// forms, over repeats of 256 bytes, eight blocks of 32 bytes each:
//
//   byte of element i of repeat r:  (r * repStride + i / perBlock * blkStride) * 32
//                                       + i % perBlock * sizeof(T)
//
// Stride 0 reads the same block again.
#pragma once

#include <cmath>

#include "sim_lanes.h"

namespace simulator {

// Arithmetic in the element's own format: floats and halves round once, integers wrap.
template <class T>
using Wide = std::conditional_t<std::is_integral<T>::value, int64_t, float>;

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return T(Wide<T>(a) + Wide<T>(b));
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return T(Wide<T>(a) - Wide<T>(b));
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return T(Wide<T>(a) * Wide<T>(b));
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    return T(Wide<T>(a) / Wide<T>(b));
  }
};
// NaN in either operand gives NaN.
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return Wide<T>(a) != Wide<T>(a) || Wide<T>(a) > Wide<T>(b) ? a : b;
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return Wide<T>(a) != Wide<T>(a) || Wide<T>(a) < Wide<T>(b) ? a : b;
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return T(a | b);
  }
};
struct Exp {
  template <class T>
  T operator()(T a) const {
    return T(std::exp(float(a)));
  }
};
struct Ln {
  template <class T>
  T operator()(T a) const {
    return T(std::log(float(a)));
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return T(std::fabs(float(a)));
  }
};
struct Sqrt {
  template <class T>
  T operator()(T a) const {
    return T(std::sqrt(float(a)));
  }
};
struct Rsqrt {
  template <class T>
  T operator()(T a) const {
    return T(1.0f / std::sqrt(float(a)));
  }
};
struct Reciprocal {
  template <class T>
  T operator()(T a) const {
    return T(1.0f / float(a));
  }
};
struct Relu {
  template <class T>
  T operator()(T a) const {
    return Max()(a, T(0));
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return T(~a);
  }
};

}  // namespace simulator

namespace AscendC {

// The three forms of dst = name(src0, src1).
#define PJ_BINARY(name, on_2201, on_1001)                                         \
  template <typename T, bool isSetMask = true>                                    \
  inline void name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,         \
                   const LocalTensor<T>& src1, const int32_t& count,              \
                   simulator::Where at = simulator::Where::here()) {              \
    using namespace simulator;                                                    \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                           \
    map<T, T, T>(at, #name, counted(per_repeat<T>(), count), dst.view("dst"),     \
                 src0.view("src0"), src1.view("src1"), simulator::name());        \
  }                                                                               \
  template <typename T, bool isSetMask = true, typename M>                        \
  inline auto name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,         \
                   const LocalTensor<T>& src1, M mask, int64_t repeatTime,        \
                   const BinaryRepeatParams& params,                              \
                   simulator::Where at = simulator::Where::here())                \
      -> simulator::IsPlainMask<M> {                                              \
    using namespace simulator;                                                    \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                           \
    map<T, T, T>(                                                                 \
        at, #name,                                                                \
        masked(at, #name, per_repeat<T>(), as_mask(mask), repeatTime, isSetMask), \
        dst.view("dst", params.dstBlkStride, params.dstRepStride),                \
        src0.view("src0", params.src0BlkStride, params.src0RepStride),            \
        src1.view("src1", params.src1BlkStride, params.src1RepStride),            \
        simulator::name());                                                       \
  }

PJ_BINARY(Add, kNumbers, kFloats | kInt32)
PJ_BINARY(Sub, kNumbers, kFloats | kInt32)
PJ_BINARY(Mul, kNumbers, kFloats | kInt32)
PJ_BINARY(Div, kFloats, kFloats)
PJ_BINARY(Max, kNumbers, kFloats | kInt32)
PJ_BINARY(Min, kNumbers, kFloats | kInt32)
PJ_BINARY(And, kInt16 | kUint16, kInt16 | kUint16)
PJ_BINARY(Or, kInt16 | kUint16, kInt16 | kUint16)
#undef PJ_BINARY

// The three forms of dst = name(src).
#define PJ_UNARY(name, on_2201, on_1001)                                               \
  template <typename T, bool isSetMask = true>                                         \
  inline void name(const LocalTensor<T>& dst, const LocalTensor<T>& src,               \
                   const int32_t& count,                                               \
                   simulator::Where at = simulator::Where::here()) {                   \
    using namespace simulator;                                                         \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                                \
    map<T, T>(at, #name, counted(per_repeat<T>(), count), dst.view("dst"),             \
              src.view("src"), simulator::name());                                     \
  }                                                                                    \
  template <typename T, bool isSetMask = true, typename M>                             \
  inline auto name(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,       \
                   int64_t repeatTime, const UnaryRepeatParams& params,                \
                   simulator::Where at = simulator::Where::here())                     \
      -> simulator::IsPlainMask<M> {                                                   \
    using namespace simulator;                                                         \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                                \
    map<T, T>(                                                                         \
        at, #name,                                                                     \
        masked(at, #name, per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),      \
        dst.view("dst", params.dstBlkStride, params.dstRepStride),                     \
        src.view("src", params.srcBlkStride, params.srcRepStride), simulator::name()); \
  }

PJ_UNARY(Exp, kFloats, kFloats)
PJ_UNARY(Ln, kFloats, kFloats)
PJ_UNARY(Abs, kFloats, kFloats)
PJ_UNARY(Sqrt, kFloats, kFloats)
PJ_UNARY(Rsqrt, kFloats, kFloats)
PJ_UNARY(Reciprocal, kFloats, kFloats)
PJ_UNARY(Relu, kFloats | kInt32, kHalf)
PJ_UNARY(Not, kInt16 | kUint16, kInt16 | kUint16)
#undef PJ_UNARY

// The three forms of dst = op(src, scalar).
#define PJ_SCALAR(name, op, on_2201, on_1001)                                          \
  template <typename T, bool isSetMask = true>                                         \
  inline void name(const LocalTensor<T>& dst, const LocalTensor<T>& src,               \
                   const T& scalarValue, const int32_t& count,                         \
                   simulator::Where at = simulator::Where::here()) {                   \
    using namespace simulator;                                                         \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                                \
    map<T, T>(at, #name, counted(per_repeat<T>(), count), dst.view("dst"),             \
              src.view("src"),                                                         \
              [scalarValue](T value) { return simulator::op()(value, scalarValue); }); \
  }                                                                                    \
  template <typename T, bool isSetMask = true, typename M>                             \
  inline auto name(                                                                    \
      const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,      \
      M mask, int64_t repeatTime, const UnaryRepeatParams& params,                     \
      simulator::Where at = simulator::Where::here()) -> simulator::IsPlainMask<M> {   \
    using namespace simulator;                                                         \
    require(at, #name, kind_of<T>(), on_2201, on_1001);                                \
    map<T, T>(                                                                         \
        at, #name,                                                                     \
        masked(at, #name, per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),      \
        dst.view("dst", params.dstBlkStride, params.dstRepStride),                     \
        src.view("src", params.srcBlkStride, params.srcRepStride),                     \
        [scalarValue](T value) { return simulator::op()(value, scalarValue); });       \
  }

PJ_SCALAR(Adds, Add, kNumbers, kFloats)
PJ_SCALAR(Muls, Mul, kNumbers, kFloats)
PJ_SCALAR(Maxs, Max, kNumbers, 0)
PJ_SCALAR(Mins, Min, kNumbers, 0)
#undef PJ_SCALAR

// dst += src * scalar. T float and U half: the product is exact.
template <typename T, typename U>
inline void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                 const U& scalarValue, const int32_t& count,
                 simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "Axpy", kind_of<T>(), kFloats, kFloats);
  constexpr int64_t lanes = per_repeat<T>();
  fold<T, U, U>(at, "Axpy", counted(lanes, count), dst.packed("dst", lanes),
                src.packed("src", lanes), src.packed("src", lanes),
                [scalarValue](T sum, U a, U) {
                  return T(float(sum) + float(a) * float(scalarValue));
                });
}
template <typename T, typename U, bool isSetMask = true, typename M>
inline auto Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                 const U& scalarValue, M mask, int64_t repeatTime,
                 const UnaryRepeatParams& params,
                 simulator::Where at = simulator::Where::here())
    -> simulator::IsPlainMask<M> {
  using namespace simulator;
  require(at, "Axpy", kind_of<T>(), kFloats, kFloats);
  const View from = src.view("src", params.srcBlkStride, params.srcRepStride);
  fold<T, U, U>(
      at, "Axpy",
      masked(at, "Axpy", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
      dst.view("dst", params.dstBlkStride, params.dstRepStride), from, from,
      [scalarValue](T sum, U a, U) {
        return T(float(sum) + float(a) * float(scalarValue));
      });
}

// dst += src0 * src1.
template <typename T, typename U>
inline void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0,
                      const LocalTensor<U>& src1, const int32_t& count,
                      simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "MulAddDst", kind_of<T>(), kFloats, 0);
  constexpr int64_t lanes = per_repeat<T>();
  fold<T, U, U>(at, "MulAddDst", counted(lanes, count), dst.packed("dst", lanes),
                src0.packed("src0", lanes), src1.packed("src1", lanes),
                [](T sum, U a, U b) { return T(float(sum) + float(a) * float(b)); });
}
template <typename T, typename U, bool isSetMask = true, typename M>
inline auto MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0,
                      const LocalTensor<U>& src1, M mask, int64_t repeatTime,
                      const BinaryRepeatParams& params,
                      simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  require(at, "MulAddDst", kind_of<T>(), kFloats, 0);
  fold<T, U, U>(
      at, "MulAddDst",
      masked(at, "MulAddDst", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
      dst.view("dst", params.dstBlkStride, params.dstRepStride),
      src0.view("src0", params.src0BlkStride, params.src0RepStride),
      src1.view("src1", params.src1BlkStride, params.src1RepStride),
      [](T sum, U a, U b) { return T(float(sum) + float(a) * float(b)); });
}

template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue,
                      const int32_t& count,
                      simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  constexpr uint32_t kinds = kFloats | kBfloat16 | kInt16 | kUint16 | kInt32 | kUint32;
  require(at, "Duplicate", kind_of<T>(), kinds, kinds & ~uint32_t(kBfloat16));
  fill<T>(at, "Duplicate", counted(per_repeat<T>(), count), dst.view("dst"),
          [scalarValue](int64_t, int64_t) { return scalarValue; });
}
template <typename T, bool isSetMask = true, typename M>
inline auto Duplicate(const LocalTensor<T>& dst, const T& scalarValue, M mask,
                      int64_t repeatTime, int64_t dstBlockStride,
                      int64_t dstRepeatStride,
                      simulator::Where at = simulator::Where::here())
    -> simulator::IsPlainMask<M> {
  using namespace simulator;
  constexpr uint32_t kinds = kFloats | kBfloat16 | kInt16 | kUint16 | kInt32 | kUint32;
  require(at, "Duplicate", kind_of<T>(), kinds, kinds & ~uint32_t(kBfloat16));
  fill<T>(
      at, "Duplicate",
      masked(at, "Duplicate", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
      dst.view("dst", dstBlockStride, dstRepeatStride),
      [scalarValue](int64_t, int64_t) { return scalarValue; });
}

// dst[i] = firstValue + i.
template <typename T>
inline void CreateVecIndex(const LocalTensor<T>& dst, const T& firstValue,
                           uint32_t count,
                           simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require(at, "CreateVecIndex", kind_of<T>(), kNumbers, 0);
  constexpr int64_t lanes = per_repeat<T>();
  fill<T>(at, "CreateVecIndex", counted(lanes, count), dst.view("dst"),
          [firstValue](int64_t r, int64_t i) {
            return T(Wide<T>(firstValue) + Wide<T>(r * lanes + i));
          });
}

// Copy within the unified buffer by repeats.
template <typename T, bool isSetMask = true, typename M>
inline auto Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask,
                 int64_t repeatTime, const CopyRepeatParams& params,
                 simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  constexpr uint32_t kinds = kFloats | kBfloat16 | kInt16 | kUint16 | kInt32 | kUint32;
  require(at, "Copy", kind_of<T>(), kinds, 0);
  map<T, T>(at, "Copy",
            masked(at, "Copy", per_repeat<T>(), as_mask(mask), repeatTime, isSetMask),
            dst.view("dst", params.dstStride, params.dstRepeatSize),
            src.view("src", params.srcStride, params.srcRepeatSize),
            [](T value) { return value; });
}

// The mask registers, for calls with isSetMask false.
void SetMaskCount(simulator::Where at = simulator::Where::here());
void SetMaskNorm(simulator::Where at = simulator::Where::here());
void ResetMask(simulator::Where at = simulator::Where::here());
template <typename T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(uint64_t maskHigh, uint64_t maskLow) {
  simulator::core().mask().bits[0] = maskLow;
  simulator::core().mask().bits[1] = maskHigh;
}
template <typename T, MaskMode mode = MaskMode::NORMAL>
inline void SetVectorMask(int32_t len) {
  auto& mask = simulator::core().mask();
  mask.bits[0] = mode == MaskMode::COUNTER ? uint64_t(len)
                 : len >= 64               ? ~uint64_t(0)
                                           : (uint64_t(1) << len) - 1;
  mask.bits[1] = mode == MaskMode::COUNTER || len <= 64 ? 0
                 : len >= 128 ? ~uint64_t(0)
                              : (uint64_t(1) << (len - 64)) - 1;
}

}  // namespace AscendC
