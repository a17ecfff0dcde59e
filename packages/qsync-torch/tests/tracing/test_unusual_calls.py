"""Calls that few models make: custom operators, complex numbers, reentrant checkpointing, LayerDrop, products of every kind."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import TraceError
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.precision import Precision
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tracing.trace import trace


def job(model: nn.Module, shape: tuple[int, ...] = (2, 4), dtype: torch.dtype = torch.float32) -> Job:
    def batch(step: int, size: int) -> Batch:
        return Batch((torch.randn(shape) if dtype is torch.float32 else torch.zeros(shape, dtype=dtype),))

    return Job(
        "unusual",
        model,
        batch,
        lambda output, batch: (output[0] if isinstance(output, tuple) else output).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


def flops_of(dag: PrecisionDag, kind: str) -> int:
    return sum(operator.flops for operator in dag.operators if operator.kind == kind)


class Product(nn.Module):
    """A function of the input and one parameter."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    ("model", "shape", "kind", "flops"),
    [
        (nn.LSTM(3, 5, 2), (7, 2, 3), "lstm", 2 * (7 * 2) * 4 * 5 * (3 + 5 + 5 + 5)),
        (nn.GRU(3, 5, bidirectional=True), (7, 2, 3), "gru", 2 * (7 * 2) * 2 * 3 * 5 * (3 + 5)),
        (nn.GRUCell(3, 5), (2, 3), "gru_cell", 2 * 2 * 3 * 5 * (3 + 5)),
        (nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 5, 5), "conv_transpose2d", 2 * (2 * 5 * 5) * 3 * 4 * 9),
        (nn.Conv1d(3, 4, 3), (2, 3, 9), "conv1d", 2 * (2 * 7) * 3 * 4 * 3),
        (nn.Bilinear(4, 4, 6), (2, 4), "bilinear", 2 * 2 * 4 * 4 * 6),
        (Product(torch.matmul, 4, 5), (2, 4), "linear", 2 * 2 * 4 * 5),
        (Product(torch.mv, 4), (2, 4), "mv", 2 * 2 * 4),
        (Product(lambda x, w: torch.addmm(x.new_ones(5), x, w), 4, 5), (2, 4), "linear", 2 * 2 * 4 * 5),
        (Product(lambda x, w: w @ x, 3, 2), (2, 4), "matmul", 2 * 3 * 2 * 4),
        (Product(lambda x, w: torch.bmm(x, w), 3, 4, 5), (3, 2, 4), "bmm", 2 * 3 * 2 * 4 * 5),
        (Product(lambda x, w: torch.einsum("nk,kj->nj", x, w), 4, 5), (2, 4), "einsum", 2 * 2 * 4 * 5),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_product_counts(model: nn.Module, shape: tuple[int, ...], kind: str, flops: int) -> None:
    """The share of the operations that a plan can lower is of all of them."""
    if kind == "bilinear":
        inner = model
        model = nn.Module()
        model.inner = inner
        model.forward = lambda x: inner(x, x)
    assert flops_of(trace(job(model, shape)), kind) == flops


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: x @ w, ""),
        (lambda x, w: torch.addmm(w[0], x, w), ""),
        (lambda x, w: (x @ w) @ w, ""),
        (lambda x, w: torch.addmm(x.mean(0), x, w), "its bias is computed, not a parameter"),
        (lambda x, w: torch.addmm(w[:2], x, w), "torch.addmm adds a tensor of shape [2, 4] to the product"),
        (lambda x, w: torch.addmm(w[0], x, w, beta=2), "torch.addmm is called with factors alpha or beta other than 1"),
        (lambda x, w: torch.addmm(w[0], x, w, alpha=2) @ w, "torch.addmm is called with factors alpha or beta other than 1"),
        (lambda x, w: torch.vmap(lambda row: row @ w)(x), "it is called under torch.vmap"),
    ],
)
def test_a_whole_matrix_on_the_right_is_the_weight_of_a_linear(function, reason: str) -> None:
    dag = trace(job(Product(function, 4, 4)))
    products = [operator for operator in dag.operators if operator.weight_shape]
    assert [str(operator.op_id) for operator in products] == [f"weight#{call}" for call in range(len(products))]
    assert products[0].not_applicable.startswith(reason)
    assert {operator.is_adjustable for operator in products} == {not reason}
    for operator in products:
        assert (operator.kind, operator.parameters[0], operator.is_transposed) == ("linear", "weight", True)
        assert operator.input_shapes[0][-1] == 4


@pytest.mark.parametrize(
    "function",
    [lambda x, w: w @ w, lambda x, w: w.t() @ w, lambda x, w: w[:2, :2] @ x, lambda x, w: x @ w[:, :2], lambda x, w: x @ w[:2].t()],
    ids=["parameters", "view and parameter", "left", "part", "part, transposed"],
)
def test_other_products_are_no_operators_of_a_plan(function) -> None:
    assert trace(job(Product(lambda x, w: x.mean() + function(x, w), 4, 4))).adjustable == ()


