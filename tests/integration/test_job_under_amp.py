"""A job that trains under autocast: from its trace to training under its plan, and what an operator at the base does."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("qsync_planner")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from qsync_core.cluster_file import parse_cluster  # noqa: E402
from qsync_core.errors import ClusterError, ObservationError, QSyncError  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_core.ir.variant import Variant  # noqa: E402
from qsync_planner.allocator import Inputs, Request, allocate  # noqa: E402
from qsync_planner.indicate import indicate  # noqa: E402
from qsync_planner.matching import under_base  # noqa: E402
from qsync_planner.replayer.replay import Replayer, plan_variants  # noqa: E402
from qsync_planner.reporting.explain import explain  # noqa: E402
from qsync_planner.verify import verify  # noqa: E402
from qsync_torch import apply_  # noqa: E402
from qsync_torch.job import Batch, Job  # noqa: E402
from qsync_torch.observing.montecarlo import MonteCarloCollector  # noqa: E402
from qsync_torch.observing.observe import ObserveRequest, observe  # noqa: E402
from qsync_torch.profiling.bench import Efforts  # noqa: E402
from qsync_torch.profiling.measured_timeline import measured_timeline  # noqa: E402
from qsync_torch.profiling.profile import ProfileRequest, profile  # noqa: E402
from qsync_torch.timing import Effort  # noqa: E402
from qsync_torch.tracing.trace import trace  # noqa: E402

QUICK = Effort(min_repeats=3, max_repeats=3, budget_s=0.02)
BF16 = Variant.of(Precision.BFLOAT16)
INT8 = Variant.of(Precision.INT8)
INT8_UNDER = attrs.evolve(INT8, output=Precision.BFLOAT16)
LADDER = (INT8, BF16, Variant.of(Precision.FLOAT32))
CLUSTER = """
[[group]]
name = "train"
device = "cpu"
count = 1
role = "train"

[[group]]
name = "infer"
device = "cpu"
count = 1
role = "infer"
ladder = ["int8", "float32"]
MEMORY

[[link]]
between = ["train", "infer"]
bandwidth_gbps = 32
"""


class Net(nn.Module):
    """Convolution, norms, attention by hand, a residual: every class of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.a, self.norm = nn.Linear(512, 64), nn.LayerNorm(64)
        self.q, self.k, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(F.relu(self.bn(self.conv(x))).flatten(1)))
        weights = torch.softmax(self.q(x) @ self.k(x).t(), -1)
        return self.out(x + weights @ x)


def batch(step: int, size: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    return Batch((torch.randn(size, 3, 8, 8, generator=draw),), target=torch.randint(10, (size,), generator=draw))


def make_job(amp: str | None = "bfloat16") -> Job:
    torch.manual_seed(0)
    loss = lambda output, batch: F.cross_entropy(output, batch.target)  # noqa: E731
    return Job("net", Net(), batch, loss, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), 16, amp)


def quick_profile(job: Job, dag):
    notes: list[str] = []
    efforts = Efforts(QUICK, QUICK, attrs.evolve(QUICK, budget_s=0.2))
    found = profile(job, dag, ProfileRequest(ladder=LADDER, efforts=efforts), note=notes.append)
    return found, notes


def cluster(memory: int | None = None):
    return parse_cluster(CLUSTER.replace("MEMORY", "" if memory is None else f'memory = "{memory} B"'))


