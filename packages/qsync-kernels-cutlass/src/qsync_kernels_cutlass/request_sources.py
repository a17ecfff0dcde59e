"""The kernels that a request with a configuration may load (compiling ahead makes these), and those that it will; without torch."""

from __future__ import annotations

from qsync_core.kernels.backend import KernelRequest, Op
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.config import ConvConfig, GemmConfig
from qsync_kernels_cutlass.conv_folding import folds
from qsync_kernels_cutlass.conv_source import conv_source, fold_source, turn_source
from qsync_kernels_cutlass.gemm_source import convert_source, gemm_source, transpose_source
from qsync_kernels_cutlass.kernel_source import KernelSource
from qsync_kernels_cutlass.problem import BYTES, ConvProblem, GemmProblem, problem_of
from qsync_kernels_cutlass.validity import Config

ROW_BYTES = 16
"""Rows of operands start at multiples of it, or are copied to where they do."""


def request_sources(request: KernelRequest, config: Config, arch: Architecture) -> list[KernelSource]:
    """The product's kernel first, then those that bring operands into shape, whatever their strides and alignment are.

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


def needed_sources(request: KernelRequest, config: Config, arch: Architecture) -> list[KernelSource]:
    """Those of :func:`request_sources` that dense and aligned operands of the request's sizes need.

    Args: as of :func:`request_sources`.
    """
    problem = problem_of(request)
    every = request_sources(request, config, arch)
    if isinstance(problem, ConvProblem):
        unused = [] if _folds(request, problem) else [fold_source(arch.name)]
    elif not _rows_are_whole(request, problem):
        return every
    else:
        unused = [convert_source(arch, name, name) for name in (problem.a_format, problem.b_format)]
        unused += (
            [] if request.op in (Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT, Op.CONV2D_GRAD_INPUT) else [transpose_source(arch)]
        )
    return [source for source in every if source not in unused]


def _folds(request: KernelRequest, problem: ConvProblem) -> bool:
    taps = problem.filter_h, problem.filter_w
    return request.op == Op.CONV2D_OUTPUT and folds(problem.in_c, taps, problem.geometry)


def _rows_are_whole(request: KernelRequest, problem: GemmProblem) -> bool:
    """Whether features come in multiples of 16 bytes; the number of tokens or pixels does not matter."""
    first, second = request.shapes
    features = (first[1], second[1]) if request.op == Op.LINEAR_GRAD_WEIGHT else second[:2]
    smallest = min(BYTES[problem.a_format], BYTES[problem.b_format])
    return all(count * smallest % ROW_BYTES == 0 for count in features)


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
