"""What a rank that is measured alone gets from its collectives: what it would get if all ranks did as it does."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor  # registers operators of its own
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.distributed.alone import Alone
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

X = torch.arange(1.0, 9.0).view(4, 2)
OPS = torch.ops._c10d_functional


def world_name():
    return dist.group.WORLD.group_name


@pytest.fixture(autouse=True)
def three_ranks_of_which_one_is_here():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


def answer(call):
    with Alone() as alone:
        found = call()
    assert alone.communicates
    return found


def all_reduced(op):
    x = X.clone()
    dist.all_reduce(x, op)
    return x


def gathered(call):
    parts = [torch.zeros(4, 2) for _ in range(3)]
    call(parts, X)
    return torch.cat(parts)


def into(out, call):
    call(out)
    return out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: all_reduced(dist.ReduceOp.SUM), 3 * X),
        (lambda: all_reduced(dist.ReduceOp.MAX), X),
        (lambda: all_reduced(dist.ReduceOp.PRODUCT), X**3),
        (lambda: gathered(dist.all_gather), X.repeat(3, 1)),
        (lambda: gathered(lambda parts, x: dist.gather(x, parts, 1)), X.repeat(3, 1)),
        (lambda: into(torch.zeros(3, 4, 2), lambda out: dist.all_gather_into_tensor(out, X)), X.repeat(3, 1, 1)),
        (lambda: into(X.clone(), lambda out: dist.broadcast(out, 0)), X),
        (lambda: into(torch.zeros(4, 2), lambda out: dist.reduce_scatter(out, [X, 2 * X, 4 * X])), 6 * X),
        (lambda: into(torch.zeros(1, 2), lambda out: dist.reduce_scatter_tensor(out, X[:3])), 3 * X[1:2]),
        (lambda: into(torch.zeros(3, 2), lambda out: dist.all_to_all_single(out, X[:3])), X[1].repeat(3, 1)),
        (lambda: into(torch.zeros(4, 2), lambda out: dist.scatter(out, [X, 2 * X, 4 * X], 1)), 2 * X),
        (lambda: into(torch.full((4, 2), torch.nan), lambda out: dist.scatter(out, src=0)), torch.zeros(4, 2)),
        (lambda: functional.all_reduce(X, "sum", dist.group.WORLD) * 1, 3 * X),
        (lambda: functional.all_gather_tensor(X, 0, dist.group.WORLD) * 1, X.repeat(3, 1)),
        (lambda: functional.reduce_scatter_tensor(X[:3], "sum", 0, dist.group.WORLD) * 1, 3 * X[1:2]),
        (lambda: into(X.clone(), lambda out: OPS.all_reduce_(out, "sum", world_name())), 3 * X),
        (lambda: into(X.clone(), lambda out: OPS.all_reduce_coalesced_([out], "sum", world_name())), 3 * X),
        (lambda: into(torch.zeros(12, 2), lambda out: OPS.all_gather_into_tensor_out(X, 3, world_name(), out=out)), X.repeat(3, 1)),
        (lambda: torch.ops._dtensor.shard_dim_alltoall(X.view(1, 8)[:, :6], 0, 1, world_name()), X.view(1, 8)[:, 2:4].repeat(3, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_other_rank_does_as_this_one(call, expected):
    assert torch.equal(answer(call), expected)


def test_a_gathered_object_is_its_own():
    found = [None] * 3
    answer(lambda: dist.all_gather_object(found, {"size": 4}))
    assert found == [{"size": 4}] * 3


def test_a_transfer_that_is_waited_for_has_ended():
    x = X.clone()
    work = answer(lambda: dist.all_reduce(x, async_op=True))
    assert work.wait()
    assert torch.equal(x, 3 * X)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


@pytest.mark.parametrize("through", ["backward", "grad"])
def test_a_backward_that_communicates_is_answered_too(through):
    x = X.clone().requires_grad_()
    with Alone() as alone:
        loss = alone.follow(Summed.apply(x).sum())
    found = torch.autograd.grad(loss, x)[0] if through == "grad" else (loss.backward(), x.grad)[1]
    assert alone.communicates
    assert torch.equal(found, torch.full_like(X, 3.0))


def centred(x):
    h = x.sin()
    mean = h.detach().mean(0)
    dist.all_reduce(mean)
    return (h - mean / dist.get_world_size()).exp()


@pytest.mark.parametrize(("reentrant", "through"), [(False, "backward"), (False, "grad"), (True, "backward")])
def test_what_checkpointing_runs_again_is_answered(reentrant, through):
    x = X.clone().requires_grad_()
    with Alone():
        (expected,) = torch.autograd.grad(centred(x).sum(), x)
    loss = Alone().run(lambda: checkpoint(centred, x, use_reentrant=reentrant).sum())
    found = torch.autograd.grad(loss, x)[0] if through == "grad" else (loss.backward(), x.grad)[1]
    assert torch.equal(found, expected)


class Twice(torch.autograd.Function):
    """x³, whose gradient, of this rank alone, asks all ranks for its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * Summed.apply(3 * x**2)


