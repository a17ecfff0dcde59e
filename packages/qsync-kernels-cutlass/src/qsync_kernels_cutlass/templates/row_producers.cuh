// Producers of the rows of a matrix: layer normalization of x (+ residual), and ReLU, GELU or SiLU, that write their 8-bit copies;
// and their gradients (docs/design/fused-chains.md).
//
// One to eight warps have a row, and hold it in registers: one launch, one read, 16 bytes a thread and access.  Longer rows are
// read again, from the cache.  One scale for a whole tensor takes a second launch, ``round_rows``, which reads x once more.
#pragma once

#include "producer_block.cuh"

namespace qsync {

constexpr int kHeldOutput = 4, kHeldGradient = 2;  // eights of a row that a thread holds at most

struct Rows {
  QsyncProducerArguments q;
  int warps;       // of a row
  int64_t blocks;
  float* partial;  // maxima of blocks, and then their checksums; of a gradient (2, teams, columns)

  int64_t teams() const { return blocks * (kWarps / warps); }

  static Rows of(QsyncProducerArguments const& q, int held, int64_t blocks_per_sm) {
    Rows p = {};
    p.q = q;
    p.warps = 1;
    int64_t const eights = ceil_div(q.columns, kEight);
    while (p.warps < kWarps && eights > int64_t(32) * held * p.warps) p.warps *= 2;
    p.blocks = smaller(smaller(ceil_div(q.rows, kWarps / p.warps), q.sm_count * blocks_per_sm), kMostPrograms);
    p.partial = static_cast<float*>(q.workspace);
    return p;
  }

  bool is_held(int held) const { return q.columns <= int64_t(kThreads) * held * kEight; }
};

// The threads that have a row together; all of a block's reduce at the same time.
struct Team {
  int size, member;
  int64_t first_row, step;
  int eights;

  __device__ static Team of(Rows const& p) {
    int const size = 32 * p.warps, teams = kThreads / size;
    return {size, int(threadIdx.x) % size, int64_t(blockIdx.x) * teams + int(threadIdx.x) / size, int64_t(gridDim.x) * teams,
            int((p.q.columns + kEight - 1) / kEight)};
  }

  // Rounds of the loop over rows: the same for all teams of a block.
  __device__ int64_t rounds(int64_t rows) const {
    int64_t const first = first_row - int(threadIdx.x) / size;
    return first < rows ? (rows - first + step - 1) / step : 0;
  }

  __device__ int64_t index(int64_t row, int eight, int64_t columns) const { return row * columns + int64_t(eight) * kEight; }

  __device__ static int count(int eight, int64_t columns) {
    int64_t const left = columns - int64_t(eight) * kEight;
    return left < kEight ? int(left) : kEight;
  }

  template <class Value, class Combine>
  __device__ Value reduced(Value value, Combine combine) const {
    __shared__ Value shared[kWarps];
    for (int distance = 16; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    if (size == 32) return value;
    int const warp = threadIdx.x / 32, first = warp - member / 32;
    if (threadIdx.x % 32 == 0) shared[warp] = value;
    __syncthreads();
    value = shared[first];
    for (int other = 1; other < size / 32; ++other) value = combine(value, shared[first + other]);
    __syncthreads();
    return value;
  }

  __device__ float sum(float value) const {
    return reduced(value, [](float one, float other) { return one + other; });
  }

  __device__ uint32_t sum(uint32_t value) const {
    return reduced(value, [](uint32_t one, uint32_t other) { return one + other; });
  }

  __device__ uint32_t largest(uint32_t value) const {
    return reduced(value, [](uint32_t one, uint32_t other) { return larger(one, other); });
  }
};

// What is normalized, or activated: x (+ residual), as it is kept where it is kept.
template <bool kWide>
struct Source {
  Raw x, residual;

  __device__ void load(QsyncProducerArguments const& q, int64_t index, int count) {
    x = load_eight<kWide>(q.x, int(q.x_format), index, count);
    if (q.residual != nullptr) residual = load_eight<kWide>(q.residual, int(q.residual_format), index, count);
  }

