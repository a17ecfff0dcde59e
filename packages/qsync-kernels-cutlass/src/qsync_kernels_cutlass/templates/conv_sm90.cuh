// int8 NHWC convolution for sm_90a: implicit GEMM on the persistent warp-specialised GEMM kernels.
//
// CUTLASS's own Hopper convolution runs one tile a block and one consumer warpgroup only.  A convolution differs from a
// product in one thing: where the tiles of A come from.  So the main loop below keeps CUTLASS's TMA im2col collective for
// loading and wgmma, and presents it to the persistent GEMM kernels (ping-pong and cooperative) as a rank-4 product
// M = N*P*Q, N = K, K = R*S*C: their tile scheduler and overlapped epilogues then serve convolutions too.
//
//     out[n, p, q, k] = a_scale * b_scale[k or 0] * sum over r, s, c of x[n, p', q', c] * w[k, r, s, c] + bias[k]
//
// The sum is exact in int32.  Scales and bias are float32; bias may be null.  Of QsyncArguments it reads the convolution's
// sizes, and: lda, elements between neighbouring pixels of x (in_c where x is dense, more for a group's channels, less for
// windows that overlap); stride_a, between rows of pixels; stride_b, between images; ldo, between pixels of out.  w is dense.
#pragma once

#include "cute/tensor.hpp"
// Before the collectives, which use it without including it.
#include "cutlass/kernel_hardware_info.hpp"

#include "cutlass/conv/collective/builders/sm90_common.inl"
#include "cutlass/conv/collective/collective_conv.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

#include "launch.cuh"

namespace qsync {

using Geometry = cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, 2>;

// The schedule is hidden by one of the GEMM kernels' so that these, not the one-tile convolution kernel, are chosen.
template <int Stages_, class ClusterShape_, class Schedule_>
struct Im2colPolicy : cutlass::conv::MainloopSm90TmaGmmaWarpSpecializedImplicitGemm<
                          cutlass::conv::Operator::kFprop, Stages_, 2, ClusterShape_> {
  using Schedule = Schedule_;
};

template <class Base, class Policy, class GemmTileShape>
struct Im2colMainloop : Base {
  using DispatchPolicy = Policy;
  using TileShape = GemmTileShape;
  using CtaShape_MNK = GemmTileShape;
  using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;  // of the product that the kernels believe they compute
  using StrideB = StrideA;
  using TransformA = cute::identity;
  using TransformB = cute::identity;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  static constexpr int NumProducerThreadEvents = 1;

  struct Arguments {
    typename Base::ElementA const* x;
    typename Base::ElementB const* w;
    Geometry geometry;
  };

  struct Params : Base::Params {
    int channels, filter_h, filter_w;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& arguments, void* workspace) {
    auto base = Base::to_underlying_arguments(arguments.geometry, {arguments.x, arguments.w}, workspace);
    return {base, arguments.geometry.shape_B[3], arguments.geometry.shape_B[1], arguments.geometry.shape_B[2]};
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const& arguments) {
    return Base::can_implement(arguments.geometry, {arguments.x, arguments.w});
  }

  // Tiles of A and B with the (empty) batch mode that the GEMM kernels expect: (BLK_M, BLK_K, m, k, 1), k = (c, s, r).
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem, Params const& params) const {
    using namespace cute;
    auto [M, N, K, L] = problem;
    auto extent_k = make_shape(params.channels, params.filter_w, params.filter_h);
    Tensor mA = params.tma_load_a.get_tma_tensor(make_shape(M, extent_k));
    Tensor mB = params.tma_load_b.get_tma_tensor(make_shape(N, extent_k));
    Tensor gA = local_tile(mA, typename Base::TileShape{}, make_coord(_, _, _), Step<_1, Underscore, _1>{});
    Tensor gB = local_tile(mB, typename Base::TileShape{}, make_coord(_, _, _), Step<Underscore, _1, _1>{});
    return cute::make_tuple(with_batch(gA), with_batch(gB));
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& block, KTileIterator k_tile,
                           int k_tile_count, int thread, uint32_t rank_in_cluster, TensorStorage& shared) {
    using namespace cute;
    auto gA = get<0>(inputs)(_, _, _, _, _0{});
    auto gB = get<1>(inputs)(_, _, _, _, _0{});
    Base::load(params, pipeline, state, cute::make_tuple(gA, gB), block, k_tile, k_tile_count, thread, rank_in_cluster,
               shared);
  }