TURNS = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: torch.transpose(w, -1, -2),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "thrice": lambda w: w.t().t().t(),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize(
    ("function", "shape", "is_transposed"),
    [
        (lambda x, w: x @ w, (6, 4), False),
        (lambda x, w: torch.addmm(w[0], x, w), (6, 4), False),
        (F.linear, (4, 6), True),
    ],
    ids=["@", "addmm", "linear"],
)
def test_a_product_with_a_transpose_is_one_with_the_weight(turn, function, shape, is_transposed) -> None:
    """A linear layer of a script's own calls ``x @ self.weight.t() + self.bias``."""
    (operator,) = trace(job(Product(lambda x, w: function(x, turn(w)), *shape))).adjustable
    assert (str(operator.op_id), operator.kind, operator.is_transposed) == ("weight#0", "linear", is_transposed)
    assert operator.weight_shape == (6, 4)
    assert operator.output_shape[-1] == 6
    assert operator.not_applicable == ""


class Scaled(torch.autograd.Function):
    """A product with the gradients that its author wrote down."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@pytest.mark.parametrize(
    ("function", "delivered"), [(lambda x, w: Scaled.apply(x, w), Precision.FLOAT32), (F.linear, Precision.BFLOAT16)]
)
def test_a_gradient_formula_gets_gradients_in_the_format_of_its_weights(function, delivered: Precision) -> None:
    """``grad @ weight`` fails where the gradient has the 16 bits of the result."""
    dag = trace(job(nn.Sequential(Product(function, 4, 4), nn.Linear(4, 4))))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["0.weight#0", "1#0"]
    outputs = dict.fromkeys(("0.weight", "1"), Precision.BFLOAT16)
    assert OutputFormats.of(dag).delivered("0.weight", outputs) is delivered


class Checkpointed(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options
        self.stem, self.body, self.out = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.body, self.stem(x), **self.options))


@pytest.mark.parametrize(
    ("prepare", "is_itself"),
    [
        (lambda w, x: w.to(x.dtype), True),
        (lambda w, x: w.to(x), True),
        (lambda w, x: w.to(x.device), True),
        (lambda w, x: w.type(torch.float32), True),
        (lambda w, x: w.float(), True),
        (lambda w, x: w.type_as(x), True),
        (lambda w, x: w.flatten(1), True),
        (lambda w, x: +w, True),
        (lambda w, x: torch.atleast_2d(w), True),
        (lambda w, x: F.dropout(w, 0.5, training=False), True),
        (lambda w, x: F.dropout(w, 0.0, training=True), True),
        (lambda w, x: F.dropout(w, 0.5, training=True), False),
        (lambda w, x: w.contiguous(), True),
        (lambda w, x: w.to(x.dtype, copy=True), False),
        (lambda w, x: w.double().float(), False),
        (lambda w, x: w.view_as(w), False),
        (lambda w, x: w[:], False),
    ],
)
@pytest.mark.parametrize("product", [F.linear, torch.matmul, torch.linalg.matmul])
def test_a_weight_that_a_function_returns_unchanged_is_an_operator_of_the_plan(prepare, is_itself: bool, product) -> None:
    """``apply_`` knows a weight by its identity, and DeepSeek's gate calls ``F.linear(x.type(t), self.weight.type(t))``."""
    model = Product(lambda x, w: product(x, prepare(w, x)), 4, 4)
    assert (prepare(model.weight, torch.zeros(2, 4)) is model.weight) == is_itself
    assert [str(operator.op_id) for operator in trace(job(model)).adjustable] == ["weight#0"] * is_itself


def test_reentrant_checkpointing_is_traced_like_any_other() -> None:
    dags = [trace(job(Checkpointed(use_reentrant=reentrant))) for reentrant in (True, False)]
    assert dags[0] == dags[1]
    assert len(dags[0].adjustable) == 3
    assert torch.utils.checkpoint.CheckpointFunction.__name__ == "CheckpointFunction"


class WholeCheckpointed(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, **self.options)


def test_reentrant_checkpointing_of_an_input_without_gradient_is_named() -> None:
    with pytest.raises(TraceError, match=r"no parameter of unusual gets a gradient.*use_reentrant=False"):
        trace(job(WholeCheckpointed(use_reentrant=True)))


