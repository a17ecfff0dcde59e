"""The arithmetic behind the rows, and the parts that a CPU runs in seconds."""

import itertools
import re
from types import SimpleNamespace

import attrs
import pytest
import torch

import gpu_steps
from kernels.bench import Bench
from kernels.whole_model import Mode, StepTimes
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace
from steps import jobs, rows_capped, rows_learning, rows_memory, rows_rounding, rows_time
from steps.jobs import AMP, FLOAT8, FUSED16, INT8, TINY, Contender, Steps, best, eight_bit, low_settings, ratio
from steps.roofline import LONGEST, REST, floor_bytes, host_lines, part_of, recorded

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
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
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


def test_operators_that_stay_in_the_base_have_its_bytes():
    dag = trace(load_job(TINY["resnet50"], 2))
    setting = attrs.evolve(eight_bit(INT8), autocast=torch.float16)
    ids = [operator.op_id for operator in dag.adjustable]
    all_, none, some = (floor_bytes(dag, setting, CPU, lowered)["products"] for lowered in (ids, [], ids[::2]))
    assert all_ == floor_bytes(dag, setting, CPU)["products"] < some < none == floor_bytes(dag, AMP, CPU)["products"]


def test_the_cpu_is_seen_in_backward_too():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            for _ in range(300_000):  # long enough to be among the longest
                pass
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    head, *functions = host_lines("doubled", recorded(lambda: Doubled.apply(x).sum().backward(), CPU))
    assert re.fullmatch(r"doubled: \d+\.\d\d ms of the CPU to issue a step, under the profiler", head)
    assert any(re.search(r"  \d+\.\d\d ms +1 calls DoubledBackward$", line) for line in functions)
    assert len(functions) <= LONGEST


def test_errors_of_the_reference_are_those_of_pytorch():
    gradients, half, whole = rows_rounding.producer_rows(Bench(CPU, quick=True))
    assert gradients["value"] < 4
    assert half["id"] == whole["id"] == "L7"
    assert half["what"].endswith("worst of 6 shapes")
    assert whole["what"].endswith("worst of 12 shapes")
    assert 0.1 < half["value"] <= whole["value"] < 2


@pytest.fixture
def opened(monkeypatch):
    """Contenders whose steps take a time by their names, instead of models; in the order in which they were opened."""
    found = []
    took_ms = {"amp float16": 4.0, "float16": 3.0, "float16 fused": 2.0, "int8→float16": 5.0, "int8→float16 int8 saved": 1.0}

    def open_(self, contender, **options):
        found.append(contender.setting.name)
        return SimpleNamespace(step=lambda: took_ms.get(contender.setting.name, 9.0))

    def in_turns(models, device, *, blocks, steps):
        return {contender: StepTimes((step(),) * blocks) for contender, step in models.items()}

    monkeypatch.setattr(jobs, "JobKernels", lambda *arguments: SimpleNamespace(dag=None))
    monkeypatch.setattr(jobs, "time_in_turns", in_turns)
    monkeypatch.setattr(Steps, "prepare", lambda self, contenders: None)
    monkeypatch.setattr(Steps, "open", open_)
    monkeypatch.setattr(rows_memory, "peak_bytes", lambda steps, contender: steps.open(contender).step())
    return found


def test_a_row_is_there_before_the_next_contender_is_opened(opened, monkeypatch):
    """So that a run which is stopped keeps the best so far."""
    explained = []
    monkeypatch.setattr(rows_time, "explain", lambda bench, id_, steps, pair: explained.append(id_))
    rows = rows_time.step_rows(Bench(CPU, quick=True), "L1", tuned=False, words="")
    assert [(row["id"], row["value"]) for row in itertools.islice(rows, 3)] == [("L1", 1.25), ("L1-fused", 2.5), ("L1f", 0.5)]
    assert opened == ["amp float16", "float16", "float16 fused", "int8→float16"]
    assert [(row["id"], row["value"]) for row in itertools.islice(rows, 3)] == [("L1", 0.25), ("L1-fused", 0.5), ("L1f", 0.5)]
    assert len(opened) == 5
    assert [row["value"] for row in rows if row["id"] == "L1"] == [0.25] * 4  # slower ones do not replace it
    assert explained == []


