// Matrix products for sm_75 to sm_89 (and later chips): warp-level tensor core instructions, dequantization in the epilogue.
//
// The product, its scales and its bias are those of gemm_sm90.cuh.  Scales come as pointers to one value or to a vector; the one
// that is not used is null and counts as 1, so one kernel takes both.  A Config has
//     A, B, Accumulator, Output           element types
//     LayoutA, LayoutB                    of the operands in memory
//     Arch, Operator                      cutlass::arch tags
//     Tile, Warp, Instruction             GemmShape
//     kStages                             shared memory buffers
#pragma once

#include "cutlass/cutlass.h"
// The visitors' header relies on what these two include.
#include "cutlass/gemm/device/gemm_universal_base.h"
#include "cutlass/numeric_conversion.h"
//
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

#include "launch_2x.cuh"

namespace qsync {

template <class Config>
struct Gemm2x {
  static_assert(Config::Arch::kMinComputeCapability >= 75, "the visitors lie out outputs otherwise than Volta's epilogue: gemm_volta.cuh");

  using A = typename Config::A;
  using B = typename Config::B;
  using Output = typename Config::Output;
  using Tile = typename Config::Tile;

  static constexpr int kEpilogueStages = 1;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, typename Config::Warp, Output,
                                                                          kElements16Bytes<Output>, kEpilogueStages>;
  template <template <class> class Function, class Element>
  using Compute = cutlass::epilogue::threadblock::VisitorCompute<Function, Element, float, kRound>;
  template <class... Nodes>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Nodes...>;
  using Accumulated = cutlass::epilogue::threadblock::VisitorAccFetch;
  using ScaleOfBoth = cutlass::epilogue::threadblock::VisitorScalarBroadcast<float, cute::Stride<cute::_0, cute::_0, cute::_0>, 2>;
  using ScaleA =
      cutlass::epilogue::threadblock::VisitorColBroadcast<ThreadMap, float, cute::Stride<cute::_1, cute::_0, int32_t>>;
  using VectorN =
      cutlass::epilogue::threadblock::VisitorRowBroadcast<ThreadMap, float, cute::Stride<cute::_0, cute::_1, int32_t>>;
  using ScaledByB = Tree<Compute<cutlass::multiplies, float>, VectorN, Accumulated>;
  using ScaledByVectors = Tree<Compute<cutlass::multiplies, float>, ScaleA, ScaledByB>;
  using Dequantized = Tree<Compute<cutlass::homogeneous_multiply_add, Output>, ScaleOfBoth, ScaledByVectors, VectorN>;
  using Store = cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Output, kRound,
                                                                cute::Stride<int64_t, cute::_1, int64_t>>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      A, typename Config::LayoutA, cutlass::ComplexTransform::kNone, kElements16Bytes<A>, B, typename Config::LayoutB,
      cutlass::ComplexTransform::kNone, kElements16Bytes<B>, Output, cutlass::layout::RowMajor, kElements16Bytes<Output>,
      typename Config::Accumulator, float, cutlass::arch::OpClassTensorOp, typename Config::Arch, Tile,
      typename Config::Warp, typename Config::Instruction, Tree<Store, Dequantized>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, Config::kStages, typename Config::Operator,
      kEpilogueStages>::GemmKernel;

  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));  // validity.py predicts it, a test compares

  static int32_t check(QsyncArguments const& q) {
    if (auto const status = check_2x<Config>(q); status != QSYNC_OK) return status;
    bool const vectors = (q.b_scale_count == 1 || aligned(q.b_scale, 16)) && aligned(q.bias, 16);
    return vectors ? QSYNC_OK : QSYNC_MISALIGNED;
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();

    float const* const vector_a = q.a_scale_count == 1 ? nullptr : q.a_scale;
    float const* const vector_b = q.b_scale_count == 1 ? nullptr : q.b_scale;
    float const* const scalar_a = q.a_scale_count == 1 ? q.a_scale : nullptr;
    float const* const scalar_b = q.b_scale_count == 1 ? q.b_scale : nullptr;
    typename Kernel::FusionCallbacks::Arguments epilogue{
        {{{1.0f, 1.0f}, {scalar_a, scalar_b}, {}},
         {{vector_a, 1.0f, {}}, {{vector_b, 1.0f, {}}, {}, {}}, {}},
         {static_cast<float const*>(q.bias), 0.0f, {}},
         {}},
        {static_cast<Output*>(q.out), {q.ldo, cute::_1{}, int64_t(0)}}};
    typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, {int(q.m), int(q.n), int(q.k)}, 1, epilogue,
                                         q.a, q.b, nullptr, nullptr, 0, 0, 0, 0, q.lda, q.ldb, 0, 0);
    typename Kernel::Params params(arguments, 1, 1);

    return launch_2x<Kernel>(params, q);
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
