"""The arithmetic behind the rows, and the parts that a CPU runs in seconds."""

import re

import gpu_steps
import pytest
import torch
from kernels.bench import Bench
from kernels.whole_model import Mode, StepTimes

from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace
from steps import rows_rounding
from steps.jobs import AMP, FLOAT8, FUSED16, INT8, TINY, Contender, best, eight_bit, low_settings, ratio
from steps.roofline import REST, floor_bytes, part_of

CPU = torch.device("cpu")


def test_a_ratio_is_the_median_of_neighbouring_blocks():
    value, spread = ratio(StepTimes((2.0, 3.0, 8.0)), StepTimes((1.0, 2.0, 4.0)))
    assert value == 2.0
    assert spread == "1.500 to 2.000 of 3 pairs of blocks"


def test_the_best_is_of_its_family():
    slow, fast = (Contender(setting, Mode.GRAPH) for setting in (eight_bit(INT8), eight_bit(FLOAT8)))
    times = {Contender(AMP, Mode.GRAPH): StepTimes((1.0,)), slow: StepTimes((3.0,)), fast: StepTimes((2.0,))}
    assert best(times, "int8") is slow
    assert best(times, "int8", "float8") is fast
    with pytest.raises(
        RuntimeError, match=r"no contender of float16 ran \(what did: amp float16, CUDA graph, int8→float16, CUDA graph"
    ):
        best(times, "float16")


def test_contenders_have_names_of_their_own():
    settings = [*low_settings(INT8, fused=False), *low_settings(INT8, fused=True), *low_settings(FLOAT8, fused=True), FUSED16, AMP]
    names = [Contender(setting, Mode.COMPILED_GRAPH).name for setting in settings]
    assert len(set(names)) == len(names)
    assert "int8→float16 int8 saved, qsync.compile, CUDA graph" in names


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("quantize_from_partials", "quantization"),
        ("normalize_positions", "producers"),
        ("sm90_xmma_fprop_implicit_gemm_s8s8", "products"),
        ("void at::native::multi_tensor_apply_kernel", "optimizer"),
        ("triton_poi_fused_relu_3", REST),
    ],
)
def test_kernels_are_told_by_their_names(kernel, part):
    assert part_of(kernel) == part


def test_fusion_and_8_bit_take_bytes_away():
    dag = trace(load_job(TINY["resnet50"], 2))
    plain, fused, kept, amp = (
        floor_bytes(dag, setting, CPU)
        for setting in (eight_bit(INT8), eight_bit(INT8, fused=True), eight_bit(INT8, fused=True, saved="int8"), AMP)
    )
    assert fused["quantization"] < plain["quantization"]
    assert kept["producers"] < fused["producers"]
    assert plain["products"] < amp["products"]
    assert amp["quantization"] == 0


def test_errors_of_the_reference_are_those_of_pytorch():
    (row, gradients) = rows_rounding.producer_rows(Bench(CPU, quick=True))
    assert row["id"] == "L7"
    assert 0.1 < row["value"] < 2
    assert gradients["value"] < 4


def test_a_part_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_steps.py", "--tiny", "--only", "L1,L11"])
    with pytest.raises(SystemExit, match=re.escape("no such parts: L11; known are prepare-L1")):
        gpu_steps.main()


def test_what_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_steps.py", "--only", "L1"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu_steps.main()
