"""A model in 16 bits whose script names the format that it casts to is observed as one that follows its weights', in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.tracing.trace import trace

HALF = torch.bfloat16
Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
LADDER = [Variant.named("bfloat16@nf4"), Variant.named("int8")]


class Block(nn.Module):
    """A frozen layer in bfloat16 with an adapter, behind a norm in float32."""

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self.norm, self.frozen = nn.LayerNorm(16), nn.Linear(16, 16).to(HALF).requires_grad_(False)
        self.down, self.up, self.cast = nn.Linear(16, 4).to(HALF), nn.Linear(4, 16).to(HALF), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cast(self.norm(x.float()), self.frozen.weight.dtype)
        return torch.tanh(self.frozen(y) + self.up(self.down(y))).float()


class Net(nn.Module):
    """Two of them, checkpointed or not."""

    def __init__(self, cast: Cast = torch.Tensor.to, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.checkpointed = nn.ModuleList([Block(cast), Block(cast)]), nn.Linear(16, 3), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x.float())


def observed(
    model: nn.Module, given: torch.dtype = torch.float32, announce: Callable[[str], None] = lambda text: None
) -> dict[tuple[str, str, str], tuple[float, ...]]:
    def batch(step: int, size: int) -> Batch:
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(step)).to(HALF)  # of which each format has the values
        return Batch((x.to(given),), target=torch.arange(size) % 3)

    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output, batch.target)

    job = Job("net", model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=8)
    found = observe(job, trace(job), ObserveRequest(LADDER, warmup=1, steps=2), announce=announce)
    return {(str(series.op_id), str(series.variant), series.term): tuple(series.values) for series in found.series}


@pytest.mark.parametrize(
    ("cast", "checkpointed", "given"),
    [
        (lambda y, _: y.to(HALF), False, torch.float32),
        (lambda y, _: y.to(dtype=HALF), False, torch.float32),
        (lambda y, _: y.bfloat16(), False, HALF),
        (lambda y, _: torch.empty_like(y, dtype=HALF).copy_(y), False, torch.float32),
        (lambda y, _: y.to(HALF), True, HALF),
    ],
    ids=["to", "to by name", "bfloat16", "made anew", "checkpointed"],
)
def test_what_the_script_casts_to_sixteen_bits_is_observed_in_float32(cast: Cast, checkpointed: bool, given: torch.dtype) -> None:
    model = Net(cast, checkpointed)
    wanted, found = observed(Net()), observed(model, given)
    assert found.keys() == wanted.keys()
    assert sum("store=nf4" in variant for _, variant, _ in found) > 20
    for key, values in found.items():
        assert values == pytest.approx(wanted[key], rel=1e-5), key
    assert model(torch.randn(2, 16)).dtype is torch.float32
    assert cast(torch.ones(2), HALF).dtype is HALF, "as ever, outside of observing"


class UnderAutocast(Net):
    """Enters it in its forward, which is how PyTorch's manual has it for models that other code calls."""

    @torch.autocast("cpu", HALF)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


def test_an_autocast_in_the_forward_is_not_in_force() -> None:
    wanted, found = observed(Net()), observed(UnderAutocast())
    common = found.keys() & wanted.keys()
    assert sum("store=nf4" in variant for _, variant, _ in common) > 20
    for key in common:
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
    with torch.autocast("cpu", HALF):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is HALF, "and is in force again behind that"


class Plain(nn.Module):
    """All in bfloat16, as are the batches that it takes without a cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.head = nn.Linear(16, 16).to(HALF).requires_grad_(False), nn.Linear(16, 3).to(HALF)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.frozen(x))).float()


def test_batches_that_a_loader_gives_in_sixteen_bits() -> None:
    assert sum("store=nf4" in variant for _, variant, _ in observed(Plain(), HALF)) > 5


TABLE = torch.eye(16, dtype=HALF).flip(0)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not HALF:
        raise TypeError("only bfloat16 is supported")
    return x


def run_again(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: (y.float() * 1.0).to(HALF) @ TABLE, x, use_reentrant=False)


class Insisting(Net):
    """On its format, as code in front of kernels for 16 bits does, or by tensors that are neither parameters nor buffers."""

    def __init__(self, within: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.within(self.blocks[0].frozen(x.to(HALF))).float())


@pytest.mark.parametrize(
    ("within", "in_any_format"),
    [
        (as_it_is, lambda x: x),
        (lambda x: x @ TABLE, lambda x: x.flip(-1)),
        (lambda x: x @ TABLE.view(torch.int16).view(HALF), lambda x: x.flip(-1)),
        (run_again, lambda x: x.flip(-1)),
    ],
    ids=["asked for", "a constant", "bits", "a function run again"],
)
def test_what_does_not_run_in_float32_is_observed_in_its_own_format(
    within: Callable[[torch.Tensor], torch.Tensor], in_any_format: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    said: list[str] = []
    wanted, found = observed(Insisting(in_any_format)), observed(Insisting(within), announce=said.append)
    assert [text for text in said if text.startswith("updates in bfloat16 are observed instead of float32")]
    stored = [key for key in wanted if key[2] == "stored_grad"]
    assert len(stored) == 2
    for key in stored:
        assert found[key] == pytest.approx(wanted[key], rel=0.1), key
