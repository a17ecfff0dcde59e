// Batch normalization (+ residual) (+ ReLU) that writes its 8-bit copies, and its gradients (docs/design/fused-chains.md).
//
// Images are channels-last: a matrix of positions and channels.  Forward: each block of ``channel_statistics`` leaves the mean, the
// sum of squares, the smallest and the largest x of a strip of channels at some of the positions; ``channel_coefficients`` merges
// them, and knows the largest result without having written one, since z is monotone in x; ``normalize_positions`` writes.
// Backward: ``reduce_gradient`` sums h and h * xhat, ``apply_gradient`` writes; for an 8-bit copy of the gradient the first also notes
// the largest magnitudes of both, of which ``gradient_reach`` makes a bound of the gradient's.  The first pass of both also sums up
// the bits that it reads, which decide about random numbers.  Each of the large kernels reads a tensor once, 16
// bytes a thread and access; memory is what limits them.  The second pass of both walks backward and finds the end of x in the
// cache.
#pragma once

#include "producer_block.cuh"

namespace qsync {

// How a block's threads lie on the matrix: ``lanes`` eights of channels beside each other, rows below.
struct Strips {
  int lanes, rows, count;  // rows of a block's tile; strips beside each other
  int64_t tiles;

  static Strips of(QsyncProducerArguments const& q, int most_lanes) {
    int64_t const eights = ceil_div(q.columns, kEight);
    int lanes = 1;
    while (lanes < most_lanes && lanes < eights) lanes *= 2;
    int const rows = kThreads / lanes;
    return {lanes, rows, int(ceil_div(eights, lanes)), ceil_div(q.rows, rows)};
  }

  int64_t programs(QsyncProducerArguments const& q, int64_t blocks, int64_t most) const {
    int64_t const wanted = q.sm_count * blocks / count;
    return smaller(smaller(tiles, most), wanted > 0 ? wanted : 1);
  }
};

constexpr int kSumLanes = 8, kWriteLanes = 32;
constexpr int kRowsAtOnce = 2;  // of a thread, whose loads are on their way together

struct BatchNorm {
  QsyncProducerArguments q;
  Strips strips;
  int64_t programs;   // of the kernel that sums
  float* partial;     // forward (5, channels, programs), backward (2, programs, channels)
  float* counts;      // positions of each program
  float* checksums;   // of x, or of the gradient, by program and strip
  int checksum_count;
  float* inverse;     // of the scales of xhat in 8 bit
  float* bound;       // the largest magnitude of 8 channels' results
  int bounds;
  float const* total;    // of h and of h * xhat
  float const* product;
};

// Which channels and rows are a thread's.
struct Place {
  int64_t column, first_row, step;
  int count;  // of its channels; 0 where it has none