  __device__ void widen(QsyncProducerArguments const& q, float (&s)[kEight]) const {
    qsync::widen(x, int(q.x_format), s);
    if (q.residual == nullptr) return;
    float added[kEight];
    qsync::widen(residual, int(q.residual_format), added);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      s[i] += added[i];
      if (q.kept != nullptr) s[i] = rounded_to(s[i], int(q.kept_format));
    }
  }
};

// The same, and the sum of the bits of x.
template <bool kWide>
__device__ inline uint32_t source_of(QsyncProducerArguments const& q, int64_t index, int count, float (&s)[kEight]) {
  Source<kWide> source;
  source.load(q, index, count);
  source.widen(q, s);
  return bits_of(source.x, int(q.x_format));
}

// The result of eight elements; ``xhat`` becomes what they are normalized to, for an activation what they were.
template <bool kWide, bool kNormalizes, Activation kActivation>
__device__ inline void result_of(QsyncProducerArguments const& q, int eight, int count, float mean, float rstd,
                                 float (&xhat)[kEight], float (&r)[kEight]) {
  if (!kNormalizes) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) r[i] = activated<kActivation>(xhat[i]);
    return;
  }
  float weight[kEight], bias[kEight];
  load_vector<kWide>(q.weight, int64_t(eight) * kEight, count, 1.0f, weight);
  load_vector<kWide>(q.bias, int64_t(eight) * kEight, count, 0.0f, bias);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    xhat[i] = __fmul_rn(__fsub_rn(xhat[i], mean), rstd);
    r[i] = __fmaf_rn(xhat[i], weight[i], bias[i]);
  }
}

template <bool kWide, bool kNormalizes, Activation kActivation, int kHeld>
__global__ void __launch_bounds__(kThreads, 2) produce_rows(Rows p) {
  constexpr int kSlots = kHeld > 0 ? kHeld : 1;
  auto const& q = p.q;
  Team const team = Team::of(p);
  int const rounding = int(q.rounding), slots = kHeld > 0 ? kHeld : (team.eights + team.size - 1) / team.size;
  bool const by_row = q.q != nullptr && q.scale_per_row != 0, by_tensor = q.q != nullptr && q.scale_per_row == 0;
  uint64_t const offset = offset_of(q);
  float const length = float(q.columns);
  uint32_t greatest = 0, total = 0;
  int64_t const rounds = team.rounds(q.rows);
  for (int64_t round = 0; round < rounds; ++round) {
    int64_t const row = team.first_row + round * team.step;
    int const eights = row < q.rows ? team.eights : 0;
    uint32_t bits = 0;  // of the thread's part of x
    float held[kSlots][kEight];
    if (kHeld > 0) {
      // Two eights on their way at once: registers for more would cost warps.
#pragma unroll
      for (int first = 0; first < kSlots; first += 2) {
        Source<kWide> sources[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          int const eight = team.member + (first + k) * team.size;
          if (eight < eights) sources[k].load(q, team.index(row, eight, q.columns), Team::count(eight, q.columns));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (team.member + (first + k) * team.size >= eights) continue;
          bits += bits_of(sources[k].x, int(q.x_format));
          sources[k].widen(q, held[(first + k) % kSlots]);
        }
      }
    }
    // Calls visit(eight, index, count, values) for each of the thread's eights; a visit may change its values.
    auto const each = [&](auto const& visit) {
      if (kHeld == 0) bits = 0;
#pragma unroll (kSlots)
      for (int slot = 0; slot < slots; ++slot) {
        int const eight = team.member + slot * team.size;
        if (eight >= eights) continue;
        int64_t const index = team.index(row, eight, q.columns);
        int const count = Team::count(eight, q.columns);
        float values[kEight];
        if (kHeld > 0) {
#pragma unroll
          for (int i = 0; i < kEight; ++i) values[i] = held[kHeld > 0 ? slot : 0][i];
        } else {
          bits += source_of<kWide>(q, index, count, values);
        }
        visit(eight, index, count, values);
      }
    };

    float mean = 0.0f, rstd = 1.0f;
    if (kNormalizes) {
      // About a first estimate of the mean, which rounding may have moved where the mean is large.
      float sum = 0.0f, apart = 0.0f, squares = 0.0f;
      each([&](int, int64_t, int count, float const (&s)[kEight]) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) sum += i < count ? s[i] : 0.0f;
      });
      float const estimate = team.sum(sum) / length;
      each([&](int, int64_t, int count, float const (&s)[kEight]) {
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          float const centred = i < count ? s[i] - estimate : 0.0f;
          apart += centred;
          squares += centred * centred;
        }
      });
      float const moved = team.sum(apart) / length, variance = team.sum(squares) / length - moved * moved;
      mean = estimate + moved;
      rstd = inverse_deviation(variance < 0.0f ? 0.0f : variance, float(q.eps));
      if (team.member == 0 && row < q.rows) q.mean[row] = mean, q.spread[row] = rstd;
    }

    uint32_t absmax = 0, x_absmax = 0;
    each([&](int eight, int64_t, int count, float (&xhat)[kEight]) {
      float r[kEight];
      result_of<kWide, kNormalizes, kActivation>(q, eight, count, mean, rstd, xhat, r);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (i < count) absmax = larger(absmax, magnitude(r[i])), x_absmax = larger(x_absmax, magnitude(xhat[i]));
      }
    });
    Scale scale = {1.0f, 1.0f}, x_scale = {1.0f, 1.0f};
    greatest = larger(greatest, absmax);
    total += bits;
    // What has a scale a row takes the stream of the row's checksum.
    uint64_t const number = offset + share_of(team.sum(bits));
    Stream const stream = stream_of(q.seed, number), x_stream = stream_of(q.x_seed, number);
    if (by_row) {
      scale = scale_of(team.largest(absmax));
      if (team.member == 0 && row < q.rows) q.scale[row] = scale.scale;
    }
    if (q.x_q != nullptr) {
      x_scale = scale_of(team.largest(x_absmax));
      if (team.member == 0 && row < q.rows) q.x_scale[row] = x_scale.scale;
    }

    each([&](int eight, int64_t index, int count, float (&xhat)[kEight]) {
      if (kNormalizes && q.kept != nullptr) store_eight<kWide>(q.kept, int(q.kept_format), index, count, xhat);
      float r[kEight];
      result_of<kWide, kNormalizes, kActivation>(q, eight, count, mean, rstd, xhat, r);
      if (q.out != nullptr) store_eight<kWide>(q.out, int(q.out_format), index, count, r);
      if (q.x_q != nullptr) store_copy<kWide>(q.x_q, index, count, xhat, x_scale, rounding, x_stream);
      if (by_row) store_copy<kWide>(q.q, index, count, r, scale, rounding, stream);
    });
  }
  if (by_tensor) {
    greatest = block_largest(greatest);
    total = block_sum(total);
    if (threadIdx.x == 0) {
      p.partial[blockIdx.x] = __uint_as_float(greatest);
      p.partial[p.blocks + blockIdx.x] = __uint_as_float(total);
    }
  } else if (q.stream_out != nullptr) {
    total = block_sum(total);
    uint64_t const share = share_of(total) + (blockIdx.x == 0 ? offset : 0);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(q.stream_out), share);
  }
}

