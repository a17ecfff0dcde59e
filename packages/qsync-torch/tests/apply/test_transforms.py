"""What transforms or records an applied model: batched gradients, ``torch.func``, forward mode, tracing; right, or refused.

The reference is the applied model itself, differentiated step by step with the same random numbers, or the model without a plan.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from qsync_core.errors import PlanError
from qsync_torch import apply_
from qsync_torch.aten import float_products

NAMES = ("conv", "a", "b")


class Net(nn.Module):
    """A convolution, a functional linear and a linear; smooth."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.conv(x)).flatten(1)
        return self.b(torch.tanh(F.linear(x, self.a.weight, self.a.bias)))


def planned(variant):
    model = Net()
    return model, apply_(model, dict.fromkeys(NAMES, variant), seed=5)


@pytest.fixture
def x():
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def slow(request, monkeypatch):
    """A 16-bit format of which the CPU is said to have no products."""
    monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset({request.param}))
    return str(request.param).removeprefix("torch.")


def parameters_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(model, parameters, x):
    return functional_call(model, parameters, (x,)).square().mean()


def close(found, expected, tolerance=0.02):
    return all((f - e).norm() <= tolerance * e.norm() for f, e in zip(found, expected, strict=True))


def by_autograd(y, leaves, vectors):
    return torch.autograd.grad(y, leaves, vectors, is_grads_batched=True)


def by_vmap(y, leaves, vectors):
    return torch.vmap(lambda vector: torch.autograd.grad(y, leaves, vector, retain_graph=True))(vectors)


@pytest.mark.parametrize("variant", ["int8", "int8>bfloat16", "bfloat16"])
@pytest.mark.parametrize("in_a_batch", [by_autograd, by_vmap])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_batch_of_gradients_is_that_of_each(x, variant, in_a_batch):
    model, _ = planned(variant)
    leaves = [x.requires_grad_(), *model.parameters()]
    y, vectors = model(x), torch.randn(3, 4, 3)
    each = [torch.autograd.grad(y, leaves, vector, retain_graph=True) for vector in vectors]
    expected = [torch.stack(of_one) for of_one in zip(*each, strict=True)]
    found = in_a_batch(y, leaves, vectors)
    if variant == "bfloat16":  # a batch sums in another order
        assert close(found, expected)
    else:
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("variant", ["int8", "bfloat16"])
def test_a_vectorized_jacobian(x, variant):
    model, applied = planned(variant)
    expected = torch.autograd.functional.jacobian(model, x)
    applied.step = 0
    assert close([torch.autograd.functional.jacobian(model, x, vectorize=True)], [expected])


@pytest.mark.parametrize("in_a_batch", [by_autograd, by_vmap])
def test_second_derivatives_of_a_batch_are_refused(x, in_a_batch, monkeypatch):
    """PyTorch loses what an autograd function puts around such gradients, and a penalty would have none without a word."""
    model, _ = planned("int8")
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **options: grad(*args, **options, create_graph=True))
    y = model(x.requires_grad_())
    with pytest.raises(PlanError, match=r"operator b#0 runs in int8, which has no second derivative"):
        in_a_batch(y, [x], torch.randn(3, 4, 3))


def of_functional_grad(model, x):
    return torch.func.grad(loss, argnums=1)(model, parameters_of(model), x)


TRANSFORMS = {
    "grad": of_functional_grad,
    "vmap": lambda model, x: torch.vmap(lambda one: model(one[None])[0])(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "per sample": lambda model, x: torch.vmap(
        lambda parameters, one: torch.func.grad(loss, argnums=1)(model, parameters, one), in_dims=(None, 0)
    )(parameters_of(model), x[:, None]),
    "ensemble": lambda model, x: torch.vmap(lambda parameters: functional_call(model, parameters, (x,)))(
        {name: torch.stack([value, 2 * value]) for name, value in parameters_of(model).items()}
    ),
    "hessian": lambda model, x: torch.func.hessian(lambda one: model(one).square().mean())(x[:1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func_is_refused_by_the_name_of_an_8_bit_operator(x, transform):
    model, _ = planned("int8")
    with pytest.raises(PlanError, match=r"operator conv#0 runs in int8, which torch.func cannot transform.*float format.*deepcopy"):
        transform(model, x)
    transform(model.eval(), x)
    transform(copy.deepcopy(model).train(), x)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func_transforms_float_formats_with_and_without_products_of_the_processor(x, transform, slow):
    model, _ = planned(slow)
    found, expected = (torch.utils._pytree.tree_leaves(transform(one, x)) for one in (model, Net()))
    assert close([f.float() for f in found], expected, 0.05)


def dual(model, x):
    with forward_ad.dual_level():
        return [part.clone() for part in forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.flip(0))))]


def test_forward_mode_is_refused_by_the_name_of_an_8_bit_operator(x):
    model, _ = planned("int8")
    with pytest.raises(PlanError, match=r"operator conv#0 runs in int8, which has no derivative in forward mode.*float format"):
        dual(model, x)
    assert close(dual(model.eval(), x), dual(Net(), x), 0)


def test_forward_mode_goes_through_float_formats(x, slow):
    model, _ = planned(slow)
    assert close([part.float() for part in dual(model, x)], dual(Net(), x))
    forward_mode = torch.autograd.functional.jacobian(model, x, vectorize=True, strategy="forward-mode")
    assert close([forward_mode.float()], [torch.autograd.functional.jacobian(Net(), x)])


def test_a_name_of_a_node_is_pytorchs():
    model, _ = planned("int8>float32")
    assert model(torch.randn(4, 2, 3, 3)).grad_fn.name() == "QuantizedProductBackward"


RECORDERS = {
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "torch.export.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "torch.export.export, strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
}


@pytest.mark.parametrize("what", RECORDERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recorded_forward_would_round_alike_in_every_step(x, what):
    """So 8-bit operators are refused; float formats, and evaluation, are recorded as they run."""
    record, name = RECORDERS[what], what.partition(",")[0]
    model, applied = planned("int8")
    with pytest.raises(PlanError, match=rf"{name} records one forward .* 8-bit operators \(.*conv#0.*in eval mode"):
        record(model, x)
    assert torch.equal(record(model.eval(), x)(x), Net()(x))
    applied.remove()
    model, _ = planned("bfloat16")
    assert close([record(model, x)(x).float()], [model(x)], 0.01)


def test_a_symbolic_trace_calls_modules_of_the_plan(x):
    model = Net()
    apply_(model, {"conv": "bfloat16", "b": "int8"}, seed=5)
    traced = torch.fx.symbolic_trace(model)
    expected, found = Net()(x), traced(x)
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.05
    found.sum().backward()


def test_a_symbolic_trace_takes_parameters_of_functional_calls_by_their_names():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return F.linear(x, self.w)

    model = Reads()
    x = torch.randn(4, 8)
    apply_(model, {"w": "int8"})
    traced = torch.fx.symbolic_trace(model)
    assert dict(traced.named_parameters())["w"] is dict(model.named_parameters())["w"]
    assert torch.equal(traced(x), F.linear(x, dict(model.named_parameters())["w"]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_is_refused_and_a_copy_is_scripted_without_the_plan(x):
    model, applied = planned("bfloat16")
    for part in (model, model.b, nn.Sequential(model)):
        with pytest.raises(PlanError, match=r"torch.jit.script reads the source .*copy\.deepcopy"):
            torch.jit.script(part)
    assert torch.equal(torch.jit.script(copy.deepcopy(model))(x), Net()(x))
    applied.remove()
    assert torch.equal(torch.jit.script(model)(x), Net()(x))