  __device__ static Place of(BatchNorm const& p) {
    int const lane = threadIdx.x % p.strips.lanes;
    int64_t const column = (int64_t(blockIdx.y) * p.strips.lanes + lane) * kEight, left = p.q.columns - column;
    int64_t const first = int64_t(blockIdx.x) * p.strips.rows + threadIdx.x / p.strips.lanes;
    return {column, first, int64_t(gridDim.x) * p.strips.rows, left <= 0 ? 0 : left < kEight ? int(left) : kEight};
  }
};

template <bool kWide>
__global__ void __launch_bounds__(kThreads, 2) channel_statistics(BatchNorm p) {
  constexpr int kAtOnce = 4;
  auto const& q = p.q;
  int const format = int(q.x_format);
  Place const place = Place::of(p);
  ChannelSums sums[kEight];
  float total[kEight], count = 0.0f;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kEight; ++i) sums[i] = {0.0f, 0.0f, 0.0f, INFINITY, -INFINITY}, total[i] = 0.0f;
  for (int64_t row = place.first_row; row < q.rows && place.count > 0; row += kAtOnce * place.step) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int64_t const at = row + k * place.step;
      if (at < q.rows) raw[k] = load_eight<kWide>(q.x, format, at * q.columns + place.column, place.count);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (row + k * place.step >= q.rows) continue;
      float x[kEight];
      widen(raw[k], format, x);
      bits += bits_of(raw[k], format);
      // About the thread's first x: a mean that is large beside the deviation costs no digits.
      if (count == 0.0f) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) sums[i].shift = x[i];
      }
      count += 1.0f;
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        float const centred = x[i] - sums[i].shift;
        total[i] += centred;
        sums[i].squares += centred * centred;
        sums[i].low = fminf(sums[i].low, x[i]);
        sums[i].high = fmaxf(sums[i].high, x[i]);
      }
    }
  }
  bits = block_sum(bits);
  if (threadIdx.x == 0) p.checksums[blockIdx.y * gridDim.x + blockIdx.x] = __uint_as_float(bits);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    sums[i].moved = count == 0.0f ? 0.0f : total[i] / count;
    float const squares = sums[i].squares - total[i] * sums[i].moved;
    sums[i].squares = squares < 0.0f ? 0.0f : squares;
  }
  // Threads of a warp that have the same channels, then warps.
  for (int distance = p.strips.lanes; distance < 32; distance *= 2) {
    float const other_count = __shfl_xor_sync(0xFFFFFFFFu, count, distance);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      ChannelSums const other = {
          __shfl_xor_sync(0xFFFFFFFFu, sums[i].shift, distance), __shfl_xor_sync(0xFFFFFFFFu, sums[i].moved, distance),
          __shfl_xor_sync(0xFFFFFFFFu, sums[i].squares, distance), __shfl_xor_sync(0xFFFFFFFFu, sums[i].low, distance),
          __shfl_xor_sync(0xFFFFFFFFu, sums[i].high, distance)};
      merge(sums[i], count, other, other_count);
    }
    count += other_count;
  }
  __shared__ ChannelSums shared[kWarps][kSumLanes * kEight];
  __shared__ float shared_counts[kWarps][kSumLanes];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < p.strips.lanes) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) shared[warp][lane * kEight + i] = sums[i];
    shared_counts[warp][lane] = count;
  }
  __syncthreads();
  int64_t const column = int64_t(blockIdx.y) * p.strips.lanes * kEight + threadIdx.x;
  if (int(threadIdx.x) >= p.strips.lanes * kEight || column >= q.columns) return;
  ChannelSums merged = shared[0][threadIdx.x];
  float merged_count = shared_counts[0][threadIdx.x / kEight];
  for (int other = 1; other < kWarps; ++other) {
    float const other_count = shared_counts[other][threadIdx.x / kEight];
    merge(merged, merged_count, shared[other][threadIdx.x], other_count);
    merged_count += other_count;
  }
  int64_t const kind = q.columns * p.programs;
  float* const at = p.partial + column * p.programs + blockIdx.x;
  at[0] = merged.shift, at[kind] = merged.moved, at[2 * kind] = merged.squares;
  at[3 * kind] = merged.low, at[4 * kind] = merged.high;
  if (column == 0) p.counts[blockIdx.x] = merged_count;
}

// Statistics and scales of 8 channels, a warp each, and the largest magnitude of their results.  With a residual that is a bound,
// and ``normalize_positions`` finds the true one, beginning with the 0 written here.
template <Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) channel_coefficients(BatchNorm p) {
  auto const& q = p.q;
  int64_t const channel = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, kind = q.columns * p.programs;
  bool const present = channel < q.columns;
  ChannelSums sums = {};
  float count = 0.0f;
  for (int64_t program = threadIdx.x % 32; program < p.programs && present; program += 32) {
    float const* const at = p.partial + channel * p.programs + program;
    ChannelSums const other = {at[0], at[kind], at[2 * kind], at[3 * kind], at[4 * kind]};
    merge(sums, count, other, p.counts[program]);
    count += p.counts[program];
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    ChannelSums const other = {
        __shfl_xor_sync(0xFFFFFFFFu, sums.shift, distance), __shfl_xor_sync(0xFFFFFFFFu, sums.moved, distance),
        __shfl_xor_sync(0xFFFFFFFFu, sums.squares, distance), __shfl_xor_sync(0xFFFFFFFFu, sums.low, distance),
        __shfl_xor_sync(0xFFFFFFFFu, sums.high, distance)};
    float const other_count = __shfl_xor_sync(0xFFFFFFFFu, count, distance);
    merge(sums, count, other, other_count);
    count += other_count;
  }
  uint32_t bound = 0;
  if (present && threadIdx.x % 32 == 0) {
    float const mean = sums.shift + sums.moved, variance = sums.squares / count;
    q.mean[channel] = mean;
    q.spread[channel] = variance;
    float const rstd = inverse_deviation(variance, float(q.eps));
    float const low = __fsub_rn(sums.low, mean), high = __fsub_rn(sums.high, mean);
    if (q.x_q != nullptr) {
      Scale const scale = scale_of(larger(magnitude(__fmul_rn(low, rstd)), magnitude(__fmul_rn(high, rstd))));
      q.x_scale[channel] = scale.scale;
      p.inverse[channel] = scale.inverse;
    }
    float const factor = __fmul_rn(q.weight == nullptr ? 1.0f : q.weight[channel], rstd);
    float const shift = q.bias == nullptr ? 0.0f : q.bias[channel];
    float one = affine(low, factor, shift), other = affine(high, factor, shift);
    if (q.residual != nullptr) {
      // Whichever of the two is larger.
      float const reach = q.residual_absmax == nullptr ? 0.0f : *q.residual_absmax;
      one = __fadd_rn(one, one < other ? -reach : reach), other = __fadd_rn(other, one < other ? reach : -reach);
    }
    bound = larger(magnitude(activated<kActivation>(one)), magnitude(activated<kActivation>(other)));
  }
  bound = block_largest(bound);
  if (threadIdx.x == 0) {
    p.bound[blockIdx.x] = __uint_as_float(bound);
    if (blockIdx.x == 0 && q.absmax != nullptr && q.residual != nullptr) *q.absmax = 0.0f;
  }
}

