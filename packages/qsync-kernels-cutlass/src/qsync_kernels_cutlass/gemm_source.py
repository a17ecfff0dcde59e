"""The CUDA source of a matrix product: which template, with which types, layouts and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.config import Family, GemmConfig, Schedule, Scheduler
from qsync_kernels_cutlass.kernel_source import KernelSource
from qsync_kernels_cutlass.problem import BYTES, GemmProblem

_CUTLASS_TYPES = {
    "int8": "int8_t",
    "float8_e4m3fn": "cutlass::float_e4m3_t",
    "float8_e5m2": "cutlass::float_e5m2_t",
    "float16": "cutlass::half_t",
    "bfloat16": "cutlass::bfloat16_t",
    "float32": "float",
}
_CUDA_TYPES = {
    "int8": "int8_t",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
}
_SHORT = {"int8": "s8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16", "float32": "f32"}

_TMA = Template("""\
#include "gemm_sm90.cuh"

namespace {
struct Config {
  using A = $a;
  using B = $b;
  using Accumulator = $accumulator;
  using Output = $out;
  using LayoutA = cutlass::layout::$layout_a;
  using LayoutB = cutlass::layout::$layout_b;
  using Tile = cute::Shape<$tile>;
  using Cluster = cute::Shape<$cluster, cute::_1>;
  using Schedule = cutlass::gemm::$schedule;
  using EpilogueSchedule = cutlass::epilogue::$epilogue_schedule;
  using Scheduler = cutlass::gemm::$scheduler;
  template <int kEpilogueBytes>
  using Stages = cutlass::gemm::collective::$stages;
};
}  // namespace

QSYNC_EXPORT int32_t qsync_$name(QsyncArguments const* q) { return qsync::GemmSm90<Config>::run(*q); }
QSYNC_EXPORT int64_t qsync_${name}_workspace(QsyncArguments const* q) { return qsync::GemmSm90<Config>::workspace(*q); }
""")

_MMA = Template("""\
#include "$header"

namespace {
struct Config {
  using A = $a;
  using B = $b;
  using Accumulator = $accumulator;
  using Output = $out;
  using LayoutA = cutlass::layout::$layout_a;
  using LayoutB = cutlass::layout::$layout_b;
  static constexpr bool kRowMajorA = $row_major_a, kColumnMajorB = $column_major_b;
  using Arch = cutlass::arch::$arch;
  using Operator = cutlass::arch::$operator;
  using Tile = cutlass::gemm::GemmShape<$tile>;
  using Warp = cutlass::gemm::GemmShape<$warp>;
  using Instruction = cutlass::gemm::GemmShape<$instruction>;
  static constexpr int kStages = $stages;
};
}  // namespace

QSYNC_EXPORT int32_t qsync_$name(QsyncArguments const* q) { return qsync::$kernel<Config>::run(*q); }
QSYNC_EXPORT int64_t qsync_${name}_workspace(QsyncArguments const* q) { return qsync::$kernel<Config>::workspace(*q); }
""")

_PLAIN = Template("""\
#include "$header"

