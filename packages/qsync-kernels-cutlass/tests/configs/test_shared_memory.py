"""Shared memory that ``validity`` counts against what the compiler lays out, with as many stages as are said to fit.

Many configurations are laid out in one source, whose kernels are not instantiated, so that one compilation measures a family.
"""

from __future__ import annotations

import ctypes
import itertools

import attrs
import pytest
from kernel_requests import FLOAT8, INT8, conv2d, linear

from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Op
from qsync_core.progress import silent
from qsync_kernels_cutlass.architectures import SM_75, SM_80, SM_86, SM_90A
from qsync_kernels_cutlass.compiling import toolchain
from qsync_kernels_cutlass.compiling.compile import compile_files
from qsync_kernels_cutlass.configs import validity
from qsync_kernels_cutlass.configs.config import ConvConfig, Family, GemmConfig, Schedule, Scheduler
from qsync_kernels_cutlass.configs.problem import ConvProblem, problem_of
from qsync_kernels_cutlass.sources import KernelSource, conv_source, gemm_source

MOST_OVERESTIMATED = 2 * validity.SWIZZLE_ALIGNMENT + 256

BFLOAT16_OUT = problem_of(conv2d())
FLOAT32_OUT = problem_of(conv2d(variant=attrs.evolve(INT8, output=Precision.FLOAT32)))
INT8_GEMM = problem_of(linear())
FLOAT8_GEMM = problem_of(linear(variant=FLOAT8))
BFLOAT_WEIGHT_GRADIENT = problem_of(linear(Op.LINEAR_GRAD_WEIGHT))

REPORTED = (
    "path=tma;tile=128x192x128;stages=5",
    "path=tma;tile=128x192x64;stages=10",
    "path=tma;tile=128x128x64;stages=13",
    "path=tma;tile=64x128x64;stages=18;schedule=pingpong",
)
"""Convolutions that were taken to fit and did not."""

SIDES = {Schedule.COOPERATIVE: (128, 256), Schedule.PINGPONG: (64, 128, 192)}


def tma(kind, problem, depths=(128,), columns=(16, 64, 96, 192, 256), schedulers=(None,)):
    """Configurations with as many stages as ``validity`` says fit."""
    for schedule, rows in SIDES.items():
        for tile_m, tile_n, depth, scheduler in itertools.product(rows, columns, depths, schedulers):
            config = kind(Family.TMA, (tile_m, tile_n, depth), schedule=schedule, stages=2)
            config = config if scheduler is None else attrs.evolve(config, scheduler=scheduler)
            config = attrs.evolve(config, stages=validity.max_stages(config, SM_90A, problem))
            if validity.is_valid(config, SM_90A, problem):
                yield problem, config


def mma(kind, problem, arch, stages=8):
    instruction = validity.instructions(arch, problem.a_format)[0]
    depth = 64 // validity.BYTES[problem.a_format]
    for (tile_m, tile_n), (warp_m, warp_n) in (((128, 256), (64, 64)), ((64, 256), (64, 64)), ((64, 64), (32, 32))):
        config = kind(Family.MMA, (tile_m, tile_n, depth), (warp_m, warp_n, depth), instruction, 2)
        fitting = min(stages, validity.max_stages(config, arch, problem))
        for count in {2, fitting}:
            if validity.is_valid(attrs.evolve(config, stages=count), arch, problem):
                yield problem, attrs.evolve(config, stages=count)