template <bool kWide, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) normalize_positions(BatchNorm p) {
  auto const& q = p.q;
  int const rounding = int(q.rounding), x_format = int(q.x_format), out_format = int(q.out_format);
  bool const has_residual = q.residual != nullptr;
  uint32_t absmax = 0;
  Scale scale = {1.0f, 1.0f};
  if (q.q != nullptr || q.absmax != nullptr) {
    absmax = largest_of(p.bound, p.bounds);
    scale = scale_of(absmax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      if (q.q != nullptr) *q.scale = scale.scale;
      if (q.absmax != nullptr && !has_residual) *q.absmax = rounded_to(__uint_as_float(absmax), out_format);
    }
  }
  Stream stream = {}, x_stream = {};
  if (q.q != nullptr || q.x_q != nullptr) {
    uint64_t const number = offset_of(q) + share_of(sum_of(p.checksums, p.checksum_count));
    stream = stream_of(q.seed, number), x_stream = stream_of(q.x_seed, number);
    if (q.stream_out != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *q.stream_out = int64_t(number);
  }
  Place const place = Place::of(p);
  float mean[kEight], rstd[kEight], factor[kEight], shift[kEight], x_scale[kEight], x_inverse[kEight];
  if (place.count > 0) {
    load_vector<false>(q.mean, place.column, place.count, 0.0f, mean);
    load_vector<false>(q.spread, place.column, place.count, 0.0f, rstd);
    load_vector<false>(q.weight, place.column, place.count, 1.0f, factor);
    load_vector<false>(q.bias, place.column, place.count, 0.0f, shift);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      rstd[i] = inverse_deviation(rstd[i], float(q.eps));
      factor[i] = __fmul_rn(factor[i], rstd[i]);
    }
    if (q.x_q != nullptr) {
      load_vector<false>(q.x_scale, place.column, place.count, 1.0f, x_scale);
      load_vector<false>(p.inverse, place.column, place.count, 1.0f, x_inverse);
    }
  }
  int64_t const eights = (q.columns + kEight - 1) / kEight;
  float const most = __uint_as_float(absmax);
  uint32_t largest = 0;
  for (int64_t number = place.first_row; number < q.rows && place.count > 0; number += kRowsAtOnce * place.step) {
    Raw raws[kRowsAtOnce] = {}, residual_raws[kRowsAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      int64_t const row = q.rows - 1 - (number + k * place.step), index = row * q.columns + place.column;
      if (row < 0) continue;
      raws[k] = load_eight<kWide>(q.x, x_format, index, place.count);
      if (has_residual) residual_raws[k] = load_eight<kWide>(q.residual, int(q.residual_format), index, place.count);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      int64_t const row = q.rows - 1 - (number + k * place.step), index = row * q.columns + place.column;
      if (row < 0) continue;
      float z[kEight];
      widen(raws[k], x_format, z);
#pragma unroll
      for (int i = 0; i < kEight; ++i) z[i] = __fsub_rn(z[i], mean[i]);
      if (q.x_q != nullptr) {
        float normalized[kEight];
#pragma unroll
        for (int i = 0; i < kEight; ++i) normalized[i] = __fmul_rn(z[i], rstd[i]);
        store_copy<kWide>(q.x_q, index, place.count, normalized, x_scale, x_inverse, rounding, x_stream);
      }
#pragma unroll
      for (int i = 0; i < kEight; ++i) z[i] = affine(z[i], factor[i], shift[i]);
      if (has_residual) {
        float residual[kEight];
        widen(residual_raws[k], int(q.residual_format), residual);
#pragma unroll
        for (int i = 0; i < kEight; ++i) z[i] = __fadd_rn(z[i], residual[i]);
      }
      if (q.open != nullptr) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kEight; ++i) bits |= (i < place.count && z[i] > 0.0f ? 1u : 0u) << i;
        q.open[row * eights + place.column / kEight] = uint8_t(bits);
      }
#pragma unroll
      for (int i = 0; i < kEight; ++i) z[i] = activated<kActivation>(z[i]);
      if (q.out != nullptr) store_eight<kWide>(q.out, out_format, index, place.count, z);
      if (has_residual) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          if (i < place.count) largest = larger(largest, magnitude(z[i]));
          // Were a residual larger than its caller says, int8 would wrap around.
          z[i] = fminf(fmaxf(z[i], -most), most);
        }
      }
      if (q.q != nullptr) store_copy<kWide>(q.q, index, place.count, z, scale, rounding, stream);
    }
  }
  if (q.absmax != nullptr && has_residual) {
    // A maximum is the same in any order.  Rounding is monotone: the largest r is the largest of what was written.
    largest = block_largest(largest);
    if (threadIdx.x == 0) {
      atomicMax(reinterpret_cast<unsigned int*>(q.absmax), __float_as_uint(rounded_to(__uint_as_float(largest), out_format)));
    }
  }
}

