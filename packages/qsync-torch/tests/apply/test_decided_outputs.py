"""Outputs that a plan decided: what ``apply_`` takes, refuses and carries out, and that nothing is promoted meanwhile."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

from .small_models import named
from .test_apply import plan_of

BFLOAT16 = Variant.parse("bfloat16")


class AddsInPlace(nn.Module):
    """A buffer of large numbers is added in place to what an operator delivers, and taken off again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("offset", torch.full((8,), 1000.0))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h += self.offset
        g = torch.relu(self.b(h - self.offset))
        self.seen = [h.data.dtype, g.data.dtype]
        return self.c(g)


def traced(model: nn.Module) -> OutputFormats:
    job = Job(
        "m", model, lambda step, size: Batch((torch.randn(size, 8),)), lambda y, _: y.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1), 4,
    )  # fmt: skip
    return OutputFormats.of(trace(job))


def test_what_is_added_in_place_is_delivered_in_float32_and_the_sum_keeps_its_digits() -> None:
    formats = OutputFormats({"b": ("b",)})
    plan = plan_of(formats.decided(named(a=BFLOAT16, b=BFLOAT16, c=BFLOAT16)))
    model, plain, x = AddsInPlace(), AddsInPlace(), torch.randn(16, 8)
    apply_(model, attrs.evolve(plan, output_formats=formats))
    found, expected = model(x), plain(x)
    assert model.seen == [torch.float32, torch.bfloat16]
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert found.dtype is torch.float32


def test_a_plan_that_was_edited_is_refused_with_the_operator_and_what_to_write() -> None:
    formats = OutputFormats({"a": ("a", "b"), "b": ("b",)})
    edited = attrs.evolve(plan_of(named(a=BFLOAT16, b=BFLOAT16.in_float32, c=BFLOAT16.in_float32)), output_formats=formats)
    said = r"lets a#0 of group 'infer' deliver bfloat16, .*beside the result of b, which delivers float32; write out=float32 in"
    with pytest.raises(PlanError, match=said):
        apply_(AddsInPlace(), edited)
    edited = attrs.evolve(plan_of(named(a=BFLOAT16.in_float32, b=BFLOAT16, c=BFLOAT16)), output_formats=formats)
    with pytest.raises(PlanError, match=r"lets c#0 of group 'infer' deliver bfloat16, .*what reads it takes float32"):
        apply_(AddsInPlace(), edited)


def test_a_plan_from_before_delivers_float32_and_says_so() -> None:
    old = attrs.evolve(plan_of(named(a=BFLOAT16, b=BFLOAT16, c=BFLOAT16)), output_formats=None)
    model = AddsInPlace()
    with pytest.warns(UserWarning, match=r"from before QSync decided the format .* all deliver float32"):
        applied = apply_(model, old)
    model(torch.randn(4, 8))
    assert model.seen == [torch.float32, torch.float32]
    assert {variant.label for variant in applied.variants.values()} == {"bfloat16>float32"}


def test_variants_by_operator_deliver_float32_and_whole_assignments_what_they_say() -> None:
    model = AddsInPlace()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = apply_(model, {"b": "bfloat16"})
        model(torch.randn(4, 8))
        assert model.seen == [torch.float32, torch.float32]
        applied.remove()
        (group,) = plan_of({OpId("b"): BFLOAT16}).groups
        apply_(model, group.assignments)
        with pytest.raises(PlanError, match=r"where operators of the plan deliver bfloat16: call \.float"):
            model(torch.randn(4, 8))
    assert model.seen == [torch.float32, torch.bfloat16]


def test_the_trace_of_a_model_that_adds_in_place_keeps_those_operands_in_float32() -> None:
    class Trace(AddsInPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            h += self.offset
            return self.c(torch.relu(self.b(h - self.offset)))

    assert traced(Trace()).together == {"b": ("b",)}


def test_attention_whose_mask_is_in_the_trace_and_in_some_steps_alone() -> None:
    """Transformers' eager attention adds a float32 mask where it is traced or something is hidden, and none otherwise."""
    from transformers import BertConfig, BertModel

    def bert() -> BertModel:
        torch.manual_seed(0)
        config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager")  # fmt: skip
        return BertModel(config, add_pooling_layer=False)

    tokens = torch.arange(16).view(2, 8)
    job = Job(
        "m", bert(), lambda step, size: Batch((tokens.repeat(size // 2, 1),)), lambda y, _: y[0].square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1), 4,
    )  # fmt: skip
    formats = OutputFormats.of(dag := trace(job))
    model, plain = bert(), bert()
    plan = plan_of(formats.decided(dict.fromkeys((operator.op_id for operator in dag.adjustable), BFLOAT16)))
    apply_(model, attrs.evolve(plan, output_formats=formats))
    hidden = torch.ones(2, 8, dtype=torch.long)
    hidden[0, 5:] = 0
    for mask in (None, hidden):
        found, expected = model(tokens, attention_mask=mask)[0], plain(tokens, attention_mask=mask)[0]
        assert (found - expected).norm() < 0.02 * expected.norm()
        found.square().sum().backward()
