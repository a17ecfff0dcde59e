"""Training in two passes over a batch (GradCache): the second one, with gradients, rounds as the first one did."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch import apply_

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
    for _ in range(2):
        way(run, applied, lambda: chunks(batch))
        applied.advance()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("part", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_gradients_are_those_of_one_pass(batch, part, checkpointed):
    pieces = batch.split(4)
    for chunks in (lambda _: pieces, lambda batch: batch.split(4), lambda batch: [batch[:4], batch[4:]]):
        found = gradients(in_two_passes, batch, chunks, part, checkpointed)
        expected = gradients(in_one_pass, batch, chunks, part)
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(found, expected, strict=True))


def test_a_batch_that_is_copied_rounds_alike_and_anew_in_the_next_step(batch):
    model = Towers()
    applied = apply_(model, VARIANTS)
    with torch.no_grad():
        first = model(batch)
    assert torch.equal(model(batch.clone()), first)
    applied.advance()
    assert not torch.equal(model(batch), first)


def test_a_compiled_model_repeats_its_first_pass(batch):
    torch._dynamo.reset()
    model = Towers()
    apply_(model, VARIANTS)
    run = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        first = run(batch)
    assert torch.equal(run(batch), first)
