// What the kernels of the 2.x paths have in common: the checks of products' arguments, and the launch.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/numeric_size.h"

#include "launch.cuh"

namespace qsync {

template <class Element>
inline constexpr int kElements16Bytes = 128 / cutlass::sizeof_bits<Element>::value;

// Loads and stores are guarded 16 bytes at a time, so extents along contiguous dimensions are multiples of 16 bytes as rows are.
template <class Config>
int32_t check_2x(QsyncArguments const& q) {
  using A = typename Config::A;
  using B = typename Config::B;
  using Output = typename Config::Output;
  if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
  if (!fits_int32(q.m) || !fits_int32(q.n) || !fits_int32(q.k) || q.m == 0 || q.n == 0 || q.k == 0 || q.batch != 1) {
    return QSYNC_INVALID_PROBLEM;
  }
  bool const a = aligned(q.a, 16) && q.lda % kElements16Bytes<A> == 0 && (Config::kRowMajorA ? q.k : q.m) % kElements16Bytes<A> == 0;
  bool const b =
      aligned(q.b, 16) && q.ldb % kElements16Bytes<B> == 0 && (Config::kColumnMajorB ? q.k : q.n) % kElements16Bytes<B> == 0;
  bool const out = aligned(q.out, 16) && q.ldo % kElements16Bytes<Output> == 0 && q.n % kElements16Bytes<Output> == 0;
  return a && b && out ? QSYNC_OK : QSYNC_MISALIGNED;
}

// Launches `function`, which runs Kernel on `params`, over tiles.m() x tiles.n() tiles.  Blocks walk bands of `swizzle` tiles;
// CUTLASS fixes the width at compile time, here it is an argument, whose logarithm is written to `log_swizzle` (of `params`).
template <class Kernel, class Function>
int32_t launch_in_bands(Function function, typename Kernel::Params& params, cutlass::gemm::GemmCoord const& tiles,
                        int& log_swizzle, QsyncArguments const& q) {
  log_swizzle = 0;
  while (log_swizzle < 4 && (int64_t(2) << log_swizzle) <= q.swizzle && (1 << log_swizzle) < tiles.n()) ++log_swizzle;
  int64_t const grid_x = int64_t(tiles.m()) << log_swizzle;
  int64_t const grid_y = (tiles.n() + (1 << log_swizzle) - 1) >> log_swizzle;
  if (!fits_int32(grid_x) || grid_y > 65535) return QSYNC_INVALID_PROBLEM;

  constexpr int kBytes = int(sizeof(typename Kernel::SharedStorage));
  static std::atomic<uint64_t> allowed_devices{0};
  if (auto const status = allow_shared_memory<kBytes>(function, q.device, allowed_devices); status != QSYNC_OK) return status;
  dim3 const grid{unsigned(grid_x), unsigned(grid_y), 1};
  function<<<grid, Kernel::kThreadCount, kBytes, static_cast<cudaStream_t>(q.stream)>>>(params);
  return cuda_status(cudaGetLastError());
}

template <class Kernel>
int32_t launch_2x(typename Kernel::Params& params, QsyncArguments const& q) {
  return launch_in_bands<Kernel>(cutlass::Kernel2<Kernel>, params, params.grid_tiled_shape, params.swizzle_log_tile, q);
}

}  // namespace qsync
