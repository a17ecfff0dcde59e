"""Forwards that are generators: what they give is computed when the script asks for it, as planned for the forward that it called.

The reference is the same model with the same seed, whose forward returns a list.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, named
from .two_layers import equal

VARIANTS = named(a=Variant.of(Precision.INT8), b=BFLOAT16, c=INT8)


class Listed(nn.Module):
    """A module, a function and a checkpointed function, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def pieces(self, x):
        x = torch.relu(self.a(x))
        yield x
        x = torch.relu(F.linear(x, self.b.weight, self.b.bias))
        yield {"x": [x]}
        yield checkpoint(lambda t: F.linear(t, self.c.weight), x, use_reentrant=False)

    def forward(self, x):
        return list(self.pieces(x))


class Yielding(Listed):
    def forward(self, x):
        yield from self.pieces(x)


class Returning(Listed):
    def forward(self, x):
        return self.pieces(x)


class Inside(Listed):
    """Generators in a container."""

    def forward(self, x):
        return {"pieces": [(self.pieces(x), self.pieces(x))], "x": iter([x])}


class Sent(Listed):
    def forward(self, x):
        try:
            x = yield self.a(x)
        except ValueError:
            x = -x
        yield F.linear(x, self.b.weight)
        return F.linear(x, self.c.weight)


def planned(kind):
    model = kind()
    return model, apply_(model, VARIANTS, seed=5)


def gradients_of(model, output):
    first, second, third = output
    assert first.dtype == second["x"][0].dtype == third.dtype == torch.float32
    model.zero_grad()
    (first.square().sum() + second["x"][0].square().sum() + third.square().sum()).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [Yielding, Returning])
def test_pieces_run_as_planned_and_nothing_is_missed(x, kind):
    (expected, _), (model, _) = planned(Listed), planned(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert equal(gradients_of(model, model(x)), gradients_of(expected, expected(x)))


def test_pieces_of_two_forwards_each_have_their_own_random_numbers(x):
    (expected, _), (model, _) = planned(Listed), planned(Yielding)
    lists = [expected(x), expected(2 * x)]
    pairs = list(zip(model(x), model(2 * x), strict=True))  # in turns
    for found, output in zip(zip(*pairs, strict=True), lists, strict=True):
        assert equal(gradients_of(model, found), gradients_of(expected, output))


def test_evaluation_is_in_full_precision(x):
    model, _ = planned(Yielding)
    assert torch.equal(list(model.eval()(x))[2], Listed()(x)[2])


def test_what_the_script_sends_and_throws_arrives(x):
    (model, _), plain = planned(Sent), Sent()
    for run in (model, plain):
        pieces = run(x)
        first = next(pieces)
        assert torch.allclose(pieces.send(2 * first), F.linear(2 * first, run.b.weight), atol=0.05)
        with pytest.raises(StopIteration) as end:
            next(pieces)
        assert torch.allclose(end.value.value, F.linear(2 * first, run.c.weight), atol=0.05)
        assert end.value.value.dtype is torch.float32
        pieces = run(x)
        next(pieces)
        assert torch.allclose(pieces.throw(ValueError("again")), F.linear(-x, run.b.weight), atol=0.05)
        pieces.close()
        with pytest.raises(StopIteration):
            next(pieces)


def test_an_operator_that_no_piece_runs_is_named_at_the_end(x):
    class Early(Listed):
        def forward(self, x):
            yield self.a(x)

    model, _ = planned(Early)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(piece.sum() for piece in model(x)).backward()
    with pytest.warns(UserWarning, match="the plan lowers b#0, c#0, which the first step did not run"):
        optimizer.step()


def test_generators_in_a_container_run_as_planned(x):
    """Both give what the list gives: they belong to one forward."""
    (expected, _), (model, _) = planned(Listed), planned(Inside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, gradients = model(x), gradients_of(expected, expected(x))
        for pieces in output["pieces"][0]:
            assert equal(gradients_of(model, list(pieces)), gradients)
    assert torch.equal(next(output["x"]), x)