// h and xhat of eight elements.  Where ReLU was open is read, or worked out again from x as the forward did.
template <bool kWide, Activation kActivation>
struct GradientOfEight {
  float mean[kEight], step[kEight];     // xhat is (x - mean) * step: of 8-bit xhat, 0 and its scale
  float factor[kEight], shift[kEight];  // z is (x - mean) * factor + shift

  __device__ void prepare(BatchNorm const& p, Place const& place) {
    auto const& q = p.q;
    bool const eight_bit = q.x_format == QSYNC_INT8;
    load_vector<false>(eight_bit ? nullptr : q.mean, place.column, place.count, 0.0f, mean);
    load_vector<false>(q.spread, place.column, place.count, 0.0f, step);
    load_vector<false>(q.weight, place.column, place.count, 1.0f, factor);
    load_vector<false>(q.bias, place.column, place.count, 0.0f, shift);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      step[i] = inverse_deviation(step[i], float(q.eps));
      factor[i] = __fmul_rn(factor[i], step[i]);
    }
    if (eight_bit) load_vector<false>(q.x_scale, place.column, place.count, 1.0f, step);
  }

  struct Loaded {
    Raw grad, x;
    uint32_t open;
  };

  __device__ static Loaded load(QsyncProducerArguments const& q, Place const& place, int64_t row) {
    int64_t const index = row * q.columns + place.column;
    Loaded loaded = {load_eight<kWide>(q.grad, int(q.grad_format), index, place.count),
                     load_eight<kWide>(q.x, int(q.x_format), index, place.count), 0xFFu};
    if (kActivation == Activation::kRelu && q.open != nullptr) {
      loaded.open = q.open[row * ((q.columns + kEight - 1) / kEight) + place.column / kEight];
    }
    return loaded;
  }

  __device__ void widened(QsyncProducerArguments const& q, Place const& place, Loaded const& loaded, float (&h)[kEight],
                          float (&xhat)[kEight]) const {
    widen(loaded.grad, int(q.grad_format), h);
    widen(loaded.x, int(q.x_format), xhat);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      bool is_open = (loaded.open >> i & 1u) != 0;
      float const centred = __fsub_rn(xhat[i], mean[i]);
      xhat[i] = __fmul_rn(centred, step[i]);
      if (kActivation == Activation::kRelu && q.open == nullptr) is_open = affine(centred, factor[i], shift[i]) > 0.0f;
      if (!is_open || i >= place.count) h[i] = 0.0f;
    }
  }
};