class Sliced(nn.Module):
    """Runs parts of its layers, and has a module under two names, as prompts of PEFT have the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.again = self.layers[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[1:][:-1:2]:
            x = torch.tanh(layer(x))
        return self.head[1:](x)


def test_modules_in_a_slice_have_their_own_names() -> None:
    operators = {str(operator.op_id): operator.kind for operator in trace(job(Sliced())).operators}
    linears = [name for name, kind in operators.items() if kind == "linear"]
    assert linears == ["layers.1#0", "layers.3#0", "head.2#0"]
    assert operators["head.1#0"] == "relu"


class LayerDrop(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.layers = p, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if drawn < self.p:  # layer drop
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_no_layer_is_dropped_in_an_ordinary_step(p: float) -> None:
    assert len(trace(job(LayerDrop(p))).adjustable) == 2


@torch.library.custom_op("qsync_test::scale_by_count", mutates_args=())
def scale_by_count(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x * count.item()


@scale_by_count.register_fake
def _(x, count):
    return torch.empty_like(x)


scale_by_count.register_autograd(
    lambda ctx, grad: (grad * ctx.count.item(), None), setup_context=lambda ctx, inputs, output: setattr(ctx, "count", inputs[1])
)


class WithCustomOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(scale_by_count(self.first(x), torch.tensor(3)))


def test_a_custom_operator_whose_backward_reads_values_is_traced_and_can_be_run() -> None:
    """Mixture-of-experts models of transformers have one."""
    dag = trace(job(WithCustomOperator()))
    assert [op for bucket in dag.buckets for op in bucket.parameters] == ["last.bias", "last.weight", "first.bias", "first.weight"]
    (custom,) = (operator for operator in dag.operators if operator.kind == "scale_by_count")
    call = AtenCall.of(custom)
    inputs = call.make_inputs([torch.float32])
    assert call.bind(inputs)().shape == (2, 4)


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.phase = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y + torch.fft.irfft(torch.fft.rfft(y) * torch.view_as_complex(self.phase))


def test_complex_values_are_operators_of_float32_pairs() -> None:
    dag = trace(job(Fourier()))
    forth, product, back, total = (
        next(o for o in dag.operators if o.kind == kind) for kind in ("fft_rfft", "mul", "fft_irfft", "add")
    )
    assert forth.output_shape == (2, 3, 2)  # real and imaginary parts
    assert {forth.op_class, product.op_class, back.op_class} == {OpClass.FIXED}
    assert product.inputs == (forth.op_id,)
    assert total.inputs == (dag.adjustable[0].op_id, back.op_id)
    for operator in (forth, product, back):
        call = AtenCall.of(operator)
        result = call.bind(call.make_inputs([torch.float32]), call.make_parameters())()
        assert math.prod(result.shape) * (2 if result.is_complex() else 1) == operator.output_numel


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (nn.EmbeddingBag(9, 4), (2, 5), torch.int64),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4), torch.float32),
        (Product(lambda x, w: torch.linalg.cholesky(x @ x.mT + w), 1, 3, 3), (2, 3, 4), torch.float32),
        (Product(lambda x, w: torch.linalg.solve(x + w, x), 3, 3), (2, 3, 3), torch.float32),
        (Product(lambda x, w: (x + w).masked_fill(x > 0, torch.finfo(torch.float32).min), 4), (2, 4), torch.float32),
        (Product(lambda x, w: torch.fft.fft(x * w).abs(), 4), (2, 4), torch.float32),
    ],
)
def test_recorded_calls_run_on_random_operands(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for operator in trace(job(model, shape, dtype)).operators:
        call = AtenCall.of(operator)
        if call is None:
            assert operator.is_adjustable or operator.kind == "input"
            continue
        is_fixed = operator.op_class in (OpClass.FIXED, OpClass.ADJUSTABLE)
        for precision in (torch.float32,) if is_fixed else (torch.float32, torch.bfloat16):
            inputs = [x.requires_grad_() for x in call.make_inputs([precision] * len(operator.inputs))]
            call.bind(inputs, [p.requires_grad_() for p in call.make_parameters()])()


def of_layout(change) -> Job:
    return Job(
        "sparse",
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        lambda step, size: Batch((change(torch.eye(size, 4)),)),
        lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        2,
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_inputs() -> None:
    """No operator that reads one is adjustable; those behind it are."""
    dag = trace(of_layout(torch.Tensor.to_sparse))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["1#0"]
    assert next(o.not_applicable for o in dag.operators if str(o.op_id) == "0#0") == "its input is sparse_coo, not dense"
    with pytest.raises(TraceError, match=r"sparse cannot be traced with input in sparse_csr: give it dense, or as to_sparse\(\)"):
        trace(of_layout(torch.Tensor.to_sparse_csr))


class Gathered(nn.Module):
    """Features of all ranks, as contrastive losses compare them."""

    def __init__(self, gather) -> None:
        super().__init__()
        self.encoder, self.head, self.gather = nn.Linear(4, 4), nn.Linear(4, 4), gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat(tuple(self.gather(self.encoder(x)))))


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("gather", [collectives.all_gather, lambda h: [collectives.all_reduce(h)] * 3], ids=["gather", "reduce"])
def test_differentiable_collectives_are_traced_as_if_all_ranks_did_as_this_one(gather) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        dag = trace(job(Gathered(gather)))
    finally:
        dist.destroy_process_group()
    alone = trace(job(Gathered(lambda h: [h] * 3)))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["encoder#0", "head#0"]
    assert [operator.flops for operator in dag.adjustable] == [operator.flops for operator in alone.adjustable]
