"""Functions that a model calls after an operator which delivers 16 bits, and which take float32 or one format alone."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_torch import apply_

from .small_models import BFLOAT16, FLOAT32, named

ADJACENT = torch.eye(8).to_sparse()


@torch.jit.script
def scripted(h, w):
    return torch.matmul(h, w)


class Calls(nn.Module):
    """An operator, and one function of its output and a parameter."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.w, self.function = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4), function

    def forward(self, x):
        return self.function(self.a(x), self.w)


def gradients_of(model):
    torch.manual_seed(1)
    y = model(torch.randn(8, 16))
    assert y.dtype is torch.float32
    y.square().sum().backward()
    return [parameter.grad for parameter in (model.a.weight, model.w) if parameter.grad is not None]


ROWS = torch.arange(4096) % 2
TAKEN = {
    "quantile": lambda h, _: torch.quantile(h, 0.5, dim=1),
    "nanquantile": lambda h, _: h.nanquantile(0.5, dim=1),
    "pdist": lambda h, _: F.pdist(h),
    "cdist": lambda h, _: torch.cdist(h, h.roll(1, 0)),
    "index_reduce": lambda h, w: w[:4].index_reduce(0, torch.arange(8) % 4, h, "mean"),
    "index_reduce_": lambda h, _: torch.zeros(4, 16).index_reduce_(0, torch.arange(8) % 4, h, "amax", include_self=False),
    "scatter_reduce_": lambda h, _: torch.zeros(4, 16).scatter_reduce_(0, ROWS[:8, None].expand(8, 16), h, "sum"),
    "linalg.matmul": lambda h, w: torch.linalg.matmul(h, w.sin()),
    "linalg.multi_dot": lambda h, w: torch.linalg.multi_dot([h, w, w]),
    "linalg.vecdot": lambda h, w: torch.linalg.vecdot(h, w[:8]),
    "sparse @ dense": lambda h, _: ADJACENT @ h,
    "sparse.mm": lambda h, _: torch.sparse.mm(ADJACENT, h),
    "sparse.addmm": lambda h, w: torch.sparse.addmm(w[:8], ADJACENT, h),
    "heaviside": lambda h, w: torch.heaviside(h.detach(), w[:8].detach()) * h * w[:8],
    "embedding_bag": lambda h, w: F.embedding_bag(torch.arange(16).view(8, 2), w, per_sample_weights=h[:, :2], mode="sum"),
}