template <bool kWide, Activation kActivation, bool kCopies>
__global__ void __launch_bounds__(kThreads, 2) reduce_gradient(BatchNorm p) {
  auto const& q = p.q;
  Place const place = Place::of(p);
  GradientOfEight<kWide, kActivation> gradient;
  float total[kEight] = {}, product[kEight] = {};
  uint32_t highest[kEight] = {}, widest[kEight] = {}, bits = 0;
  if (place.count > 0) gradient.prepare(p, place);
  for (int64_t first = place.first_row; first < q.rows && place.count > 0; first += kRowsAtOnce * place.step) {
    typename GradientOfEight<kWide, kActivation>::Loaded loaded[kRowsAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k * place.step < q.rows) loaded[k] = gradient.load(q, place, first + k * place.step);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      if (first + k * place.step >= q.rows) continue;
      float h[kEight], xhat[kEight];
      gradient.widened(q, place, loaded[k], h, xhat);
      if (kCopies) bits += bits_of(loaded[k].grad, int(q.grad_format));
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        total[i] += h[i], product[i] = __fmaf_rn(h[i], xhat[i], product[i]);
        if (kCopies) highest[i] = larger(highest[i], magnitude(h[i])), widest[i] = larger(widest[i], magnitude(xhat[i]));
      }
    }
  }
  if (kCopies) {
    bits = block_sum(bits);
    if (threadIdx.x == 0) p.checksums[blockIdx.y * gridDim.x + blockIdx.x] = __uint_as_float(bits);
  }
  for (int distance = p.strips.lanes; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      total[i] += __shfl_xor_sync(0xFFFFFFFFu, total[i], distance);
      product[i] += __shfl_xor_sync(0xFFFFFFFFu, product[i], distance);
      if (kCopies) highest[i] = larger(highest[i], __shfl_xor_sync(0xFFFFFFFFu, highest[i], distance));
      if (kCopies) widest[i] = larger(widest[i], __shfl_xor_sync(0xFFFFFFFFu, widest[i], distance));
    }
  }
  __shared__ float shared[kCopies ? 4 : 2][kWarps][kSumLanes * kEight];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < p.strips.lanes) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      shared[0][warp][lane * kEight + i] = total[i];
      shared[1][warp][lane * kEight + i] = product[i];
      if (kCopies) shared[2][warp][lane * kEight + i] = __uint_as_float(highest[i]);
      if (kCopies) shared[3][warp][lane * kEight + i] = __uint_as_float(widest[i]);
    }
  }
  __syncthreads();
  int const width = p.strips.lanes * kEight, which = threadIdx.x / width, within = threadIdx.x % width;
  int64_t const column = int64_t(blockIdx.y) * width + within;
  if (which >= (kCopies ? 4 : 2) || column >= q.columns) return;
  float sum = shared[which][0][within];
  for (int other = 1; other < kWarps; ++other) {
    float const found = shared[which][other][within];
    sum = which < 2 ? sum + found : __uint_as_float(larger(__float_as_uint(sum), __float_as_uint(found)));
  }
  p.partial[(which * p.programs + blockIdx.x) * q.columns + column] = sum;
}

