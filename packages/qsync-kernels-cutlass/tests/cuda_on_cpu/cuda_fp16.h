// float16 on a CPU; rounds to nearest, ties to even.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline float __half2float(__half x) {
  unsigned const sign = unsigned(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | mantissa << 13);
  float const magnitude = std::ldexp(float(exponent == 0 ? mantissa : 1024 + mantissa), exponent == 0 ? -24 : int(exponent) - 25);
  return sign != 0 ? -magnitude : magnitude;
}

inline __half __float2half_rn(float x) {
  unsigned const sign = __float_as_uint(x) >> 16 & 0x8000u;
  if (std::isnan(x)) return {static_cast<unsigned short>(sign | 0x7E00u)};
  float const magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return {static_cast<unsigned short>(sign | 0x7C00u)};
  int exponent;
  std::frexp(magnitude, &exponent);
  exponent = exponent - 1 < -14 ? -14 : exponent - 1;
  // In units of the spacing; a mantissa that rounds up to 2048 carries into the exponent, as it should.
  unsigned const steps = unsigned(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return {static_cast<unsigned short>(sign | (steps < 1024 ? steps : (unsigned(exponent + 14) << 10) + steps))};
}
