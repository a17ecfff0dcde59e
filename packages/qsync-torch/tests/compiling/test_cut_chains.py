"""What a graph break cuts of chains is said, once, by the names of both parts; results stay right."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_torch as qsync
from nightly import nightly

from .chained_models import images, lowered
from .test_planned_chains import FLOAT32, FUSED, NEAREST, plan_of


@torch._dynamo.disable
def eager_relu(x):
    return F.relu(x)


def cut(x):
    torch._dynamo.graph_break()
    return x


def whole(x):
    return x


class Block(nn.Module):
    """A residual block whose graph can be broken in four places."""

    def __init__(self, *places):
        super().__init__()
        self.places = places
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv3, self.pool = nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)

    def forward(self, x):
        at = dict.fromkeys(self.places, cut)
        y = at.get("norm", whole)(self.bn1(at.get("product", whole)(self.conv1(x))))
        y = eager_relu(y) if "eager" in self.places else F.relu(y)
        z = self.bn2(self.conv2(at.get("function", whole)(y)))
        z = at.get("sum", whole)(at.get("norm2", whole)(z) + x)
        return self.pool(self.conv3(F.relu(z)))


class Pooled(Block):
    """No chain ends where its graph is broken."""

    def forward(self, x):
        return self.conv2(cut(self.conv1(cut(self.pool(F.relu(self.bn1(self.conv1(x))))))))


class Shortcut(Block):
    """What a chain behind the break takes as its residual is a batch norm of its own."""

    def forward(self, x):
        y = cut(self.bn1(self.conv1(x)))
        return self.conv3(F.relu(self.bn2(self.conv2(x)) + y))


class Called(nn.Module):
    """Functional operators, without modules that name them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        y = cut(F.gelu(self.up(cut(self.norm(x)))))
        return F.linear(y, self.down.weight)


def said(run, x, steps=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            run(x.clone().requires_grad_()).sum().backward()
    return [str(one.message) for one in caught if "in parts" in str(one.message)]


def compiled(model, x_plan=None, variant=NEAREST, without=()):
    model = qsync.apply_(model, lowered(model, variant, without)) if x_plan is None else model
    return qsync.compile(model, x_plan, backend="aot_eager")


@pytest.mark.parametrize(
    "places, shown",
    [
        (("function", "sum"), "bn1 before conv2, bn2 before conv3"),
        *nightly((("norm", "norm2"), "bn1 before conv2, bn2 before conv3"), (("eager",), "eager activation before conv2")),
    ],
)
@pytest.mark.slow
def test_both_parts_are_named_once(places, shown):
    (sentence,) = said(compiled(Block(*places)), images(), steps=2)
    assert f"({shown}), because its graph is cut between them by graph breaks: " in sentence
    assert "results are right, but it takes more time and memory" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("make", [Block, *nightly(lambda: Block("product"), Pooled, Shortcut)])
def test_nothing_is_said_where_nothing_is_lost(make):
    model = make()
    assert said(compiled(model), images()) == []


def test_nothing_is_said_of_operators_in_float_formats_and_in_evaluation():
    assert said(compiled(Block("norm"), without=("conv2",)), images()) == []
    run = compiled(Block("norm"))
    run.eval()
    assert said(run, images()) == []


def test_functions_are_named_after_their_module():
    (sentence,) = said(compiled(Called()), torch.randn(4, 16))
    assert "(norm before up, gelu before down)" in sentence


@pytest.mark.parametrize(
    "place, variant, chains, shown",
    [
        ("function", NEAREST, ("bn1#0",), "bn1 before conv2"),
        ("norm", NEAREST, ("bn1#0",), "bn1 before conv2"),
        ("function", NEAREST, ("bn2#0",), ""),
        *nightly(("norm", FLOAT32, ("bn1#0",), "bn1 before relu"), ("function", FLOAT32, ("bn1#0",), "")),
    ],
)
def test_of_a_plan_that_names_chains_only_those(place, variant, chains, shown):
    model = Block(place)
    sentences = said(compiled(model, plan_of(model, variant, dict.fromkeys(chains, FUSED))), images())
    assert [f"({shown})" in sentence for sentence in sentences] == ([True] if shown else [])


@pytest.mark.distributed
def test_buckets_cut_chains_too(tmp_path, monkeypatch):
    """DistributedDataParallel inside the compiled model, with a bucket for each operator or so."""
    monkeypatch.setattr("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Block()
        qsync.apply_(model, lowered(model, NEAREST))
        parallel = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        (sentence,) = said(qsync.compile(parallel, backend="aot_eager"), images())
        assert "(bn1 before conv2, bn2 before conv3), because its graph is cut between them by buckets of" in sentence
    finally:
        dist.destroy_process_group()
