// What producers compute, of one element, of eight neighbours, and of two partial sums.
//
// Eight neighbours of a row are a thread's: 16 bytes of a 16-bit tensor, 8 of its copy, 1 of the bits that say where ReLU is open.
// Formats of tensors are known when a kernel runs, so that one library serves all of them: a branch for eight elements costs less
// than the conversion.  Operations whose bits must agree between two kernels are spelled (__fmaf_rn and so on), so that no compiler
// contracts them in one place and not in the other.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "producers.h"

namespace qsync {

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

constexpr int kEight = 8;

// Eight neighbours as they lie in memory: loads of several tensors are on their way before the first is converted.
struct Raw {
  uint4 first, second;  // the second for float32 alone
};

__device__ inline int bytes_of(int format) { return format == QSYNC_FLOAT32 ? 4 : format == QSYNC_INT8 ? 1 : 2; }

__device__ inline uint32_t& word_of(Raw& raw, int word) {
  uint4& part = word < 4 ? raw.first : raw.second;
  return word % 4 == 0 ? part.x : word % 4 == 1 ? part.y : word % 4 == 2 ? part.z : part.w;
}

// Elements index .. index + count - 1; zeros beyond.  kWide: there are eight, at a multiple of 16 bytes (8 of int8).
template <bool kWide>
__device__ inline Raw load_eight(void const* data, int format, int64_t index, int count) {
  Raw raw = {};
  auto const* const bytes = static_cast<uint8_t const*>(data) + index * bytes_of(format);
  if (kWide) {
    if (format == QSYNC_INT8) {
      uint2 const both = *reinterpret_cast<uint2 const*>(bytes);
      raw.first.x = both.x, raw.first.y = both.y;
    } else {
      raw.first = *reinterpret_cast<uint4 const*>(bytes);
      if (format == QSYNC_FLOAT32) raw.second = *reinterpret_cast<uint4 const*>(bytes + 16);
    }
    return raw;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (i >= count) continue;
    if (format == QSYNC_FLOAT32) {
      word_of(raw, i) = reinterpret_cast<uint32_t const*>(bytes)[i];
    } else if (format == QSYNC_INT8) {
      word_of(raw, i / 4) |= uint32_t(bytes[i]) << (8 * (i % 4));
    } else {
      word_of(raw, i / 2) |= uint32_t(reinterpret_cast<uint16_t const*>(bytes)[i]) << (16 * (i % 2));
    }
  }
  return raw;
}

__device__ inline void widen(Raw raw, int format, float (&values)[kEight]) {
  if (format == QSYNC_FLOAT32) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = __uint_as_float(word_of(raw, i));
  } else if (format == QSYNC_FLOAT16) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      values[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word_of(raw, i / 2) >> (16 * (i % 2)))));
    }
  } else if (format == QSYNC_BFLOAT16) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      uint32_t const word = word_of(raw, i / 2);
      values[i] = __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = float(int8_t(word_of(raw, i / 4) >> (8 * (i % 4))));
  }
}

// A number as a tensor of the format holds it.
__device__ inline uint32_t narrowed(float value, int format) {
  if (format == QSYNC_FLOAT32) return __float_as_uint(value);
  return format == QSYNC_FLOAT16 ? __half_as_ushort(__float2half_rn(value)) : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ inline float rounded_to(float value, int format) {
  if (format == QSYNC_FLOAT32) return value;
  uint32_t const bits = narrowed(value, format);
  return format == QSYNC_FLOAT16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

template <bool kWide>
__device__ inline void store_eight(void* data, int format, int64_t index, int count, float const (&values)[kEight]) {
  auto* const bytes = static_cast<uint8_t*>(data) + index * bytes_of(format);
  if (kWide) {
    Raw raw = {};
    if (format == QSYNC_FLOAT32) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) word_of(raw, i) = __float_as_uint(values[i]);
      reinterpret_cast<uint4*>(bytes)[1] = raw.second;
    } else {
#pragma unroll
      for (int i = 0; i < kEight; i += 2) word_of(raw, i / 2) = narrowed(values[i], format) | narrowed(values[i + 1], format) << 16;
    }
    reinterpret_cast<uint4*>(bytes)[0] = raw.first;
    return;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (i >= count) continue;
    if (format == QSYNC_FLOAT32) {
      reinterpret_cast<float*>(bytes)[i] = values[i];
    } else {
      reinterpret_cast<uint16_t*>(bytes)[i] = uint16_t(narrowed(values[i], format));
    }
  }
}

