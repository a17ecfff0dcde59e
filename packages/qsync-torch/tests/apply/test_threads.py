"""Models under a plan in scripts of several threads, and backward passes in another thread than their forward ran in.

A GPU's backward pass always runs in autograd's own threads; here the script calls ``backward()`` in one of its own.  The reference
is the same work, one thread after the other.
"""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import PlanError
from qsync_torch import apply_

from .small_models import BFLOAT16, INT8, named
from .test_own_checkpoints import attached, checkpoint, diffusion, equal, gradients_of, hooks, reentrant, separate

PATIENCE_S = 30


def pytorchs(function, x, parameters):
    return checkpoint(function, x, use_reentrant=False)


KINDS = [pytorchs, reentrant, diffusion, separate, attached, hooks]


class Gate(nn.Module):
    """Calls what a test gives it, in the middle of a forward, and where that runs again."""

    def __init__(self):
        super().__init__()
        self.meet = None

    def forward(self, x):
        if self.meet is not None:
            self.meet()
        return x


class Gated(nn.Module):
    """Two layers and a product, as modules and as functions, in a checkpoint of the given kind."""

    def __init__(self, kind, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.gate = nn.Linear(16, 16), nn.Linear(16, 16), Gate()
        self.right = nn.Parameter(torch.randn(16, 16) / 4)
        self.kind = kind

    def body(self, x):
        x = self.gate(torch.relu(self.a(x)))
        return F.linear(x, self.b.weight, self.b.bias) @ self.right

    def forward(self, x):
        y = self.body(x) if self.kind is None else self.kind(self.body, x, list(self.parameters()))
        return y.float().sin()


VARIANTS = named(a=INT8, b=BFLOAT16, right=INT8)


def planned(kind, seed=0):
    model = Gated(kind, seed)
    return model, apply_(model, VARIANTS, seed=5)


def inputs(seed=1):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def in_thread(work, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result(PATIENCE_S)


def two_steps(model):
    """Two forwards before one backward."""
    return gradients_of(model, model(inputs(1)).square().sum() + model(inputs(2)).square().sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_in_another_thread_repeats_its_forwards(kind):
    def gradients(kind, run):
        model, applied = planned(kind)
        loss = model(inputs(1)).square().sum() + model(inputs(2)).square().sum()
        return run(gradients_of, model, loss), applied.step

    expected, found = gradients(None, lambda work, *args: work(*args)), gradients(kind, in_thread)
    assert equal(found[0], expected[0])
    assert found[1] == expected[1] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_train_a_model_each(kind):
    """They wait for each other in the middle of each forward, and of what runs again."""
    expected = [two_steps(planned(kind, seed)[0]) for seed in range(2)]
    models = [planned(kind, seed)[0] for seed in range(2)]
    barrier = threading.Barrier(2)
    for model in models:
        model.gate.meet = lambda: barrier.wait(PATIENCE_S)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(two_steps, models))
    assert all(map(equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_model_of_another_thread_does_not_change_an_evaluation(kind):
    """Its forward has begun inside a forward of the planned one, and runs again while that is evaluated."""
    model, _ = planned(None)
    other = Gated(kind, seed=3)
    losses = []
    model.gate.meet = lambda: losses.append(in_thread(lambda: other(inputs(2)).square().sum()))
    model(inputs(1))
    model.gate.meet, model.kind = None, pytorchs
    found = []
    other.gate.meet = lambda: found.append(in_thread(model.eval(), inputs(1)))
    gradients = gradients_of(other, losses[0])
    plain = Gated(None)
    assert found
    assert all(torch.equal(y, plain(inputs(1))) for y in found)
    reference = Gated(None, seed=3)
    assert equal(gradients, gradients_of(reference, reference(inputs(2)).square().sum()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_forward_begins_while_another_thread_is_in_the_backward(kind):
    def gradients(meets):
        model, applied = planned(kind)
        first = model(inputs(1)).square().sum()
        later = []

        def meet():
            model.gate.meet = None
            later.append(in_thread(model, inputs(2)))

        if meets:
            model.gate.meet = meet
        else:
            later.append(model(inputs(2)))
        found = gradients_of(model, first)
        return [*found, *gradients_of(model, later[0].square().sum())], applied.step

    expected, found = gradients(False), gradients(True)
    assert equal(found[0], expected[0])
    assert found[1] == expected[1] == 2


@pytest.mark.parametrize("kind", [pytorchs, diffusion, attached, hooks])  # others accumulate into .grad, which both would share
def test_two_backward_passes_of_one_model_run_in_two_threads(kind):
    def gradients(threads):
        model, _ = planned(kind)
        losses = [model(inputs(seed)).square().sum() for seed in (1, 2)]
        grad = lambda loss: torch.autograd.grad(loss, list(model.parameters()))  # noqa: E731
        if not threads:
            return [grad(loss) for loss in losses]
        barrier = threading.Barrier(2)
        model.gate.meet = lambda: barrier.wait(PATIENCE_S)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(grad, losses))
        model.gate.meet = None
        assert not model(inputs(1)).equal(model(inputs(1)))  # its random numbers go on
        assert torch.equal(model.eval()(inputs(1)), Gated(None)(inputs(1)))
        return found

    assert all(map(equal, gradients(True), gradients(False)))


def test_nodes_of_another_thread_are_known_also_after_something_ran_again_here():
    model, _ = planned(pytorchs)
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss = model.train()(inputs(1)).square().sum() + model.eval()(inputs(2)).square().sum()
            pool.submit(gradients_of, model.train(), loss).result(PATIENCE_S)


@pytest.mark.parametrize("part", [True, False])
def test_one_model_in_two_threads_at_once_is_refused(part):
    model, _ = planned(None)
    other = model.a if part else model
    model.gate.meet = lambda: in_thread(other, inputs(1))
    with pytest.raises(PlanError, match=r"runs in two threads at once.*copy\.deepcopy"):
        model(inputs(1))
    model.gate.meet = None
    assert in_thread(two_steps, model)[0].isfinite().all()