// What |gradient * multiplier| of 32 channels cannot exceed; each operation is monotone, and rounded as ``apply_gradient`` does.
static __global__ void __launch_bounds__(kThreads) gradient_reach(BatchNorm p) {
  __shared__ uint32_t shared[2][kWarps][kSumColumns];
  auto const& q = p.q;
  int const lane = threadIdx.x % kSumColumns, group = threadIdx.x / kSumColumns;
  int64_t const column = int64_t(blockIdx.x) * kSumColumns + lane, kind = p.programs * q.columns;
  uint32_t highest = 0, widest = 0;
  for (int64_t program = group; program < p.programs && column < q.columns; program += kWarps) {
    float const* const at = p.partial + 2 * kind + program * q.columns + column;
    highest = larger(highest, __float_as_uint(at[0])), widest = larger(widest, __float_as_uint(at[kind]));
  }
  shared[0][group][lane] = highest, shared[1][group][lane] = widest;
  __syncthreads();
  uint32_t reach = 0;
  if (group == 0 && column < q.columns) {
    for (int other = 1; other < kWarps; ++other) {
      highest = larger(highest, shared[0][other][lane]), widest = larger(widest, shared[1][other][lane]);
    }
    float const positions = float(q.rows), mean_h = fabsf(__fdiv_rn(p.total[column], positions));
    float const mean_product = fabsf(__fdiv_rn(p.product[column], positions));
    float const weight = q.weight == nullptr ? 1.0f : q.weight[column];
    float const factor = fabsf(__fmul_rn(weight, inverse_deviation(q.spread[column], float(q.eps))));
    float const sum = __fmaf_rn(__uint_as_float(widest), mean_product, __fadd_rn(__uint_as_float(highest), mean_h));
    float const multiplier = q.multiplier == nullptr ? 1.0f : q.multiplier[column];
    reach = magnitude(__fmul_rn(__fmul_rn(factor, sum), multiplier));
  }
  reach = block_largest(reach);
  if (threadIdx.x == 0) p.bound[blockIdx.x] = __uint_as_float(reach);
}

template <bool kWide, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) apply_gradient(BatchNorm p) {
  auto const& q = p.q;
  Scale scale = {1.0f, 1.0f};
  Stream stream = {};
  if (q.q != nullptr) {
    scale = scale_of(largest_of(p.bound, p.bounds));
    stream = stream_of(q.seed, offset_of(q) + share_of(sum_of(p.checksums, p.checksum_count)));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *q.scale = scale.scale;
  }
  Place const place = Place::of(p);
  if (place.count == 0) return;
  GradientOfEight<kWide, kActivation> gradient;
  gradient.prepare(p, place);
  float mean_h[kEight], mean_product[kEight];
  load_vector<false>(p.total, place.column, place.count, 0.0f, mean_h);
  load_vector<false>(p.product, place.column, place.count, 0.0f, mean_product);
  float const positions = float(q.rows);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    mean_h[i] = __fdiv_rn(mean_h[i], positions), mean_product[i] = __fdiv_rn(mean_product[i], positions);
  }
  int const format = int(q.grad_input_format);
  for (int64_t number = place.first_row; number < q.rows; number += kRowsAtOnce * place.step) {
    typename GradientOfEight<kWide, kActivation>::Loaded loaded[kRowsAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      int64_t const row = q.rows - 1 - (number + k * place.step);
      if (row >= 0) loaded[k] = gradient.load(q, place, row);
    }
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      int64_t const row = q.rows - 1 - (number + k * place.step), index = row * q.columns + place.column;
      if (row < 0) continue;
      float h[kEight], xhat[kEight];
      gradient.widened(q, place, loaded[k], h, xhat);
      if (q.grad_residual != nullptr) store_eight<kWide>(q.grad_residual, format, index, place.count, h);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        h[i] = __fmul_rn(gradient.factor[i], __fmaf_rn(-xhat[i], mean_product[i], __fsub_rn(h[i], mean_h[i])));
      }
      if (q.grad_input != nullptr) store_eight<kWide>(q.grad_input, format, index, place.count, h);
      if (q.q == nullptr) continue;
      if (q.multiplier != nullptr) {
        float multiplier[kEight];
        load_vector<false>(q.multiplier, place.column, place.count, 0.0f, multiplier);
#pragma unroll
        for (int i = 0; i < kEight; ++i) h[i] = __fmul_rn(h[i], multiplier[i]);
      }
      store_copy<kWide>(q.q, index, place.count, h, scale, int(q.rounding), stream);
    }
  }
}

template <Activation kActivation>
struct BatchNormOutput {
  static BatchNorm planned(QsyncProducerArguments const& q) {
    BatchNorm p = {};
    p.q = q;
    p.strips = Strips::of(q, kSumLanes);
    p.programs = p.strips.programs(q, kSumming, kMostPrograms);
    p.bounds = int(ceil_div(q.columns, kWarps));
    p.partial = static_cast<float*>(q.workspace);
    p.counts = p.partial + 5 * p.programs * q.columns;
    p.inverse = p.counts + p.programs;
    p.bound = p.inverse + q.columns;
    p.checksums = p.bound + p.bounds;
    p.checksum_count = int(p.programs) * p.strips.count;
    return p;
  }

