"""Sources of matrix products: what enters them, and what does not."""

from __future__ import annotations

import re

import attrs
import pytest

from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.architectures import SM_70, SM_75, SM_80, SM_86, SM_89, SM_90A
from qsync_kernels_cutlass.compiling.compile import TEMPLATES
from qsync_kernels_cutlass.configs.config import Family, GemmConfig, Raster, Schedule, Scheduler
from qsync_kernels_cutlass.configs.problem import GemmProblem
from qsync_kernels_cutlass.sources import convert_source, gemm_source, rows_contiguous, transpose_source

OUTPUT = GemmProblem(Op.LINEAR_OUTPUT, 1, 1, 1, "int8", "int8", "bfloat16")
TMA = GemmConfig(Family.TMA, (128, 256, 128), cluster=(2, 1))
MMA = GemmConfig(Family.MMA, (128, 64, 64), (64, 32, 64), (16, 8, 32), 3)
SIMT = GemmConfig(Family.SIMT, (64, 32, 32), (32, 32, 32), (1, 1, 4), 2)


def using(text: str) -> dict[str, str]:
    """The type aliases of a source's Config."""
    return dict(re.findall(r"using (\w+) = ([^;]+);", text))


def test_tma_source_spells_the_configuration():
    found = using(gemm_source(TMA, SM_90A, OUTPUT).text)
    assert found["A"] == found["B"] == "int8_t"
    assert (found["Accumulator"], found["Output"]) == ("int32_t", "cutlass::bfloat16_t")
    assert found["Tile"] == "cute::Shape<cute::Int<128>, cute::Int<256>, cute::Int<128>>"
    assert found["Cluster"] == "cute::Shape<cute::Int<2>, cute::Int<1>, cute::_1>"
    assert found["Schedule"].endswith("Cooperative")
    assert found["EpilogueSchedule"].endswith("Cooperative")
    assert found["Scheduler"].endswith("PersistentScheduler")
    assert found["Stages"].endswith("StageCountAutoCarveout<kEpilogueBytes>")
    pingpong = attrs.evolve(TMA, schedule=Schedule.PINGPONG, stages=5)
    found = using(gemm_source(pingpong, SM_90A, OUTPUT).text)
    assert found["Schedule"].endswith("Pingpong")
    assert not found["EpilogueSchedule"].endswith("Cooperative")
    assert found["Stages"].endswith("StageCount<5>")
    stream_k = attrs.evolve(TMA, scheduler=Scheduler.STREAM_K)
    assert using(gemm_source(stream_k, SM_90A, OUTPUT).text)["Scheduler"].endswith("StreamKScheduler")


@pytest.mark.parametrize(
    ("arch", "tag"), [(SM_70, "Sm70"), (SM_75, "Sm75"), (SM_80, "Sm80"), (SM_86, "Sm80"), (SM_89, "Sm80"), (SM_90A, "Sm80")]
)
def test_mma_source_takes_the_architecture_whose_instructions_it_uses(arch, tag):
    source = gemm_source(MMA, arch, OUTPUT)
    found = using(source.text)
    assert found["Arch"] == f"cutlass::arch::{tag}"
    assert found["Warp"] == "cutlass::gemm::GemmShape<64, 32, 64>"
    assert found["Instruction"] == "cutlass::gemm::GemmShape<16, 8, 32>"
    assert "kStages = 3;" in source.text
    assert source.arch == arch.name


def test_volta_has_a_template_of_its_own():
    """Its instructions lay out their results otherwise than the epilogue visitors of later chips assume."""
    assert '#include "gemm_volta.cuh"' in gemm_source(MMA, SM_70, OUTPUT).text
    assert '#include "gemm_2x.cuh"' in gemm_source(MMA, SM_75, OUTPUT).text