// Eight entries of a float32 vector, ``otherwise`` where there is none.
template <bool kWide>
__device__ inline void load_vector(float const* vector, int64_t index, int count, float otherwise, float (&values)[kEight]) {
  if (vector == nullptr) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = otherwise;
  } else {
    widen(load_eight<kWide>(vector, QSYNC_FLOAT32, index, count), QSYNC_FLOAT32, values);
  }
}

// Magnitudes are compared as bits, in which NaN is larger than infinity: it stays, and shows in the scale.
__device__ inline uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }
__device__ inline uint32_t larger(uint32_t one, uint32_t other) { return one > other ? one : other; }

// The sum of the bit patterns of eight elements, as signed integers of their width; it wraps around.
__device__ inline uint32_t bits_of(Raw raw, int format) {
  uint32_t sum = 0;
  if (format == QSYNC_FLOAT32) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) sum += word_of(raw, i);
  } else {
#pragma unroll
    for (int i = 0; i < kEight / 2; ++i) {
      uint32_t const word = word_of(raw, i);
      sum += uint32_t(int32_t(int16_t(uint16_t(word)))) + uint32_t(int32_t(word) >> 16);
    }
  }
  return sum;
}

// Random numbers: those of PyTorch's own kernels here (qsync_torch/aten/random_bits.py), so that a copy written by a producer has
// the bits of one that ``quantize`` of backend aten writes.  Byte i of a stream is the high byte of number i and the low one of
// number i - 1; MurmurHash3's finaliser makes four bytes of a word's index and the key.
struct Stream {
  uint32_t low, high;
};

__device__ inline uint64_t mix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

__device__ inline uint64_t offset_of(QsyncProducerArguments const& q) {
  return uint64_t(q.offset_tensor == nullptr ? q.offset : *q.offset_tensor);
}

// What a checksum adds to the offset: offset + 0x9E3779B900000000 * checksum is the number of a stream.  Rounding follows from data.
__device__ inline uint64_t share_of(uint32_t checksum) { return uint64_t(checksum * 0x9E3779B9u) << 32; }

__device__ inline Stream stream_of(int64_t seed, uint64_t number) {
  uint64_t const key = mix64(mix64(uint64_t(seed)) ^ number) >> 1;
  return {uint32_t(key), uint32_t(key >> 31)};
}

__device__ inline uint32_t random_word(Stream stream, uint32_t index) {
  uint32_t h = index * 0x9E3779B1u + stream.low;
  h = ((h ^ (h >> 16)) * 0x85EBCA6Bu) ^ stream.high;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return (h ^ (h >> 16)) ^ 0x80808080u;  // bytes are signed there
}

// Numbers of elements first .. first + 7: multiples of 2^-16 in [0, 1).
__device__ inline void draw_eight(Stream stream, int64_t first, float (&draws)[kEight]) {
  uint32_t const index = uint32_t(uint64_t(first) >> 2), shift = 8 * uint32_t(first & 3);
  uint32_t const words[3] = {random_word(stream, index), random_word(stream, index + 1), random_word(stream, index + 2)};
  uint32_t const bytes[3] = {__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift),
                             words[2] >> shift};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    uint32_t const number = __byte_perm(bytes[i / 4], bytes[i / 4 + 1], ((i % 4) << 4) | (i % 4 + 1)) & 0xFFFFu;
    draws[i] = __uint_as_float(0x3F800000u | number << 7) - 1.0f;
  }
}

// The scale of int8 numbers up to a magnitude, and its inverse: a little less, so that no product is larger than 127 and a sum with
// a draw stays below 128.
struct Scale {
  float scale, inverse;
};

__device__ inline Scale scale_of(uint32_t absmax_bits) {
  constexpr float kSmallest = 1.17549435e-38f;  // 2^-126
  float const absmax = __uint_as_float(absmax_bits), quotient = __fdiv_rn(absmax, 127.0f);
  float const scale = absmax_bits == 0 ? 1.0f : quotient < kSmallest ? kSmallest : quotient;
  return {scale, __fmul_rn(__fdiv_rn(1.0f, scale), 1.0f - 0x1p-22f)};
}

