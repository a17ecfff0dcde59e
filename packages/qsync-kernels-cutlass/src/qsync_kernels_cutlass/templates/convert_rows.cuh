// Copies a matrix whose rows are contiguous into another format: out[m, n] = a_scale[m or 0] * a[m, n] (a_scale null: 1), and fills
// out's rows with zeros up to k columns (k >= n).  The same format in and out pads rows.
// q.m x q.n is the size of a, q.lda and q.ldo are elements between rows of a and out.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "launch.cuh"

namespace qsync {

inline constexpr int kConvertThreads = 256;
inline constexpr int kConvertVector = 8;  // elements of one thread

template <class Input, class Output>
__device__ Output converted(Input value, float scale) {
  if constexpr (std::is_same_v<Input, Output>) {
    return value;
  } else {
    return Output(float(value) * scale);
  }
}

template <class Element>
struct alignas(sizeof(Element) * kConvertVector) ConvertVector {
  Element elements[kConvertVector];
};

template <class Input, class Output, bool kVectors>
__global__ void __launch_bounds__(kConvertThreads) convert_rows_kernel(QsyncArguments q) {
  int64_t const vectors_per_row = (q.k - 1) / kConvertVector + 1, count = q.m * vectors_per_row;
  int64_t const step = int64_t(gridDim.x) * kConvertThreads;
  for (int64_t vector = int64_t(blockIdx.x) * kConvertThreads + threadIdx.x; vector < count; vector += step) {
    int64_t const row = vector / vectors_per_row, column = vector % vectors_per_row * kConvertVector;
    float const scale = q.a_scale == nullptr ? 1.0f : q.a_scale[q.a_scale_count == 1 ? 0 : row];
    auto const* const from = static_cast<Input const*>(q.a) + row * q.lda + column;
    auto* const to = static_cast<Output*>(q.out) + row * q.ldo + column;
    if (kVectors && column + kConvertVector <= q.n) {
      auto const in = *reinterpret_cast<ConvertVector<Input> const*>(from);
      ConvertVector<Output> out;
      for (int i = 0; i < kConvertVector; ++i) out.elements[i] = converted<Input, Output>(in.elements[i], scale);
      *reinterpret_cast<ConvertVector<Output>*>(to) = out;
    } else {
      for (int i = 0; i < kConvertVector && column + i < q.k; ++i) {
        to[i] = column + i < q.n ? converted<Input, Output>(from[i], scale) : Output(0.0f);
      }
    }
  }
}

template <class Input, class Output>
struct ConvertRows {
  static int32_t run(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    if (q.m <= 0 || q.n <= 0 || q.k < q.n || q.lda < q.n || q.ldo < q.k) return QSYNC_INVALID_PROBLEM;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    bool const vectors = aligned(q.a, sizeof(ConvertVector<Input>)) && q.lda % kConvertVector == 0 &&
                         aligned(q.out, sizeof(ConvertVector<Output>)) && q.ldo % kConvertVector == 0;
    int64_t const blocks = (q.m * ((q.k - 1) / kConvertVector + 1) - 1) / kConvertThreads + 1;
    int64_t const most = q.sm_count > 0 ? q.sm_count * 32 : 4096;
    auto const kernel = vectors ? convert_rows_kernel<Input, Output, true> : convert_rows_kernel<Input, Output, false>;
    kernel<<<unsigned(blocks < most ? blocks : most), kConvertThreads, 0, static_cast<cudaStream_t>(q.stream)>>>(q);
    return cuda_status(cudaGetLastError());
  }

  static int64_t workspace(QsyncArguments const&) { return 0; }
};

}  // namespace qsync