// The result again, under one scale, the last rows first.
template <bool kWide, bool kNormalizes, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) round_rows(Rows p) {
  auto const& q = p.q;
  uint32_t const absmax = largest_of(p.partial, int(p.blocks));
  Scale const scale = scale_of(absmax);
  uint64_t const number = offset_of(q) + share_of(sum_of(p.partial + p.blocks, int(p.blocks)));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *q.scale = scale.scale;
    if (q.stream_out != nullptr) *q.stream_out = int64_t(number);
  }
  Stream const stream = stream_of(q.seed, number);
  Team const team = Team::of(p);
  float const most = __uint_as_float(absmax);
  for (int64_t number = team.first_row; number < q.rows; number += team.step) {
    int64_t const row = q.rows - 1 - number;
    float const mean = kNormalizes ? q.mean[row] : 0.0f, rstd = kNormalizes ? q.spread[row] : 1.0f;
#pragma unroll 2
    for (int eight = team.member; eight < team.eights; eight += team.size) {
      int64_t const index = team.index(row, eight, q.columns);
      int const count = Team::count(eight, q.columns);
      float s[kEight], r[kEight];
      source_of<kWide>(q, index, count, s);
      result_of<kWide, kNormalizes, kActivation>(q, eight, count, mean, rstd, s, r);
      // What two kernels work out is the same number; if a compiler thought otherwise, int8 would wrap around.
#pragma unroll
      for (int i = 0; i < kEight; ++i) r[i] = fminf(fmaxf(r[i], -most), most);
      store_copy<kWide>(q.q, index, count, r, scale, int(q.rounding), stream);
    }
  }
}

template <bool kNormalizes, Activation kActivation>
struct RowsOutput {
  static int64_t workspace(QsyncProducerArguments const& q) {
    if (int32_t const status = check(q, 0)) return -int64_t(status);
    return int64_t(sizeof(float)) * 2 * Rows::of(q, kHeldOutput, kWriting).blocks;
  }