__device__ inline int rounded_int8(float value, float scale, float inverse, float draw, int rounding) {
  if (rounding == QSYNC_STOCHASTIC) return __float2int_rd(__fmaf_rn(value, inverse, draw));
  float const quotient = __fdiv_rn(value, scale);
  int const found = rounding == QSYNC_NEAREST ? __float2int_rn(quotient) : __float2int_rd(quotient);
  return found < -127 ? -127 : found > 127 ? 127 : found;
}

// The int8 copy of elements index .. index + count - 1; scales may differ between the eight.
template <bool kWide>
__device__ inline void store_copy(int8_t* q, int64_t index, int count, float const (&values)[kEight], float const (&scales)[kEight],
                                  float const (&inverses)[kEight], int rounding, Stream stream) {
  float draws[kEight] = {};
  if (rounding == QSYNC_STOCHASTIC) draw_eight(stream, index, draws);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    int const found = rounded_int8(values[i], scales[i], inverses[i], draws[i], rounding);
    words[i / 4] |= (uint32_t(found) & 0xFFu) << (8 * (i % 4));
  }
  if (kWide) {
    *reinterpret_cast<uint2*>(q + index) = {words[0], words[1]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (i < count) q[index + i] = int8_t(words[i / 4] >> (8 * (i % 4)));
  }
}

template <bool kWide>
__device__ inline void store_copy(int8_t* q, int64_t index, int count, float const (&values)[kEight], Scale scale, int rounding,
                                  Stream stream) {
  float scales[kEight], inverses[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) scales[i] = scale.scale, inverses[i] = scale.inverse;
  store_copy<kWide>(q, index, count, values, scales, inverses, rounding, stream);
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct SigmoidAndSlope {
  float value, slope;
};

// The derivative too: 1 - sigmoid(x), of which rounding leaves little for large x, is worked out by itself.
__device__ inline SigmoidAndSlope sigmoid_and_slope(float x) {
  float const e = expf(-fabsf(x)), above = 1.0f / (1.0f + e), below = e * above;
  return {x < 0.0f ? below : above, below * above};
}

// tanh(u) is 2 sigmoid(2 u) - 1; u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ inline float twice_tanh_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }

template <Activation kActivation>
__device__ inline float activated(float z) {
  switch (kActivation) {
    case Activation::kRelu: return z <= 0.0f ? 0.0f : z;
    case Activation::kGelu: return 0.5f * z * (1.0f + erff(z * 0.7071067811865476f));
    case Activation::kGeluTanh: return z * sigmoid(twice_tanh_argument(z));
    case Activation::kSilu: return z * sigmoid(z);
    default: return z;
  }
}

// The derivative; of ReLU at 0 it is 0, as in PyTorch.
template <Activation kActivation>
__device__ inline float slope(float z) {
  switch (kActivation) {
    case Activation::kRelu: return z > 0.0f ? 1.0f : 0.0f;
    case Activation::kGelu: return 0.5f * (1.0f + erff(z * 0.7071067811865476f)) + z * 0.3989422804014327f * expf(-0.5f * z * z);
    case Activation::kGeluTanh: {
      SigmoidAndSlope const s = sigmoid_and_slope(twice_tanh_argument(z));
      return s.value + z * s.slope * 1.5957691216057308f * (1.0f + 0.134145f * z * z);
    }
    case Activation::kSilu: {
      SigmoidAndSlope const s = sigmoid_and_slope(z);
      return s.value + z * s.slope;
    }
    default: return 1.0f;
  }
}

// 1 / sqrt(variance + eps); forward and backward work it out alike.
__device__ inline float inverse_deviation(float variance, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps)));
}

// z of x - mean; a fused multiply-add, monotone in x as its parts are.
__device__ inline float affine(float centred, float factor, float shift) { return __fmaf_rn(centred, factor, shift); }

// Of the x of one channel at some positions: the mean is shift + moved (two numbers have more digits than their sum), squares the
// sum of squared differences from it.
struct ChannelSums {
  float shift, moved, squares, low, high;
};

// Sums over the positions of both; Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983.
__device__ inline void merge(ChannelSums& into, float count, ChannelSums const& other, float other_count) {
  if (other_count == 0.0f) return;
  if (count == 0.0f) {
    into = other;
    return;
  }
  float const apart = (other.shift - into.shift) + (other.moved - into.moved), share = other_count / (count + other_count);
  into.moved += apart * share;
  into.squares += other.squares + apart * apart * (count * share);
  into.low = fminf(into.low, other.low);
  into.high = fmaxf(into.high, other.high);
}

}  // namespace qsync
