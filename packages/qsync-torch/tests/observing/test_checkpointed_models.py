"""What hutchinson observes of a model with activation checkpointing is what it observes without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from qsync_core.artifacts.files import digest
from qsync_core.ir import observations as terms
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.observing.second_derivatives import Uncheckpointed
from qsync_torch.tracing.trace import trace

Observed = dict[tuple[str, str, str], tuple[float, ...]]
LADDER = [Variant.named("bfloat16@nf4"), Variant.named("int8")]


class Block(nn.Module):
    """A frozen linear with an adapter, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.LayerNorm(16), nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.frozen(y) + self.up(self.down(y)))


class Net(nn.Module):
    """Two blocks, each checkpointed; ``how`` says by what."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.how, self.gradient_checkpointing = how.removeprefix("float32 "), how == "switched"
        if how == "wrapped":
            self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))
        if not how.startswith("float32"):
            self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        for block in self.blocks:
            if self.gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=True)
            elif self.how == "called":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def job_of(model: nn.Module) -> Job:
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(size, 16, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 3)

    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output.float(), batch.target)

    return Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=8)


def assert_alike(found: Observed, wanted: Observed) -> None:
    assert found.keys() == wanted.keys()
    for key, values in found.items():
        assert values == pytest.approx(wanted[key], rel=1e-5), key


def observed(model: nn.Module) -> Observed:
    job = job_of(model)
    found = observe(job, trace(job), ObserveRequest(LADDER, warmup=0, steps=2, collectors=[HutchinsonCollector()]))
    return {
        (str(series.op_id).replace("_checkpoint_wrapped_module.", ""), str(series.variant), series.term): tuple(series.values)
        for series in found.series
    }


@pytest.mark.parametrize("how", ["called", "wrapped", "switched"])
def test_a_checkpointed_model_is_observed_as_one_without(how: str) -> None:
    wanted, found = observed(Net()), observed(Net(how))
    assert sum(name.startswith("blocks.") for name, _, _ in found) > 20
    assert_alike(found, wanted)


def test_what_chains_in_checkpoints_keep_is_observed_too() -> None:
    found = observed(Net("float32 called"))
    assert {name for name, _, term in found if term == terms.KEPT_INPUT} == {"blocks.0.norm#0", "blocks.1.norm#0"}
    assert_alike(found, observed(Net("float32")))


@pytest.mark.parametrize("how", ["called", "switched"])
def test_a_graph_has_no_checkpoints_in_it(how: str) -> None:
    """So a rank may have them alone: the plan of the others is its own too."""
    assert digest(trace(job_of(Net(how)))) == digest(trace(job_of(Net())))


def test_what_switches_checkpoints_is_set_back() -> None:
    """And the model has no more hooks than before."""
    model = Net("switched")
    with Uncheckpointed(model):
        assert not model.gradient_checkpointing
    assert model.gradient_checkpointing
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Loose(Net):
    """Has code outside of modules in a checkpoint: what collectors replace, an operator of plans, and a product of activations."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def inner(self, y: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.layer_norm(y, (16,)))
        return self.blocks[0](F.linear(y, self.stem.weight) * torch.tanh(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        return self.head(checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


def test_code_outside_of_modules_may_be_checkpointed() -> None:
    wanted, found = observed(Loose(False)), observed(Loose())
    assert {name for name, _, _ in found} > {"stem#0", "stem#1", "blocks.0.frozen#0", "head#0"}
    assert_alike(found, wanted)


class Nested(Loose):
    """Has checkpoints inside of a checkpoint, one of them next to nothing else."""

    def inner(self, y: torch.Tensor) -> torch.Tensor:
        def deeper(z: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.part(super(Nested, self).inner, z)) * z

        return self.part(deeper, y)

    def part(self, run: Callable[[torch.Tensor], torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return checkpoint(run, y, use_reentrant=False) if self.checkpointed else run(y)


def test_checkpoints_inside_of_checkpoints() -> None:
    """Their graph is that of the model without them; it ended in gradients that no parameter got."""
    assert digest(trace(job_of(Nested()))) == digest(trace(job_of(Nested(False))))
    assert_alike(observed(Nested()), observed(Nested(False)))


class Follows(nn.Linear):
    @property
    def gradient_checkpointing(self) -> bool:
        return True


def test_a_switch_that_cannot_be_set_stays() -> None:
    """As where it follows from other settings: what is checkpointed then is kept as elsewhere."""
    model = nn.Sequential(Follows(4, 4))
    with Uncheckpointed(model):
        assert model[0].gradient_checkpointing
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Dropped(Net):
    """Draws other masks where a checkpoint runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.blocks[0](y), 0.3) * y

        x = self.stem(x.to(self.stem.weight.dtype))
        return self.head(checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False) if self.how == "called" else inner(x))


def test_what_stored_weights_change_together_is_of_one_run_too() -> None:
    """The gradients that are compared, with and without stored weights; those of the training step are the script's matter."""
    found, wanted = observed(Dropped("called")), observed(Dropped())
    assert {key: values[0] for key, values in found.items() if key[0] != "None"} == pytest.approx(
        {key: values[0] for key, values in wanted.items() if key[0] != "None"}, rel=1e-5
    )


@pytest.mark.parametrize("how", ["plain", "called"])
def test_a_graph_that_no_backward_pass_comes_by_is_released(how: str) -> None:
    """As where memory runs out before: a batch is then taken in parts, for which that memory is needed."""
    model = Net(how)
    with Uncheckpointed(model) as uncheckpointed, uncheckpointed.forward():
        y = model.stem(torch.randn(2, 16, dtype=torch.bfloat16))
        kept = checkpoint(torch.exp, y, use_reentrant=False) if how == "called" else torch.exp(y)
        output = kept.sum()
    held = weakref.ref(kept)
    del kept, output, y
    gc.collect()
    assert held() is None


def test_a_forward_that_fails_leaves_no_hooks() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x.exp())

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    with Uncheckpointed(model) as uncheckpointed, uncheckpointed.forward(), pytest.raises(ValueError):
        checkpoint(model, torch.randn(2, 4), use_reentrant=False)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