  template <bool kWide>
  static int32_t launched(QsyncProducerArguments const& q) {
    Rows p = Rows::of(q, kHeldOutput, kWriting);
    auto const kernel = p.is_held(kHeldOutput) ? produce_rows<kWide, kNormalizes, kActivation, kHeldOutput>
                                               : produce_rows<kWide, kNormalizes, kActivation, 0>;
    if (q.stream_out != nullptr && q.scale_per_row != 0) {  // to which blocks add
      auto const error = cudaMemsetAsync(q.stream_out, 0, sizeof(int64_t), static_cast<cudaStream_t>(q.stream));
      if (error != cudaSuccess) return cuda_status(error);
    }
    int32_t const status = launch(kernel, dim3(unsigned(p.blocks)), p, q.stream);
    if (status != QSYNC_OK || q.q == nullptr || q.scale_per_row != 0) return status;
    if (q.kept != nullptr) {  // the sum is there
      p.q.x = q.kept, p.q.x_format = q.kept_format, p.q.residual = nullptr;
    }
    return launch(round_rows<kWide, kNormalizes, kActivation>, dim3(unsigned(p.blocks)), p, q.stream);
  }

  static int32_t run(QsyncProducerArguments const& q) {
    int64_t const needed = workspace(q);
    if (int32_t const status = needed < 0 ? int32_t(-needed) : check(q, needed)) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    return is_wide(q) ? launched<true>(q) : launched<false>(q);
  }
};

// g, weight * g and xhat of eight elements; zeros beyond the row.
template <bool kWide>
__device__ inline void gradient_of(QsyncProducerArguments const& q, int64_t index, int eight, int count, float mean, float factor,
                                   float (&g)[kEight], float (&w)[kEight], float (&xhat)[kEight]) {
  Raw const grad = load_eight<kWide>(q.grad, int(q.grad_format), index, count);
  Raw const x = load_eight<kWide>(q.x, int(q.x_format), index, count);
  load_vector<kWide>(q.weight, int64_t(eight) * kEight, count, 1.0f, w);
  widen(grad, int(q.grad_format), g);
  widen(x, int(q.x_format), xhat);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    w[i] *= g[i];
    xhat[i] = i < count ? (q.x_format == QSYNC_INT8 ? xhat[i] : xhat[i] - mean) * factor : 0.0f;
  }
}

// Each team adds up the gradients of weight and bias of its rows in registers, and leaves one partial sum a column; kHeld = 0: in
// memory, which starts as zeros.
template <bool kWide, int kHeld>
__global__ void __launch_bounds__(kThreads, 2) layer_norm_gradient(Rows p) {
  constexpr int kSlots = kHeld > 0 ? kHeld : 1;
  auto const& q = p.q;
  Team const team = Team::of(p);
  int const slots = kHeld > 0 ? kHeld : (team.eights + team.size - 1) / team.size;
  bool const sums = q.grad_weight != nullptr || q.grad_bias != nullptr;
  int64_t const teams = int64_t(gridDim.x) * (kThreads / team.size), kind = teams * q.columns;
  float* const at = p.partial + (int64_t(blockIdx.x) * (kThreads / team.size) + int(threadIdx.x) / team.size) * q.columns;
  float products[kSlots][kEight] = {}, totals[kSlots][kEight] = {};
  float const length = float(q.columns);
  int64_t const rounds = team.rounds(q.rows);
  for (int64_t round = 0; round < rounds; ++round) {
    int64_t const row = team.first_row + round * team.step;
    int const eights = row < q.rows ? team.eights : 0;
    float mean = 0.0f, rstd = 0.0f, factor = 0.0f;
    if (row < q.rows) mean = q.mean[row], rstd = q.spread[row], factor = q.x_format == QSYNC_INT8 ? q.x_scale[row] : rstd;
    float w[kSlots][kEight], xhat[kSlots][kEight], sum_w = 0.0f, sum_product = 0.0f;
#pragma unroll (kSlots)
    for (int slot = 0; slot < slots; ++slot) {
      int const eight = team.member + slot * team.size, place = kHeld > 0 ? slot : 0;
      if (eight >= eights) continue;
      float g[kEight];
      int const count = Team::count(eight, q.columns);
      gradient_of<kWide>(q, team.index(row, eight, q.columns), eight, count, mean, factor, g, w[place], xhat[place]);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        sum_w += w[place][i];
        sum_product += w[place][i] * xhat[place][i];
        if (kHeld > 0) {
          totals[place][i] += g[i];
          products[place][i] += g[i] * xhat[place][i];
        } else if (sums && i < count) {
          at[int64_t(eight) * kEight + i] += g[i] * xhat[place][i];
          at[kind + int64_t(eight) * kEight + i] += g[i];
        }
      }
    }
    float const mean_w = team.sum(sum_w) / length, mean_product = team.sum(sum_product) / length;
    if (q.grad_input == nullptr) continue;
#pragma unroll (kSlots)
    for (int slot = 0; slot < slots; ++slot) {
      int const eight = team.member + slot * team.size, place = kHeld > 0 ? slot : 0;
      if (eight >= eights) continue;
      int64_t const index = team.index(row, eight, q.columns);
      int const count = Team::count(eight, q.columns);
      float g[kEight];
      if (kHeld == 0) gradient_of<kWide>(q, index, eight, count, mean, factor, g, w[place], xhat[place]);
#pragma unroll
      for (int i = 0; i < kEight; ++i) g[i] = (w[place][i] - mean_w - xhat[place][i] * mean_product) * rstd;
      store_eight<kWide>(q.grad_input, int(q.grad_input_format), index, count, g);
    }
  }
  if (kHeld == 0 || !sums) return;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    int const eight = team.member + slot * team.size;
    if (eight >= team.eights) continue;
    int const count = Team::count(eight, q.columns);
    store_eight<false>(at, QSYNC_FLOAT32, int64_t(eight) * kEight, count, products[slot]);
    store_eight<false>(at + kind, QSYNC_FLOAT32, int64_t(eight) * kEight, count, totals[slot]);
  }
}

