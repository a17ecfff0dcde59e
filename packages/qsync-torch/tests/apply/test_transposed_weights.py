"""``x @ weight`` and ``torch.addmm``: linear operators whose weight is stored as inputs by outputs, as GPT-2's is.

The reference is the same model with ``nn.Linear`` in their place, which nothing but the layout of the weight tells apart.
"""

import copy
import warnings

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

from .small_models import BFLOAT16, FLOAT32, INT8
from .test_apply import plan_of

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST)
EIGHT_BIT_GRADIENTS = attrs.evolve(NEAREST, grad_input=Precision.INT8, grad_weight=Precision.INT8)
VARIANTS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": Variant.parse("float16"),
    "int8": NEAREST,
    "int8-per-tensor": attrs.evolve(NEAREST, w_granularity=Granularity.PER_TENSOR),
    "int8-gradients": EIGHT_BIT_GRADIENTS,
}
WAYS = {
    "addmm": lambda x, w, b: torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.shape[:-1], -1),
    "addmm by name": lambda x, w, b: torch.addmm(input=b, mat1=x.flatten(0, -2), mat2=w, beta=1).view(*x.shape[:-1], -1),
    "Tensor.addmm": lambda x, w, b: b.addmm(x.flatten(0, -2), w).view(*x.shape[:-1], -1),
    "matmul": lambda x, w, b: torch.matmul(x, w) + b,
    "matmul by name": lambda x, w, b: torch.matmul(input=x, other=w) + b,
    "@": lambda x, w, b: x @ w + b,
    "Tensor.matmul": lambda x, w, b: x.matmul(w) + b,
    "mm": lambda x, w, b: torch.mm(x.flatten(0, -2), w).view(*x.shape[:-1], -1) + b,
    "Tensor.mm": lambda x, w, b: x.flatten(0, -2).mm(mat2=w).view(*x.shape[:-1], -1) + b,
}


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, k, n, way="addmm"):
        super().__init__()
        self.weight, self.bias, self.way = nn.Parameter(torch.randn(k, n) / k**0.5), nn.Parameter(torch.randn(n)), way

    def forward(self, x):
        return WAYS[self.way](x, self.weight, self.bias)


class Layer(nn.Linear):
    """The same of a Linear; a bias that is added to the product is no part of the operator."""

    way = "addmm"

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) if "addmm" in self.way else F.linear(x, self.weight) + self.bias


class Block(nn.Module):
    """Two projections, perhaps under gradient checkpointing."""

    def __init__(self, way="addmm", use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.use_reentrant = Conv1D(16, 48, way), Conv1D(48, 16, way), use_reentrant

    def body(self, x):
        return self.b(F.gelu(self.a(x)))

    def forward(self, x):
        return self.body(x) if self.use_reentrant is None else checkpoint(self.body, x, use_reentrant=self.use_reentrant)


def twin(model, kind=Layer):
    """The model with Linears of the transposed weights."""
    found = copy.deepcopy(model)
    for name, module in list(found.named_modules()):
        if type(module).__name__ == "Conv1D":
            layer = kind(*module.weight.shape)
            layer.load_state_dict({"weight": module.weight.t(), "bias": module.bias})
            layer.way = getattr(module, "way", "addmm")
            found.set_submodule(name, layer)
    return found


def step(model, variants, *inputs, **kwargs):
    applied = apply_(model, variants)
    model.zero_grad()
    output = model(*inputs, **kwargs)
    loss = output.square().mean() if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    applied.remove()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


ROUNDED = 0.0 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 2.0**-12
"""Relative difference that a sum's last bits make without oneDNN's bfloat16: sums in float32 follow the layout."""


def check_equal(model, found, expected, *, of_twin=True, rounded=0.0):
    (loss, gradients), (other_loss, others) = found, expected
    assert torch.equal(loss, other_loss)
    turned = {f"{name}.weight" for name, module in model.named_modules() if of_twin and type(module).__name__ == "Conv1D"}
    for name, parameter in model.named_parameters():
        gradient, other = gradients[name], others[name]
        assert gradient.dtype is torch.float32
        assert gradient.stride() == parameter.stride()
        other = other.t() if name in turned else other
        assert torch.equal(gradient, other) or (gradient - other).norm() <= rounded * other.norm(), name


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(3, 5, 16).requires_grad_()


def both(variant):
    return {OpId("a.weight"): variant, OpId("b.weight"): variant}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("way", WAYS)
def test_it_runs_as_a_linear_does_to_the_last_bit(x, way, variant):
    model = Block(way)
    check_equal(model, step(model, both(variant), x), step(twin(model), both(variant), x))


class Own(nn.Module):
    """Two linear layers of a script's own, which store their weights as PyTorch's do."""

    def __init__(self, product):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.product = nn.ParameterDict(), nn.ParameterDict(), product
        for layer, n, k in ((self.a, 48, 16), (self.b, 16, 48)):
            layer.update({"weight": torch.randn(n, k) / k**0.5, "bias": torch.randn(n)})

    def forward(self, x):
        for layer in (self.a, self.b):
            x = F.gelu(self.product(x, layer["weight"]) + layer["bias"])
        return x


def traced(model, x):
    return trace(Job("own", model, lambda _, size: Batch((x.detach()[:size],)), lambda y, _: y.square().mean(), torch.optim.SGD, 3))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "product", [lambda x, w: x @ w.t(), lambda x, w: torch.matmul(x, w.mT), lambda x, w: x.matmul(w.permute(1, 0).contiguous())]
)
def test_a_product_with_a_transpose_runs_as_a_linear_does(x, product, variant):
    model, linear = Own(product), Own(F.linear)
    plans = [plan_of({operator.op_id: variant for operator in traced(one, x).adjustable}) for one in (model, linear)]
    assert [str(op_id) for op_id in plans[0].operator_ids] == ["a.weight#0", "b.weight#0"]
    assert plans[0] == plans[1]
    check_equal(model, step(model, plans[0], x), step(linear, plans[1], x), of_twin=False)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_round_as_their_forward_did(x, use_reentrant):
    found = step(Block(use_reentrant=use_reentrant), both(INT8), x)
    check_equal(Block(), found, step(Block(), both(INT8), x), of_twin=False)


