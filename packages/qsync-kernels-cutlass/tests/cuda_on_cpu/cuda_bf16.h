// bfloat16 on a CPU; rounds to nearest, ties to even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned const bits = __float_as_uint(x);
  if (std::isnan(x)) return {0x7FFF};
  return {static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
