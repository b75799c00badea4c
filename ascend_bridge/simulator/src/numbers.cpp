// Rounding between float and binary16.
#include "sim_types.h"

namespace simulator {

float half_value(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 0) {  // fraction * 2^-24, exact in float
    const float value = float(fraction) * (1.0f / 16777216.0f);
    return sign ? -value : value;
  }
  if (exponent == 31) return float_value(sign | 0x7f800000u | fraction << 13);
  return float_value(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t half_truncated(uint32_t magnitude, uint32_t* cut) {
  const int exponent = int(magnitude >> 23) - 112;
  const uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
  if (exponent >= 31) {
    *cut = 0xffffffffu;
    return 0x7bff;
  }
  const int shift = exponent > 0 ? 13 : 14 - exponent;
  if (shift > 31) {
    *cut = magnitude != 0;
    return 0;
  }
  *cut = fraction << (32 - shift);
  const uint32_t kept = fraction >> shift;
  if (exponent <= 0) return uint16_t(kept);
  return uint16_t((uint32_t(exponent) << 10) + (kept & 0x3ff));
}

uint16_t half_bits(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00);  // 65536 and more
  uint32_t cut;
  uint16_t kept = half_truncated(magnitude, &cut);
  if (cut > 0x80000000u || (cut == 0x80000000u && (kept & 1))) ++kept;
  return uint16_t(sign | kept);
}

}  // namespace simulator
