"""``qsync fits``: what it draws against counts by hand and against a step with values, its figures and its refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.cli.root import cli
from qsync_core.errors import JobError
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import DATASHEETS
from qsync_torch.fits import fits
from qsync_torch.fits.as_on_cuda import AsOnCuda, on_meta
from qsync_torch.fits.drawn_step import draw
from qsync_torch.fits.fits import BUCKETS, CONTEXT, Fits
from qsync_torch.fits.pace import pace
from qsync_torch.job import Batch, Job, SeveralOptimizers

WIDTH, LAYERS, SAMPLES = 256, 4, 64


class Layers(nn.Module):
    """Linear layers, each followed by a GELU, whose activations may be computed again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = lambda x, layer=layer: nn.functional.gelu(layer(x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.again else run(x)
        return x


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job(model: nn.Module | None = None, **changed: Any) -> Job:
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.zeros(size, WIDTH),), {}, torch.zeros(size, WIDTH))

    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch.target)

    return Job("layers", model or Layers(), batch, loss, sgd, SAMPLES, **changed)


def test_the_parts_of_a_step_by_hand() -> None:
    """Four weights of 256 KiB with momentum, two tensors of a batch, eleven products: the first input has no gradient."""
    step = draw(job(), SAMPLES)
    weight, tensor = 4 * WIDTH * WIDTH, 4 * SAMPLES * WIDTH
    assert step.peak["parameters"] == step.peak["optimizer state"] == step.trained_bytes == LAYERS * weight
    assert step.peak["batch"] == 2 * tensor
    products = [(kernel.work.products[0], count) for kernel, count in step.kernels if kernel.work.products]
    assert sum(operations * count for (_, operations), count in products) == 2 * SAMPLES * WIDTH * WIDTH * (3 * LAYERS - 1)
    assert {precision for (precision, _), _ in products} == {Precision.FLOAT32}


@pytest.mark.parametrize("several", [False, True])
def test_a_fused_optimizer_takes_no_memory_of_its_own_and_passes_once(several: bool) -> None:
    """AdamW with ``foreach`` has a square root of each second moment besides."""

    def adam(parameters: Iterable[nn.Parameter], **how: bool) -> torch.optim.Optimizer:
        given = list(parameters)
        parts = [given[:1], given[1:]] if several else [given]
        return SeveralOptimizers([torch.optim.AdamW(part, **how) for part in parts])

    foreach = draw(attrs.evolve(job(), optimizer=adam), SAMPLES)
    fused = draw(attrs.evolve(job(), optimizer=lambda parameters: adam(parameters, fused=True)), SAMPLES)
    trained = LAYERS * 4 * WIDTH * WIDTH
    assert fused.peak["optimizer state"] == foreach.peak["optimizer state"] == 2 * trained
    assert foreach.peak["workspace"] >= (1 if not several else 0.75) * trained > fused.peak["workspace"]
    assert [(kernel.work.nbytes, count) for kernel, count in fused.update] == [(7 * trained, 1)]
    assert fused.kernels == foreach.kernels


def test_activations_are_kept_in_the_format_of_autocast_and_freed_by_checkpoints() -> None:
    narrow = draw(job(amp="bfloat16"), SAMPLES)
    assert {p for kernel, _ in narrow.kernels for p, _ in kernel.work.products} == {Precision.BFLOAT16}
    many = 64 * SAMPLES
    kept, again = draw(job(), many), draw(job(Layers(again=True)), many)
    assert again.peak_bytes < kept.peak_bytes - 2 * 4 * many * WIDTH
    assert again.starts == kept.starts + LAYERS  # a product each, once more; nothing needs the result of its GELU
    assert draw(job(amp="bfloat16"), many).peak_bytes < kept.peak_bytes


