"""Fused chains on a GPU: what they cost, and a step under a plan that names them."""

from __future__ import annotations

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import qsync_torch as qsync  # noqa: E402
from qsync_core.chains.finding import chains_of  # noqa: E402
from qsync_core.ir.chain import ChainVariant  # noqa: E402
from qsync_core.ir.formats import OutputFormats  # noqa: E402
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, PrecisionPlan, Role  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_torch.devices import device_type  # noqa: E402
from qsync_torch.job import Batch, Job  # noqa: E402
from qsync_torch.profiling.bench import Efforts  # noqa: E402
from qsync_torch.profiling.profile import ProfileRequest, profile  # noqa: E402
from qsync_torch.timing import Effort  # noqa: E402
from qsync_torch.tracing.trace import trace  # noqa: E402

DEVICE, BACKEND = "cuda", "triton+aten"
QUICK = Effort(min_repeats=3, max_repeats=3, budget_s=0.0, warmup=1)
INT8, FLOAT32 = Variant.of(Precision.INT8, output=Precision.BFLOAT16), Variant.of(Precision.FLOAT32)


class Net(nn.Module):
    """Four times convolution, batch norm and ReLU, of large images."""

    def __init__(self):
        super().__init__()
        blocks = []
        for _ in range(4):
            blocks += [nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Conv2d(64, 16, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).mean((2, 3))


class Gated(nn.Module):
    """Two blocks of a norm, written out as transformers does, and a gated unit, with a stream beside them."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(512, 512), nn.Linear(512, 16)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(512)) for _ in range(2))
        self.gates, self.ups = (nn.ModuleList(nn.Linear(512, 2048, bias=False) for _ in range(2)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2048, 512, bias=False) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for weight, gate, up, down in zip(self.weights, self.gates, self.ups, self.downs, strict=True):
            y = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            x = x + down(F.silu(gate(y)) * up(y))
        return self.head(x).mean(1)


def batch(step, size):
    x = torch.randn(size, 64, 32, 32, generator=torch.Generator().manual_seed(step))
    return Batch((x.contiguous(memory_format=torch.channels_last),), target=torch.arange(size) % 16)


@pytest.fixture
def job():
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last)
    loss = lambda y, given: F.cross_entropy(y.float(), given.target)  # noqa: E731
    return Job("chained", model, batch, loss, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=16)


@pytest.fixture
def gated():
    torch.manual_seed(0)
    tokens = lambda step, size: Batch(  # noqa: E731
        (torch.randn(size, 256, 512, generator=torch.Generator().manual_seed(step)),), target=torch.arange(size) % 16
    )
    loss = lambda y, given: F.cross_entropy(y.float(), given.target)  # noqa: E731
    return Job("gated", Gated(), tokens, loss, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=16)


@pytest.mark.parametrize("name", ["job", "gated"])
def test_chains_are_timed_on_the_named_backend(name, request):
    """A chain's kernels read and write at the speed of memory: 4 MiB and more take microseconds, and not none."""
    job = request.getfixturevalue(name)
    dag = trace(job)
    efforts = Efforts(QUICK, QUICK, QUICK)
    found = profile(job, dag, ProfileRequest(DEVICE, ladder=(INT8, FLOAT32), backend=BACKEND, with_chains=True, efforts=efforts))
    assert {name for entry in found.chains for name in entry.chains} == {chain.name for chain in chains_of(dag)}
    for entry in found.chains:
        assert entry.cost.backend.split("+")[0] == BACKEND.split("+")[0]
        assert entry.cost.forward_compute_ns > 1_000
        assert entry.cost.backward_compute_ns > 1_000
        assert entry.cost.spread < 1


@pytest.mark.parametrize("name, share", [("job", 0.7), ("gated", 0.8)])
def test_a_step_under_a_plan_keeps_less(name, share, request):
    """The plan's losses are near those of full precision, and its forward keeps less than the same operators unfused."""
    job = request.getfixturevalue(name)
    dag = trace(job)
    said = {chain.name: ChainAssignment(ChainVariant(saved=Precision.INT8), BACKEND, "", "") for chain in chains_of(dag)}
    formats = OutputFormats.of(dag)
    variants = formats.decided({operator.op_id: INT8 for operator in dag.adjustable})
    assignments = {op_id: Assignment(variant, BACKEND, "", "") for op_id, variant in variants.items()}
    plan = PrecisionPlan(
        "chained", "", tuple(assignments), {}, "greedy", "lossvar", time_limit_ns=1, predicted_iteration_ns=1, objective=0.0,
        bound=None, rank0_group="infer", output_formats=formats, groups=(GroupPlan(
            "infer", Role.INFER, 1, device_type(torch.device(DEVICE), 1.0, 0), Precision.FLOAT32, assignments, chains=said,
        ),),
    )  # fmt: skip

    def run(how):
        model = how(job.copy_model().to(DEVICE))
        losses, kept = [], 0
        for step in range(3):
            given = job.batch(step, job.batch_size).to(DEVICE)
            before = torch.cuda.memory_allocated()
            loss = job.compute_loss(given, model)
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
            losses.append(float(loss.detach()))
            model.zero_grad(set_to_none=True)
        return torch.tensor(losses), kept

    exact, _ = run(lambda model: model)
    _, unfused = run(lambda model: qsync.apply_(model, assignments).model)
    losses, kept = run(lambda model: qsync.compile(model, plan, fullgraph=True))
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)
    assert kept < share * unfused


@pytest.mark.parametrize("parallel", [False, True], ids=["alone", "in DistributedDataParallel"])
def test_a_compiler_captures_fused_chains(job, parallel, tmp_path, caplog):
    """``mode="reduce-overhead"``: graphs are captured and replayed, every step rounds anew, gradients reach the parameters."""
    caplog.set_level("INFO", "qsync_torch.compiling")
    torch._dynamo.reset()
    if parallel:
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = job.copy_model().to(DEVICE)
        given = job.batch(0, job.batch_size).to(DEVICE)
        job.compute_loss(given, model).backward()
        exact = torch.cat([p.grad.flatten() for p in model.parameters()])
        assignments = {operator.op_id: INT8 for operator in trace(job).adjustable}
        applied = qsync.apply_(model, assignments, backend=BACKEND)
        run = qsync.compile(applied, saved="int8", mode="reduce-overhead")
        run = DistributedDataParallel(run) if parallel else run
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        found = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the compiled model runs in parts")
            for _ in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                model.zero_grad(set_to_none=True)
                job.compute_loss(given, run).backward()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                applied.advance()
        assert len([r for r in caplog.records if r.getMessage().startswith("fused: ")]) == 4
        assert applied.step == 6
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped
        assert all(not torch.equal(one, other) for one, other in itertools.combinations(found, 2))
        for gradients in found:
            assert (gradients - exact).norm() < 0.2 * exact.norm()
    finally:
        torch._dynamo.reset()
        if parallel:
            dist.destroy_process_group()
