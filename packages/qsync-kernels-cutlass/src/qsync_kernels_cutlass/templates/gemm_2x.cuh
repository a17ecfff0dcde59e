// Matrix products for sm_70 to sm_89 (and later chips): warp-level tensor core instructions, dequantization in the epilogue.
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

#include "launch.cuh"

namespace qsync {

template <class Config>
struct Gemm2x {
  using A = typename Config::A;
  using B = typename Config::B;
  using Output = typename Config::Output;
  using Tile = typename Config::Tile;

  template <class Element>
  static constexpr int kElements16Bytes = 128 / cutlass::sizeof_bits<Element>::value;
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

  static int32_t check(QsyncArguments const& q) {
    if (q.struct_bytes != int64_t(sizeof(QsyncArguments))) return QSYNC_WRONG_ABI;
    if (!fits_int32(q.m) || !fits_int32(q.n) || !fits_int32(q.k) || q.m == 0 || q.n == 0 || q.k == 0 || q.batch != 1) {
      return QSYNC_INVALID_PROBLEM;
    }
    // Loads and stores are guarded 16 bytes at a time, so extents along contiguous dimensions are multiples of 16 bytes too.
    bool const a = aligned(q.a, 16) && q.lda % kElements16Bytes<A> == 0 &&
                   (Config::kRowMajorA ? q.k : q.m) % kElements16Bytes<A> == 0;
    bool const b = aligned(q.b, 16) && q.ldb % kElements16Bytes<B> == 0 &&
                   (Config::kColumnMajorB ? q.k : q.n) % kElements16Bytes<B> == 0;
    bool const out = aligned(q.out, 16) && q.ldo % kElements16Bytes<Output> == 0 && q.n % kElements16Bytes<Output> == 0;
    bool const vectors = (q.b_scale_count == 1 || aligned(q.b_scale, 16)) && aligned(q.bias, 16);
    return a && b && out && vectors ? QSYNC_OK : QSYNC_MISALIGNED;
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

    // Blocks walk bands of `swizzle` tiles; CUTLASS fixes the width at compile time, here it is an argument.
    int log_tile = 0;
    while (log_tile < 4 && (int64_t(2) << log_tile) <= q.swizzle && (1 << log_tile) < params.grid_tiled_shape.n()) ++log_tile;
    params.swizzle_log_tile = log_tile;
    int64_t const grid_x = int64_t(params.grid_tiled_shape.m()) << log_tile;
    int64_t const grid_y = (params.grid_tiled_shape.n() + (1 << log_tile) - 1) >> log_tile;
    if (!fits_int32(grid_x) || grid_y > 65535) return QSYNC_INVALID_PROBLEM;

    constexpr int kBytes = int(sizeof(typename Kernel::SharedStorage));
    static std::atomic<uint64_t> allowed_devices{0};
    if (auto const status = allow_shared_memory(cutlass::Kernel2<Kernel>, kBytes, q.device, allowed_devices); status != QSYNC_OK) {
      return status;
    }
    dim3 const grid{unsigned(grid_x), unsigned(grid_y), 1};
    cutlass::Kernel2<Kernel><<<grid, Kernel::kThreadCount, kBytes, static_cast<cudaStream_t>(q.stream)>>>(params);
    return cuda_status(cudaGetLastError());
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
