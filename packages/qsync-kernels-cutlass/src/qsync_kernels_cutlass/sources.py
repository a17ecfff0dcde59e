"""The CUDA source of kernels: a few lines that name a template of ``templates/`` with its types, layouts and tiles.

:func:`gemm_source` and :func:`conv_source` write the products, :func:`convert_source` and its neighbours the kernels that bring
operands into shape, :func:`request_sources` lists all that a product may load.  Nothing here needs torch or a compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import Template

import attrs

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.configs import candidates, validity
from qsync_kernels_cutlass.configs.config import (
    AddressIterator,
    Config,
    ConvConfig,
    Family,
    GemmConfig,
    Schedule,
    Scheduler,
    shape_text,
)
from qsync_kernels_cutlass.configs.problem import BYTES, ConvProblem, GemmProblem, problem_of
from qsync_kernels_cutlass.configs.validity import ALIGNMENT_BYTES

_NAME = re.compile(r"[a-z][a-z0-9_]{0,80}")


def _check_name(source: object, attribute: object, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError(f"a kernel's name is lower-case letters, digits and '_', at most 81, got {value!r}")


@attrs.frozen
class KernelSource:
    """Source text that exports ``qsync_<name>`` and ``qsync_<name>_workspace`` (see ``templates/abi.h``).

    Attributes:
        name: lower-case letters, digits and underscores.
        text: CUDA C++; ``#include "x.cuh"`` finds the package's templates.
        arch: architecture to compile for (``sm_90a``).
    """

    name: str = attrs.field(validator=_check_name)
    text: str
    arch: str

    @property
    def symbol(self) -> str:
        """The exported function that runs the kernel."""
        return f"qsync_{self.name}"

    @property
    def workspace_symbol(self) -> str:
        """The exported function that returns the bytes of workspace."""
        return f"qsync_{self.name}_workspace"


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

_GEMM_TMA = Template("""\
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