def test_a_second_derivative_that_communicates_is_answered():
    x = X.clone().requires_grad_()
    with Alone() as alone:
        (slope,) = torch.autograd.grad(alone.follow(Twice.apply(x).sum()), x, create_graph=True)
        torch.autograd.backward(slope, torch.ones_like(slope))
    assert torch.equal(x.grad, 3 * 6 * X)


def test_a_backward_inside_is_answered_each_time():
    x = X.clone().requires_grad_()
    with Alone():
        y = Summed.apply(x).sum()
        for _ in range(2):
            y.backward(retain_graph=True)
    assert torch.equal(x.grad, torch.full_like(X, 6.0))


class Told(torch.nn.Module):
    """A linear's output goes to other ranks, or what they have comes into it, before the next linear reads it."""

    def __init__(self, tell):
        super().__init__()
        self.a, self.b, self.tell = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4), tell

    def forward(self, x):
        h = self.a(x)
        if self.tell is not None:
            self.tell(h.detach())
        return self.b(h)


@pytest.mark.parametrize(
    ("tell", "delivers"),
    [
        (None, Precision.BFLOAT16),
        (lambda h: dist.broadcast(h, 0), Precision.FLOAT32),
        (lambda h: dist.gather(h, None, 0), Precision.FLOAT32),
        (lambda h: dist.gather(h, [torch.zeros_like(h) for _ in range(3)], 1), Precision.FLOAT32),
        (lambda h: dist.send(h, 0), Precision.FLOAT32),
        (lambda h: dist.recv(h, 0), Precision.FLOAT32),
        (lambda h: dist.all_reduce(h), Precision.FLOAT32),
        (lambda h: dist.reduce(h, 0), Precision.FLOAT32),
        (lambda h: dist.all_gather([torch.zeros_like(h) for _ in range(3)], h), Precision.FLOAT32),
        (lambda h: dist.scatter(torch.zeros_like(h), [h, h, h], 1), Precision.FLOAT32),
        (lambda h: dist.all_to_all_single(torch.zeros_like(h), h), Precision.FLOAT32),
    ],
    ids=[
        "nothing",
        "broadcast",
        "gather",
        "gathers",
        "send",
        "recv",
        "all_reduce",
        "reduce",
        "all_gather",
        "scatter",
        "all_to_all",
    ],
)
def test_what_leaves_a_rank_is_delivered_in_the_format_that_it_has_without_a_plan(tell, delivers):
    def batch(step, size):
        return Batch((torch.ones(size, 16),), target=torch.zeros(size, dtype=torch.long))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch.target)

    dag = trace(Job("told", Told(tell), batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), 3))
    lowered = {operator.op_id: Variant.of(Precision.BFLOAT16) for operator in dag.adjustable}
    found = OutputFormats.of(dag).decided(lowered)
    assert found[dag.adjustable[0].op_id].output is delivers
