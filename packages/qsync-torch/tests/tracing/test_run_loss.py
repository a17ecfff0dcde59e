"""Losses that cannot be exported are run, and the graph has each as one operator of the model's outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from qsync_core.errors import JobError, TraceError
from qsync_core.ir.dag import OpClass
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.capturing.capture import capture
from qsync_torch.distributed.alone import Alone
from qsync_torch.job import Batch, Job
from qsync_torch.observing.observe import ObserveRequest, observe
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.benchmark_case import loss_case
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.running_loss import RunLoss, map_tensors, run_loss
from qsync_torch.tracing.trace import trace

ONCE = Effort(min_repeats=1, max_repeats=1, warmup=0, budget_s=0.01)
FLOAT32, BFLOAT16 = Variant.plain(Precision.FLOAT32), Variant.plain(Precision.BFLOAT16)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.dropout(self.norm(self.body(x)).relu(), 0.5)
        return {"left": self.left(x), "right": self.right(x)}


def job_of(loss: Callable[[Any, torch.Tensor], Any], samples: int = 6, model: nn.Module | None = None) -> Job:
    torch.manual_seed(0)
    model = TwoHeads() if model is None else model

    def batch(step: int, size: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        return Batch((torch.randn(size, 16, generator=draw),), target=torch.randint(8, (size,), generator=draw))

    return Job("heads", model, batch, lambda output, batch: loss(output, batch.target), lambda p: torch.optim.SGD(p, 0.1), samples)


def masked(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["left"][target != 3], target[target != 3])


def matched(output: Any, target: torch.Tensor) -> torch.Tensor:
    order = np.argsort(output["left"].detach().numpy()[:, 0])
    return F.mse_loss(output["left"][torch.from_numpy(order)], F.one_hot(target, 8).float())


def by_class(output: Any, target: torch.Tensor) -> torch.Tensor:
    return torch.stack([output["left"][target == c].mean() for c in target.unique()]).sum()


def by_ctc(output: Any, target: torch.Tensor) -> torch.Tensor:
    log_probs = output["left"][:, None].log_softmax(-1)
    lengths = torch.full((1,), len(log_probs))
    return F.ctc_loss(log_probs, target[None, :2] % 7 + 1, lengths, torch.full((1,), 2))


def counted(output: Any, target: torch.Tensor) -> torch.Tensor:
    weight = 1 / (torch.bincount(target, minlength=8) + 1).float()
    return F.cross_entropy(output["left"], target, weight=weight, reduction="sum")


def in_place(output: Any, target: torch.Tensor) -> torch.Tensor:
    output["left"].mul_(2)
    return F.cross_entropy(output["left"][target != 3], target[target != 3])


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (masked, ("cross_entropy", "mean")),
        (matched, ("mse", "mean")),
        (by_class, ("custom", "sum")),
        (by_ctc, ("ctc", "mean")),
        (counted, ("cross_entropy", "sum")),
        (in_place, ("cross_entropy", "mean")),
    ],
)
def test_the_model_is_traced_as_under_a_loss_that_exports(loss, kind):
    job = job_of(loss)
    dag, plain = trace(job), trace(job_of(lambda output, target: output["left"].square().mean(), model=job.model))
    assert (dag.loss, dag.loss_reduction) == kind
    # A loss that is run takes all that it is given; what it does with it is not in the graph.
    found, expected = ([attrs.evolve(one, also_read_by=()) for one in graph.adjustable] for graph in (dag, plain))
    assert found == expected
    assert [operator.op_id.fqn for operator in dag.adjustable] == ["body", "left", "right"]
    assert dag.buckets == plain.buckets
    last = dag.operators[-1]
    assert (str(last.op_id), last.kind, last.op_class) == ("$loss#0", "loss", OpClass.FIXED)
    assert [str(read) for read in last.inputs] == ["left#0"]
    assert (last.input_shapes, last.output_shape, last.no_grad_inputs) == (((6, 8),), (), ())
    ours = [operator for operator in plain.operators if not operator.op_id.fqn.startswith("$loss")]
    assert [attrs.evolve(one, also_read_by=()) for one in dag.operators[:-1]] == [
        attrs.evolve(one, also_read_by=()) for one in ours
    ]


def test_a_loss_that_exports_is_traced_as_before_and_runs_nothing(monkeypatch):
    monkeypatch.setattr("qsync_torch.tracing.trace.run_loss", lambda *_: pytest.fail("the loss was run"))
    dag = trace(job_of(lambda output, target: F.cross_entropy(output["left"], target)))
    assert str(dag.operators[-1].op_id) == "$loss.cross_entropy_loss#0"


def test_data_do_not_show_in_the_graph():
    """Ranks that have other data have the same graph."""
    job = job_of(masked)
    other = attrs.evolve(job, batch=lambda step, size: job.batch(step + 3, size))
    assert (job.batch(0, 6).target != 3).sum() != (other.batch(0, 6).target != 3).sum()
    assert trace(job) == trace(other)


def test_the_job_is_left_as_it_was():
    job = job_of(masked)
    job.model.eval()
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trace(job)
    assert torch.equal(torch.rand(4), expected)
    assert not job.model.training
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in job.model.parameters())


def test_parameters_that_the_loss_reads_get_their_gradients_first():
    model = TwoHeads()

    def penalised(output: Any, target: torch.Tensor) -> torch.Tensor:
        return masked(output, target) + model.right.weight.square().sum() + model.left.weight.square().sum()

    job = job_of(penalised, model=model)
    job.compute_loss(job.batch(0, 6)).backward()
    expected = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    dag = trace(job)
    assert set(run_loss(job, job.batch(0, 6)).parameters) == {"left.weight", "right.weight"} == set(dag.operators[-1].parameters)
    assert {name for bucket in dag.buckets for name in bucket.parameters} >= expected


def test_costs_of_a_run_loss_are_those_of_running_it():
    """What autograd keeps, counted by hand: the chosen rows are all, of 1,000 classes."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[target >= 0], target[target >= 0])

    job = job_of(loss, 64, nn.Linear(16, 1000))
    dag = trace(job)
    measured = profile(job, dag, ProfileRequest(with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    cost = measured.cost(dag.operators[-1].op_id, FLOAT32)
    log_probs, index, target, weight = 64 * 1000 * 4, 64 * 8, 64 * 8, 4
    assert not cost.saves_inputs
    assert cost.saved_own_bytes - log_probs in range(index + target + 2 * weight + 65)
    assert cost.workspace_bytes >= 0 < cost.backward_compute_ns + cost.backward_dispatch_ns


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Summed.apply(gradient)


def test_a_loss_that_asks_other_ranks_runs_and_is_measured_without_them():
    seen: list[Any] = []

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        count = (target != 3).sum().float()
        dist.all_reduce(count)
        total = Summed.apply(output["left"][target != 3].sum())
        seen.append(count.item())
        return total / count

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        job = job_of(loss)
        batch = job.batch(0, 6)
        of_three = 3.0 * int((batch.target != 3).sum())
        dag = trace(job)
        assert dag.operators[-1].op_id.fqn == "$loss"
        ready = loss_case(job, dag.operators[-1], job.model, batch, Alone()).make_ready()
        left, _ = ready.wanted
        (gradient,) = torch.autograd.grad(ready.run(), left)
    finally:
        dist.destroy_process_group()
    assert {value for value in seen if type(value) is float} == {of_three}  # others are of the export
    torch.testing.assert_close(gradient, (batch.target != 3).float()[:, None].expand(6, 8) * 3 / of_three)


@pytest.mark.parametrize("loss", [masked, matched, by_class, counted])
def test_jobs_with_such_losses_are_observed(loss):
    job = job_of(loss)
    dag = trace(job)
    found = observe(job, dag, ObserveRequest([BFLOAT16], warmup=0, steps=1))
    reached = {series.op_id.fqn for series in found.series if series.term == "operands"}
    assert reached == {"body", "left"}  # no gradient reaches the other head


def test_a_loss_that_does_not_take_half_a_batch_is_observed_with_whole_ones():
    def thirds(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(output[:2], output[2:4], output[4:6])

    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    job = capture(model, torch.optim.SGD(model.parameters(), 0.1), thirds, [(torch.randn(6, 16), torch.zeros(6))])
    said: list[str] = []
    found = observe(job, trace(job), ObserveRequest([BFLOAT16], warmup=0, steps=1), announce=said.append)
    assert found.batch_size == 6
    assert any(
        re.search(r"^updates of 6 samples are observed instead of 3: the loss_fn of Linear, .* failed in line \d+", text)
        for text in said
    )


class Graphs(nn.Module):
    """Edges name rows of the batch, which half of it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sources, targets = edges
        return self.out(torch.zeros_like(nodes).index_add(0, targets, self.message(nodes[sources])))


def test_a_model_that_does_not_run_on_half_a_batch_is_observed_on_whole_ones():
    torch.manual_seed(0)
    model, edges = Graphs(), torch.tensor([[0, 1, 5], [3, 5, 2]])
    loader = [(torch.randn(6, 16), edges, torch.tensor([0, 1, 2, 0, 1, 2]))]
    job = capture(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, loader)
    said: list[str] = []
    asked = ObserveRequest([BFLOAT16], warmup=0, steps=1)
    assert observe(job, trace(job), asked, announce=said.append).batch_size == 6
    assert any(text.startswith("updates of 6 samples are observed instead of 3: Graphs does not run") for text in said)
    with pytest.raises(IndexError):
        observe(job, trace(job), attrs.evolve(asked, batch_size=3))


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(target * output.log_softmax(-1)).sum(-1).mean()  # its own line


class Failing(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return failing(output, target)


@pytest.mark.parametrize("loss", [failing, Failing()])
def test_a_loss_that_fails_names_its_own_line(loss):
    model = nn.Linear(16, 10)
    job = capture(model, torch.optim.SGD(model.parameters(), 0.1), loss, [(torch.randn(4, 16), torch.randint(10, (4,)))])
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# its own line\n"))
    said = (
        rf"^the loss_fn of Linear, called with a tensor of shape \(4, 10\) and .*, failed in line {line} of test_run_loss\.py \(Run"
    )
    with pytest.raises(JobError, match=said):
        trace(job)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda output, target: output["left"][target != 3].mean(0), "must be one scalar tensor, got a tensor of shape (8,)"),
        (lambda output, target: float(output["left"][target != 3].mean()), "must be one scalar tensor, got a Python number"),
        (lambda output, target: output["left"].detach()[target != 3].mean(), "no parameter of heads gets a gradient"),
    ],
)
def test_what_is_no_loss_is_refused(loss, said):
    with pytest.raises(TraceError, match=re.escape(said)):
        trace(job_of(loss))


def line_of(marker: str) -> int:
    with open(__file__) as file:
        return next(number for number, text in enumerate(file, 1) if text.endswith(f"# {marker}\n"))


def test_a_loss_that_differentiates_its_outputs_is_refused_with_what_to_do():
    inputs = torch.randn(6, 16, requires_grad=True)

    def penalty(output: Any, target: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(output["left"].sum(), inputs, create_graph=True)  # slope
        return masked(output, target) + slope.square().sum()

    job = attrs.evolve(job_of(penalty), batch=lambda step, size: Batch((inputs,), target=torch.arange(6)))
    line = line_of("slope")
    said = rf"^the loss of heads differentiates the model's outputs because of .*:{line} .*: train such a model without a plan"
    with pytest.raises(TraceError, match=said):
        trace(job)


def test_a_jobs_own_loss_that_fails_is_named():
    def wrong(output: Any, target: torch.Tensor) -> torch.Tensor:
        return output["left"][target != 3][:, :3] @ output["right"]  # wrong shapes

    with pytest.raises(TraceError, match=rf"^the loss of heads fails because of .*:{line_of('wrong shapes')} .*RuntimeError: mat1"):
        trace(job_of(wrong))


def test_kinds_are_those_of_every_path():
    def both(output: Any, target: torch.Tensor) -> torch.Tensor:
        return masked(output, target) + F.cross_entropy(output["right"], target % 4)

    def mixed(output: Any, target: torch.Tensor) -> torch.Tensor:
        return masked(output, target) + output["right"].square().mean()

    batch = job_of(both).batch(0, 6)
    assert run_loss(job_of(both), batch) == RunLoss((0, 1), (), "cross_entropy", "mean")
    assert run_loss(job_of(mixed), batch) == RunLoss((0, 1), (), "custom", "mean")


def test_tensors_are_found_in_objects_and_put_into_copies():
    @attrs.define(slots=False)
    class Output:
        scores: torch.Tensor
        sizes: tuple[int, ...]
        parts: list[Any]

    scores, other, labels = torch.zeros(2), torch.ones(3), torch.arange(4)
    output = Output(scores, (1, 2), [{"x": other, "y": labels}])
    found: list[torch.Tensor] = []
    made = map_tensors(output, lambda tensor: (found.append(tensor), tensor + 1)[1])
    assert [tensor is given for tensor, given in zip(found, (scores, other), strict=True)] == [True, True]
    assert torch.equal(made.scores, torch.ones(2))
    assert made.parts[0]["y"] is labels
    assert output.scores is scores