def test_compiled(x):
    model, variants = Block(), both(NEAREST)
    eager = step(model, variants, x)
    apply_(model, variants)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = compiled(x).square().mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    check_equal(model, (loss.detach(), gradients), eager, of_twin=False)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, use_cache=False)).train()

    def batch(step, size):
        tokens = torch.randint(40, (size, 16), generator=torch.Generator().manual_seed(step))
        return Batch((), {"input_ids": tokens, "labels": tokens})

    dag = trace(Job("gpt2", model, batch, lambda output, _: output.loss, lambda p: torch.optim.SGD(p, 0.1), 2))
    projections = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [f"transformer.h.{block}.{name}.weight#0" for block in range(2) for name in projections]
    assert [str(operator.op_id) for operator in dag.adjustable] == [*names, "lm_head#0"]
    # Tokens × (4 projections of width² · 3, 1, 4 and 4, twice, and the head) of all, with attention's two products of 16 tokens.
    lowered, attention = 2 * 32 * (2 * 12 * 32 * 32 + 32 * 40), 2 * 2 * (2 * 2 * 2 * 16 * 16 * 16)
    assert sum(operator.flops for operator in dag.adjustable) == lowered
    assert lowered + attention <= sum(operator.flops for operator in dag.operators) < 1.1 * (lowered + attention)
    inputs = batch(0, 2).kwargs
    for variant, rounded in ((NEAREST, 0.0), (BFLOAT16, ROUNDED)):
        variants = {operator.op_id: variant for operator in dag.adjustable}
        of_twin = {OpId(op_id.fqn.removesuffix(".weight")): variant for op_id in variants}
        for _ in range(2):  # the second time with checkpoints
            found, expected = step(model, variants, **inputs), step(twin(model, nn.Linear), of_twin, **inputs)
            check_equal(model, found, expected, rounded=rounded)
            model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder's weight, read the other way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(16, 8)

    def forward(self, x):
        return F.relu(self.encoder(x)) @ self.encoder.weight


def test_one_weight_in_both_layouts_has_one_variant_and_a_scale_for_each_output_of_each_call(x):
    model = Tied()
    found = step(model, {OpId("encoder"): NEAREST}, x)

    class Untied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = copy.deepcopy(model.encoder), nn.Linear(8, 16, bias=False)
            self.decoder.weight.data.copy_(model.encoder.weight.t())

        def forward(self, x):
            return self.decoder(F.relu(self.encoder(x)))

    loss, gradients = step(Untied(), {OpId("encoder"): NEAREST, OpId("decoder"): NEAREST}, x)
    assert torch.equal(found[0], loss)
    expected = gradients["encoder.weight"] + gradients["decoder.weight"].t()
    assert torch.allclose(found[1]["encoder.weight"], expected, rtol=1e-6, atol=0)


