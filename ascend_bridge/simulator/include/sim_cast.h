// Cast: conversion between element types.
#pragma once

#include "sim_vector.h"

namespace simulator {

using AscendC::RoundMode;

void require_cast(Where at, Kind to, Kind from, RoundMode mode);
double round_to_integer(double value, RoundMode mode);
uint16_t to_half(float value, RoundMode mode);
uint16_t to_bfloat16(float value, RoundMode mode);

// Integers saturate and NaN becomes 0.
template <class D>
inline D to_integer(float value, RoundMode mode) {
  const double rounded = round_to_integer(double(value), mode);
  constexpr double low =
      double(std::is_signed<D>::value
                 ? -(int64_t(1) << (sizeof(D) * 8 - 1 < 63 ? sizeof(D) * 8 - 1 : 62))
                 : 0);
  constexpr double high =
      std::is_signed<D>::value
          ? -low - 1
          : double((uint64_t(1) << (sizeof(D) * 8 < 64 ? sizeof(D) * 8 : 63)) - 1);
  if (!(rounded == rounded)) return D(0);
  return D(rounded < low ? low : rounded > high ? high : rounded);
}

template <class D, class S>
inline D convert(S value, RoundMode mode) {
  if constexpr (std::is_same<D, half>::value) {
    return half::from_bits(to_half(float(value), mode));
  } else if constexpr (std::is_same<D, bfloat16_t>::value) {
    return bfloat16_t::from_bits(to_bfloat16(float(value), mode));
  } else if constexpr (std::is_same<D, float>::value) {
    if constexpr (std::is_same<S, float>::value) {
      return mode == RoundMode::CAST_NONE ? value
                                          : float(round_to_integer(value, mode));
    }
    return float(value);
  } else if constexpr (std::is_integral<S>::value) {
    constexpr int64_t low = -(int64_t(1) << (sizeof(D) < 8 ? sizeof(D) * 8 - 1 : 62));
    const int64_t wide = int64_t(value);
    if (sizeof(D) < sizeof(S)) {
      return D(wide < low ? low : wide > -low - 1 ? -low - 1 : wide);
    }
    return D(wide);
  } else {
    return to_integer<D>(float(value), mode);
  }
}

template <class D, class S>
constexpr int64_t lanes_of_cast() {
  return kRepeat / int64_t(sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
}

}  // namespace simulator

namespace AscendC {

template <typename T, typename U>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                 const RoundMode& roundMode, const uint32_t count,
                 simulator::Where at = simulator::Where::here()) {
  using namespace simulator;
  require_cast(at, kind_of<T>(), kind_of<U>(), roundMode);
  constexpr int64_t lanes = lanes_of_cast<T, U>();
  const RoundMode mode = roundMode;
  map<T, U>(at, "Cast", counted(lanes, count), dst.packed("dst", lanes),
            src.packed("src", lanes),
            [mode](U value) { return convert<T>(value, mode); });
}

template <typename T, typename U, bool isSetMask = true, typename M>
inline auto Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src,
                 const RoundMode& roundMode, M mask, int64_t repeatTime,
                 const UnaryRepeatParams& params,
                 simulator::Where at = simulator::Where::here())
    -> simulator::IsMask<M> {
  using namespace simulator;
  require_cast(at, kind_of<T>(), kind_of<U>(), roundMode);
  const RoundMode mode = roundMode;
  map<T, U>(
      at, "Cast",
      masked(at, "Cast", lanes_of_cast<T, U>(), as_mask(mask), repeatTime, isSetMask),
      dst.view("dst", params.dstBlkStride, params.dstRepStride),
      src.view("src", params.srcBlkStride, params.srcRepStride),
      [mode](U value) { return convert<T>(value, mode); });
}

}  // namespace AscendC
