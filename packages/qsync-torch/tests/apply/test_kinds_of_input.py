"""Inputs of planned operators that are no ordinary dense tensors: they run right, or are refused by the operator's name.

The reference is the model without a plan, and for what rounds at random the same model on dense tensors.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.errors import NumericsError
from qsync_torch import apply_
from qsync_torch.aten import float_products

VARIANTS = ["int8>float32", "int8", "bfloat16", "float16", "float32"]


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.op = nn.Linear(16, 8)

    def forward(self, x):
        return self.op(x)


class Functional(Linear):
    def forward(self, x):
        return F.linear(x, self.op.weight, self.op.bias)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.op = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return x @ self.op


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.op = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        return self.op(x)


LINEARS = [Linear, Functional, Product]


@pytest.fixture(params=[False, True], ids=["products", "no products"])
def hardware(request, monkeypatch):
    """With and without the CPU's products of 16-bit formats."""
    slow = {torch.bfloat16, torch.float16} if request.param else set()
    monkeypatch.setattr(float_products, "FORMATS_WITHOUT_HARDWARE", frozenset(slow))


def planned(kind, variant):
    model = kind()
    return model, apply_(model, {"op": variant}, seed=5)


def step(model, x, parts):
    """Outputs and gradients, of whatever ``parts`` takes from the output."""
    model.zero_grad()
    found = parts(model(x))
    sum(part.square().sum() for part in found).backward()
    return [*(part.detach() for part in found), *(parameter.grad for parameter in model.parameters())]


def close(found, expected, tolerance=0.03):
    return all((f - e).norm() <= tolerance * e.norm() for f, e in zip(found, expected, strict=True))


SPARSE = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "sparse_csc": lambda x: x.to_sparse_csc(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.strided),
}


@pytest.mark.parametrize("kind", [Linear, Functional])
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested")
def test_sparse_inputs_are_refused_in_another_format_and_run_in_float32(kind, layout, hardware):
    x = SPARSE[layout](F.dropout(torch.randn(4, 16)))
    for variant in VARIANTS[:-1]:
        model, _ = planned(kind, variant)
        with pytest.raises(
            NumericsError, match=rf"operator op#0: in .* it takes dense tensors, and its input is {layout}: .*float32"
        ):
            model(x)
    model, _ = planned(kind, "float32")
    found, expected = ([*y.unbind()] if y.is_nested else [y] for y in (model(x), kind()(x)))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def jagged(x, lengths):
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_sequences_of_several_lengths_run_as_their_values_do(kind, variant, hardware):
    (model, _), (other, _), plain = planned(kind, variant), planned(kind, variant), kind()
    x = torch.randn(5, 16, requires_grad=True)
    nested = jagged(x, [3, 2])
    found = step(model, nested, lambda y: [y.values()])
    gradient, x.grad = x.grad, None
    expected = step(other, x, lambda y: [y])
    assert all(torch.equal(f, e) for f, e in zip([*found, gradient], [*expected, x.grad], strict=True))
    assert close(found, step(plain, nested.detach(), lambda y: [y.values()]))
    assert (model(nested) + plain(nested)).shape == plain(nested).shape  # the same sequences


@pytest.mark.parametrize("variant", ["int8", "bfloat16"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_sequences_run_compiled_too(variant):
    (model, _), (other, _), x = planned(Linear, variant), planned(Linear, variant), torch.randn(5, 16)
    compiled = torch.compile(model, backend="aot_eager")
    found = step(compiled, jagged(x, [3, 2]), lambda y: [y.values()])
    assert all(torch.equal(f, e) for f, e in zip(found, step(other, x, lambda y: [y]), strict=True))


@pytest.mark.parametrize("kind", [Linear, Functional])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_sequences_with_gaps_are_refused(kind):
    x = torch.nested.nested_tensor_from_jagged(torch.randn(5, 16), torch.tensor([0, 3, 5]), torch.tensor([2, 1]))
    model, _ = planned(kind, "int8")
    with pytest.raises(NumericsError, match=r"operator op#0: in int8>float32 it takes dense tensors, and its input is nested"):
        model(x)


class Carrying(torch.Tensor):
    """Results are of the class of what they are computed from, and carry what that carries."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            result.carried = next((x.carried for x in args if hasattr(x, "carried")), None)
        return result


@pytest.mark.parametrize("kind", [*LINEARS, Convolution])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_class_of_the_users_makes_the_result_its_own(kind, variant):
    plain = torch.randn(2, 2, 5, 5) if kind is Convolution else torch.randn(4, 16)
    x = plain.clone().as_subclass(Carrying)
    x.carried = "affine"
    (model, _), (other, _) = planned(kind, variant), planned(kind, variant)
    y = model(x)
    assert type(y) is type(kind()(x)) is Carrying
    assert y.carried == "affine"
    assert all(
        torch.equal(f, e) for f, e in zip(step(model, x, lambda y: [y]), step(other, plain, lambda y: [y]), strict=True)
    ) or (
        variant.startswith("int8")  # of another step, which rounds otherwise
    )
    assert torch.equal(y.as_subclass(torch.Tensor), planned(kind, variant)[0](plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_for_a_class_of_the_users(variant):
    """Where both sides differ, the input is padded first: once."""
    model = nn.Sequential(nn.Conv2d(2, 4, 2, padding="same"))
    apply_(model, {"0": variant})
    assert model(torch.randn(2, 2, 5, 5).as_subclass(Carrying)).shape == (2, 4, 5, 5)


INPUTS = {
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand_as(x),
    "strided": lambda x: torch.cat([x, x], -1)[..., ::2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "parameter": lambda x: nn.Parameter(x),
    "sign to be changed": lambda x: torch.complex(x, x).conj().imag,
    "unbatched": lambda x: x[0],
}


@pytest.mark.parametrize("kind", [*LINEARS, Convolution])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", INPUTS)
def test_dense_inputs_of_every_form(kind, variant, name):
    x = INPUTS[name](torch.randn(2, 2, 5, 5) if kind is Convolution else torch.randn(4, 16))
    found, expected = (step(model, x, lambda y: [y]) for model in (planned(kind, variant)[0], kind()))
    assert [f.shape for f in found] == [e.shape for e in expected]
    assert close(found, expected, 0.06)


OTHERS = {
    "integers": lambda x: x.long(),
    "complex": lambda x: x.to(torch.complex64),
    "float64": lambda x: x.double(),
    "array": lambda x: x.numpy(),
}


@pytest.mark.parametrize("kind", [Linear, Convolution])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_float_tensor_is_refused_by_name(kind, name):
    x = OTHERS[name](torch.ones(2, 2, 5, 5) if kind is Convolution else torch.ones(4, 16))
    for variant in VARIANTS[:-1]:
        with pytest.raises(NumericsError, match="operator op#0"):
            planned(kind, variant)[0](x)


def test_images_of_other_dimensions_are_refused_as_pytorch_does():
    with pytest.raises(
        RuntimeError, match=r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv2d, but got input of size: \[5, 5\]"
    ):
        planned(Convolution, "int8")[0](torch.randn(5, 5))