_GEMM_MMA = Template("""\
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

_CONV_EXPORTS = Template("""\
QSYNC_EXPORT int32_t qsync_$name(const QsyncArguments* arguments) { return $run(*arguments); }
QSYNC_EXPORT int64_t qsync_${name}_workspace(const QsyncArguments* arguments) { $workspace }
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
    name = _gemm_name(config, problem)
    if config.path is Family.SIMT:
        types = ", ".join(_CUDA_TYPES[name] for name in (problem.a_format, problem.b_format, problem.out_format))
        return _plain(name, "gemm_simt.cuh", f"GemmSimt<{types}, {_numbers(config.tile)}>", arch)
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
    if config.path is Family.TMA:
        cooperative = config.schedule is Schedule.COOPERATIVE
        text = _GEMM_TMA.substitute(
            shared,
            tile=_integers(config.tile),
            cluster=_integers(config.cluster),
            schedule="KernelTmaWarpSpecializedCooperative" if cooperative else "KernelTmaWarpSpecializedPingpong",
            epilogue_schedule="TmaWarpSpecializedCooperative" if cooperative else "TmaWarpSpecialized",
            scheduler="StreamKScheduler" if config.scheduler is Scheduler.STREAM_K else "PersistentScheduler",
            stages=f"StageCount<{config.stages}>" if config.stages else "StageCountAutoCarveout<kEpilogueBytes>",
        )
        return KernelSource(name, text, arch.name)
    float8 = problem.a_format.startswith("float8")
    # cp.async and the instructions of sm_80 are what every later chip runs; float8 came with sm_89.
    tag = "Sm70" if arch.capability < (7, 5) else "Sm75" if arch.capability < (8, 0) else "Sm89" if float8 else "Sm80"
    text = _GEMM_MMA.substitute(
        shared,
        header="gemm_volta.cuh" if tag == "Sm70" else "gemm_2x.cuh",
        kernel="GemmVolta" if tag == "Sm70" else "Gemm2x",
        row_major_a=str(rows_a).lower(),
        column_major_b=str(rows_b).lower(),
        arch=tag,
        operator="OpMultiplyAddSaturate" if problem.a_format == "int8" else "OpMultiplyAdd",
        tile=_numbers(config.tile),
        warp=_numbers(config.warp),
        instruction=_numbers(config.instruction),
        stages=config.stages,
    )
    return KernelSource(name, text, arch.name)


def _gemm_name(config: GemmConfig, problem: GemmProblem) -> str:
    """Readable in a profiler and in messages; what distinguishes libraries is the digest of the whole source."""
    formats = "_".join(_SHORT[name] for name in (problem.a_format, problem.b_format, problem.out_format))
    layout = "".join("t" if rows else "n" for rows in rows_contiguous(problem))
    parts = ["gemm", str(config.path), formats, layout, shape_text(config.tile)]
    if config.path is Family.TMA:
        parts += ["c" + shape_text(config.cluster), str(config.schedule)]
        parts += ["streamk"] if config.scheduler is Scheduler.STREAM_K else []
    elif config.path is Family.MMA:
        parts.append("w" + shape_text(config.warp))
    return "_".join([*parts, f"s{config.stages}"] if config.stages else parts)


def transpose_source(arch: Architecture) -> KernelSource:
    """The kernel that transposes a matrix of 1-byte elements (``templates/transpose_bytes.cuh``)."""
    return _plain("transpose_bytes", "transpose_bytes.cuh", "TransposeBytes", arch)


def convert_source(arch: Architecture, source_format: str, target_format: str) -> KernelSource:
    """The kernel that converts rows to another format, or pads them (``templates/convert_rows.cuh``)."""
    name = f"convert_{_SHORT[source_format]}_{_SHORT[target_format]}"
    kernel = f"ConvertRows<{_CUDA_TYPES[source_format]}, {_CUDA_TYPES[target_format]}>"
    return _plain(name, "convert_rows.cuh", kernel, arch)


def _plain(name: str, header: str, kernel: str, arch: Architecture) -> KernelSource:
    return KernelSource(name, _PLAIN.substitute(header=header, kernel=kernel, name=name), arch.name)


CONV_OUT_ALIGNMENT = {"float32": 4, "float16": 8, "bfloat16": 8}
"""Output channels of convolutions come in multiples of 16 bytes, which are so many elements of each format that they write."""


def conv_source(config: ConvConfig, arch: Architecture, out_format: str) -> KernelSource:
    """The source of an int8 convolution with dequantization into ``out_format``.

    Args:
        config: which template and its tiles; run-time knobs do not matter.
        arch: chip to compile for.
        out_format: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        BackendError: when there is no template for the configuration's path or the output's format.
    """
    if out_format not in CONV_OUT_ALIGNMENT:
        raise BackendError(f"int8 convolutions write {', '.join(CONV_OUT_ALIGNMENT)}, not {out_format}")
    out, tile = _CUTLASS_TYPES[out_format], shape_text(config.tile)
    if config.path is Family.TMA:
        cooperative = config.schedule is Schedule.COOPERATIVE
        schedule = "coop" if cooperative else "ping"
        name = f"conv2d_tma_{tile}_{shape_text(config.cluster)}_{config.stages}_{schedule}_{_SHORT[out_format]}"
        header = "conv_sm90.cuh"
        sizes = _numbers((*config.tile, *config.cluster, config.stages))
        kernel = f"ConvSm90<{sizes}, {'true' if cooperative else 'false'}, {out}>"
    elif config.path is Family.MMA:
        name = f"conv2d_mma_{tile}_{shape_text(config.warp)}_{config.stages}_{config.iterator}_{_SHORT[out_format]}"
        header = "conv_2x.cuh"
        shapes = ", ".join(
            f"cutlass::gemm::GemmShape<{_numbers(shape)}>" for shape in (config.tile, config.warp, config.instruction)
        )
        # Chips after Ampere run its instructions; only Turing has others.
        tag = "cutlass::arch::Sm75" if arch.name == "sm_75" else "cutlass::arch::Sm80"
        algorithm = "kOptimized" if config.iterator is AddressIterator.OPTIMIZED else "kAnalytic"
        kernel = f"Conv2x<{tag}, {shapes}, {config.stages}, cutlass::conv::IteratorAlgorithm::{algorithm}, {out}>"
    else:
        raise BackendError("there is no convolution without tensor cores among the CUTLASS templates; choose the backend aten")
    exports = _CONV_EXPORTS.substitute(name=name, run="Kernel::run", workspace="return Kernel::workspace(*arguments);")
    return KernelSource(name, f'#include "{header}"\nusing Kernel = qsync::{kernel};\n{exports}', arch.name)


def fold_source(arch: Architecture) -> KernelSource:
    """The kernel that folds blocks of pixels into single pixels (``templates/conv_operands.cuh``)."""
    return _conv_operands("conv2d_fold_pixels", "run_fold_pixels", arch)


def turn_source(arch: Architecture) -> KernelSource:
    """The kernel that turns filters for the gradient of the input (``templates/conv_operands.cuh``)."""
    return _conv_operands("conv2d_turn_filters", "run_turn_filters", arch)


def _conv_operands(name: str, run: str, arch: Architecture) -> KernelSource:
    exports = _CONV_EXPORTS.substitute(name=name, run=f"qsync::{run}", workspace="(void)arguments; return 0;")
    return KernelSource(name, f'#include "conv_operands.cuh"\n{exports}', arch.name)


def request_sources(request: KernelRequest, config: Config, arch: Architecture) -> list[KernelSource]:
    """The kernels that a request may load: the product's first, then those that bring operands of any strides into shape.

    Args:
        request: one that ``support.reasons`` accepts.
        config: valid for it.
        arch: chip to compile for.
    """
    problem = problem_of(request)
    if isinstance(problem, ConvProblem) and isinstance(config, ConvConfig):
        shaping = turn_source(arch) if request.op == Op.CONV2D_GRAD_INPUT else fold_source(arch)
        return [conv_source(config, arch, problem.out_format), shaping]
    if isinstance(problem, GemmProblem) and isinstance(config, GemmConfig):
        products = [(config, problem), *other_results(request, config, arch)]
        return [*(gemm_source(one, arch, of) for one, of in products), *_copies(request, problem, arch)]
    raise TypeError(f"a {type(config).__name__} does not run a {type(problem).__name__}")


def other_results(request: KernelRequest, config: GemmConfig, arch: Architecture) -> list[tuple[GemmConfig, GemmProblem]]:
    """The 8-bit gradient of a linear's input in float32: it has the format of the activation, which no request says.

    Behind a LayerNorm that is float32, whatever the operators' outputs are.
    """
    problem = problem_of(request)
    if request.op != Op.LINEAR_GRAD_INPUT or BYTES[problem.a_format] > 1 or problem.out_format == "float32":
        return []
    assert isinstance(problem, GemmProblem)
    other = attrs.evolve(problem, out_format="float32")
    return [(config_for(other, config, arch), other)]


def config_for(problem: GemmProblem, config: GemmConfig, arch: Architecture) -> GemmConfig:
    """The configuration if it fits a problem that differs in the format of its result, else the best guess for that."""
    chosen = candidates.ranked(problem, arch)[0] if validity.reasons(config, arch, problem) else config
    assert isinstance(chosen, GemmConfig)
    return chosen


def needed_sources(request: KernelRequest, config: Config, arch: Architecture) -> list[KernelSource]:
    """List the sources of :func:`request_sources` that dense and aligned operands of the request's sizes need."""
    problem = problem_of(request)
    every = request_sources(request, config, arch)
    if isinstance(problem, ConvProblem):
        unused = [] if problem.folds else [fold_source(arch)]
    elif not _rows_are_whole(request, problem):
        return every
    else:
        unused = [convert_source(arch, name, name) for name in (problem.a_format, problem.b_format)]
        if request.op not in (Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_GRAD_INPUT):
            unused.append(transpose_source(arch))
    return [source for source in every if source not in unused]


def _rows_are_whole(request: KernelRequest, problem: GemmProblem) -> bool:
    """Whether features come in multiples of 16 bytes; the number of tokens or pixels does not matter."""
    first, second = request.shapes
    features = (first[1], second[1]) if request.op == Op.LINEAR_GRAD_WEIGHT else second[:2]
    smallest = min(BYTES[problem.a_format], BYTES[problem.b_format])
    return all(count * smallest % ALIGNMENT_BYTES == 0 for count in features)


def _copies(request: KernelRequest, problem: GemmProblem, arch: Architecture) -> list[KernelSource]:
    """Padding of each operand's rows, transposes of 8-bit operands, conversion of 8-bit copies that a 16-bit product reads."""
    formats = {problem.a_format, problem.b_format}
    made = [convert_source(arch, name, name) for name in sorted(formats)]
    if any(BYTES[name] == 1 for name in formats):
        made.append(transpose_source(arch))
    saved = str(request.variant.saved)
    if request.op != Op.LINEAR_OUTPUT and BYTES[saved] == 1 and saved not in formats:
        made.append(convert_source(arch, saved, problem.a_format))
    return made


def _integers(values: Iterable[int]) -> str:
    return ", ".join(f"cute::Int<{value}>" for value in values)


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
