"""What is said when a job cannot be traced: the user's file and line, and what to do."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_core.errors import JobError, QSyncError, TraceError
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

HERE = Path(__file__)


def line_of(marker: str) -> int:
    """Number of the line of this file that ends with a comment."""
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {marker}"))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class ValueBranch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # value branch
            y = y * 2
        return y


class ValueLoop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum())):  # value loop
            x = self.linear(x)
        return x


class ThroughNumpy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.from_numpy(x.numpy()))  # through numpy


class WrongShape(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, :3])  # wrong shape


class ValueShape(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y > 0]  # value shape


class Forces(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)  # forces
        return forces


class OtherData(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.bias.data = self.linear.bias.data.double()  # other data
        return self.linear(x)


class InPlace(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_().mul_(x)  # what relu_ needs for its gradient


class CountsDown(Base):
    """As Funnel makes its relative positions: from numbers, which the shapes of a graph do not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).to(x.dtype)
        return self.linear(x) * torch.arange(positions[-1], positions[0] - 1, -1)  # counts down


class TurnsRound(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).to(x.dtype)
        places = torch.arange(positions[-1], positions[0] - 1, -1, dtype=torch.long)
        return self.linear(x)[:, places]  # as many as there are places


class OtherBranch(Base):
    """As SwitchTransformers has one for exports, which fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            x = x[:, :3]
        return self.linear(x)  # only in an export


class Inner(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:  # inner module
            return x
        return self.linear(x)


def job(model: nn.Module, loss=lambda output: output.sum(), batch=None) -> Job:
    return Job(
        "broken",
        model,
        batch or (lambda step, size: Batch((torch.randn(size, 4),))),
        lambda output, batch: loss(output),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


@pytest.mark.parametrize(
    ("model", "marker", "advice"),
    [
        (ValueBranch(), "value branch", "use torch.cond"),
        (ValueLoop(), "value loop", "depend on tensor values"),
        (ThroughNumpy(), "through numpy", "leaves PyTorch for NumPy: compute with tensors"),
        (WrongShape(), "wrong shape", "see that the model runs on the job's first batch"),
        (ValueShape(), "value shape", "depend on tensor values"),
        (TurnsRound(), "as many as there are places", "its control flow or shapes depend on tensor values"),
        (OtherBranch(), "only in an export", "also where torch.compiler.is_compiling() is true, as it is in an export"),
        (CountsDown(), "counts down", "(a shape is made from a number that is read from a tensor)"),
        (Forces(), "forces", "no derivatives inside a step (forces, a gradient penalty): train such a model without a plan"),
        (OtherData(), "other data", "give the tensor its shape and format once, before it is trained"),
        (nn.Sequential(nn.Linear(4, 4), Inner()), "inner module", "choose between values with torch.where"),
    ],
)
def test_the_users_line_is_named(model: nn.Module, marker: str, advice: str, capfd) -> None:
    with pytest.raises(TraceError) as error:
        trace(job(model))
    message = str(error.value)
    assert message.startswith("broken cannot be ")
    assert f"because of {HERE}:{line_of(marker)} (" in message
    assert advice in message
    assert "\n" not in message
    assert capfd.readouterr().err == ""  # torch's own log lines would bury it


@pytest.mark.parametrize(
    ("broken", "kind", "message"),
    [
        (job(nn.Linear(4, 4), loss=lambda y: y), TraceError, "must be one scalar tensor, got a tensor of shape (2, 4)"),
        (job(nn.Linear(4, 4), loss=lambda y: y.sum().item()), TraceError, "must be one scalar tensor, got a Python number"),
        (job(nn.Linear(4, 4), loss=lambda y: None), TraceError, "must be one scalar tensor, got None"),
        (job(InPlace()), TraceError, "PyTorch's backward pass fails, under a plan or not (RuntimeError: one of the variables"),
        (job(nn.Linear(4, 4), loss=lambda y: torch.zeros(())), TraceError, "no parameter of broken gets a gradient"),
        (job(nn.Linear(4, 4).requires_grad_(False)), TraceError, "no parameter of broken gets a gradient"),
        (job(nn.Linear(4, 4).double()), TraceError, "parameter weight of broken is float64; QSync plans for parameters in float32"),
        (
            job(nn.Linear(4, 4), batch=lambda step, size: (torch.randn(size, 4),)),
            JobError,
            "must return a qsync_torch.job.Batch, got tuple",
        ),
        (
            job(nn.Linear(4, 4), batch=lambda step, size: Batch((torch.randn(-size, 4),))),
            JobError,
            "the batch function of broken failed at step 0 with batch size 2: RuntimeError: ",
        ),
    ],
)
def test_other_jobs_that_can_not_be_traced(broken: Job, kind: type[QSyncError], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        trace(broken)


@pytest.mark.parametrize("key", ["C#", "red\x1b[31m", "two\nlines", "x" * 1100])
def test_a_module_whose_name_no_operator_can_have_is_named(key: str) -> None:
    model = nn.Sequential()
    model.add_module(key, nn.Linear(4, 4))
    shown = re.escape(repr(key[:80]))
    with pytest.raises(TraceError, match=rf"an operator's FQN is .* got {shown}; give that module of the model another name"):
        trace(job(model))


def test_a_job_needs_shapes() -> None:
    with pytest.raises(JobError, match=r"weight of broken has no shape yet.*: run the model on one first"):
        job(nn.LazyLinear(4))


@pytest.mark.parametrize("mebibytes", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bucket_size_is_a_positive_number(mebibytes: float) -> None:
    with pytest.raises(TraceError, match=f"the bucket size is a number of MiB above 0, got {mebibytes}"):
        trace(job(nn.Linear(4, 4)), bucket_cap_mb=mebibytes)


def test_a_value_read_by_item_that_does_not_steer_the_graph_is_fine() -> None:
    class Logging(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.last = y.sum().item()
            return y

    assert len(trace(job(Logging())).adjustable) == 1


def test_nothing_is_left_behind_after_a_failure() -> None:
    model = ValueBranch().eval()
    with pytest.raises(TraceError):
        trace(job(model))
    assert not model.training
    assert not model.linear.training


class Packed(torch.Tensor):
    """A tensor around another, as libraries have weights that they quantized."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Packed(torch.empty(4, 4)) if func is torch.ops.aten.detach.default else NotImplemented


class PackedParameter(nn.Parameter):
    """As bitsandbytes has such weights: a class of parameters, of integers."""


@pytest.mark.parametrize(
    "weight",
    [
        nn.Parameter(Packed(torch.randn(4, 4)), requires_grad=False),
        PackedParameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False),
    ],
)
def test_weights_that_another_library_quantized_are_refused_by_name(weight: nn.Parameter) -> None:
    model = Base()
    model.linear.weight = weight
    job = Job("quantized", model, lambda step, size: Batch((torch.randn(size, 4),)), lambda y, _: y.sum(), torch.optim.SGD, 2)
    with pytest.raises(TraceError, match=r"^parameter linear\.weight of quantized is a Packed\w*, whose numbers another library"):
        trace(job)
