"""Fused chains in a profile: which ways to run are measured, what is kept, and that plans can be made of it."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.artifacts import files as artifact
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import ChainVariant, Producer
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.semantics import chain_result, chain_run
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import bench
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.chain_cost import chain_case, distinct_chains
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort, make_stopwatch
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.chooser import KernelChooser

from ..compiling.chained_models import Bert, ResNet, Vgg, images

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
EFFORTS = Efforts(QUICK, QUICK, QUICK)
INT8, BFLOAT16, FLOAT32 = (Variant.of(p) for p in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))
LADDER = (INT8, BFLOAT16, FLOAT32)
CPU = torch.device("cpu")


def job_of(model, make=images):
    return Job(
        "chained",
        model,
        lambda step, size: Batch((make(size),), target=torch.arange(size) % 4),
        lambda output, batch: F.cross_entropy(output.reshape(len(batch.target), -1), batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def tokens(batch):
    return torch.randn(batch, 5, 16)


@pytest.fixture(scope="module")
def job():
    return job_of(Vgg())


@pytest.fixture(scope="module")
def dag(job):
    return trace(job)


@pytest.fixture(scope="module")
def found(job, dag):
    return profile(job, dag, ProfileRequest(ladder=LADDER, with_chains=True, efforts=EFFORTS))


def test_every_chain_is_measured_however_its_neighbours_run(dag, found):
    """By trying all variants of the readers, and formats that may arrive; ReLU's input is not kept in 8 bit."""
    wanted = set()
    for chain in chains_of(dag):
        for variant in LADDER:
            result = chain_result(chain, dict.fromkeys(chain.product_readers, variant))
            for saved in (None,) if chain.producer is Producer.ACTIVATION else (None, Precision.INT8):
                for arriving in (Precision.FLOAT32, Precision.BFLOAT16):
                    run = chain_run(chain, ChainVariant(saved=saved), result, arriving)
                    wanted.add((chain.name, run.form, run.variant))
    assert wanted == set(found.chain_index)
    assert len({chain.name for chain in chains_of(dag)}) == 4
    for entry in found.chains:
        assert entry.cost.backend == "aten"
        assert entry.cost.forward_compute_ns > 0
        assert entry.cost.backward_compute_ns > 0


def test_it_can_be_stored_and_nothing_else_differs(job, dag, found):
    assert artifact.from_bytes(artifact.to_bytes(found), Profile) == found
    without = profile(job, dag, ProfileRequest(ladder=LADDER, efforts=EFFORTS))
    assert without.chains == ()
    assert b"chains" not in artifact.to_bytes(attrs.evolve(without, check=None))  # which a later version added
    assert without.cost_index == found.cost_index


def test_chains_that_cost_the_same_are_measured_once():
    dag = trace(job_of(ResNet()))
    together = {frozenset(map(str, item.holders)) for item in distinct_chains(dag, LADDER)}
    assert frozenset(["blocks.0.bn1#0", "blocks.1.bn1#0", "blocks.2.bn1#0"]) in together
    assert frozenset(["bn#0"]) in together


def elements_kept(dag, item):
    """What backward reads besides an input kept as it is, in bytes, by the text of docs/design/fused-chains.md."""
    chain, variant, form = item.chain, item.run.variant, item.run.form
    numel = 1
    for size in item.shape:
        numel *= size
    groups = item.shape[1] if chain.producer is Producer.BATCH_NORM else item.shape[0]
    statistics = {Producer.ACTIVATION: 0, Producer.GLU: 0, Producer.RMS_NORM: 4 * groups}.get(chain.producer, 2 * 4 * groups)
    operands = 1 if chain.factor is None else 2
    copied = 0 if chain.normalizes_a_sum else operands - len(chain.operands)  # what does not lie in rows
    kept = numel * variant.saved.nbytes if chain.normalizes_a_sum else copied * numel * variant.saved.nbytes
    bits = 0
    if chain.producer is Producer.BATCH_NORM and form.activation == "relu" and (form.residual or variant.saved.needs_scale):
        batch, channels, height, width = item.shape
        bits = batch * height * width * -(-channels // 8)
    return statistics + (operands * (numel + 4 * groups) if variant.saved.needs_scale else kept) + bits


class Gated(nn.Module):
    """Norms written out, with and without an addition and a weight, and gated units, one of two halves of a result."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.both, self.weight, self.head = nn.Linear(16, 64), nn.Parameter(torch.ones(16)), nn.Linear(32, 4)

    def forward(self, x):
        y = self.norm(x)
        x = self.down(F.silu(self.gate(y)) * self.up(y)) + y
        x = (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        gate, up = self.both(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight).chunk(2, -1)
        return self.head(up * F.gelu(gate))


@pytest.mark.parametrize("model, make", [(ResNet, images), (Bert, tokens), (Gated, tokens)])
def test_what_a_chain_keeps(model, make):
    """Channels-last images, and rows: no copy of the input is made."""
    dag = trace(job_of(model().to(memory_format=torch.channels_last), make))
    measured = 0
    for item in distinct_chains(dag, LADDER):
        choice = KernelChooser(CPU).for_chain(item.requests(CPU))
        if choice is None:
            continue
        cost = bench.measure_case(lambda item=item: chain_case(dag, item, KernelChoice(), CPU), choice, make_stopwatch(CPU), QUICK)
        assert cost.saved_own_bytes == elements_kept(dag, item), item.run
        as_it_is = not item.run.variant.saved.needs_scale and not item.chain.normalizes_a_sum
        assert len(cost.saves_inputs) == (len(item.chain.operands) if as_it_is else 0)
        measured += 1
    assert measured >= 20


def test_a_killed_run_continues_with_the_chains_that_are_left(job, dag, tmp_path, monkeypatch):
    measured, original = [], bench.measure_case

    def counting(*arguments):
        measured.append(1)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(bench, "measure_case", counting)
    with pytest.raises(KeyboardInterrupt):
        profile(job, dag, ProfileRequest(ladder=LADDER, with_chains=True, efforts=EFFORTS), resume=tmp_path / "x.partial")
    profile(job, dag, ProfileRequest(ladder=LADDER, with_chains=True, efforts=EFFORTS), resume=tmp_path / "x.partial")
    ways = [item for item in distinct_chains(dag, LADDER) if KernelChooser(CPU).for_chain(item.requests(CPU)) is not None]
    assert len(measured) == len(ways) + 1