def test_float8_takes_the_instructions_of_sm_89():
    float8 = attrs.evolve(OUTPUT, a_format="float8_e5m2", b_format="float8_e4m3fn")
    found = using(gemm_source(MMA, SM_89, float8).text)
    assert found["Arch"] == "cutlass::arch::Sm89"
    assert (found["A"], found["B"]) == ("cutlass::float_e5m2_t", "cutlass::float_e4m3_t")
    assert found["Accumulator"] == "float"


def test_simt_source_has_the_tile_and_no_warps():
    text = gemm_source(SIMT, SM_70, OUTPUT).text
    assert "GemmSimt<int8_t, int8_t, __nv_bfloat16, 64, 32, 32>" in text


@pytest.mark.parametrize("config", [TMA, MMA, SIMT])
def test_run_time_knobs_and_sizes_share_one_library(config):
    tuned = attrs.evolve(config, raster=Raster.ALONG_M, swizzle=4, splits=2)
    larger = attrs.evolve(OUTPUT, m=4096, n=4096, k=4096)
    assert gemm_source(tuned, SM_90A, larger) == gemm_source(config, SM_90A, OUTPUT)


def test_everything_compiled_distinguishes_sources():
    problems = [attrs.evolve(OUTPUT, out_format=name) for name in ("bfloat16", "float16", "float32")]
    problems += [attrs.evolve(OUTPUT, a_format="float8_e4m3fn"), attrs.evolve(OUTPUT, b_format="float8_e4m3fn")]
    configs = [TMA, attrs.evolve(TMA, cluster=(1, 2)), attrs.evolve(TMA, stages=3), attrs.evolve(TMA, tile=(128, 128, 128))]
    configs += [attrs.evolve(TMA, scheduler=Scheduler.STREAM_K), MMA, attrs.evolve(MMA, warp=(32, 32, 64)), SIMT]
    sources = [gemm_source(config, SM_90A, problem) for config in configs for problem in problems]
    assert len({source.text for source in sources}) == len({source.name for source in sources}) == len(sources)


@pytest.mark.parametrize(
    ("op", "formats", "expected"),
    [
        (Op.LINEAR_OUTPUT, "int8", (True, True)),
        (Op.LINEAR_GRAD_INPUT, "int8", (True, True)),
        (Op.LINEAR_GRAD_WEIGHT, "float8_e5m2", (True, True)),
        (Op.LINEAR_GRAD_INPUT, "bfloat16", (True, False)),
        (Op.LINEAR_GRAD_WEIGHT, "float16", (False, False)),
        (Op.CONV2D_OUTPUT, "int8", (True, True)),
    ],
)
def test_layouts_of_the_operands(op, formats, expected):
    """8-bit tensor cores read k contiguous only; 16-bit gradients read their operands as the forward product left them."""
    problem = attrs.evolve(OUTPUT, op=op, a_format=formats, b_format=formats)
    assert rows_contiguous(problem) == expected
    found = using(gemm_source(TMA, SM_90A, problem).text)
    assert found["LayoutA"] == "cutlass::layout::" + ("RowMajor" if expected[0] else "ColumnMajor")
    assert found["LayoutB"] == "cutlass::layout::" + ("ColumnMajor" if expected[1] else "RowMajor")


@pytest.mark.parametrize(
    "source",
    [
        gemm_source(TMA, SM_90A, OUTPUT),
        gemm_source(MMA, SM_80, OUTPUT),
        gemm_source(SIMT, SM_80, OUTPUT),
        transpose_source(SM_80),
        convert_source(SM_80, "int8", "bfloat16"),
    ],
    ids=lambda source: source.name,
)
def test_sources_export_their_functions_and_find_their_templates(source):
    for symbol in (source.symbol, source.workspace_symbol):
        assert re.search(rf"QSYNC_EXPORT int(32|64)_t {symbol}\(QsyncArguments const\* q\)", source.text)
    (header,) = re.findall(r'#include "(.*)"', source.text)
    assert (TEMPLATES / header).is_file()
