// Matrix products for sm_90a: TMA loads, warp-group tensor core instructions, dequantization in the epilogue.
//
//     out[m, n] = a_scale[m or 0] * (b_scale[n or 0] * sum over k of a[m, k] * b[n, k]) + bias[n]
//
// The sum is exact in int32 for 8-bit integers and in float32 otherwise.  Scales and bias are float32 and may be null (1 and 0).
// A source defines a Config and calls run<Config> and workspace<Config>.  Config has
//     A, B, Accumulator, Output           element types
//     LayoutA, LayoutB                    RowMajor A and ColumnMajor B have k contiguous (8-bit operands must)
//     Tile, Cluster                       cute shapes
//     Schedule, EpilogueSchedule          warp specialisation
//     Scheduler                           PersistentScheduler or StreamKScheduler
//     Stages<epilogue_bytes>              StageCount<n> or StageCountAutoCarveout<epilogue_bytes>
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

#include "launch.cuh"

namespace qsync {

template <class Config>
struct GemmSm90 {
  using A = typename Config::A;
  using B = typename Config::B;
  using Output = typename Config::Output;
  using Tile = typename Config::Tile;
  using Cluster = typename Config::Cluster;

  template <class Element>
  static constexpr int kElements16Bytes = 128 / cutlass::sizeof_bits<Element>::value;

  // One kernel takes scalar and vector scales: the stride along the tile is a run-time flag.
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using ScaleA =
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float, float, cute::Stride<bool, cute::_0, cute::_0>>;
  using ScaleB =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, bool, cute::_0>>;
  using Bias =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, cute::_1, cute::_0>>;
  using Multiply = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, kRound>;
  using MultiplyAdd = cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Output, float, kRound>;
  using ScaledByB = cutlass::epilogue::fusion::Sm90EVT<Multiply, ScaleB, cutlass::epilogue::fusion::Sm90AccFetch>;
  using Dequantize = cutlass::epilogue::fusion::Sm90EVT<MultiplyAdd, ScaleA, ScaledByB, Bias>;

  using RowMajor = cutlass::layout::RowMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
      typename Config::Accumulator, float, void, RowMajor, kElements16Bytes<Output>, Output, RowMajor,
      kElements16Bytes<Output>, typename Config::EpilogueSchedule, Dequantize>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, typename Config::LayoutA, kElements16Bytes<A>, B,
      typename Config::LayoutB, kElements16Bytes<B>, typename Config::Accumulator, Tile, Cluster,
      typename Config::template Stages<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Config::Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      typename Config::Scheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;  // validity.py predicts it, a test compares

  static constexpr bool kStreamK = cute::is_same_v<typename Config::Scheduler, cutlass::gemm::StreamKScheduler>;

  static int32_t check(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    if (!fits_int32(q.m) || !fits_int32(q.n) || !fits_int32(q.k) || q.m == 0 || q.n == 0 || q.k == 0 || q.batch != 1) {
      return QSYNC_INVALID_PROBLEM;
    }
    bool const in_place = aligned(q.a, 16) && aligned(q.b, 16) && aligned(q.out, 16);
    bool const rows = q.lda % kElements16Bytes<A> == 0 && q.ldb % kElements16Bytes<B> == 0 && q.ldo % kElements16Bytes<Output> == 0;
    return in_place && rows ? QSYNC_OK : QSYNC_MISALIGNED;
  }

  static typename Kernel::Arguments kernel_arguments(QsyncArguments const& q) {
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {int(q.m), int(q.n), int(q.k), 1};
    arguments.mainloop.ptr_A = static_cast<A const*>(q.a);
    arguments.mainloop.ptr_B = static_cast<B const*>(q.b);
    set_leading(arguments.mainloop.dA, q.lda);
    set_leading(arguments.mainloop.dB, q.ldb);
    arguments.epilogue.ptr_D = static_cast<Output*>(q.out);
    set_leading(arguments.epilogue.dD, q.ldo);
    arguments.epilogue.thread = {{q.a_scale, 1.0f, {q.a_scale_count != 1, {}, {}}},
                                 {{q.b_scale, 1.0f, {{}, q.b_scale_count != 1, {}}}, {}, {}},
                                 {static_cast<float const*>(q.bias), 0.0f, {}},
                                 {}};
    arguments.hw_info.device_id = int(q.device);
    arguments.hw_info.sm_count = int(q.sm_count);
    auto& scheduler = arguments.scheduler;
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    scheduler.max_swizzle_size = int(q.swizzle);
    scheduler.raster_order = q.raster == QSYNC_RASTER_ALONG_M   ? Raster::AlongM
                             : q.raster == QSYNC_RASTER_ALONG_N ? Raster::AlongN
                                                                : Raster::Heuristic;
    if constexpr (kStreamK) scheduler.splits = int(q.splits);
    return arguments;
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    auto arguments = kernel_arguments(q);
    if (q.sm_count <= 0) arguments.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(int(q.device));
    static std::atomic<uint64_t> allowed_devices{0};
    if (auto const status = allow_shared_memory<kSharedBytes>(cutlass::device_kernel<Kernel>, q.device, allowed_devices);
        status != QSYNC_OK) {
      return status;
    }
    auto const stream = static_cast<cudaStream_t>(q.stream);
    if constexpr (kStreamK) {
      if (int64_t(Kernel::get_workspace_size(arguments)) > q.workspace_bytes) return QSYNC_WORKSPACE_TOO_SMALL;
      if (Kernel::initialize_workspace(arguments, q.workspace, stream) != cutlass::Status::kSuccess) return failure();
    }
    auto params = Kernel::to_underlying_arguments(arguments, q.workspace);
    return Device::run(params, stream) == cutlass::Status::kSuccess ? QSYNC_OK : failure();
  }

  static int64_t workspace(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return -status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return -int64_t(guard.status());
    auto arguments = kernel_arguments(q);
    if (q.sm_count <= 0) arguments.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(int(q.device));
    return int64_t(Kernel::get_workspace_size(arguments));
  }

 private:
  static int32_t failure() {
    auto const error = cudaGetLastError();
    return error == cudaSuccess ? QSYNC_INTERNAL : cuda_status(error);
  }

  // The one dynamic stride of a matrix, whichever mode has it; its batch stride is static or stays 0.
  template <class Stride>
  static void set_leading(Stride& stride, int64_t leading) {
    if constexpr (cute::is_static<cute::remove_cvref_t<decltype(cute::get<0>(stride))>>::value) {
      cute::get<1>(stride) = leading;
    } else {
      cute::get<0>(stride) = leading;
    }
  }
};

}  // namespace qsync