using Kernel = qsync::$kernel;
QSYNC_EXPORT int32_t qsync_$name(QsyncArguments const* q) { return Kernel::run(*q); }
QSYNC_EXPORT int64_t qsync_${name}_workspace(QsyncArguments const* q) { return Kernel::workspace(*q); }
""")


def rows_contiguous(problem: GemmProblem) -> tuple[bool, bool]:
    """Whether the rows of ``a`` (m, k) and of ``b`` (n, k) are contiguous in memory, so that k is the inner dimension.

    8-bit tensor core instructions read no other layout.  16-bit ones read both, and the gradients' operands lie as the forward
    product left them: grad_input sums over the weight's rows, grad_weight over the rows of both operands.
    """
    if BYTES[problem.a_format] == 1 or problem.op == Op.LINEAR_OUTPUT or problem.op.startswith("conv2d"):
        return True, True
    return problem.op != Op.LINEAR_GRAD_WEIGHT, False


def gemm_source(config: GemmConfig, arch: Architecture, problem: GemmProblem) -> KernelSource:
    """The source of one product's kernel.  Run-time knobs of the configuration do not enter it.

    Args:
        config: valid for the chip and the problem (see ``validity``).
        arch: chip to compile for.
        problem: formats and operator; its sizes do not enter the source.
    """
    name = _name(config, problem)
    if config.path is Family.SIMT:
        types = ", ".join(_CUDA_TYPES[name] for name in (problem.a_format, problem.b_format, problem.out_format))
        kernel = f"GemmSimt<{types}, {_numbers(config.tile)}>"
        return KernelSource(name, _PLAIN.substitute(header="gemm_simt.cuh", kernel=kernel, name=name), arch.name)
    rows_a, rows_b = rows_contiguous(problem)
    shared = {
        "name": name,
        "a": _CUTLASS_TYPES[problem.a_format],
        "b": _CUTLASS_TYPES[problem.b_format],
        "out": _CUTLASS_TYPES[problem.out_format],
        "accumulator": "int32_t" if problem.a_format == "int8" else "float",
        "layout_a": "RowMajor" if rows_a else "ColumnMajor",
        "layout_b": "ColumnMajor" if rows_b else "RowMajor",
    }
    text = _tma_text(config, shared) if config.path is Family.TMA else _mma_text(config, arch, problem, shared, rows_a, rows_b)
    return KernelSource(name, text, arch.name)


def transpose_source(arch: Architecture) -> KernelSource:
    """The kernel that transposes a matrix of 1-byte elements (``templates/transpose_bytes.cuh``)."""
    name = "transpose_bytes"
    return KernelSource(name, _PLAIN.substitute(header="transpose_bytes.cuh", kernel="TransposeBytes", name=name), arch.name)


def convert_source(arch: Architecture, source_format: str, target_format: str) -> KernelSource:
    """The kernel that converts rows to another format, or pads them (``templates/convert_rows.cuh``)."""
    name = f"convert_{_SHORT[source_format]}_{_SHORT[target_format]}"
    kernel = f"ConvertRows<{_CUDA_TYPES[source_format]}, {_CUDA_TYPES[target_format]}>"
    return KernelSource(name, _PLAIN.substitute(header="convert_rows.cuh", kernel=kernel, name=name), arch.name)


def _tma_text(config: GemmConfig, shared: dict[str, str]) -> str:
    cooperative = config.schedule is Schedule.COOPERATIVE
    return _TMA.substitute(
        shared,
        tile=_integers(config.tile),
        cluster=_integers(config.cluster),
        schedule="KernelTmaWarpSpecializedCooperative" if cooperative else "KernelTmaWarpSpecializedPingpong",
        epilogue_schedule="TmaWarpSpecializedCooperative" if cooperative else "TmaWarpSpecialized",
        scheduler="StreamKScheduler" if config.scheduler is Scheduler.STREAM_K else "PersistentScheduler",
        stages=f"StageCount<{config.stages}>" if config.stages else "StageCountAutoCarveout<kEpilogueBytes>",
    )


def _mma_text(
    config: GemmConfig, arch: Architecture, problem: GemmProblem, shared: dict[str, str], rows_a: bool, rows_b: bool
) -> str:
    float8 = problem.a_format.startswith("float8")
    # cp.async and the instructions of sm_80 are what every later chip runs; float8 came with sm_89.
    tag = "Sm70" if arch.capability < (7, 5) else "Sm75" if arch.capability < (8, 0) else "Sm89" if float8 else "Sm80"
    volta = tag == "Sm70"
    return _MMA.substitute(
        shared,
        header="gemm_volta.cuh" if volta else "gemm_2x.cuh",
        kernel="GemmVolta" if volta else "Gemm2x",
        row_major_a=str(rows_a).lower(),
        column_major_b=str(rows_b).lower(),
        arch=tag,
        operator="OpMultiplyAddSaturate" if problem.a_format == "int8" else "OpMultiplyAdd",
        tile=_numbers(config.tile),
        warp=_numbers(config.warp),
        instruction=_numbers(config.instruction),
        stages=config.stages,
    )


def _name(config: GemmConfig, problem: GemmProblem) -> str:
    """Readable in a profiler and in messages; what distinguishes libraries is the digest of the whole source."""
    formats = "_".join(_SHORT[name] for name in (problem.a_format, problem.b_format, problem.out_format))
    layout = "".join("t" if rows else "n" for rows in rows_contiguous(problem))
    parts = ["gemm", str(config.path), formats, layout, "x".join(map(str, config.tile))]
    if config.path is Family.TMA:
        parts += ["c" + "x".join(map(str, config.cluster)), str(config.schedule)]
        parts += ["streamk"] if config.scheduler is Scheduler.STREAM_K else []
    elif config.path is Family.MMA:
        parts.append("w" + "x".join(map(str, config.warp)))
    return "_".join([*parts, f"s{config.stages}"] if config.stages else parts)


def _integers(values: Sequence[int]) -> str:
    return ", ".join(f"cute::Int<{value}>" for value in values)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