@pytest.fixture(scope="module")
def made():
    """Graph, profile with its notes, observations and sensitivity of the job under AMP."""
    job = make_job()
    dag = trace(job)
    measured, notes = quick_profile(job, dag)
    observations = observe(job, dag, ObserveRequest(LADDER, warmup=1, steps=2, settled=None))
    return dag, measured, notes, observations, indicate(observations, dag, LADDER)


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """A script's loop under autocast; the parameters after it."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            data = batch(step, 16)
            loss = F.cross_entropy(model(*data.args), data.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
def test_the_base_is_recorded_and_nothing_above_it_measured(made):
    dag, measured, notes, observations, sensitivity = made
    assert dag.base is Precision.BFLOAT16
    assert [step.variant for step in measured.steps] == [BF16, INT8_UNDER]
    assert any("float32 is not measured" in note and "autocast" in note for note in notes)
    assert measured.software["autocast"] == "bfloat16"
    lowered = {operator.op_id for operator in dag.adjustable}
    assert {series.variant for series in observations.series if series.op_id in lowered} <= {None, INT8_UNDER}
    for operator in dag.adjustable:
        assert set(measured.cost_index[operator.op_id]) == {BF16, INT8_UNDER}
        assert set(sensitivity.omega[operator.op_id]) == {INT8_UNDER}
        assert sensitivity.omega[operator.op_id][INT8_UNDER] > 0


@pytest.mark.parametrize("amp", [None, "bfloat16"])
def test_the_predicted_full_step_is_the_measured_one(amp, made):
    """As exactly with autocast as without: to the rounding of one nanosecond for each operator."""
    dag, measured, *_ = made
    if amp is None:
        job = make_job(None)
        dag = trace(job)
        measured, _ = quick_profile(job, dag)
    alone = parse_cluster(CLUSTER[: CLUSTER.index("[[group]]", 5)])
    group = alone.groups[0]
    predicted = Replayer(Inputs(dag, under_base(alone, dag)[0], {group.name: measured})).replay({})
    step = measured.steps[0]
    assert step.variant == Variant.plain(dag.base)
    assert abs(predicted.iteration_ns - step.iteration_ns) <= 4 * len(dag.operators)
    assert predicted.groups[group.name].peak_bytes == step.peak_bytes


class Unreachable(nn.Module):
    """A time-first convolution, an LSTM and a product that is no matrix product: no plan lowers them, autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.lstm = nn.Parameter(torch.randn(3, 3, 8)), nn.LSTM(8, 8)
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.conv_tbc(x.flatten(2).permute(2, 0, 1).contiguous(), self.filters, self.out.bias[:8], 1)
        return self.out(torch.einsum("lbc,dc->lbd", self.lstm(x)[0], self.weight).mean(0))


def test_operators_that_no_plan_can_lower_run_in_the_base():
    job = attrs.evolve(make_job(), model=Unreachable())
    dag = trace(job)
    refused = {operator.kind for operator in dag.operators if operator.not_applicable}
    assert refused == {"conv_tbc", "lstm", "einsum"}
    measured, _ = quick_profile(job, dag)
    for operator in dag.operators:
        if operator.not_applicable:
            assert set(measured.cost_index[operator.op_id]) == {BF16}
    described, _ = under_base(cluster(), dag)
    base = {operator.op_id: BF16 for operator in dag.adjustable}
    found = Replayer(Inputs(dag, described, {"train": measured, "infer": measured})).replay({"train": base, "infer": base})
    assert found.iteration_ns > 0


def test_a_plan_starts_at_the_base_explains_itself_and_is_verified(made):
    dag, measured, _, _, sensitivity = made
    profiles = {"train": measured, "infer": measured}
    full = allocate(Inputs(dag, cluster(), profiles, sensitivity), Request("full"))
    low = allocate(Inputs(dag, cluster(), profiles, sensitivity), Request("uniform"))
    plan = allocate(Inputs(dag, cluster(), profiles, sensitivity))
    assert {p.base for p in (full, low, plan)} == {Precision.BFLOAT16}
    assert {group.base for group in plan.groups} == {Precision.BFLOAT16}
    assert full.objective == 0
    assert {a.variant for group in full.groups for a in group.assignments.values()} == {BF16}
    assert {a.variant for a in plan.group("infer").assignments.values()} <= {BF16, INT8_UNDER}
    assert any("float32 left off the ladder" in note and "bfloat16" in note for note in plan.notes)
    rows = explain(full)["groups"]
    assert [row["base"] for row in rows] == ["bfloat16", "bfloat16"]
    assert all("bfloat16" in operator["reason"] for row in rows for operator in row["operators"])
    described, _ = under_base(cluster(), dag)
    predicted = Replayer(Inputs(dag, described, profiles)).timeline(plan_variants(full, described))
    model = make_job().model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def train_step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            data = batch(0, 16)
            loss = F.cross_entropy(model(*data.args), data.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    apply_(model, full, group="infer")
    found = verify(predicted, measured_timeline(model, dag, train_step, group="infer", steps=2))
    adjustable = {operator.op_id for operator in dag.adjustable}
    assert adjustable <= {row.op_id for row in found.operators}
    assert not adjustable & {*found.only_predicted, *found.only_measured}


def test_a_plan_of_the_base_trains_as_autocast_alone_does(made):
    """Bit for bit: an operator at its base is left to autocast."""
    dag, measured, _, _, sensitivity = made
    plan = allocate(Inputs(dag, cluster(), {"train": measured, "infer": measured}, sensitivity), Request("full"))
    expected = train(make_job().model)
    model = make_job().model
    applied = apply_(model, plan, group="infer")
    assert applied.base is Precision.BFLOAT16
    for found, wanted in zip(train(model), expected, strict=True):
        assert torch.equal(found, wanted)


def gradient(amp: str | None, variant: Variant | None) -> torch.Tensor:
    """Of a job's first step, all operators in a variant, or without a plan."""
    job = make_job(amp)
    job.model.train()
    if variant is not None:
        apply_(job.model, dict.fromkeys((o.op_id for o in trace(job).adjustable), variant), base=job.base)
    job.compute_loss(job.batch(0, 16)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in job.model.parameters()])


