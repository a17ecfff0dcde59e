"""Training in two passes over a batch (GradCache): the second one, with gradients, rounds as the first one did."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_
from qsync_torch.apply import planned_forwards

from .small_models import BFLOAT16, INT8, named


class Towers(nn.Module):
    """An encoder, of which a script may call the model or the part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.encoder(x)


VARIANTS = {**named(**{"encoder.0": INT8}), **named(**{"encoder.2": BFLOAT16})}


@pytest.fixture(autouse=True)
def said_nothing():
    planned_forwards._say_once.cache_clear()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return torch.randn(8, 16)


def contrast(z):
    return torch.logsumexp(z @ z.t(), 1).mean()


def in_one_pass(model, applied, chunks):
    """Each chunk with gradients at once, in forwards of the same numbers."""
    contrast(torch.cat([model(chunk) for chunk in chunks()])).backward()


def in_two_passes(model, applied, chunks):
    with torch.no_grad():
        first = [model(chunk) for chunk in chunks()]
    representations = torch.cat(first).requires_grad_()
    contrast(representations).backward()
    for chunk, before, grad in zip(chunks(), first, representations.grad.split(4), strict=True):
        z = model(chunk)
        assert torch.equal(z, before)
        (z * grad).sum().backward()


def gradients(way, batch, chunks, part=False, checkpointed=False):
    model = Towers()
    applied = apply_(model, VARIANTS, seed=3)
    called = model.encoder if part else model
    run = (lambda x: checkpoint(called, x, use_reentrant=False)) if checkpointed else called
    for step in range(2):
        way(run, applied, lambda: chunks(batch))
        assert applied.step == 2 * (step + 1)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_gradients_are_those_of_one_pass(batch, part, checkpointed):
    pieces = batch.split(4)
    for chunks in (lambda _: pieces, lambda batch: batch.split(4), lambda batch: [batch[:4], batch[4:]]):
        found = gradients(in_two_passes, batch, chunks, part, checkpointed)
        expected = gradients(in_one_pass, batch, chunks, part)
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(found, expected, strict=True))


def test_a_batch_is_repeated_once_and_only_where_it_is_the_same(batch):
    model = Towers()
    applied = apply_(model, VARIANTS)
    with torch.no_grad():
        first = model(batch)
    assert torch.equal(model(batch), first)
    assert applied.step == 1
    assert not torch.equal(model(batch), first)  # the next step, on the same batch
    assert applied.step == 2
    with torch.no_grad():
        model(batch)
    batch.mul_(1)
    model(batch)
    assert applied.step == 4
    with torch.no_grad():
        model(batch)
    model(batch.clone())
    assert applied.step == 6


def test_reentrant_checkpoints_of_the_model_are_no_first_passes(batch):
    model = Towers()
    applied = apply_(model, VARIANTS)
    for step in range(3):
        checkpoint(model, batch.requires_grad_(), use_reentrant=True).sum().backward()
        assert applied.step == step + 1
    model(batch)
    assert applied.step == 4


def test_evaluations_are_no_first_passes(batch):
    model = Towers()
    applied = apply_(model, VARIANTS)
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()
    with torch.inference_mode():
        model(batch.clone())
    model(batch)
    assert applied.step == 2


def test_a_first_pass_in_full_precision_is_named(batch):
    model = Towers()
    apply_(model, VARIANTS)
    model.encoder.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encoder(batch.clone())
    with torch.no_grad():
        model.encoder(batch)
    with pytest.warns(UserWarning, match=r"a Sequential in eval mode has run without gradients in full precision.*GradCache"):
        model.encoder(batch)


def test_a_batch_that_is_copied_for_the_second_pass_is_named(batch):
    model = Towers()
    apply_(model, VARIANTS)
    for _ in range(3):
        with torch.no_grad():
            model(batch.roll(1, 0) * 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch)  # others
    with torch.no_grad():
        model(batch)
    with pytest.warns(UserWarning, match=r"a Towers has run without gradients.*on other tensors of the same values.*GradCache"):
        model(batch.clone())


def test_other_tokens_are_another_batch():
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))
    apply_(model, named(**{"1": INT8}))
    tokens = torch.arange(8)
    with torch.no_grad():
        model(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens.flip(0))
    with pytest.warns(UserWarning, match="on other tensors of the same values"):
        model(tokens.clone())


def test_a_first_pass_of_a_compiled_model_is_named_and_a_checkpoint_is_none(batch):
    torch._dynamo.reset()
    model = Towers()
    applied = apply_(model, VARIANTS)
    run = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of ours; the compiler has others
        checkpoint(run, batch.requires_grad_(), use_reentrant=True).sum().backward()
    torch._dynamo.reset()
    step = applied.step
    with torch.no_grad(), pytest.warns(UserWarning, match="a compiled model under a plan runs without gradients in training mode"):
        first = run(batch)
    applied.step = step
    assert torch.equal(run(batch), first)