 private:
  template <class Tensor>
  CUTLASS_DEVICE static auto with_batch(Tensor const& tensor) {
    return cute::make_tensor(tensor.data(),
                             cute::append<5>(tensor.layout(), cute::Layout<cute::_1, cute::_0>{}));
  }
};

template <int TileM, int TileN, int TileK, int ClusterM, int ClusterN, int Stages, bool Cooperative, class ElementD>
struct ConvSm90 {
  using ElementX = int8_t;
  using Accumulator = int32_t;
  using Tile = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, cute::Int<TileK>>;
  using ConvTile = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, cute::Shape<cute::Int<TileK>>>;
  using Cluster = cute::Shape<cute::Int<ClusterM>, cute::Int<ClusterN>, cute::_1>;
  using Schedule = cute::conditional_t<Cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                       cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule = cute::conditional_t<Cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                               cutlass::epilogue::TmaWarpSpecialized>;

  // out = accumulator * (scale_x * scale_w[k]) + bias[k]; scales and bias are read by the kernel.
  static constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
  using ScaleX = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float>;
  using ScaleW = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, bool, int64_t>>;
  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float, float, cute::Stride<cute::_0, cute::_1, int64_t>>;
  using Scale = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, float, float, Round>, ScaleX, ScaleW>;
  using Dequantize = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, ElementD, float, Round>, Scale,
      cutlass::epilogue::fusion::Sm90AccFetch, Bias>;

  static constexpr int AlignmentD = 128 / cutlass::sizeof_bits<ElementD>::value;
  // Tiles are stored by parts, with a barrier each; parts of 128 bytes a row fill whole cache lines.  (CUTLASS's choice for
  // 16-bit outputs is half of that, and convolutions with few input channels wait for their stores.)
  static constexpr int LineD = 128 / int(sizeof(ElementD));
  using EpilogueTile = cute::conditional_t<TileN % LineD == 0,
                                           cute::Shape<cute::Int<Cooperative ? 128 : 64>, cute::Int<TileN % LineD == 0 ? LineD : 16>>,
                                           cutlass::epilogue::collective::EpilogueTileAuto>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, Accumulator, float, void,
      cutlass::layout::RowMajor, AlignmentD, ElementD, cutlass::layout::RowMajor, AlignmentD, EpilogueSchedule,
      Dequantize>::CollectiveOp;

  static constexpr int StageBytes = (TileM + TileN) * TileK + int(sizeof(typename cutlass::PipelineTmaAsync<1>::SharedStorage));
  static constexpr int MostStages =
      (cutlass::gemm::collective::detail::sm90_smem_capacity_bytes - int(sizeof(typename Epilogue::SharedStorage)) - 1024) /
      StageBytes;
  static constexpr int StageCount = Stages > 0 ? Stages : MostStages;