def test_a_lowered_plan_is_as_far_from_its_base_as_without_autocast():
    """Rounding to int8 outweighs what bfloat16 adds beside it; the relative errors of one draw each differ by less than twofold."""
    errors = []
    for amp, variant in ((None, INT8), ("bfloat16", INT8_UNDER)):
        base = gradient(amp, None)
        errors.append(float((gradient(amp, variant) - base).norm() / base.norm()))
    without, under = errors
    assert 0.5 * without < under < 2 * without


def test_a_lowered_plan_trains_and_is_removed_without_a_trace(made):
    dag, *_ = made
    model = make_job().model
    applied = apply_(model, dict.fromkeys((o.op_id for o in dag.adjustable), INT8_UNDER), base=Precision.BFLOAT16)
    lowered = train(model)
    applied.remove()
    expected = train(make_job().model)
    assert any(not torch.equal(a, b) for a, b in zip(lowered, expected, strict=True))
    again = make_job().model
    apply_(again, dict.fromkeys((o.op_id for o in dag.adjustable), INT8_UNDER), base=Precision.BFLOAT16).remove()
    assert all(torch.equal(a, b) for a, b in zip(train(again), expected, strict=True))


def test_the_truth_is_measured_under_autocast(made):
    """The undisturbed gradient of ``montecarlo`` is that of a script under autocast."""
    dag, *_ = made
    job = make_job()
    steps = {"warmup": 0, "steps": 1, "settled": None, "batch_size": 16}
    truth = observe(job, dag, ObserveRequest(LADDER, collectors=[MonteCarloCollector(2)], **steps))
    model = make_job().model.train()
    with torch.autocast("cpu", torch.bfloat16):
        data = batch(0, 16)
        F.cross_entropy(model(*data.args), data.target).backward()
    squared = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    assert truth.values("montecarlo", "gradient_sq_norm")[0] == pytest.approx(squared, rel=1e-6)
    assert {series.variant for series in truth.series} == {None, INT8_UNDER}


def test_what_does_not_go_together_is_refused(made):
    dag, *_ = made
    with pytest.raises(QSyncError, match="traced of a job that trains under autocast in bfloat16, and net trains without autocast"):
        profile(make_job(None), dag)
    with pytest.raises(QSyncError, match=r"under autocast in float16: .*GradScaler.*bfloat16"):
        make_job("float16")
    with pytest.raises(QSyncError, match=r"the amp of net is the format of its autocast, 'bfloat16', or None.*got 'half'"):
        make_job("half")
    with pytest.raises(ObservationError, match="only bfloat16 is asked about"):
        observe(make_job(), dag, ObserveRequest(LADDER[1:]))
    volta = parse_cluster(CLUSTER.replace("MEMORY", "").replace('device = "cpu"', 'device = "V100"', 1))
    with pytest.raises(ClusterError, match=r"autocast in bfloat16, which group 'train' cannot run: .*V100"):
        under_base(volta, dag)
    half = parse_cluster(CLUSTER.replace("MEMORY", "").replace('role = "train"', 'role = "train"\nbase = "float16"'))
    with pytest.raises(ClusterError, match="group 'train' has base float16, but net trains under autocast in bfloat16"):
        under_base(half, dag)