class TiedEmbedding(nn.Module):
    """A weight that is looked up, and multiplied with, as language models tie their heads."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.body, self.head = nn.Embedding(10, 16), nn.Linear(16, 16), head

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.tokens(tokens))), self.tokens.weight)


class TiedBody(TiedEmbedding):
    """The weight of a planned module, which is multiplied with once more."""

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.tokens(tokens))), self.body.weight)


@pytest.mark.parametrize("model, name", [(TiedEmbedding, "tokens.weight"), (TiedBody, "body")], ids=["embedding", "own module"])
@pytest.mark.parametrize("head", [F.linear, lambda x, w: x @ w.t()], ids=["F.linear", "@"])
def test_a_tied_weight_is_multiplied_with_as_planned_and_without_a_warning(model, name, head):
    class Untied(model):
        def forward(self, tokens):
            return self.decoder(torch.tanh(self.body(self.tokens(tokens))))

    tied, untied, tokens = model(head), Untied(head), torch.arange(10).view(2, 5)
    weight = tied.get_parameter(name if name.endswith("weight") else f"{name}.weight")
    untied.decoder = nn.Linear(16, len(weight), bias=False)
    untied.decoder.weight.data.copy_(weight)
    expected, _ = step(untied, {OpId("body"): NEAREST, OpId("decoder"): NEAREST}, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_(tied, dict.fromkeys((OpId("body"), OpId(name)), NEAREST))
        optimizer = torch.optim.SGD(tied.parameters(), 0.1)
        losses = []
        for _ in range(2):
            losses.append(tied(tokens).square().mean())
            losses[-1].backward()
            optimizer.step()
    assert torch.equal(losses[0].detach(), expected)


class Adapted(nn.Module):
    """Products of what a model stores alone, and with a weight on the left: no operators of a plan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.a, self.b = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 16))
        self.register_buffer("fixed", torch.randn(16, 16))
        self.left, self.penalty = nn.Parameter(torch.randn(5, 5)), 0.0

    def forward(self, x):
        weight = self.layer.weight + self.a @ self.b
        self.penalty = (self.layer.weight.t() @ self.layer.weight).square().sum() + (self.fixed @ self.layer.weight).sum()
        return self.left @ (self.layer(x) + x * weight.mean())


def test_products_without_an_activation_are_left_alone(x):
    model = Adapted()
    model(x)
    penalty = model.penalty
    apply_(model, plan_of({OpId("layer"): BFLOAT16}))
    model(x).sum().backward()
    assert model.penalty.dtype is torch.float32
    assert torch.equal(model.penalty, penalty)


def test_a_product_that_the_plan_does_not_name_is_refused(x):
    model = Block("@")
    apply_(model, plan_of({OpId("a.weight"): INT8}))
    with pytest.raises(PlanError, match=r"b\.weight runs but the plan does not name it.*trace this model"):
        model(x)


def test_a_product_that_no_plan_can_have_runs_as_it_is(x):
    model = Own(lambda x, w: F.linear(x, w.detach()))
    dag = traced(model, x)
    unaddressed = tuple(operator.op_id for operator in dag.operators if operator.kind == "linear")
    assert dag.adjustable == ()
    assert len(unaddressed) == 2
    model.out = nn.Linear(16, 16)
    apply_(model, attrs.evolve(plan_of({OpId("out"): INT8}), unaddressed_ids=unaddressed))
    assert torch.equal(model(x), Own(F.linear)(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w, alpha=2),
        lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w, beta=0.5),
        lambda x, w, b: torch.addmm(x.new_ones(15, 48), x.flatten(0, -2), w),
    ],
    ids=["alpha", "beta", "summand"],
)
def test_an_addmm_that_is_no_linear_is_in_full_precision_and_named(x, call, monkeypatch):
    monkeypatch.setitem(WAYS, "addmm", call)
    model = Conv1D(16, 48)
    exact = model(x).flatten(0, -2)
    apply_(model, {OpId("weight"): INT8})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    assert torch.equal(model(x).flatten(0, -2), exact)
    with pytest.warns(UserWarning, match="the plan lowers weight#0, which the first step did not run"):
        optimizer.step()


def test_other_shapes_are_refused_and_transposed_ones_are_what_the_model_stores(x):
    job = Job(
        "block", Block(), lambda *_: Batch((x.detach(),)), lambda y, _: y.square().mean(), lambda p: torch.optim.SGD(p, 0.1), 3
    )
    shapes = {operator.op_id.fqn: operator.parameter_shape for operator in trace(job).adjustable}
    assert shapes == {"a.weight": (16, 48), "b.weight": (48, 16)}
    apply_(Block(), attrs.evolve(plan_of(both(INT8)), weight_shapes=shapes)).remove()
    with pytest.raises(PlanError, match=r"the weight of a\.weight has shape \[16, 48\] in this Block and \[48, 16\] in the plan"):
        apply_(Block(), attrs.evolve(plan_of(both(INT8)), weight_shapes={"a.weight": (48, 16)}))
