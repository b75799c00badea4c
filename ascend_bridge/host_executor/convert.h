// Element formats: how each becomes float32, and back. Included by kernels.cc only.
//
// XLA's threads run with denormals flushed to zero, so a conversion must not go
// through a float32 denormal: the small float16 and float8 values go through integers,
// or through the processor's own conversion, which the flushing does not concern.
#pragma once

#include "simd.h"

namespace {

PJ_INLINE float bf16_to_f32(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

PJ_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

PJ_INLINE uint16_t f32_to_f16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u) {                                    // below 2^-14
    const int shift = 126 - (int)(size >> 23);
    if (shift > 24) return (uint16_t)sign;
    const uint32_t whole = (size & 0x7fffffu) | 0x800000u;
    const uint32_t half = 1u << (shift - 1), kept = whole >> shift;
    const uint32_t rest = whole & ((1u << shift) - 1);
    return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
  }
  const uint32_t odd = (size >> 13) & 1;
  return (uint16_t)(sign | ((size - 0x38000000u + 0xfffu + odd) >> 13));
}

#if PJ_LANES == 4
PJ_INLINE VF widen_f16(VU x) {
  const VU sign = (x & 0x8000u) << 16, size = x & 0x7fffu;
  const VU normal = (size << 13) + (112u << 23);
  const VF tiny = __builtin_convertvector((VI)size, VF) * splat(5.9604644775390625e-8f);
  VU bits = size < 0x400u ? (VU)tiny : normal;
  bits = size >= 0x7c00u ? (size << 13) | 0x7f800000u : bits;
  return (VF)(bits | sign);
}
#endif

PJ_INLINE VF widen_f8(VU x) {
  const VU sign = (x & 0x80u) << 24, size = x & 0x7fu;
  const VU normal = (size << 20) + (120u << 23);
  const VF tiny = __builtin_convertvector((VI)size, VF) * splat(0.001953125f);
  VU bits = size < 8u ? (VU)tiny : normal;
  bits = size == 0x7fu ? (VU)(VU{} + 0x7fc00000u) : bits;
  return (VF)(bits | sign);
}

// W elements in their own order.
struct F32 {
  static constexpr int kBytes = 4;
  PJ_INLINE VF load_w(const char* p) { return load((const float*)p); }
};
struct BF16 {
  static constexpr int kBytes = 2;
  PJ_INLINE VF load_w(const char* p) {
    VH x;
    memcpy(&x, p, sizeof x);
    return (VF)(__builtin_convertvector(x, VU) << 16);
  }
};
struct F16 {
  static constexpr int kBytes = 2;
  PJ_INLINE VF load_w(const char* p) {
#if PJ_LANES == 16
    return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif PJ_LANES == 8
    return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    VH x;
    memcpy(&x, p, sizeof x);
    return widen_f16(__builtin_convertvector(x, VU));
#endif
  }
};
struct I8 {
  static constexpr int kBytes = 1;
  PJ_INLINE VF widen(VU x) { return __builtin_convertvector((VI)(x << 24) >> 24, VF); }
  PJ_INLINE VF load_w(const char* p) {
    VB x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, VI), VF);
  }
};
struct F8E4M3 {
  static constexpr int kBytes = 1;
  PJ_INLINE VF widen(VU x) { return widen_f8(x); }
  PJ_INLINE VF load_w(const char* p) {
    VB x;
    memcpy(&x, p, sizeof x);
    return widen((VU)__builtin_convertvector(x, VI) & 0xffu);
  }
};

// The first `count` < W elements, then zeros; reads nothing past them.
template <class E>
PJ_INLINE VF load_some(const char* p, int64_t count) {
  char padded[W * 4] = {0};
  memcpy(padded, p, (size_t)(count * E::kBytes));
  return E::load_w(padded);
}

// Writes D elements, a multiple of 2 W, of a format of one byte as bfloat16.
template <class E>
PJ_INLINE void halve_row(const char* from, int64_t count, char* to) {
  for (int64_t d = 0; d < count; d += 2 * W) {
    VH pairs;
    memcpy(&pairs, from + d, sizeof pairs);
    const VU both = __builtin_convertvector(pairs, VU);
    const VU even = (VU)E::widen(both & 0xffu), odd = (VU)E::widen(both >> 8);
    const VU halves = even >> 16 | (odd & 0xffff0000u);
    memcpy(to + d * 2, &halves, sizeof halves);
  }
}

// Writes D elements times `factor` as float32, then zeros up to a multiple of W.
template <class E>
PJ_INLINE void widen_row(const char* from, float factor, int64_t count, float* to) {
  int64_t d = 0;
  for (; d + W <= count; d += W) {
    store(to + d, E::load_w(from + d * E::kBytes) * splat(factor));
  }
  if (d < count) {
    store(to + d, load_some<E>(from + d * E::kBytes, count - d) * splat(factor));
  }
}

}  // namespace
