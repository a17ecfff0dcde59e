// Matrix products without tensor cores, for any chip, any size and any strides.
//
// The product, its scales and its bias are those of gemm_sm90.cuh.  A block of 16 x 16 threads computes a tile of kM x kN outputs, a
// thread every 16th row and column of it; k advances kDepth elements at a time through shared memory.  8-bit integers are summed by
// dp4a in int32, everything else in float32.  Element strides: a[m, k] is at m * lda + k * stride_a, b[n, k] at n * ldb + k * stride_b,
// out[m, n] at m * ldo + n * stride_o.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "launch.cuh"

namespace qsync {

template <class Element>
struct GemmSimtTraits {
  using Shared = float;
  using Accumulator = float;
  static constexpr int kPack = 1;
};
template <>
struct GemmSimtTraits<int8_t> {
  using Shared = int32_t;  // four bytes along k
  using Accumulator = int32_t;
  static constexpr int kPack = 4;
};

inline constexpr int kSimtThreads = 256;

// kRows rows and kWords * kPack columns of an operand, zero outside it; rows lie along shared memory's fast dimension, so that the 16
// threads of a half warp read consecutive words.
template <int kRows, int kWords, class Element, class Shared>
__device__ void simt_load(Shared (*shared)[kRows + 1], Element const* data, int64_t rows, int64_t k, int64_t row_stride,
                          int64_t k_stride, int64_t first_row, int64_t first_k) {
  constexpr int kPack = GemmSimtTraits<Element>::kPack;
  for (int word = threadIdx.x; word < kRows * kWords; word += kSimtThreads) {
    int const row = word / kWords, column = word % kWords;
    int64_t const at_row = first_row + row, at_k = first_k + column * kPack;
    if constexpr (kPack == 4) {
      uint32_t packed = 0;
      if (at_row < rows) {
        for (int byte = 0; byte < 4; ++byte) {
          if (at_k + byte < k) packed |= uint32_t(uint8_t(data[at_row * row_stride + (at_k + byte) * k_stride])) << (8 * byte);
        }
      }
      shared[column][row] = int32_t(packed);
    } else {
      bool const inside = at_row < rows && at_k < k;
      shared[column][row] = inside ? float(data[at_row * row_stride + at_k * k_stride]) : 0.0f;
    }
  }
}

template <class Element>
__device__ auto simt_multiply_add(typename GemmSimtTraits<Element>::Shared a, typename GemmSimtTraits<Element>::Shared b,
                                  typename GemmSimtTraits<Element>::Accumulator sum) {
  if constexpr (GemmSimtTraits<Element>::kPack == 4) {
    return __dp4a(a, b, sum);
  } else {
    return fmaf(a, b, sum);
  }
}

template <class A, class B, class Output, int kM, int kN, int kDepth>
__global__ void __launch_bounds__(kSimtThreads) gemm_simt_kernel(QsyncArguments q, int64_t tiles_n) {
  using Traits = GemmSimtTraits<A>;
  static_assert(std::is_same_v<typename Traits::Shared, typename GemmSimtTraits<B>::Shared>, "both operands are integers or neither");
  static_assert(kM % 16 == 0 && kN % 16 == 0 && kDepth % 4 == 0, "a thread's part of the tile is whole");
  constexpr int kWords = kDepth / Traits::kPack, kRowsOfThread = kM / 16, kColumnsOfThread = kN / 16;
  __shared__ typename Traits::Shared shared_a[kWords][kM + 1];
  __shared__ typename Traits::Shared shared_b[kWords][kN + 1];

  int64_t const first_m = int64_t(blockIdx.x) / tiles_n * kM, first_n = int64_t(blockIdx.x) % tiles_n * kN;
  int const thread_n = threadIdx.x % 16, thread_m = threadIdx.x / 16;
  typename Traits::Accumulator sum[kRowsOfThread][kColumnsOfThread] = {};
  for (int64_t first_k = 0; first_k < q.k; first_k += kDepth) {
    simt_load<kM, kWords>(shared_a, static_cast<A const*>(q.a), q.m, q.k, q.lda, q.stride_a, first_m, first_k);
    simt_load<kN, kWords>(shared_b, static_cast<B const*>(q.b), q.n, q.k, q.ldb, q.stride_b, first_n, first_k);
    __syncthreads();
    for (int word = 0; word < kWords; ++word) {
      typename Traits::Shared a[kRowsOfThread], b[kColumnsOfThread];
      for (int i = 0; i < kRowsOfThread; ++i) a[i] = shared_a[word][thread_m + 16 * i];
      for (int j = 0; j < kColumnsOfThread; ++j) b[j] = shared_b[word][thread_n + 16 * j];
      for (int i = 0; i < kRowsOfThread; ++i) {
        for (int j = 0; j < kColumnsOfThread; ++j) sum[i][j] = simt_multiply_add<A>(a[i], b[j], sum[i][j]);
      }
    }
    __syncthreads();
  }

  for (int i = 0; i < kRowsOfThread; ++i) {
    int64_t const m = first_m + thread_m + 16 * i;
    if (m >= q.m) continue;
    float const a_scale = q.a_scale == nullptr ? 1.0f : q.a_scale[q.a_scale_count == 1 ? 0 : m];
    for (int j = 0; j < kColumnsOfThread; ++j) {
      int64_t const n = first_n + thread_n + 16 * j;
      if (n >= q.n) continue;
      float const b_scale = q.b_scale == nullptr ? 1.0f : q.b_scale[q.b_scale_count == 1 ? 0 : n];
      float const bias = q.bias == nullptr ? 0.0f : static_cast<float const*>(q.bias)[n];
      static_cast<Output*>(q.out)[m * q.ldo + n * q.stride_o] = Output(fmaf(a_scale, b_scale * float(sum[i][j]), bias));
    }
  }
}

template <class A, class B, class Output, int kM, int kN, int kDepth>
struct GemmSimt {
  static int32_t check(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    return q.m > 0 && q.n > 0 && q.k > 0 && q.batch == 1 ? QSYNC_OK : QSYNC_INVALID_PROBLEM;
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    int64_t const tiles_m = (q.m - 1) / kM + 1, tiles_n = (q.n - 1) / kN + 1;
    if (tiles_m > INT32_MAX / tiles_n) return QSYNC_INVALID_PROBLEM;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    auto const stream = static_cast<cudaStream_t>(q.stream);
    gemm_simt_kernel<A, B, Output, kM, kN, kDepth><<<unsigned(tiles_m * tiles_n), kSimtThreads, 0, stream>>>(q, tiles_n);
    return cuda_status(cudaGetLastError());
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