  static int64_t workspace(QsyncProducerArguments const& q) {
    if (int32_t const status = check(q, 0)) return -int64_t(status);
    BatchNorm const p = planned(q);
    return int64_t(sizeof(float)) * (5 * p.programs * q.columns + p.programs + q.columns + p.bounds + p.checksum_count);
  }

  static int32_t run(QsyncProducerArguments const& q) {
    int64_t const needed = workspace(q);
    if (int32_t const status = needed < 0 ? int32_t(-needed) : check(q, needed)) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    BatchNorm p = planned(q);
    bool const wide = is_wide(q);
    dim3 const reading{unsigned(p.programs), unsigned(p.strips.count)};
    int32_t status = launch(wide ? channel_statistics<true> : channel_statistics<false>, reading, p, q.stream);
    if (status == QSYNC_OK) status = launch(channel_coefficients<kActivation>, dim3(unsigned(p.bounds)), p, q.stream);
    if (status != QSYNC_OK || (q.out == nullptr && q.q == nullptr && q.x_q == nullptr && q.open == nullptr)) return status;
    p.strips = Strips::of(q, kWriteLanes);
    dim3 const writing{unsigned(p.strips.programs(q, kWriting, INT32_MAX)), unsigned(p.strips.count)};
    auto const kernel = wide ? normalize_positions<true, kActivation> : normalize_positions<false, kActivation>;
    return launch(kernel, writing, p, q.stream);
  }
};

template <Activation kActivation>
struct BatchNormGradient {
  // Of partial results: two sums, and two maxima for a copy.
  static int64_t kinds(QsyncProducerArguments const& q) { return q.q == nullptr ? 2 : 4; }

  static BatchNorm planned(QsyncProducerArguments const& q) {
    BatchNorm p = {};
    p.q = q;
    p.strips = Strips::of(q, kSumLanes);
    p.programs = p.strips.programs(q, kSumming, kMostPrograms);
    p.partial = static_cast<float*>(q.workspace);
    float* const spare = p.partial + kinds(q) * p.programs * q.columns;
    p.bounds = q.q == nullptr ? 0 : int(ceil_div(q.columns, kSumColumns));
    p.bound = spare + 2 * q.columns;
    p.checksums = p.bound + p.bounds;
    p.checksum_count = q.q == nullptr ? 0 : int(p.programs) * p.strips.count;
    p.total = q.grad_bias == nullptr ? spare : q.grad_bias;
    p.product = q.grad_weight == nullptr ? spare + q.columns : q.grad_weight;
    return p;
  }

  static int64_t workspace(QsyncProducerArguments const& q) {
    if (int32_t const status = check(q, 0)) return -int64_t(status);
    BatchNorm const p = planned(q);
    return int64_t(sizeof(float)) * (kinds(q) * p.programs * q.columns + 2 * q.columns + p.bounds + p.checksum_count);
  }

  static int32_t run(QsyncProducerArguments const& q) {
    int64_t const needed = workspace(q);
    if (int32_t const status = needed < 0 ? int32_t(-needed) : check(q, needed)) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    BatchNorm p = planned(q);
    bool const wide = is_wide(q);
    dim3 const reading{unsigned(p.programs), unsigned(p.strips.count)};
    bool const copies = q.q != nullptr;
    auto const reduce = wide ? copies ? reduce_gradient<true, kActivation, true> : reduce_gradient<true, kActivation, false>
                             : copies ? reduce_gradient<false, kActivation, true> : reduce_gradient<false, kActivation, false>;
    int32_t status = launch(reduce, reading, p, q.stream);
    ColumnSums const sums = {p.partial, const_cast<float*>(p.total), const_cast<float*>(p.product), p.programs, q.columns};
    if (status == QSYNC_OK) status = launch_add_programs(sums, q.stream);
    if (status == QSYNC_OK && copies) status = launch(gradient_reach, dim3(unsigned(p.bounds)), p, q.stream);
    if (status != QSYNC_OK || (q.grad_input == nullptr && q.grad_residual == nullptr && !copies)) return status;
    p.strips = Strips::of(q, kWriteLanes);
    dim3 const writing{unsigned(p.strips.programs(q, kWriting, INT32_MAX)), unsigned(p.strips.count)};
    return launch(wide ? apply_gradient<true, kActivation> : apply_gradient<false, kActivation>, writing, p, q.stream);
  }
};

}  // namespace qsync
