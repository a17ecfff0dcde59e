"""Operands of every request: the shapes, formats and layouts that ``apply_`` gives, accepted by the reference backend."""

import attrs
import pytest
import torch

from qsync_core.errors import BackendError
from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelConfig, KernelRequest, Op
from qsync_core.kernels.requests import CallShapes, operator_requests, quantization_variant
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.kernels.binding import Bound
from qsync_torch.kernels.operands import OUT
from qsync_torch.operators import conv2d, linear
from qsync_torch.tuning.kernel_timing import make_operands, rotating_sets

CPU = torch.device("cpu")
INT8 = Variant.of(Precision.INT8)
SIXTEEN = Variant.of(Precision.INT8, output=Precision.BFLOAT16)
GRADS = attrs.evolve(SIXTEEN, grad_input=Precision.INT8, grad_weight=Precision.INT8)
ONE_GRAD = attrs.evolve(INT8, grad_input=Precision.INT8, w_granularity=Granularity.PER_TENSOR)
ROWS = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW, rounding=Rounding.NEAREST)
GRADS_BY_ROW = attrs.evolve(GRADS, x_granularity=Granularity.PER_ROW)
AFFINE = attrs.evolve(INT8, symmetric=False, grad_input=Precision.INT8)
AFFINE_ROWS = attrs.evolve(ROWS, symmetric=False)
LINEAR = CallShapes("linear", (2, 3, 16), (8, 16), (2, 3, 8))
GEOMETRY = Geometry((2, 2), (1, 1), (1, 1), 2)
CONV = CallShapes("conv2d", (2, 4, 9, 9), (6, 2, 3, 3), (2, 6, 5, 5), GEOMETRY)
DENSE = CallShapes("conv2d", (2, 4, 9, 9), (6, 4, 3, 3), (2, 6, 9, 9), Geometry(padding=(1, 1)))
CASES = [(LINEAR, variant) for variant in (INT8, SIXTEEN, GRADS, ONE_GRAD, ROWS, AFFINE, AFFINE_ROWS)]
CASES += [(CONV, INT8), (CONV, attrs.evolve(INT8, symmetric=False)), (DENSE, attrs.evolve(SIXTEEN, grad_input=Precision.INT8))]


@pytest.mark.parametrize(("call", "variant"), [*CASES, (LINEAR, GRADS_BY_ROW)])
def test_the_reference_backend_takes_them_and_writes_the_result(call, variant):
    for asked in operator_requests(call, variant, "cpu"):
        assert AtenBackend().unsupported_reasons(asked.request) == []
        arguments = make_operands(asked, CPU)
        position = 1 if asked.request.op == Op.QUANTIZE else OUT[asked.request.op.partition(".")[2]]
        result = arguments[position]
        assert tuple(result.shape) == asked.result_shape
        result.copy_(torch.full(result.shape, 113).to(result.dtype))
        AtenBackend().build(asked.request, KernelConfig())(*arguments)
        assert (result != 113).any()
        assert torch.isfinite(result.float()).all()


def test_factors_of_rows_without_columns_of_their_own_are_refused_by_the_reference_backend():
    variant = quantization_variant(Precision.INT8, Granularity.PER_TENSOR, Rounding.NEAREST)
    kernel = AtenBackend().build(KernelRequest(Op.QUANTIZE, variant, ((2, 3),)), KernelConfig())
    operands = (torch.ones(2, 3), torch.empty(2, 3, dtype=torch.int8), torch.empty(1), None, 1, 0)
    alone = "a row_multiplier goes with a scale per row and a transposed_out, and here is a scale per tensor and no transposed_out"
    with pytest.raises(BackendError, match=alone):
        kernel(*operands, row_multiplier=torch.ones(2))


@pytest.mark.parametrize(("call", "variant"), CASES)
def test_a_training_step_makes_exactly_these_requests(call, variant, monkeypatch):
    """The kernels that an operator asks for, with shapes, formats and layouts, are those that are tuned."""
    made = []

    original = Bound.kernel

    def watched(self, op, device, *shapes):
        kernel = original(self, op, device, *shapes)

        def run(*arguments):
            made.append((self.request(op, device, *shapes), arguments))
            return kernel(*arguments)

        return run

    monkeypatch.setattr(Bound, "kernel", watched)
    # Activations arrive in the format that the same rung's operators write.
    dtype = torch.bfloat16 if variant.output is Precision.BFLOAT16 else torch.float32
    x = torch.randn(call.x).to(dtype)
    w = torch.randn(call.w).requires_grad_()
    if call.kind == "linear":
        y = linear(x.requires_grad_(), w, torch.randn(call.w[0]), variant)
    else:
        x, w = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (x, w))
        y = conv2d(x, w, None, variant, **attrs.asdict(call.geometry))
    y.backward(torch.randn_like(y))
    asked = operator_requests(call, variant, "cpu")

    def facts(request):
        from qsync_core.tuning.record import formats_of

        return request.op, formats_of(request), request.shapes, request.geometry, request.multiplied, request.transposed

    assert sorted(facts(request) for request, _ in made) == sorted(facts(entry.request) for entry in asked)
    for entry in asked:
        arguments = next(arguments for request, arguments in made if facts(request) == facts(entry.request))
        ours = make_operands(entry, CPU)
        assert len(ours) == len(arguments)
        for mine, theirs in zip(ours, arguments, strict=True):
            assert type(mine) is type(theirs) or {type(mine), type(theirs)} <= {torch.Tensor, torch.nn.Parameter, type(None)}
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                assert (entry.role, mine.dtype, mine.shape) == (entry.role, theirs.dtype, theirs.shape)
                if mine.ndim == 4:
                    assert theirs.is_contiguous(memory_format=torch.channels_last)


def test_sets_rotate_through_more_than_the_cache():
    requests = {asked.role: asked for asked in operator_requests(LINEAR, INT8, "cpu")}
    sets = rotating_sets(requests["linear.output"], CPU)
    assert len(sets) == 16
    assert len({arguments[0].data_ptr() for arguments in sets}) == 16
    large = CallShapes("linear", (4096, 1024), (512, 1024), (4096, 512))
    large_sets = rotating_sets(operator_requests(large, INT8, "cpu")[2], CPU)
    assert 2 <= len(large_sets) < 16
    assert sum(t.nbytes for arguments in large_sets for t in arguments if isinstance(t, torch.Tensor)) >= 32 << 20