CASES = {
    "convolutions by TMA": (
        SM_90A,
        "conv_sm90.cuh",
        [*tma(ConvConfig, BFLOAT16_OUT, (64, 128)), *tma(ConvConfig, FLOAT32_OUT, columns=(16, 32, 48, 128))],
    ),
    "products by TMA": (
        SM_90A,
        "gemm_sm90.cuh",
        [
            *tma(GemmConfig, INT8_GEMM),
            *tma(GemmConfig, FLOAT8_GEMM, columns=(48, 192)),
            *tma(GemmConfig, BFLOAT_WEIGHT_GRADIENT, (64,), (32, 256)),
            *tma(GemmConfig, INT8_GEMM, (64,), (128,), (Scheduler.STREAM_K,)),
        ],
    ),
    "2.x products of sm_86": (
        SM_86,
        "gemm_2x.cuh",
        [*mma(GemmConfig, INT8_GEMM, SM_86), *mma(GemmConfig, BFLOAT_WEIGHT_GRADIENT, SM_86)],
    ),
    "2.x products of sm_75": (SM_75, "gemm_2x.cuh", [*mma(GemmConfig, INT8_GEMM, SM_75, 2)]),
    "2.x convolutions of sm_80": (
        SM_80,
        "conv_2x.cuh",
        [*mma(ConvConfig, BFLOAT16_OUT, SM_80), *mma(ConvConfig, FLOAT32_OUT, SM_80)],
    ),
}


@pytest.mark.parametrize("text", REPORTED)
def test_stores_of_128_bytes_a_row_count(text):
    (reason,) = validity.reasons(ConvConfig.parse(text), SM_90A, BFLOAT16_OUT)
    assert "do not fit into the 232448 bytes of shared memory that sm_90a gives a block" in reason


def layout_source(header, arch, cases):
    """A source that exports ``qsync_shared_bytes(index)``: what the compiled kernels of the configurations would have.

    The layouts are constants of host code, which launches the kernels; compiling for the device, which instantiates all of them
    once more, is left out.
    """
    lines, sizes = ["#ifndef __CUDA_ARCH__", f'#include "{header}"'], []
    for index, (problem, config) in enumerate(cases):
        if isinstance(problem, ConvProblem):
            text = conv_source(config, arch, problem.out_format).text
            kernel = text.split("using Kernel = ")[1].split(";")[0]
        else:
            text = gemm_source(config, arch, problem).text
            kernel = text.split("return ")[1].split("::run")[0].replace("<Config>", f"<config_{index}::Config>")
            definition = "\n".join(line for line in text.splitlines() if not line.startswith(("#include", "QSYNC_EXPORT")))
            lines.append(f"namespace config_{index} {{\n{definition}\n}}")
        sizes.append(f"{kernel}::kSharedBytes")
    lines.append(f"static const int64_t sizes[] = {{{', '.join(sizes)}}};")
    lines.append("QSYNC_EXPORT int64_t qsync_shared_bytes(int64_t index) { return sizes[index]; }")
    lines.append("#endif")
    return KernelSource("shared_bytes", "\n".join(lines), arch.name)


@pytest.fixture(scope="module")
def libraries(request):
    """By case that is selected, the library of its layouts; all are compiled side by side."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "").startswith("test_what_is_counted_")]
    selected = {test.callspec.params["name"] for test in tests}
    nvcc = toolchain.find_nvcc()
    sources = {name: layout_source(header, arch, cases) for name, (arch, header, cases) in CASES.items() if name in selected}
    wanted = {name: source for name, source in sources.items() if not toolchain.arch_reason(nvcc, CASES[name][0].name)}
    return dict(zip(wanted, compile_files(list(wanted.values()), progress=silent), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="nvcc is not installed, so nothing can be compiled")
@pytest.mark.skipif(toolchain.find_headers() is None, reason="CUTLASS's headers are not installed (nvidia-cutlass)")
@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_is_what_the_compiler_lays_out(libraries, name):
    arch, _, cases = CASES[name]
    if reason := toolchain.arch_reason(toolchain.find_nvcc(), arch.name):
        pytest.skip(reason)
    shared_bytes = ctypes.CDLL(str(libraries[name])).qsync_shared_bytes
    shared_bytes.restype, shared_bytes.argtypes = ctypes.c_int64, (ctypes.c_int64,)
    assert len(cases) > 2
    for index, (problem, config) in enumerate(cases):
        laid_out, counted = shared_bytes(index), validity.shared_bytes(config, problem)
        said = f"{config.text} for {problem.a_format} -> {problem.out_format}: {laid_out} bytes, counted {counted}"
        assert laid_out <= counted <= arch.shared_bytes_per_block, said
        assert counted <= laid_out + MOST_OVERESTIMATED, said
