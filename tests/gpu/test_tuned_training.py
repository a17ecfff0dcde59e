"""From tuning to a training step on a GPU: the fastest kernels are found, measured, planned and run, and give the right numbers."""

import json

import pytest
import torch
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import CallShapes, operator_requests
from qsync_core.kernels.roofline import lower_bound_ns
from qsync_core.tuning.search import Effort
from qsync_torch import apply_
from qsync_torch.devices import device_facts
from qsync_torch.job import Batch, Job
from qsync_torch.kernels.installed import open_store
from qsync_torch.kernels.selection import find_backends
from qsync_torch.profiling.profile import chooser_of
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.job_tuning import distinct_requests, tune_requests
from qsync_torch.tuning.kernel_timing import device_peaks

CUDA = torch.device("cuda", 0)
# Rounding to nearest: backends need not draw the same random numbers.
INT8 = Variant.of(Precision.INT8, output=Precision.BFLOAT16, rounding=Rounding.NEAREST)
EFFORT = Effort(budget=2, samples=(3, 9))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64, 128)
        self.head = nn.Linear(128, 16)

    def forward(self, x):
        return self.head(torch.relu(self.fc(torch.relu(self.conv(x)).mean((2, 3)))))


def make_job():
    torch.manual_seed(0)
    return Job(
        "small",
        Net().to(memory_format=torch.channels_last),
        lambda step, size: Batch(
            (torch.randn(size, 32, 16, 16).to(memory_format=torch.channels_last),), target=torch.arange(size) % 16
        ),
        lambda output, batch: nn.functional.cross_entropy(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=64,
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The graph, and everything that tuning found; the store is the default one of this module."""
    job = make_job()
    dag = trace(job)
    path = tmp_path_factory.mktemp("tuned") / "tuning.sqlite"
    requests = distinct_requests(dag, (INT8,), *device_facts(CUDA))
    found = tune_requests(requests, find_backends(("auto",)), open_store(CUDA, path), CUDA, effort=EFFORT)
    return job, dag, path, found


def test_every_kernel_is_tuned_and_none_beats_the_roofline(tuned):
    *_, found = tuned
    peaks = device_peaks(CUDA)
    assert peaks.bytes_per_ns > 0
    for entry in found.requests:
        assert entry.best is not None, entry.refusals
        for record in entry.records:
            assert record.latency_ns >= lower_bound_ns(entry.asked, peaks)


def test_a_second_run_measures_nothing(tuned):
    _, _dag, path, found = tuned
    requests = [entry.asked for entry in found.requests]
    again = tune_requests(requests, find_backends(("auto",)), open_store(CUDA, path), CUDA, effort=EFFORT)
    assert again.reused == sum(len(entry.records) for entry in found.requests)


def test_the_fastest_kernels_train_as_the_reference_does(tuned):
    _job, dag, path, found = tuned
    chooser = chooser_of(CUDA, "auto", path)
    fastest = {(e.asked.role, e.asked.request.shapes): e.best for e in found.requests}
    plan = {}
    for operator in dag.adjustable:
        call = CallShapes.of(operator)
        chosen = chooser.for_operator(call, INT8)
        ops = dict(chosen.pins)
        for asked in operator_requests(call, INT8, *device_facts(CUDA)):
            best = fastest[asked.role, asked.request.shapes]
            assert chosen.backend == "aten" or ops[asked.role].backend == best.key.backend
        plan[operator.op_id] = Assignment(INT8, chosen.backend, chosen.config, "")
    assert not chooser.untuned
    gradients = {}
    for name, entries in (("tuned", plan), ("aten", {op_id: Assignment(INT8, "aten", "", "") for op_id in plan})):
        job_ = make_job()
        model = job_.model.to(CUDA)
        apply_(model, entries, seed=1)
        batch = job_.batch(0, 64).to(CUDA)
        job_.compute_loss(batch, model).backward()
        gradients[name] = {key: p.grad.double() for key, p in model.named_parameters()}
    for key, reference in gradients["aten"].items():
        error = (gradients["tuned"][key] - reference).norm() / reference.norm()
        assert error < 0.03, (key, float(error))


def test_the_command_line(tuned, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from qsync_core.artifacts import files as artifact
    from qsync_core.cli.root import cli

    _, dag, path, _ = tuned
    artifact.save(dag, tmp_path / "dag.qsync")
    monkeypatch.setenv("QSYNC_TUNING", str(path))
    shown = CliRunner().invoke(
        cli, ["backends", str(tmp_path / "dag.qsync"), "--device", "cuda", "--rungs", str(INT8), "--json"], catch_exceptions=False
    )
    assert shown.exit_code == 0, shown.output
    operators = json.loads(shown.stdout)["operators"]
    assert operators
    assert all(entry["chosen"]["exact"] and entry["chosen"]["latency_ns"] > 0 for entry in operators)


def test_a_plan_of_variants_runs_on_what_was_tuned(tuned, monkeypatch):
    from qsync_torch.kernels.binding import BOUND

    _, _dag, path, _found = tuned
    monkeypatch.setenv("QSYNC_TUNING", str(path))
    job = make_job()
    model = job.model.to(CUDA)
    apply_(model, {OpId("fc"): INT8})
    loss = job.compute_loss(job.batch(0, 64).to(CUDA), model)
    loss.backward()
    assert torch.isfinite(loss)
    by_auto = [bound for bound in BOUND.values() if bound.choice.chain == ("auto",)]
    assert any(op == Op.LINEAR_OUTPUT for bound in by_auto for op, *_ in bound._kernels)