@pytest.mark.parametrize("amp", [None, "bfloat16"])
def test_what_a_forward_keeps_is_what_autograd_keeps_with_values(amp: str | None) -> None:
    """Autograd's saved tensors of the same model on the CPU, under its own autocast, but for the weights."""
    model = Layers()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.zeros(SAMPLES, WIDTH)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=amp is not None):
        output = model(x)
    for tensor in (x, *model.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    drawn: dict[int, int] = {}
    empty = on_meta(Layers())

    def pack_meta(tensor: torch.Tensor) -> torch.Tensor:
        drawn[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        alive.append(tensor.untyped_storage())
        return tensor

    alive: list[Any] = []
    rules = AsOnCuda(None if amp is None else torch.bfloat16)
    input_ = torch.zeros(SAMPLES, WIDTH, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack_meta, lambda tensor: tensor), rules:
        result = empty(input_)
    for tensor in (input_, *empty.parameters()):
        drawn.pop(id(tensor.untyped_storage()), None)
    assert result.dtype is output.dtype
    assert sum(drawn.values()) == sum(kept.values())


class Attends(nn.Module):
    """Attention with dropout over a mask whose values the model looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.project = nn.Embedding(32, 64), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.project(self.embedding(tokens)).unflatten(-1, (4, 16)).transpose(1, 2)
        mask = (tokens != 0)[:, None, None, :] if (tokens == 0).any() else None
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.1)


def test_attention_keeps_no_scores_and_masks_are_looked_at() -> None:
    """Scores of 8 × 4 × 512² would be 32 MiB; the mask, shared, is one of its elements a score."""

    def made(padded: bool) -> Job:
        def batch(step: int, size: int) -> Batch:
            tokens = torch.ones(size, 512, dtype=torch.long)
            tokens[:, -1] = 0 if padded else 1
            return Batch((tokens,))

        return Job("attends", Attends(), batch, lambda output, batch: output.sum(), sgd, 8)

    plain, padded = draw(made(False), 8), draw(made(True), 8)
    assert plain.peak_bytes < 16 * 2**20
    names = {kernel.name for kernel, _ in padded.kernels}
    assert "_scaled_dot_product_efficient_attention" in names
    assert plain.starts < padded.starts


def test_a_plan_shares_the_cast_of_what_several_read() -> None:
    rules = AsOnCuda(lowered=torch.bfloat16)
    x, first, second = (torch.zeros(8, 8, device="meta", requires_grad=True) for _ in range(3))
    casts: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        casts.append(id(tensor.untyped_storage()))
        return tensor

    with rules, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one, two = nn.functional.linear(x, first), nn.functional.linear(x, second)
    assert one.dtype is two.dtype is torch.bfloat16
    assert len(casts) == 4
    assert len(set(casts)) == 3


def test_shared_weights_stay_shared_without_memory() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    on_meta(model)
    assert model[1].weight is model[0].weight
    assert model[0].weight.is_meta


def deep(size: int = 256) -> Job:
    """Convolutions of which a sample keeps 64 MiB."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(16)))

    def batch(step: int, size: int) -> Batch:
        return Batch((torch.zeros(size, 16, 256, 256, device="meta"),))

    return Job("deep", model, batch, lambda output, batch: output.mean(), sgd, size)


def test_a_faster_gpu_is_faster_and_a_larger_one_holds_more() -> None:
    asked = Fits(deep(16))
    small, large = asked.on(DATASHEETS["RTX 3050"]), asked.on(DATASHEETS["RTX 3090"])
    for few, many in zip(small.ways, large.ways, strict=True):
        assert few.pace.device_ns > many.pace.device_ns
        assert few.largest_batch is not None
        assert many.largest_batch is not None
        assert few.largest_batch < many.largest_batch
    assert small.ways[0].parts[BUCKETS] == 2 * 16 * 4 * (16 * 16 * 9 + 16)
    assert BUCKETS not in Fits(job(), alone=True).on(DATASHEETS["T4"]).ways[0].parts


def test_the_largest_batch_fits_and_a_twentieth_more_does_not() -> None:
    asked, sheet = Fits(deep(16)), DATASHEETS["T4"]
    way = asked.on(sheet).ways[0]
    assert way.largest_batch is not None
    memory = sheet.chip.memory_gb * 10**9
    assert asked._process_bytes(way.largest_batch, sheet, None, False) <= memory
    assert asked._process_bytes(way.largest_batch * 21 // 20, sheet, None, False) > memory


def test_gradients_are_accumulated_in_as_many_micro_batches() -> None:
    one, four = draw(job(), SAMPLES), draw(job(accumulate=4), SAMPLES)
    sheet = DATASHEETS["T4"]
    assert pace(four, sheet, tf32=(True, False)).device_ns > 3 * pace(one, sheet, tf32=(True, False)).device_ns
    assert four.peak["gradients"] >= one.peak["gradients"]


def test_a_gpu_without_the_hardware_of_autocast_leaves_the_others_their_answers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("torch.nn.CrossEntropyLoss(), loader", "torch.nn.CrossEntropyLoss(), loader, amp='bfloat16'"))
    result = run(script, "--device", "V100", "--device", "L4")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.startswith(("V100 ", "L4 "))}
    assert rows["V100"][-4:] == ["no", "–", "–", "–"]
    assert "yes" in rows["L4"]
    assert "Sequential trains under autocast in bfloat16, which V100 has no hardware for" in result.stdout
    devices = json.loads(run(script, "--device", "V100", "--device", "L4", "--json").stdout)["devices"]
    assert [len(device["ways"]) for device in devices] == [0, 1]
    assert "has no hardware" in devices[0]["lacks"]
    assert run(script, "--device", "V100").exit_code == 0


def test_what_fits_by_less_than_the_estimates_error_fits_barely() -> None:
    asked, sheet = Fits(job()), DATASHEETS["T4"]
    takes = asked.on(sheet).ways[0].process_bytes
    answers = {}
    for share in (0.99, 1.0, 1.07, 1.09):
        answers[share] = asked._way(sheet, round(takes * share), None).as_dict()["fits"]
    assert answers == {0.99: "no", 1.0: "barely", 1.07: "barely", 1.09: "yes"}


def test_barely_is_said_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "MEMORY_ERROR", 1e3)
    result = run("resnet18:image=32,batch=4,classes=10", "--device", "T4")
    assert " barely " in result.stdout
    assert "barely: the GPU has less than 100000% more than the process is estimated to take" in result.stdout


