import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.artifacts import files as artifact
from qsync_core.errors import QSyncError
from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import OpClass
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, Profile
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer
from qsync_torch.job import Batch, Job
from qsync_torch.profiling import bench
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.cast_cost import possible_casts
from qsync_torch.profiling.profile import ProfileRequest, distinct_items, layout_advice, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

QUICK = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
EFFORTS = Efforts(QUICK, QUICK, QUICK)
INT8, BFLOAT16, FLOAT32 = (Variant.of(p) for p in (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32))
LADDER = (INT8, BFLOAT16, FLOAT32)


class Twins(nn.Module):
    """Two equal convolutions and their norms, an addition, a linear: five distinct kinds of work, eight operators."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in "ab")
        self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.stem(x)
        y = self.norm_a(self.a(y)) + self.norm_b(self.b(y))
        return self.head(F.relu(y).mean((2, 3)))


def _job():
    torch.manual_seed(0)
    return Job(
        "twins",
        Twins(),
        lambda step, size: Batch((torch.randn(size, 3, 8, 8),), target=torch.arange(size) % 4),
        lambda output, batch: F.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.Adam(parameters),
        batch_size=2,
    )


@pytest.fixture(scope="module")
def job():
    return _job()


@pytest.fixture(scope="module")
def dag(job):
    return trace(job)


@pytest.fixture(scope="module")
def found(job, dag):
    return profile(job, dag, ProfileRequest(ladder=LADDER, share=0.5, memory_cap_bytes=123, efforts=EFFORTS))


def test_every_operator_has_a_cost_in_every_format_it_can_run_in(dag, found):
    for operator in dag.operators:
        known = set(found.cost_index.get(operator.op_id, {}))
        if operator.kind == "input":
            assert not known
        elif operator.is_adjustable:
            assert known == set(LADDER)
        elif operator.op_class is OpClass.FIXED:
            assert known == {FLOAT32}
        else:
            assert known == {Variant.plain(Precision.BFLOAT16), Variant.plain(Precision.FLOAT32)}


def test_operators_that_cost_the_same_are_measured_once(dag, found):
    by_name = {operator.op_id.fqn: operator.op_id for operator in dag.operators}
    assert found.cost_index[by_name["a"]] == found.cost_index[by_name["b"]]
    assert found.cost_index[by_name["norm_a"]] == found.cost_index[by_name["norm_b"]]
    assert found.cost_index[by_name["a"]] != found.cost_index[by_name["stem"]]
    assert len(found.costs) == len(distinct_items(dag, LADDER))


class Tied(nn.Module):
    """A frozen head that is its embedding, and a frozen layer of the same shapes that has its weight for itself."""

    def __init__(self, head_last: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.own, self.head = (nn.Linear(8, 8, bias=False) for _ in "ab")
        self.head.weight, self.head_last = self.embed.weight, head_last
        self.requires_grad_(False)
        self.norm.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = (self.own, self.head) if self.head_last else (self.head, self.own)
        return last(first(self.norm(self.embed(x))))


@pytest.mark.parametrize("head_last", [False, True])
def test_a_weight_that_is_not_stored_is_none_of_those_that_cost_the_same(head_last):
    """The first of those that are measured together speaks for all of them."""
    job = Job(
        "tied", Tied(head_last), lambda step, size: Batch((torch.arange(size * 8).reshape(size, 8) % 8,), target=torch.zeros(size)),
        lambda output, batch: output.square().mean(), lambda parameters: torch.optim.Adam(parameters), batch_size=2,
    )  # fmt: skip
    ladder = (Variant.parse("bfloat16@nf4"), FLOAT32)
    held: dict[str, set[Variant]] = {"own": set(), "head": set()}
    for item in distinct_items(trace(job), ladder):
        for op_id in item.holders:
            if op_id.fqn in held:
                held[op_id.fqn].add(item.variant)
    assert held == {"own": set(ladder), "head": {FLOAT32}}


def test_costs_are_positive_where_work_is_done(dag, found):
    for operator in dag.adjustable:
        for variant in LADDER:
            cost = found.cost(operator.op_id, variant)
            assert cost.forward_dispatch_ns + cost.forward_compute_ns > 0
            assert cost.backward_dispatch_ns + cost.backward_compute_ns > 0
            assert cost.saves_inputs == (0,)
            assert cost.backend == "aten"


def test_every_cast_of_the_ladder_has_a_model(found):
    assert {model.key for model in found.casts} == set(possible_casts(LADDER))
    for model in found.casts:
        assert model.r2 <= 1
        assert len(model.samples) >= 3


def test_steps_of_every_rung_with_memory(found):
    assert {step.variant for step in found.steps} == set(LADDER)
    for step in found.steps:
        assert step.iteration_ns == step.forward_compute_ns + step.backward_compute_ns + step.optimizer_compute_ns
        assert step.forward_dispatch_ns == step.backward_dispatch_ns == 0
        # Weights, gradients and Adam's two moments at the least.
        assert step.peak_bytes > 4 * 4 * sum(p.numel() for p in Twins().parameters())


def test_static_facts(job, found):
    numel = sum(p.numel() for p in job.model.parameters())
    count = sum(1 for _ in job.model.parameters())
    assert found.optimizer_state_bytes == 2 * 4 * numel + 4 * count  # two moments, and a step count a parameter
    assert found.input_bytes == 2 * 3 * 8 * 8 * 4 + 2 * 8
    assert (found.device.kind, found.device.share, found.device.memory_cap_bytes) == (DeviceKind.CPU, 0.5, 123)
    assert found.software["torch"] == torch.__version__
    assert found.collective is None


def test_it_can_be_stored(found):
    assert artifact.from_bytes(artifact.to_bytes(found), Profile) == found


def test_the_jobs_model_is_not_touched(job, dag):
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS))
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert all(p.grad is None for p in job.model.parameters())


def test_a_killed_run_continues_where_it_stopped(job, dag, tmp_path, monkeypatch):
    path, measured = tmp_path / "x.partial", []
    original = bench.measure_operator

    def counting(*args, **kwargs):
        measured.append(1)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(bench, "measure_operator", counting)
    with pytest.raises(KeyboardInterrupt):
        profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path)
    monkeypatch.setattr(bench, "measure_operator", original)
    total = len(distinct_items(dag, (FLOAT32,)))
    again = []

    def counting_again(*args, **kwargs):
        again.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(bench, "measure_operator", counting_again)
    first = profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path)
    assert len(again) == total - 3
    # The third run finds everything and so gives the same bytes.
    assert artifact.digest(profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path)) == artifact.digest(
        first
    )
    assert len(again) == total - 3


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _other_loss(output, batch):
    return F.multi_margin_loss(output, batch.target)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"optimizer": _sgd}, "its optimizer was torch.optim.adam.Adam("),
        ({"loss": _other_loss}, "the job's model or loss is no longer the one that was traced"),
    ],
    ids=["optimizer", "loss"],
)
def test_what_another_job_left_is_not_continued(job, dag, tmp_path, monkeypatch, changed, why):
    path = tmp_path / "x.partial"
    profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path)
    measured, original = [], bench.measure_step
    monkeypatch.setattr(bench, "measure_step", lambda *args: measured.append(1) or original(*args))
    notes = []
    profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path, note=notes.append)
    assert (measured, notes) == ([], [])
    profile(attrs.evolve(job, **changed), dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), resume=path, note=notes.append)
    assert len(measured) == 1
    assert len(notes) == 1
    assert notes[0].startswith(f"{path} is of an interrupted profile that cannot be continued: {why}")
    assert notes[0].endswith("; everything is measured again")


def test_the_jobs_own_settings_are_recorded(job, dag):
    """Whatever made them: importing its file, or the function that makes it."""

    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    try:
        found = profile(job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS)).software
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert {name: found[name] for name in ("float32_matmul", "deterministic_algorithms", "memory_format", "autocast")} == {
        "float32_matmul": "high",
        "deterministic_algorithms": "True",
        "memory_format": "contiguous",
        "autocast": "off",
    }


def test_progress_reaches_its_total(job, dag):
    told = []
    profile(
        job, dag, ProfileRequest(ladder=(FLOAT32,), efforts=EFFORTS), progress=lambda done, total, what: told.append((done, total))
    )
    assert list(dict.fromkeys(done for done, _ in told)) == list(range(told[-1][1] + 1))
    assert told[-1][0] == told[-1][1]


def test_layout_of_the_job_is_the_layout_that_is_measured(job):
    model = Twins().to(memory_format=torch.channels_last)

    def batch(step, size):
        return Batch((torch.randn(size, 3, 8, 8).to(memory_format=torch.channels_last),), target=torch.arange(size) % 4)

    last = attrs.evolve(job, model=model, batch=batch)
    keys = {operator.op_id.fqn: operator.cost_key for operator in trace(last).operators}
    other = {operator.op_id.fqn: operator.cost_key for operator in trace(job).operators}
    assert keys["a"] != other["a"]
    assert keys["norm_a"] != other["norm_a"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:0", "torch sees no CUDA device here; use --device cpu, or see 'qsync doctor'"),
        ("mps", "QSync measures cpu and cuda devices, got 'mps'"),
        ("tpu:zero", "not a device: 'tpu:zero'"),
    ],
)
def test_devices_that_are_not_there(job, dag, device, message):
    if device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(QSyncError, match=message):
        profile(job, dag, ProfileRequest(device=device))


def test_a_graph_of_another_model_is_refused(job, dag):
    class Other(Twins):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 5, padding=2)

    with pytest.raises(
        QSyncError, match=r"parameter stem.weight has shape \[8, 3, 5, 5\] in the job and \[8, 3, 3, 3\] in the graph"
    ):
        profile(attrs.evolve(job, model=Other()), dag)


@torch.library.custom_op("qsync_test::only_float32", mutates_args=())
def only_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise RuntimeError("Unsupported dtype")
    return x.clone()


only_float32.register_fake(torch.empty_like)
only_float32.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("qsync_test::only_zeros", mutates_args=())
def only_zeros(x: torch.Tensor) -> torch.Tensor:
    if x.any():
        raise RuntimeError("not a zero")
    return x.clone()


only_zeros.register_fake(torch.empty_like)
only_zeros.register_autograd(lambda ctx, grad: grad)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.function(self.first(x))
        return self.last(y)


def profile_of(model, notes=None):
    job = Job(
        "calls",
        model,
        lambda step, size: Batch((torch.randn(size, 4),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )
    dag = trace(job)
    return dag, profile(
        job, dag, ProfileRequest(with_collectives=False, efforts=EFFORTS), note=(notes if notes is not None else []).append
    )


def test_a_rung_of_rows_is_measured_of_a_model_with_convolutions(job, dag):
    """They stay at the base in the whole step of that rung, whose memory is predicted as it was measured."""
    rows, notes = Variant.named("int8-all"), []
    asked = ProfileRequest(ladder=(rows, INT8, FLOAT32), with_collectives=False, efforts=EFFORTS)
    found = profile(job, dag, asked, note=notes.append)
    has = {op_id.fqn: rows in by_variant for op_id, by_variant in found.cost_index.items() if INT8 in by_variant}
    assert has == {"stem": False, "a": False, "b": False, "head": True}
    assert not any("no kernels in 8 bit" in note for note in notes)
    measured = {step.variant: step for step in found.steps}
    assert measured.keys() == {rows, INT8, FLOAT32}
    cluster = Cluster("one", (DeviceGroup("g", "cpu", 1, Role.INFER, Precision.FLOAT32, (rows, INT8, FLOAT32)),))
    plan = {operator.op_id: rows if operator.op_id.fqn == "head" else FLOAT32 for operator in dag.adjustable}
    assert Replayer(Inputs(dag, cluster, {"g": found})).memory("g", plan).peak_bytes == measured[rows].peak_bytes


@pytest.mark.parametrize("layout, said", [(torch.contiguous_format, "2 of 3 convolutions read images"), (torch.channels_last, "")])
def test_convolutions_that_copy_their_images_are_told_how_not_to(layout, said):
    # The third one reads images of one pixel, which have either layout.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.Flatten())
    images = Job(
        "images",
        model.to(memory_format=layout),
        lambda step, size: Batch((torch.randn(size, 3, 8, 8).to(memory_format=layout),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )
    graph = trace(images)
    advice = layout_advice(graph, (Variant.of(Precision.INT8), Variant.of(Precision.FLOAT32)))
    assert advice.startswith(said)
    assert bool(advice) == bool(said)
    assert layout_advice(graph, (Variant.of(Precision.FLOAT32),)) == ""


def test_a_function_that_takes_float32_alone_is_profiled_with_that():
    """Nothing says of it that it takes 16 bits, so that operators before it deliver float32."""
    dag, profiled = profile_of(Calls(lambda x: only_float32(x)))
    assert set(profiled.cost_index) >= {operator.op_id for operator in dag.adjustable}


def test_an_operator_that_does_not_run_alone_counts_as_free_and_is_named():
    notes = []
    dag, profiled = profile_of(Calls(lambda x: x + only_zeros(x * 0)), notes)
    (operator,) = (operator for operator in dag.operators if operator.kind == "only_zeros")
    assert set(profiled.cost_index[operator.op_id]) >= {BFLOAT16, FLOAT32}
    assert {profiled.costs[index].forward_compute_ns for index in profiled.cost_index[operator.op_id].values()} == {0}
    (note,) = (note for note in notes if str(operator.op_id) in note)
    assert "not a zero" in note


def test_fourier_transforms_are_measured_in_float32():
    dag, profiled = profile_of(Calls(lambda x: torch.fft.fft(x).real))
    (operator,) = (operator for operator in dag.operators if operator.kind == "fft_fft")
    assert list(profiled.cost_index[operator.op_id]) == [FLOAT32]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_model_whose_forward_leaves_tensors_in_it_is_copied():
    _, profiled = profile_of(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)))
    assert {step.variant for step in profiled.steps} == set(LADDER)


def test_kinds_without_8_bit_kernels_are_measured_in_float_formats_alone(monkeypatch) -> None:
    sequences = attrs.evolve(KINDS["conv1d"], in_8_bit=False)
    monkeypatch.setitem(KINDS, "conv1d", sequences)
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    job = Job(
        "kinds",
        model,
        lambda step, size: Batch((torch.randn(size, 3, 6),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        batch_size=2,
    )
    notes: list[str] = []
    ladder = (Variant.of(Precision.INT8), Variant.plain(Precision.FLOAT32))
    measured = profile(job, trace(job), ProfileRequest(ladder=ladder, efforts=Efforts(QUICK, QUICK, QUICK)), note=notes.append)
    found = {op_id.fqn: set(costs) for op_id, costs in measured.cost_index.items()}
    assert (found["0"], found["2"]) == ({ladder[1]}, set(ladder))
    assert any("1 operators (0#0 and so on) have no kernels in 8 bit" in note for note in notes)