def test_a_row_without_an_8_bit_contender_names_those_that_ran(opened):
    with pytest.raises(RuntimeError, match=r"none of the 8-bit contenders ran \(what did: amp float16, torch.compile"):
        list(rows_time.step_rows(Bench(CPU, quick=True), "L2", tuned=False, words="int4"))


@pytest.mark.nightly
def test_a_contender_that_cannot_run_does_not_keep_others_from_being_prepared(opened, monkeypatch, capsys):
    def open_(self, contender, **options):
        opened.append(contender.setting.name)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Steps, "open", open_)
    assert list(rows_time.prepare_rows(Bench(CPU, quick=True), "L2", tuned=False, words="")) == []
    assert [name for name in opened if name.startswith("float8")] == ["float8→float16", "float8→float16 int8 saved"]
    assert capsys.readouterr().err.count("RuntimeError: out of memory\n") >= len(opened) == 10


def test_memory_is_written_after_each_contender(opened):
    rows = rows_memory.memory_rows(Bench(CPU, quick=True), "L4-bert", tuned=False, words="")
    assert next(rows)["value"] == 1.25
    assert opened == ["amp float16", "int8→float16"]
    assert next(rows)["value"] == 0.25
    assert [row["value"] for row in rows][-1] == 0.25


def test_learning_goes_on_from_the_losses_that_a_stopped_run_left(tmp_path, monkeypatch):
    trained, stop = [], [7]

    def final_loss(bench, model, seed, saved):
        if len(trained) in stop:
            raise KeyboardInterrupt
        trained.append((model, seed, saved))
        return 2.0 + seed + (0.1 * seed if saved else 0.0)

    monkeypatch.setattr(rows_learning, "_final_loss", final_loss)
    rows = rows_learning.learning_rows(Bench(CPU, tmp_path))
    assert next(rows)["id"] == "L8-resnet18"  # before the second model is begun
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    stop.clear()
    found = list(rows_learning.learning_rows(Bench(CPU, tmp_path)))
    assert [row["id"] for row in found] == ["L8-resnet18", "L8-bert-base", "L8"]
    assert len(trained) == len(set(trained)) == 12


def test_a_part_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_steps.py", "--tiny", "--only", "L1,L11"])
    with pytest.raises(SystemExit, match=re.escape("no such parts: L11; known are prepare-L1")):
        gpu_steps.main()


def test_what_needs_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_steps.py", "--only", "L1"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu_steps.main()


def test_a_capped_step_is_compared_with_the_faster_float16():
    found = {"amp_bytes": 4 << 30, "cap_bytes": 2 << 30, "weak_bytes": 2 << 30, "blocks": 2, "mode": "graphs", "capped_left": 0}
    found |= {"capped_ms": [12.0, 11.0, 12.0], "fused_ms": [10.0, 10.0, 12.0], "fused_left": 1}
    (alone,) = rows_capped.rows_of(Bench(CPU), found)
    assert (alone["id"], alone["value"], alone["target"]) == ("L5-fused", 1.1, "reported")
    assert "1 graphs of both sides were left to the CPU" in alone["spread"]
    rows = {row["id"]: row for row in rows_capped.rows_of(Bench(CPU), found | {"plain_ms": [8.0, 8.0, 8.0], "plain_left": 0})}
    assert {name: row["value"] for name, row in rows.items()} == {"L5-fused": 1.1, "L5-plain": 1.5, "L5": 1.5}
    assert rows["L5"]["target"] == "≤ 1.05"
    assert rows["L5"]["what"].endswith("the faster of two: compiled by PyTorch alone")
    assert "its first 2 blocks computed again in backward" in rows["L5"]["what"]
