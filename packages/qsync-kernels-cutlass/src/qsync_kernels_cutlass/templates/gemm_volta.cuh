// 16-bit matrix products for sm_70, whose tensor core instructions lay out their results in a way of their own.
//
//     out[m, n] = a_scale * sum over k of a[m, k] * b[n, k]
//
// which is what gradients need: one scale, read from device memory (null: 1), and no bias.  Sums are in float32.  The Config is that
// of gemm_2x.cuh.
#pragma once

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

#include "launch_2x.cuh"

namespace qsync {

template <class Config>
struct GemmVolta {
  using A = typename Config::A;
  using B = typename Config::B;
  using Output = typename Config::Output;
  static constexpr auto kPlain = cutlass::ComplexTransform::kNone;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      A, typename Config::LayoutA, kPlain, kElements16Bytes<A>, B, typename Config::LayoutB, kPlain, kElements16Bytes<B>, Output,
      cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, typename Config::Arch, typename Config::Tile,
      typename Config::Warp, typename Config::Instruction,
      cutlass::epilogue::thread::LinearCombination<Output, kElements16Bytes<Output>, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, Config::kStages, typename Config::Operator>::GemmKernel;

  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));  // validity.py predicts it, a test compares

  static int32_t check(QsyncArguments const& q) {
    if (auto const status = check_2x<Config>(q); status != QSYNC_OK) return status;
    bool const one_scale = q.a_scale_count == 1 && q.b_scale == nullptr && q.bias == nullptr;
    return one_scale ? QSYNC_OK : QSYNC_NOT_SUPPORTED;
  }

  static int32_t run(QsyncArguments const& q) {
    if (auto const status = check(q); status != QSYNC_OK) return status;
    DeviceGuard guard(q.device);
    if (guard.status() != QSYNC_OK) return guard.status();
    typename Kernel::Epilogue::OutputOp::Params epilogue(1.0f, 0.0f);
    epilogue.alpha_ptr = q.a_scale;
    typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, {int(q.m), int(q.n), int(q.k)}, 1, epilogue,
                                         q.a, q.b, nullptr, q.out, 0, 0, 0, 0, q.lda, q.ldb, q.ldo, q.ldo);
    typename Kernel::Params params(arguments, 1, 1);
    return launch_2x<Kernel>(params, q);
  }

  static int64_t workspace(QsyncArguments const& q) {
    auto const status = check(q);
    return status == QSYNC_OK ? 0 : -int64_t(status);
  }
};

}  // namespace qsync
