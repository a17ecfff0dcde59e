"""Graphs of models that hold 16 bits: base, formats of weights and results, what is frozen and what can be stored."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path

import attrs
import pytest
import torch
from rich.console import Console
from torch import nn

from qsync_core.artifacts.files import from_bytes, to_bytes
from qsync_core.artifacts.summary import summarize
from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.semantics import run_precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.cli.trace import _render
from qsync_torch.job import Batch, Job, held_format
from qsync_torch.tracing.trace import trace

SIXTEEN = {Precision.BFLOAT16: torch.bfloat16, Precision.FLOAT16: torch.float16}


class Adapted(nn.Module):
    """A frozen 16-bit linear with an adapter in float32 beside it, as PEFT writes it, and a normalization."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 32, dtype=dtype)
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.base = nn.Linear(32, 64, dtype=dtype)
        self.head = nn.Linear(64, 9, bias=False, dtype=dtype)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        y = self.base(h)
        return self.head((y + self.up(self.down(h.to(self.down.weight.dtype)))).to(y.dtype)).float()


def job_of(model: nn.Module, amp: str | None = None) -> Job:
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.arange(size * 3).view(size, 3) % 9,), target=torch.zeros(size, 3, 9))

    return Job(
        "held", model, batch, lambda output, batch: (output - batch.target).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), 4, amp,
    )  # fmt: skip


@pytest.mark.parametrize("held", SIXTEEN)
def test_the_base_is_what_most_weights_are_held_in(held):
    model = Adapted(SIXTEEN[held])
    dag = trace(job_of(model))
    assert held_format(model) is dag.base is held
    assert not dag.autocast
    assert dag.autocast_base is Precision.FLOAT32
    by_name = {operator.op_id.fqn: operator for operator in dag.operators}
    for name in ("base", "head"):
        operator = by_name[name]
        assert (operator.is_adjustable, operator.frozen, operator.weight_format) == (True, True, held)
        assert operator.variant == Variant.plain(held)
        assert not operator.not_stored_as(Storage.NF4)
    for name in ("down", "up"):
        operator = by_name[name]
        assert operator.not_applicable == (
            f"its weight is float32 in a model whose weights are {held}, and the script runs without autocast: it stays as it is"
        )
        assert operator.variant == Variant.plain(Precision.FLOAT32)
        assert not operator.frozen
    assert from_bytes(to_bytes(dag)) == dag


def test_results_have_the_formats_that_the_script_gives_them():
    dag = trace(job_of(Adapted(torch.bfloat16)))
    formats = {}
    for operator in dag.operators:
        if operator.is_adjustable or operator.op_class == "adjustable":
            formats[operator.op_id] = operator.variant.output
        else:
            formats[operator.op_id] = run_precision(operator, [formats[source] for source in operator.inputs])
    wide = {str(op_id) for op_id, precision in formats.items() if precision is Precision.FLOAT32 and op_id.fqn != "$loss"}
    assert {"down#0", "up#0", "to#0", "add#0"} <= wide
    assert formats[next(op_id for op_id in formats if op_id.fqn == "norm")] is Precision.BFLOAT16
    assert formats[next(op_id for op_id in formats if op_id.fqn == "embed")] is Precision.BFLOAT16


def test_under_autocast_every_linear_can_be_lowered():
    dag = trace(job_of(Adapted(torch.bfloat16), "bfloat16"))
    assert dag.autocast
    assert {operator.op_id.fqn for operator in dag.adjustable} == {"base", "head", "down", "up"}
    assert {operator.op_id.fqn for operator in dag.adjustable if operator.frozen} == {"base", "head"}


def test_a_few_weights_in_16_bits_stay_as_they_are():
    model = Adapted(torch.float32)
    model.head.to(torch.bfloat16)
    model.forward = lambda x: model.head(model.base(model.norm(model.embed(x))).bfloat16()).float() + model.up.weight.sum()
    dag = trace(job_of(model))
    head = next(operator for operator in dag.operators if operator.op_id.fqn == "head")
    assert dag.base is Precision.FLOAT32
    assert dag.autocast
    assert "its weight is bfloat16 in a model whose weights are float32" in head.not_applicable


def test_graphs_of_float32_models_are_stored_as_before():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    plain = to_bytes(trace(job_of(model)))
    assert int.from_bytes(plain[24:28], "big") == 5
    model[1].weight.requires_grad_(False)
    frozen = trace(job_of(model))
    assert int.from_bytes(to_bytes(frozen)[24:28], "big") == 6
    thawed = attrs.evolve(
        frozen,
        operators=tuple(attrs.evolve(operator, frozen=False) for operator in frozen.operators),
    )
    assert int.from_bytes(to_bytes(thawed)[24:28], "big") == 5


