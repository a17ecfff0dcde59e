import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.errors import BackendError, NumericsError, PlanError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch.operators import linear

from .operator_reference import check_operator
from .variants import ALL, INT8, NEAREST, ROWS

SHAPES = [((4, 6, 20), 8), ((1, 3), 5), ((33, 129), 17), ((2, 1, 1), 1), ((0, 16), 8)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape, columns", SHAPES)
@pytest.mark.parametrize("variant", [*ALL.values(), ROWS], ids=[*ALL, "int8 rows"])
def test_output_and_gradients_equal_float64_autograd_of_the_dequantized_operands(device, variant, shape, columns, bias):
    x, weight = torch.randn(shape, device=device), torch.randn(columns, shape[-1], device=device)
    b = torch.randn(columns, device=device, requires_grad=True) if bias else None
    check_operator(lambda *operands: linear(*operands, variant), F.linear, x, weight, b, variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int8", "bfloat16", "float16", "float32"])
def test_a_sixteen_bit_activation_gets_its_gradient_in_its_own_format(device, name, dtype):
    variant = ALL[name]
    x = torch.randn(6, 10, device=device).to(dtype)
    check_operator(lambda *operands: linear(*operands, variant), F.linear, x, torch.randn(4, 10, device=device), None, variant)


def test_operands_in_any_layout(device):
    x = torch.randn(10, 3, 4, device=device).permute(2, 1, 0)
    weight = torch.randn(10, 5, device=device).t()
    check_operator(lambda *operands: linear(*operands, INT8), F.linear, x, weight, None, INT8)


def test_stochastic_outputs_are_unbiased(device):
    """The mean over many draws is the float product: operands are rounded independently of each other."""
    variant = attrs.evolve(INT8, rounding=Rounding.STOCHASTIC)
    x, weight = torch.randn(4, 16, device=device), torch.randn(3, 16, device=device)
    draws = torch.stack([linear(x, weight, None, variant, seed=1, offset=draw << 32) for draw in range(400)]).double()
    error = (draws.mean(0) - F.linear(x.double(), weight.double())).abs() / (draws.std(0) / 400**0.5)
    assert error.max().item() < 5


def saved_tensors(call):
    """Every tensor autograd keeps, once per storage."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    return y, list(kept.values())


def test_only_int8_copies_are_kept_for_backward(device):
    x, weight = torch.randn(32, 24, device=device, requires_grad=True), torch.randn(16, 24, device=device, requires_grad=True)
    _, kept = saved_tensors(lambda: linear(x, weight, None, INT8))
    sizes = {dtype: sum(t.untyped_storage().nbytes() for t in kept if t.dtype is dtype) for dtype in {t.dtype for t in kept}}
    assert sizes == {torch.int8: 32 * 24 + 16 * 24, torch.float32: 4 + 16 * 4}


def test_what_no_gradient_needs_is_not_kept(device):
    x, weight = torch.randn(8, 24, device=device), torch.randn(16, 24, device=device, requires_grad=True)
    _, kept = saved_tensors(lambda: linear(x, weight, None, INT8))
    assert {tuple(tensor.shape) for tensor in kept} == {(8, 24), (1,)}
    y, kept = saved_tensors(lambda: linear(x.requires_grad_(), weight.detach(), None, INT8))
    assert {tuple(tensor.shape) for tensor in kept} == {(16, 24), (16,)}
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_sixteen_bit_copies_are_what_a_sixteen_bit_operator_keeps(device):
    x, weight = torch.randn(32, 24, device=device, requires_grad=True), torch.randn(16, 24, device=device, requires_grad=True)
    _, kept = saved_tensors(lambda: linear(x, weight, None, NEAREST[Precision.BFLOAT16]))
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == 2 * (32 * 24 + 16 * 24)


@pytest.mark.parametrize("loss", [torch.square, torch.clone], ids=["of a gradient", "of a constant gradient"])
def test_second_derivatives_are_refused(device, loss):
    x, weight = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(2, 8, device=device, requires_grad=True)
    found = torch.autograd.grad(loss(linear(x, weight, None, INT8)).sum(), (x, weight), create_graph=True)
    expected = torch.autograd.grad(loss(linear(x, weight, None, INT8)).sum(), (x, weight))
    assert all(torch.equal(first, second) for first, second in zip(found, expected, strict=True))
    for grad in found:
        with pytest.raises(PlanError, match=r"an operator runs in int8, which has no second derivative, .*create_graph=True"):
            grad.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {"compute": Precision.FLOAT8_E4M3FN, "saved": Precision.FLOAT8_E4M3FN},
            "float8 products need a CUDA device of compute capability 8.9, and this request is for cpu",
        ),
        ({"saved": Precision.FLOAT32}, r"it saves operands in the format it computes in \(int8\), not in float32"),
        ({"symmetric": False, "x_granularity": Granularity.PER_CHANNEL}, "scales per input channel do not factor out of a product"),
        ({"x_granularity": Granularity.PER_CHANNEL}, "scales per input channel do not factor out of a product"),
        ({"w_granularity": Granularity.PER_ROW}, "a weight has scales per tensor or per output channel, not per row"),
    ],
)
def test_refused_variants_name_operator_shapes_and_reason(changes, reason):
    variant = attrs.evolve(INT8, **changes)
    with pytest.raises(BackendError, match=rf"linear.output as .* on \[4, 8\] and \[2, 8\] cannot run on cpu: .*aten: .*{reason}"):
        linear(torch.randn(4, 8), torch.randn(2, 8), None, variant)


def test_an_unknown_backend_is_named_with_those_that_are_there():
    with pytest.raises(BackendError, match=r"kernel backend 'nowhere' is not installed here \(found: .*aten"):
        linear(torch.randn(4, 8), torch.randn(2, 8), None, INT8, backend="nowhere")


def test_infinite_activations_are_refused_on_a_cpu():
    with pytest.raises(NumericsError, match="NaN or infinite"):
        linear(torch.full((2, 4), float("inf")), torch.randn(2, 4), None, INT8)


def test_an_activation_in_8_bit_is_refused_by_name():
    with pytest.raises(NumericsError, match=r"takes float32 or a 16-bit float, got torch\.int8"):
        linear(torch.ones(2, 4, dtype=torch.int8), torch.randn(3, 4), None, INT8)