@pytest.mark.parametrize("function", TAKEN.values(), ids=TAKEN)
def test_they_take_what_an_operator_delivers(function):
    planned = Calls(function)
    apply_(planned, named(a=BFLOAT16))
    for found, expected in zip(gradients_of(planned), gradients_of(Calls(function)), strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


EXPONENTIALS = {
    "logsumexp": lambda h: torch.logsumexp(h, 1),
    "a tensor's logsumexp": lambda h: h.logsumexp(1),
    "special.logsumexp": lambda h: torch.special.logsumexp(h, 1),
    "logcumsumexp": lambda h: torch.logcumsumexp(h, 1),
}


@pytest.mark.parametrize("function", EXPONENTIALS.values(), ids=EXPONENTIALS)
def test_logarithms_of_sums_lose_no_digits_that_their_gradients_need(function):
    """The gradient is ``exp(h - result)``, and bfloat16's steps are .125 at 30."""
    torch.manual_seed(0)
    x = torch.randn(64, 16) * 20
    delivered = []
    planned = Calls(lambda h, _: h.retain_grad() or delivered.append(h) or function(h))
    apply_(planned, named(a=BFLOAT16))
    planned(x).sum().backward()
    h = delivered[0].detach().float().requires_grad_()
    function(h).sum().backward()
    assert delivered[0].dtype is torch.float32
    assert (delivered[0].grad.float() - h.grad).norm() < 2**-8 * h.grad.norm()


GATHERED = {
    "h[rows]": lambda h: h[ROWS],
    "h[list]": lambda h: h[ROWS.tolist()],
    "h[rows, columns]": lambda h: h[ROWS[:, None], torch.arange(16)],
    "take": lambda h: h.take(ROWS[:, None] * 16 + torch.arange(16)),
    "take by names": lambda h: torch.take(input=h, index=ROWS[:, None] * 16 + torch.arange(16)),
    "take by one name": lambda h: torch.take(h, index=ROWS[:, None] * 16 + torch.arange(16)),
    "embedding": lambda h: F.embedding(ROWS, h),
    "index_select": lambda h: h.index_select(0, ROWS),
}


@pytest.mark.parametrize(("read", "compiled"), [*((name, False) for name in GATHERED), ("h[rows]", True)])
def test_gradients_of_rows_that_are_read_often_lose_none(read, compiled):
    """As messages of a graph's nodes are: in 16 bits only the first 256 equal summands would count."""
    torch._dynamo.reset()
    planned, plain = (Calls(lambda h, _: GATHERED[read](h) * 1.0) for _ in range(2))
    apply_(planned, named(a=BFLOAT16))
    if compiled:
        planned.compile(backend="aot_eager")
    for model in (planned, plain):
        model(torch.ones(8, 16)).sum().backward()
    assert torch.equal(plain.a.bias.grad, torch.full((16,), 4096.0))
    assert torch.allclose(planned.a.bias.grad, plain.a.bias.grad, rtol=2**-8, atol=0)


TIMES = torch.arange(0, 1000, 3)
NUMBERS = {
    "arange": lambda h: torch.arange(2000, dtype=h.dtype),
    "linspace": lambda h: torch.linspace(0, 1, 2001, dtype=h.dtype, device=h.device),
    "to a dtype": lambda h: TIMES.to(h.dtype),
    "to a tensor": lambda h: TIMES.to(h),
    "type_as": lambda h: TIMES.int().type_as(h),
}


@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
def test_positions_and_time_steps_in_the_format_of_an_activation_stay_apart(function):
    made = []
    model = Calls(lambda h, _: made.append(function(h)) or h * made[-1][:16])
    model(torch.ones(8, 16))
    apply_(model, named(a=BFLOAT16))
    model(torch.ones(8, 16))
    assert torch.equal(made[1], made[0])
    assert made[1].dtype is torch.float32


def test_a_product_of_linalg_is_an_operator_of_the_plan():
    planned = Calls(lambda h, w: torch.linalg.matmul(h, w))
    apply_(planned, named(w=BFLOAT16))
    reference = Calls(lambda h, w: (h.bfloat16() @ w.bfloat16()).float())
    for found, expected in zip(gradients_of(planned), gradients_of(reference), strict=True):
        assert (found - expected).norm() < 1e-3 * expected.norm()


REFUSED = {
    "scripted": (scripted, "expected m1 and m2 to have the same dtype"),
    "numpy": (lambda h, w: h * torch.from_numpy(h.detach().numpy()), "Got unsupported ScalarType BFloat16"),
}


@pytest.mark.parametrize("function, said", REFUSED.values(), ids=REFUSED)
def test_what_takes_no_16_bits_is_refused_with_its_line(function, said):
    """Where a whole assignment delivers them; a trace would have seen who reads them."""
    line = inspect.getsourcelines(Calls.forward)[1] + 1 if function is scripted else ""
    model = Calls(function)
    apply_(model, {OpId("a"): Assignment(BFLOAT16, "", "", "")})
    with pytest.raises(
        PlanError, match=rf"test_functions_of_formats\.py:{line}.* fails with '{said}.*deliver bfloat16: call \.float"
    ):
        gradients_of(model)


def test_a_failure_that_is_the_models_own_stays_as_it_is():
    for function in (lambda h, w: h @ w[:3], lambda h, w: h.numpy()):
        model = Calls(function)
        apply_(model, named(a=FLOAT32))
        with pytest.raises(RuntimeError):
            gradients_of(model)


def test_an_output_that_is_too_deep_to_walk_is_refused():
    def nested(h, _):
        for _ in range(2000):
            h = [h]
        return h

    model = Calls(nested)
    apply_(model, {OpId("a"): Assignment(BFLOAT16, "", "", "")})
    with pytest.raises(PlanError, match="the list that the model returns nests deeper than Python walks"):
        model(torch.randn(8, 16))
