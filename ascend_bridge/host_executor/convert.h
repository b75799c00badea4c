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

PJ_INLINE VF widen_f16(VH halves) {
#if PJ_LANES == 16
  return (VF)_mm512_cvtph_ps((__m256i)halves);
#elif PJ_LANES == 8
  return (VF)_mm256_cvtph_ps((__m128i)halves);
#else
  const VU x = __builtin_convertvector(halves, VU);
  const VU sign = (x & 0x8000u) << 16, size = x & 0x7fffu;
  const VU normal = (size << 13) + (112u << 23);
  const VF tiny = __builtin_convertvector((VI)size, VF) * splat(5.9604644775390625e-8f);
  VU bits = size < 0x400u ? (VU)tiny : normal;
  bits = size >= 0x7c00u ? (size << 13) | 0x7f800000u : bits;
  return (VF)(bits | sign);
#endif
}

// GCC 12 takes __builtin_convertvector from bytes apart, element by element.
PJ_INLINE VI sign_extend(VB x) {
#if PJ_LANES == 16
  return (VI)_mm512_cvtepi8_epi32((__m128i)x);
#elif PJ_LANES == 8
  return (VI)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#else
  return __builtin_convertvector(x, VI);
#endif
}
#if PJ_LANES == 16
PJ_INLINE VH sign_extend_half(VB x) { return (VH)_mm256_cvtepi8_epi16((__m128i)x); }
#elif PJ_LANES == 8
PJ_INLINE VH sign_extend_half(VB x) {
  return (VH)_mm_cvtepi8_epi16(_mm_cvtsi64_si128((int64_t)x));
}
#endif

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
    VH x;
    memcpy(&x, p, sizeof x);
    return widen_f16(x);
  }
};
struct I8 {
  static constexpr int kBytes = 1;
  PJ_INLINE VF load_w(const char* p) {
    VB x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(sign_extend(x), VF);
  }
};
struct F8E4M3 {
  static constexpr int kBytes = 1;
  PJ_INLINE VF load_w(const char* p) {
    VB bytes;
    memcpy(&bytes, p, sizeof bytes);
#if PJ_LANES >= 8
    // As float16, of which the exponent has one more bit and a bias 8 higher.
    const VH x = sign_extend_half(bytes);
    const VH nan = (VH)((x & 0x7f) == 0x7f) & 0x7e00;
    return widen_f16((x << 7 & 0xbf80) | nan) * splat(256.0f);
#else
    const VU x = (VU)sign_extend(bytes);
    const VU sign = x & 0x80000000u, size = x & 0x7fu;
    const VU normal = (size << 20) + (120u << 23);
    const VF tiny = __builtin_convertvector((VI)size, VF) * splat(0.001953125f);
    VU bits = size < 8u ? (VU)tiny : normal;
    bits = size == 0x7fu ? (VU)(VU{} + 0x7fc00000u) : bits;
    return (VF)(bits | sign);
#endif
  }
};

// The first `count` < W elements, then zeros; reads nothing past them.
template <class E>
PJ_INLINE VF load_some(const char* p, int64_t count) {
  char padded[W * 4] = {0};
  memcpy(padded, p, (size_t)(count * E::kBytes));
  return E::load_w(padded);
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
