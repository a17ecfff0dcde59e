"""Configurations against the chips' limits: what is offered fits, and what does not fit names the limit that it exceeds."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_requests import FLOAT8, INT8, INT8_THROUGHOUT, conv2d, linear

from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.architectures import ARCHITECTURES, SM_70, SM_75, SM_80, SM_86, SM_89, SM_90A
from qsync_kernels_cutlass.configs import candidates, validity
from qsync_kernels_cutlass.configs.config import ConvConfig, Family, GemmConfig, Raster, Schedule, Scheduler
from qsync_kernels_cutlass.configs.problem import BYTES, problem_of

INT8_GEMM = problem_of(linear())
INT8_CONV = problem_of(conv2d())
HALF_GEMM = problem_of(linear(Op.LINEAR_GRAD_INPUT, variant=attrs.evolve(INT8, grad_input=Precision.FLOAT16)))
BFLOAT_GEMM = problem_of(linear(Op.LINEAR_GRAD_WEIGHT))
FLOAT8_GEMM = problem_of(linear(variant=FLOAT8))

TMA = GemmConfig(Family.TMA, (128, 256, 128), cluster=(2, 1))
AMPERE = GemmConfig(Family.MMA, (128, 256, 64), (64, 64, 64), (16, 8, 32), 3)
TURING = GemmConfig(Family.MMA, (128, 128, 64), (64, 64, 64), (8, 8, 16), 2)
VOLTA = GemmConfig(Family.MMA, (128, 128, 32), (64, 64, 32), (8, 8, 4), 2)
SIMT = GemmConfig(Family.SIMT, (128, 128, 32), (32, 64, 32), (1, 1, 4), 2)
CONV = ConvConfig(Family.TMA, (128, 128, 64))


@pytest.mark.parametrize(
    ("config", "arch", "problem"),
    [
        (TMA, SM_90A, INT8_GEMM),
        (AMPERE, SM_80, INT8_GEMM),
        (attrs.evolve(AMPERE, tile=(128, 128, 64)), SM_86, INT8_GEMM),
        (attrs.evolve(AMPERE, tile=(128, 128, 64)), SM_89, FLOAT8_GEMM),
        (AMPERE, SM_90A, INT8_GEMM),
        (TURING, SM_75, INT8_GEMM),
        (VOLTA, SM_70, HALF_GEMM),
        *((SIMT, arch, INT8_GEMM) for arch in ARCHITECTURES.values()),
        (CONV, SM_90A, INT8_CONV),
    ],
)
def test_usual_configurations_are_valid(config, arch, problem):
    assert validity.reasons(config, arch, problem) == []


@pytest.mark.parametrize(
    ("config", "arch", "problem", "reason"),
    [
        (TMA, SM_80, INT8_GEMM, "sm_80 has no TMA and no warp-group tensor core instructions; they came with sm_90a"),
        (attrs.evolve(TMA, stages=5), SM_90A, INT8_GEMM, "5 stages of 128x256x128 do not fit into the 232448 bytes"),
        (attrs.evolve(TMA, stages=1), SM_90A, INT8_GEMM, "one stage cannot overlap"),
        (attrs.evolve(TMA, tile=(256, 256, 128)), SM_90A, INT8_GEMM, "256 accumulators a thread spill; at most 128"),
        (attrs.evolve(TMA, schedule=Schedule.PINGPONG), SM_90A, INT8_GEMM, "256 accumulators a thread spill; at most 128"),
        (attrs.evolve(TMA, tile=(64, 256, 128)), SM_90A, INT8_GEMM, "cooperative schedule takes tiles of 128 to 256 rows"),
        (attrs.evolve(TMA, tile=(128, 200, 128)), SM_90A, INT8_GEMM, "16 to 256 columns in steps of 16, not 200"),
        (attrs.evolve(TMA, tile=(128, 128, 48)), SM_90A, INT8_GEMM, "64, 128 or 256 bytes deep, not 48"),
        (attrs.evolve(TMA, cluster=(3, 1)), SM_90A, INT8_GEMM, "clusters are 1x1, 2x1, 1x2, 2x2, 4x1 or 1x4, not 3x1"),
        (attrs.evolve(TMA, warp=(64, 64, 64)), SM_90A, INT8_GEMM, "warp and instruction tiles belong to the 2.x paths"),
        (attrs.evolve(TMA, tile=(128, 256, 128)), SM_90A, FLOAT8_GEMM, "128 accumulators a thread spill; at most 96 fit"),
        (attrs.evolve(TMA, splits=2), SM_90A, INT8_GEMM, "only the stream-K scheduler splits k"),
        (attrs.evolve(TMA, scheduler=Scheduler.STREAM_K, splits=7), SM_90A, INT8_GEMM, "7 parts are more than k has tiles"),
        (
            GemmConfig(Family.TMA, (64, 128, 128), schedule=Schedule.PINGPONG, scheduler=Scheduler.STREAM_K),
            SM_90A,
            INT8_GEMM,
            "the stream-K scheduler needs the cooperative schedule",
        ),
        (attrs.evolve(TMA, swizzle=3), SM_90A, INT8_GEMM, "the swizzle is 1, 2, 4 or 8 tiles wide, not 3"),
        (attrs.evolve(TMA, splits=0), SM_90A, INT8_GEMM, "k is split into 1 to 32 parts, not 0"),
        (attrs.evolve(TMA, tile=(0, 256, 128)), SM_90A, INT8_GEMM, "the tile 0x256x128 has a side of 0"),
        (AMPERE, SM_75, INT8_GEMM, "sm_75 multiplies int8 by 8x8x16 instructions, not 16x8x32"),
        (
            attrs.evolve(AMPERE, tile=(64, 32, 64), warp=(32, 16, 64)),
            SM_80,
            attrs.evolve(INT8_GEMM, out_format="bfloat16"),
            "16 columns is too narrow for stores of bfloat16",
        ),
        (attrs.evolve(AMPERE, stages=2), SM_70, INT8_GEMM, "sm_70 has no tensor cores for int8"),
        (
            attrs.evolve(TURING, stages=3),
            SM_75,
            INT8_GEMM,
            "sm_75 has no asynchronous copies, so that a kernel has 2 stages, not 3",
        ),
        (attrs.evolve(AMPERE, stages=9), SM_80, INT8_GEMM, "2 to 8 stages, not 9"),
        (attrs.evolve(AMPERE, stages=5), SM_86, INT8_GEMM, "5 stages of 128x256x64 do not fit into the 101376 bytes"),
        (AMPERE, SM_80, FLOAT8_GEMM, "sm_80 has no float8 tensor cores; they came with sm_89"),
        (
            attrs.evolve(TURING, instruction=(16, 8, 8)),
            SM_75,
            BFLOAT_GEMM,
            "sm_75 has no bfloat16 tensor cores; they came with sm_80",
        ),
        (attrs.evolve(AMPERE, warp=(48, 64, 64)), SM_80, INT8_GEMM, "warps of 48x64x64 do not cover the tile 128x256x64"),
        (attrs.evolve(AMPERE, warp=(0, 0, 0)), SM_80, INT8_GEMM, "warps of 0x0x0 do not cover the tile"),
        (attrs.evolve(AMPERE, warp=(8, 256, 64)), SM_80, INT8_GEMM, "a warp's tile 8x256x64 is not made of whole instructions"),
        (attrs.evolve(AMPERE, warp=(128, 256, 64)), SM_80, INT8_GEMM, "a block has 2 to 8 warps, not 1"),
        (attrs.evolve(AMPERE, warp=(128, 128, 64)), SM_80, INT8_GEMM, "512 accumulators a thread spill; at most 128"),
        (attrs.evolve(AMPERE, cluster=(2, 1)), SM_80, INT8_GEMM, "only the TMA path has clusters"),
        (attrs.evolve(AMPERE, schedule=Schedule.PINGPONG), SM_80, INT8_GEMM, "belong to the TMA path"),
        (attrs.evolve(AMPERE, raster=Raster.ALONG_M), SM_80, INT8_GEMM, "the raster is a knob of the TMA path"),
        (GemmConfig(Family.MMA, (64, 32, 32), (16, 16, 32), (16, 8, 32), 3), SM_80, INT8_GEMM, "8 warps do not divide the loads"),
        (attrs.evolve(SIMT, tile=(120, 128, 32), warp=(40, 64, 32)), SM_80, INT8_GEMM, "has sides in steps of 16 and a depth in"),
        (attrs.evolve(SIMT, tile=(128, 256, 32)), SM_80, INT8_GEMM, "128 accumulators a thread spill; at most 64 fit"),
        (
            attrs.evolve(SIMT, tile=(128, 128, 256), warp=(32, 64, 256)),
            SM_80,
            INT8_GEMM,
            "operands of 128x128x256 do not fit into the 49152 bytes of static shared memory",
        ),
        (attrs.evolve(SIMT, stages=3), SM_80, INT8_GEMM, "kernels without tensor cores have 2 stages, not 3"),
        (attrs.evolve(SIMT, instruction=(1, 1, 1)), SM_80, INT8_GEMM, "1x1x4 for int8 (dp4a) and 1x1x1 for floats"),
        (attrs.evolve(CONV, splits=2), SM_90A, INT8_CONV, "a convolution is not split along k"),
    ],
)
def test_what_does_not_fit_names_the_limit(config, arch, problem, reason):
    found = validity.reasons(config, arch, problem)
    assert any(reason in text for text in found), found
    assert not validity.is_valid(config, arch, problem)


OPS = (Op.LINEAR_OUTPUT, Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT)
SIZES = st.integers(1, 10_000)


@given(
    arch=st.sampled_from(list(ARCHITECTURES.values())),
    op=st.sampled_from(OPS),
    variant=st.sampled_from([INT8, INT8_THROUGHOUT, FLOAT8]),
    m=SIZES,
    n=SIZES,
    k=SIZES,
)
def test_whatever_is_offered_respects_the_chips_limits(arch, op, variant, m, n, k):
    problem = problem_of(linear(op, m, k, n, variant=variant))
    for config in candidates.ranked(problem, arch):
        assert validity.reasons(config, arch, problem) == []
        size = BYTES[problem.a_format]
        tile_m, tile_n, tile_k = config.tile
        stages = config.stages or 2
        assert stages * (tile_m + tile_n) * tile_k * size <= arch.shared_bytes_per_block
        assert 64 <= validity.threads(config) <= 1024
        accumulators = (
            tile_m
            * tile_n
            // {Family.TMA: 256 if config.schedule is Schedule.COOPERATIVE else 128}.get(config.path, validity.threads(config))
        )
        assert accumulators <= 128
        assert config.splits == 1 or config.splits * tile_k < problem.k + tile_k
        assert GemmConfig.parse(config.text) == config


@pytest.mark.parametrize("arch", [SM_75, SM_80, SM_86, SM_89, SM_90A], ids=lambda arch: arch.name)
def test_stages_that_fit_are_as_many_as_shared_memory_holds(arch):
    config = TMA if arch.tma else attrs.evolve(TURING if arch is SM_75 else AMPERE, tile=(128, 128, 64))
    fitting = validity.max_stages(config, arch, INT8_GEMM)
    assert validity.shared_bytes(attrs.evolve(config, stages=fitting), INT8_GEMM) <= arch.shared_bytes_per_block
    assert validity.shared_bytes(attrs.evolve(config, stages=fitting + 1), INT8_GEMM) > arch.shared_bytes_per_block
