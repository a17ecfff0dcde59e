"""Every kernel that a request with a configuration may load, without torch: what compiling ahead compiles."""

from __future__ import annotations

from qsync_core.backend import KernelRequest, Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.config import ConvConfig, GemmConfig
from qsync_kernels_cutlass.conv_source import conv_source, fold_source, turn_source
from qsync_kernels_cutlass.gemm_source import convert_source, gemm_source, transpose_source
from qsync_kernels_cutlass.kernel_source import KernelSource
from qsync_kernels_cutlass.problem import BYTES, ConvProblem, GemmProblem, problem_of
from qsync_kernels_cutlass.validity import Config


def request_sources(request: KernelRequest, config: Config, arch: Architecture) -> list[KernelSource]:
    """The product's kernel first, then those that bring operands into shape.

    Args:
        request: one that ``refusal.reasons`` accepts.
        config: valid for it.
        arch: chip to compile for.
    """
    problem = problem_of(request)
    if isinstance(problem, ConvProblem) and isinstance(config, ConvConfig):
        shaping = [turn_source(arch.name)] if request.op == Op.CONV2D_GRAD_INPUT else [fold_source(arch.name)]
        return [conv_source(config, arch.name, problem.out_format), *shaping]
    if isinstance(problem, GemmProblem) and isinstance(config, GemmConfig):
        return [gemm_source(config, arch, problem), *_copies(request, problem, arch)]
    raise TypeError(f"a {type(config).__name__} does not run a {type(problem).__name__}")


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