def test_the_memory_in_a_gpus_name_is_taken(tmp_path: Path) -> None:
    names = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-16GB")
    asked = [part for name in names for part in ("--device", name)]
    devices = json.loads(run("resnet18:image=32,batch=4,classes=10", *asked, "--json").stdout)["devices"]
    assert [(device["device"], device["memory_bytes"]) for device in devices] == [
        ("A100 40GB", 40 * 10**9),
        ("A100", 80 * 10**9),
        ("V100 16GB", 16 * 10**9),
    ]
    steps = [device["ways"][0]["device_ns"] for device in devices]
    assert steps[0] > steps[1]  # its memory is slower
    refused = run("resnet18", "--device", "A100 20GB")
    assert "names a memory of 20 GB, with which no A100 is known; without a size, A100 has 80 GB" in refused.output


SCRIPT = """
import torch
import qsync_torch as qsync

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader([(torch.zeros(64), 1)] * 32, batch_size=16)
applied = qsync.hybrid(model, optimizer, torch.nn.CrossEntropyLoss(), loader)
"""


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["fits", *map(str, arguments)])


def test_a_script_on_two_gpus_as_json(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run(script, "--device", "RTX 3060", "--device", "L4", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["estimated"] is True
    assert data["batch_size"] == 16
    assert [entry["device"] for entry in data["devices"]] == ["RTX 3060", "L4"]
    for entry in data["devices"]:
        assert [way["way"] for way in entry["ways"]] == ["as it is", "plan, all in bfloat16"]
        for way in entry["ways"]:
            assert way["process_bytes"] == sum(way["bytes"].values())
            assert way["bytes"][CONTEXT] == 808_321_024
            assert way["samples_per_s"] == pytest.approx(16 / way["step_ns"] * 1e9, rel=1e-3)
    assert any("never compared" in note and note.startswith("L4") for note in data["notes"])


def test_a_script_that_makes_a_process_group_is_a_job_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nassert dist.get_world_size() == 1\n" + SCRIPT
    )
    result = run(script, "--device", "L4", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["batch_size"] == 16
    assert "RANK" not in os.environ
    assert not dist.is_initialized()


def test_what_people_read_says_that_it_is_estimated() -> None:
    result = run("resnet18:image=32,batch=4,classes=10", "--device", "T4")
    assert result.exit_code == 0, result.output
    for said in ("estimated for GPUs that are not at hand", "14.9 GiB", "plan, all in float16", "estimated, not measured", "TF32"):
        assert said in result.stdout


def test_bad_input_is_said_in_a_sentence(tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code != 0
        return str(result.exception) + result.output

    assert "did you mean RTX 3060" in refused("resnet18", "--device", "RTX3O60")
    assert "no model is named 'resnet19'" in refused("resnet19", "--device", "T4")
    assert "Missing option '--device'" in refused("resnet18")
    script = tmp_path / "train.py"
    script.write_text("print('nothing')\n")
    assert "does not say what it trains" in refused(script, "--device", "T4")
    assert "takes no arguments (a): they are for a script" in refused("resnet18", "--device", "T4", "--", "a")


def test_a_model_that_needs_values_is_refused_with_the_way_out() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(
        JobError,
        match=r"a step of layers cannot be drawn without values \(RuntimeError: (?!RuntimeError).*qsync prepare measures it",
    ):
        draw(job(Asks()), 4)
