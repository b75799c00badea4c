// Vectors of PJ_LANES floats from compiler vector extensions (GCC >= 9, clang).
//
// Included by kernels.cc only, which is compiled once per instruction set. Everything
// has internal linkage: were a function emitted with AVX-512 code under a name another
// file shares, the linker could choose it for a processor that cannot run it.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int W = PJ_LANES;

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));
typedef int8_t VB __attribute__((vector_size(W)));

#define PJ_INLINE static inline __attribute__((always_inline))
#define PJ_UNROLL _Pragma("GCC unroll 16")

#if defined(__clang__)
#define PJ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PJ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif

PJ_INLINE VF splat(float x) {
#if PJ_LANES == 16
  return VF{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif PJ_LANES == 8
  return VF{x, x, x, x, x, x, x, x};
#else
  return VF{x, x, x, x};
#endif
}

PJ_INLINE VI iota() {
#if PJ_LANES == 16
  return VI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif PJ_LANES == 8
  return VI{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return VI{0, 1, 2, 3};
#endif
}

PJ_INLINE VF zero() { return VF{}; }

PJ_INLINE VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}

PJ_INLINE void store(float* p, VF v) { memcpy(p, &v, sizeof v); }

// a > b ? a : b, NaN in either giving b; x86 has it as one instruction.
PJ_INLINE VF vmax(VF a, VF b) {
#if PJ_LANES == 16
  // All lanes; GCC 12 takes the undefined source of the plain form for a use of it.
  return (VF)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#elif PJ_LANES == 8
  return (VF)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (VF)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// Interleave: a0 b0 a1 b1 ... from the low, or the high, halves.
#if PJ_LANES == 16
#define PJ_ZIP_LOW(a, b) \
  PJ_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define PJ_ZIP_HIGH(a, b) \
  PJ_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif PJ_LANES == 8
#define PJ_ZIP_LOW(a, b) PJ_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define PJ_ZIP_HIGH(a, b) PJ_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define PJ_ZIP_LOW(a, b) PJ_SHUFFLE(a, b, 0, 4, 1, 5)
#define PJ_ZIP_HIGH(a, b) PJ_SHUFFLE(a, b, 2, 6, 3, 7)
#endif

// The W x W matrix in v becomes its transpose: log2(W) rounds of interleaving.
PJ_INLINE void transpose(VF* v) {
  VF t[W];
  PJ_UNROLL for (int round = W; round > 1; round /= 2) {
    PJ_UNROLL for (int i = 0; i < W / 2; ++i) {
      t[2 * i] = PJ_ZIP_LOW(v[i], v[i + W / 2]);
      t[2 * i + 1] = PJ_ZIP_HIGH(v[i], v[i + W / 2]);
    }
    PJ_UNROLL for (int i = 0; i < W; ++i) v[i] = t[i];
  }
}

// Returns the vector whose lane i is the sum of the lanes of v[i], i < W. Pairs are
// added within 128-bit blocks first: those shuffles are the cheap ones.
PJ_INLINE VF sum_each(VF* v) {
#if PJ_LANES == 16
#define PJ_A(a, b) \
  PJ_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define PJ_B(a, b) \
  PJ_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define PJ_C(a, b) \
  PJ_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define PJ_D(a, b) \
  PJ_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define PJ_E(a, b) \
  PJ_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define PJ_F(a, b) \
  PJ_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif PJ_LANES == 8
#define PJ_A(a, b) PJ_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define PJ_B(a, b) PJ_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define PJ_C(a, b) PJ_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define PJ_D(a, b) PJ_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define PJ_E(a, b) PJ_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define PJ_F(a, b) PJ_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define PJ_A(a, b) PJ_SHUFFLE(a, b, 0, 4, 1, 5)
#define PJ_B(a, b) PJ_SHUFFLE(a, b, 2, 6, 3, 7)
#define PJ_C(a, b) PJ_SHUFFLE(a, b, 0, 1, 4, 5)
#define PJ_D(a, b) PJ_SHUFFLE(a, b, 2, 3, 6, 7)
#endif
  VF t[W / 2];
  PJ_UNROLL for (int i = 0; i < W / 2; ++i) {
    t[i] = PJ_A(v[2 * i], v[2 * i + 1]) + PJ_B(v[2 * i], v[2 * i + 1]);
  }
  PJ_UNROLL for (int i = 0; i < W / 4; ++i) {
    t[i] = PJ_C(t[2 * i], t[2 * i + 1]) + PJ_D(t[2 * i], t[2 * i + 1]);
  }
#if PJ_LANES >= 8
  PJ_UNROLL for (int n = W / 8; n >= 1; n /= 2) {
    PJ_UNROLL for (int i = 0; i < n; ++i) {
      t[i] = PJ_E(t[2 * i], t[2 * i + 1]) + PJ_F(t[2 * i], t[2 * i + 1]);
    }
  }
#undef PJ_E
#undef PJ_F
#endif
#undef PJ_A
#undef PJ_B
#undef PJ_C
#undef PJ_D
  return t[0];
}

// Lane i of the result is lane i ^ Distance.
template <int Distance>
PJ_INLINE VF swap_lanes(VF v) {
#if PJ_LANES == 16
  if constexpr (Distance == 8) {
    return PJ_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  } else if constexpr (Distance == 4) {
    return PJ_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  } else if constexpr (Distance == 2) {
    return PJ_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  } else {
    return PJ_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  }
#elif PJ_LANES == 8
  if constexpr (Distance == 4) {
    return PJ_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  } else if constexpr (Distance == 2) {
    return PJ_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  } else {
    return PJ_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
  }
#else
  if constexpr (Distance == 2) {
    return PJ_SHUFFLE(v, v, 2, 3, 0, 1);
  } else {
    return PJ_SHUFFLE(v, v, 1, 0, 3, 2);
  }
#endif
}

// Every lane gets the maximum over the lanes equal to it modulo Step.
template <int Step, int Distance = W / 2>
PJ_INLINE VF max_modulo(VF v) {
  if constexpr (Distance >= Step) {
    return max_modulo<Step, Distance / 2>(vmax(v, swap_lanes<Distance>(v)));
  } else {
    return v;
  }
}

template <int Step, int Distance = W / 2>
PJ_INLINE VF sum_modulo(VF v) {
  if constexpr (Distance >= Step) {
    return sum_modulo<Step, Distance / 2>(v + swap_lanes<Distance>(v));
  } else {
    return v;
  }
}

constexpr float kLowest = -__builtin_inff();

// exp(x) for x <= 0 to 2 ulp; exactly 0 below -87.3, -inf included; NaN stays NaN. The
// reduction and the coefficients are those of expf in Cephes
// (https://www.netlib.org/cephes/).
PJ_INLINE VF exp_negative(VF x) {
  const VF shifter = splat(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
#if PJ_LANES == 16
  const VF clamped = x;  // what is below becomes 0 by a mask
#else
  const VF clamped = vmax(splat(-87.3f), x);
#endif
  const VF shifted = clamped * splat(1.44269504f) + shifter;
  const VF n = shifted - shifter;
  const VF r = (clamped - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  VF p = splat(1.9875691500e-4f) * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = (p * r) * r + r + splat(1.0f);
#if PJ_LANES == 16
  const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.3f), _CMP_NLT_UQ);
  // p * 2^n; NaN stays NaN.
  return (VF)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
#else
  const VI bits = (VI)p + ((VI)shifted << 23);
  return x < splat(-87.3f) ? zero() : (x == x ? (VF)bits : x);
#endif
}

// tanh(x) to 3 ulp: a series near 0, where the quotient would lose digits.
PJ_INLINE VF tanh_all(VF x) {
  const VF size = x < zero() ? -x : x;
  const VF e = exp_negative(splat(-2.0f) * size);
  const VF far = (splat(1.0f) - e) / (splat(1.0f) + e);
  const VF y = x * x;
  VF series = splat(62.0f / 2835.0f) * y - splat(17.0f / 315.0f);
  series = series * y + splat(2.0f / 15.0f);
  series = series * y - splat(1.0f / 3.0f);
  series = x + x * y * series;
  return size < splat(0.25f) ? series : (x < zero() ? -far : far);
}

}  // namespace