  using AtomLayout = cute::conditional_t<Cooperative, cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>,
                                         cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>>;
  static constexpr auto MajorK = cute::GMMA::Major::K;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<ElementX, ElementX, Accumulator, Tile, MajorK, MajorK>(), AtomLayout{}));
  template <int Rows>
  using SmemLayout = decltype(cute::tile_to_shape(
      cutlass::gemm::collective::detail::ss_smem_selector<MajorK, ElementX, cute::Int<Rows>, cute::Int<TileK>>(),
      cute::Shape<cute::Int<Rows>, cute::Int<TileK>, cute::Int<StageCount>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using CopyX = decltype(cutlass::conv::collective::detail::sm90_cluster_shape_to_im2col_tma_atom(cute::Int<ClusterN>{}));
  using CopyW = decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(cute::Int<ClusterM>{}));

  using Im2col = cutlass::conv::collective::CollectiveConv<
      cutlass::conv::MainloopSm90TmaGmmaWarpSpecializedImplicitGemm<cutlass::conv::Operator::kFprop, StageCount, 2, Cluster>,
      ConvTile, ElementX, ElementX, TiledMma,
      cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<CopyX, SmemLayout<TileM>>,
      cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<CopyW, SmemLayout<TileN>>>;
  using Mainloop = Im2colMainloop<Im2col, Im2colPolicy<StageCount, Cluster, Schedule>, Tile>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                      cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;  // validity.py predicts it, a test compares

  static int32_t check(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    for (int64_t size : {q.images, q.in_h, q.in_w, q.in_c, q.out_h, q.out_w, q.out_c, q.filter_h, q.filter_w, q.stride_h,
                         q.stride_w, q.dilation_h, q.dilation_w, q.images * q.out_h * q.out_w}) {
      if (!fits_int32(size) || size == 0) return QSYNC_INVALID_PROBLEM;
    }
    // The limits of TMA's im2col mode: strides of at most 8; corners and offsets of a byte each.
    if (q.groups != 1 || q.stride_h > 8 || q.stride_w > 8 || !fits_int32(q.pad_h) || !fits_int32(q.pad_w)) {
      return QSYNC_NOT_SUPPORTED;
    }
    bool const pointers = aligned(q.a, 16) && aligned(q.b, 16) && aligned(q.out, 16);
    bool const rows = q.in_c % 16 == 0 && q.lda % 16 == 0 && q.stride_a % 16 == 0 && q.stride_b % 16 == 0 &&
                      q.ldo % AlignmentD == 0 && q.out_c % AlignmentD == 0;
    return pointers && rows ? QSYNC_OK : QSYNC_MISALIGNED;
  }

  static Geometry geometry(QsyncArguments const& q) {
    int const h = int(q.in_h), w = int(q.in_w), c = int(q.in_c), r = int(q.filter_h), s = int(q.filter_w);
    return Geometry(cutlass::conv::Mode::kCrossCorrelation, {int(q.images), h, w, c}, {q.stride_b, q.stride_a, q.lda, 1},
                    {int(q.out_c), r, s, c}, {int64_t(r) * s * c, int64_t(s) * c, int64_t(c), 1}, {int(q.pad_h), int(q.pad_w)},
                    {int(q.pad_h), int(q.pad_w)}, {int(q.stride_h), int(q.stride_w)}, {int(q.dilation_h), int(q.dilation_w)}, 1);
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    auto const conv = geometry(q);
    if (conv.shape_C[1] != q.out_h || conv.shape_C[2] != q.out_w) return QSYNC_INVALID_PROBLEM;
    typename Kernel::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    int const depth = int((q.in_c + TileK - 1) / TileK * q.filter_h * q.filter_w) * TileK;
    arguments.problem_shape = {int(q.images * q.out_h * q.out_w), int(q.out_c), depth, 1};
    arguments.mainloop = {static_cast<int8_t const*>(q.a), static_cast<int8_t const*>(q.b), conv};
    arguments.epilogue.ptr_D = static_cast<ElementD*>(q.out);
    cute::get<0>(arguments.epilogue.dD) = q.ldo;
    arguments.epilogue.thread = {{{{0.0f}, {q.a_scale}, {}}, {q.b_scale, 1.0f, {{}, q.b_scale_count != 1, 0}}, {}},
                                 {},
                                 {static_cast<float const*>(q.bias), 0.0f, {}},
                                 {}};
    arguments.hw_info.device_id = int(q.device);
    arguments.hw_info.sm_count = q.sm_count > 0
                                     ? int(q.sm_count)
                                     : cutlass::KernelHardwareInfo::query_device_multiprocessor_count(int(q.device));
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    arguments.scheduler.max_swizzle_size = int(q.swizzle);
    arguments.scheduler.raster_order = q.raster == QSYNC_RASTER_ALONG_M   ? Raster::AlongM
                                       : q.raster == QSYNC_RASTER_ALONG_N ? Raster::AlongN
                                                                          : Raster::Heuristic;
    if (!Kernel::can_implement(arguments)) return QSYNC_NOT_SUPPORTED;
    static std::atomic<uint64_t> allowed_devices{0};
    if (auto const status = allow_shared_memory<kSharedBytes>(cutlass::device_kernel<Kernel>, q.device, allowed_devices);
        status != QSYNC_OK) {
      return status;
    }
    auto params = Kernel::to_underlying_arguments(arguments, nullptr);
    if (Device::run(params, static_cast<cudaStream_t>(q.stream)) == cutlass::Status::kSuccess) return QSYNC_OK;
    auto const error = cudaGetLastError();
    return error == cudaSuccess ? QSYNC_INTERNAL : cuda_status(error);
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