struct LayerNormGradient {
  static int64_t workspace(QsyncProducerArguments const& q) {
    if (int32_t const status = check(q, 0)) return -int64_t(status);
    return int64_t(sizeof(float)) * 2 * Rows::of(q, kHeldGradient, kSumming).teams() * q.columns;
  }

  static int32_t run(QsyncProducerArguments const& q) {
    int64_t const needed = workspace(q);
    if (int32_t const status = needed < 0 ? int32_t(-needed) : check(q, needed)) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    Rows const p = Rows::of(q, kHeldGradient, kSumming);
    bool const wide = is_wide(q), held = p.is_held(kHeldGradient), sums = q.grad_weight != nullptr || q.grad_bias != nullptr;
    if (!held && sums) {
      auto const error = cudaMemsetAsync(p.partial, 0, size_t(needed), static_cast<cudaStream_t>(q.stream));
      if (error != cudaSuccess) return cuda_status(error);
    }
    auto const kernel = wide ? held ? layer_norm_gradient<true, kHeldGradient> : layer_norm_gradient<true, 0>
                             : held ? layer_norm_gradient<false, kHeldGradient> : layer_norm_gradient<false, 0>;
    int32_t const status = launch(kernel, dim3(unsigned(p.blocks)), p, q.stream);
    if (status != QSYNC_OK || !sums) return status;
    return launch_add_programs({p.partial, q.grad_weight, q.grad_bias, p.teams(), q.columns}, q.stream);
  }
};

template <bool kWide, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) activation_gradient(Rows p) {
  auto const& q = p.q;
  Team const team = Team::of(p);
  for (int64_t row = team.first_row; row < q.rows; row += team.step) {
    float const scale = q.x_format == QSYNC_INT8 ? q.x_scale[row] : 1.0f;
#pragma unroll 2
    for (int eight = team.member; eight < team.eights; eight += team.size) {
      int64_t const index = team.index(row, eight, q.columns);
      int const count = Team::count(eight, q.columns);
      Raw const grad = load_eight<kWide>(q.grad, int(q.grad_format), index, count);
      Raw const raw = load_eight<kWide>(q.x, int(q.x_format), index, count);
      float g[kEight], x[kEight];
      widen(grad, int(q.grad_format), g);
      widen(raw, int(q.x_format), x);
#pragma unroll
      for (int i = 0; i < kEight; ++i) g[i] *= slope<kActivation>(x[i] * scale);
      store_eight<kWide>(q.grad_input, int(q.grad_input_format), index, count, g);
    }
  }
}

template <Activation kActivation>
struct ActivationGradient {
  static int64_t workspace(QsyncProducerArguments const& q) { return -int64_t(check(q, 0)); }

  static int32_t run(QsyncProducerArguments const& q) {
    if (int32_t const status = check(q, 0)) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    Rows const p = Rows::of(q, 1, kWriting);
    auto const kernel = is_wide(q) ? activation_gradient<true, kActivation> : activation_gradient<false, kActivation>;
    return launch(kernel, dim3(unsigned(p.blocks)), p, q.stream);
  }
};

}  // namespace qsync
