// int8 NHWC convolution for sm_75 to sm_89 (and later chips): implicit GEMM on warp-level tensor core instructions.
//
// The convolution, its scales, its bias and the strides it reads are those of conv_sm90.cuh.  The main loop is CUTLASS's; its own
// kernels add a source tensor and no per-channel scale, so the kernel below gives the main loop the epilogue of gemm_2x.cuh.
#pragma once

#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

#include "launch_2x.cuh"

namespace qsync {

template <class Arch, class Tile, class Warp, class Instruction, int kStages, cutlass::conv::IteratorAlgorithm kAlgorithm, class Output>
struct Conv2x {
  static constexpr int kElements16Bytes = 128 / cutlass::sizeof_bits<Output>::value;
  static constexpr int kEpilogueStages = 1;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using Layout = cutlass::layout::TensorNHWC;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>;

  using Base = typename cutlass::conv::kernel::DefaultConv2dFprop<
      int8_t, Layout, int8_t, Layout, Output, Layout, int32_t, cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction,
      cutlass::epilogue::thread::LinearCombination<Output, kElements16Bytes, int32_t, float>, Swizzle, kStages,
      cutlass::arch::OpMultiplyAddSaturate, kAlgorithm, cutlass::conv::StrideSupport::kStrided, 16, 16>::Kernel;
  using Mma = typename Base::Mma;

  using ThreadMap =
      cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Output, kElements16Bytes, kEpilogueStages>;
  template <template <class> class Function, class Element>
  using Compute = cutlass::epilogue::threadblock::VisitorCompute<Function, Element, float, kRound>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;
  using Accumulated = cutlass::epilogue::threadblock::VisitorAccFetch;
  using ScaleOfBoth = cutlass::epilogue::threadblock::VisitorScalarBroadcast<float, cute::Stride<cute::_0, cute::_0, cute::_0>, 2>;
  using PerChannel =
      cutlass::epilogue::threadblock::VisitorRowBroadcast<ThreadMap, float, cute::Stride<cute::_0, cute::_1, int32_t>>;
  using Scaled = Tree<Compute<cutlass::multiplies, float>, PerChannel, Accumulated>;
  using Dequantized = Tree<Compute<cutlass::homogeneous_multiply_add, Output>, ScaleOfBoth, Scaled, PerChannel>;
  using Store =
      cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Output, kRound, cute::Stride<int64_t, cute::_1, int64_t>>;
  using Callbacks = Tree<Store, Dequantized>;
  using Epilogue =
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Base::Epilogue, Callbacks, kEpilogueStages>;

  struct Kernel {
    struct Params {
      cutlass::conv::Conv2dProblemSize problem;
      cute::Shape<int32_t, int32_t, int32_t> extent;  // output pixels, output channels, 1
      cutlass::gemm::GemmCoord tiles;
      int log_swizzle;
      int k_iterations, k_iterations_per_channel;
      typename Mma::IteratorA::Params iterator_x;
      typename Mma::IteratorB::Params iterator_w;
      int8_t const* x;
      int8_t const* w;
      typename Callbacks::Params callbacks;
    };

    union SharedStorage {
      typename Mma::SharedStorage main_loop;
      typename Epilogue::SharedStorage epilogue;
    };

    static constexpr int kThreadCount = 32 * Mma::WarpCount::kCount;