def test_what_cannot_be_stored_says_why():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.Linear(9, 9))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    tied = next(operator for operator in trace(job_of(model)).operators if operator.kind == "linear")
    assert tied.frozen
    assert tied.not_stored_as(Storage.NF4).endswith(": another module has it too (tied weights)")
    assert not tied.runs_in(Variant.named("float32@nf4"))


class Scaled(nn.Module):
    """Divides by the norm of another module's weight, as PEFT's DoRA does."""

    def forward(self, y: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        return y / other.weight.norm(dim=1)


def test_a_weight_that_others_read_through_its_module_can_be_stored():
    class Decomposed(Adapted):
        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.scaled = Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            return self.head(self.scaled(self.base(h), self.base) + self.up(self.down(h)))

    model = Decomposed()
    by_name = {operator.op_id.fqn: operator for operator in trace(job_of(model)).operators}
    assert by_name["scaled.linalg_vector_norm"].parameters == ("base.weight",)
    assert not by_name["base"].not_stored_as(Storage.NF4)
    apply_(model, {"base": "float32@nf4"})
    model(torch.arange(6).view(2, 3)).sum().backward()


@pytest.mark.parametrize(
    ("amp", "base", "told"),
    [
        (None, "bfloat16, in which weights are held", "It holds its weights in bfloat16."),
        ("bfloat16", "bfloat16, under autocast", "It trains under autocast in bfloat16, which"),
    ],
)
def test_where_the_base_comes_from_is_told(amp, base, told):
    dag = trace(job_of(Adapted(torch.bfloat16), amp))
    assert dict(summarize(dag))["base"] == base
    printed = io.StringIO()
    _render(dag, Path("dag.qsync"), Console(file=printed, width=200))
    assert told in printed.getvalue()


class Functional(nn.Module):
    """Modules whose weights functional calls read: alone, and beside the module's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.called, self.read, self.both = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        for part in (self.called, self.read, self.both, self.attention):
            part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(self.called(self.norm(x)), self.read.weight, self.read.bias)
        x = nn.functional.linear(self.both(x), self.both.weight)
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_weight_that_a_functional_call_reads_is_not_storable():
    """It would be read dequantized, and stay so until backward."""

    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(size, 3, 8),), target=torch.zeros(size, 3, 8))

    job = Job(
        "functional", Functional(), batch, lambda output, batch: (output - batch.target).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), 4,
    )  # fmt: skip
    found = {operator.op_id.fqn: operator.not_stored_as(Storage.NF4) for operator in trace(job).operators if operator.frozen}
    assert not found.pop("called")
    assert set(found) == {"read", "both", "attention.in_proj_weight", "attention.out_proj"}
    assert all("read by a functional call" in reason for reason in found.values())


class Own(nn.Module):
    """A layer that calls functions with its own weight: as a linear layer, and as an embedding too where it is asked to."""

    def __init__(self, embeds: bool = False, turns: bool = False) -> None:
        super().__init__()
        self.weight, self.embeds, self.turns = nn.Parameter(torch.randn(8, 8), requires_grad=False), embeds, turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight) + self.weight.norm()
        if self.embeds:
            y = y + nn.functional.embedding(torch.arange(3), self.weight)
        return y @ self.weight if self.turns else y


class OwnLinear(nn.Linear):
    """A linear module with a forward of its own, as loralib's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + x


class OwnProduct(nn.Module):
    """As short recipes write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_the_weight_of_a_layer_that_calls_linear_itself_is_storable():
    """Layers that have adapters beside their weight do; one whose weight is looked up or turned is read dequantized too often."""
    own = {"own": Own(), "linear": OwnLinear(8, 8).requires_grad_(False), "product": OwnProduct()}
    parts = {"norm": nn.LayerNorm(8), **own, "embeds": Own(embeds=True), "turns": Own(turns=True)}

    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(size, 3, 8),), target=torch.zeros(size, 3, 8))

    job = Job(
        "own", nn.Sequential(OrderedDict(parts)), batch, lambda output, batch: (output - batch.target).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), 4,
    )  # fmt: skip
    found = {operator.op_id.fqn: operator.not_stored_as(Storage.NF4) for operator in trace(job).operators if operator.frozen}
    assert not found.pop("own.weight")
    assert not found.pop("linear.weight")
    assert not found.pop("product.weight")
    assert set(found) == {"embeds.weight", "turns.weight"}
    assert all("read by a functional call other than" in reason for reason in found.values())