    CUTLASS_DEVICE void operator()(Params const& params, SharedStorage& shared) {
      Swizzle swizzle;
      auto tile = swizzle.get_tile_offset(params.log_swizzle);
      if (params.tiles.m() <= tile.m() || params.tiles.n() <= tile.n()) return;
      int const thread = threadIdx.x, lane = threadIdx.x % 32, warp = cutlass::canonical_warp_idx_sync();
      typename Mma::IteratorA x(params.iterator_x, params.problem, const_cast<int8_t*>(params.x), thread,
                                cutlass::MatrixCoord(tile.m() * Mma::Shape::kM, 0));
      typename Mma::IteratorB w(params.iterator_w, params.problem, const_cast<int8_t*>(params.w), thread,
                                cutlass::MatrixCoord(0, tile.n() * Mma::Shape::kN));
      Mma mma(shared.main_loop, thread, warp, lane);
      typename Mma::FragmentC accumulators;
      accumulators.clear();
      mma(params.k_iterations, accumulators, x, w, accumulators, params.k_iterations_per_channel);
      Epilogue epilogue(params.callbacks, shared.epilogue, thread, warp, lane);
      epilogue(accumulators, swizzle.get_tile_offset(params.log_swizzle), params.extent, thread);
    }
  };

  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));  // validity.py predicts it, a test compares

  static int32_t check(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    for (int64_t size : {q.images, q.in_h, q.in_w, q.in_c, q.out_h, q.out_w, q.out_c, q.filter_h, q.filter_w, q.stride_h,
                         q.stride_w, q.dilation_h, q.dilation_w, q.images * q.out_h * q.out_w, q.images * q.stride_b}) {
      if (!fits_int32(size) || size == 0) return QSYNC_INVALID_PROBLEM;
    }
    if (q.groups != 1 || !fits_int32(q.pad_h) || !fits_int32(q.pad_w)) return QSYNC_NOT_SUPPORTED;
    bool const pointers = aligned(q.a, 16) && aligned(q.b, 16) && aligned(q.out, 16) && aligned(q.bias, 16) &&
                          (q.b_scale_count == 1 || aligned(q.b_scale, 16));
    bool const rows = q.in_c % 16 == 0 && q.lda % 16 == 0 && q.stride_a % 16 == 0 && q.stride_b % 16 == 0 &&
                      q.ldo % kElements16Bytes == 0 && q.out_c % kElements16Bytes == 0;
    return pointers && rows ? QSYNC_OK : QSYNC_MISALIGNED;
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    int const c = int(q.in_c), r = int(q.filter_h), s = int(q.filter_w);
    cutlass::conv::Conv2dProblemSize const problem(
        int(q.images), int(q.in_h), int(q.in_w), c, int(q.out_c), r, s, int(q.out_h), int(q.out_w), int(q.pad_h), int(q.pad_w),
        int(q.stride_h), int(q.stride_w), int(q.dilation_h), int(q.dilation_w), cutlass::conv::Mode::kCrossCorrelation);
    if (Mma::IteratorA::can_implement(problem) != cutlass::Status::kSuccess ||
        Mma::IteratorB::can_implement(problem) != cutlass::Status::kSuccess) {
      return QSYNC_NOT_SUPPORTED;
    }
    int const m = int(q.images * q.out_h * q.out_w), n = int(q.out_c);
    Layout const layout_x({int(q.lda), int(q.stride_a), int(q.stride_b)});
    Layout const layout_w({c, s * c, r * s * c});

    typename Kernel::Params params;
    params.problem = problem;
    params.extent = {m, n, 1};
    params.k_iterations = r * s * ((c + Tile::kK - 1) / Tile::kK);
    params.k_iterations_per_channel = r * s;
    params.iterator_x = Mma::IteratorA::getParams(problem, layout_x);
    params.iterator_w = typename Mma::IteratorB::Params(problem, layout_w);
    params.x = static_cast<int8_t const*>(q.a);
    params.w = static_cast<int8_t const*>(q.b);
    bool const per_channel = q.b_scale_count != 1;
    typename Callbacks::Arguments const callbacks{
        {{{1.0f, 1.0f}, {q.a_scale, per_channel ? nullptr : q.b_scale}, {}},
         {{per_channel ? q.b_scale : nullptr, 1.0f, {}}, {}, {}},
         {static_cast<float const*>(q.bias), 0.0f, {}},
         {}},
        {static_cast<Output*>(q.out), {q.ldo, cute::_1{}, int64_t(0)}}};
    params.callbacks = Callbacks::to_underlying_arguments(params.extent, callbacks, nullptr);

    params.tiles = {(m + Tile::kM - 1) / Tile::kM, (n + Tile::kN - 1) / Tile::kN, 1};
    return launch_in_bands<Kernel>(cutlass::Kernel<Kernel>, params, params.tiles, params.log_swizzle, q);
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
