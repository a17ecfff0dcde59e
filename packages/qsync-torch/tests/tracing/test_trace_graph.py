"""trace on hand-made modules: functional, repeated and tied calls, views, in-place work, branches, what cannot be lowered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def traced(
    model: nn.Module, *inputs: torch.Tensor, loss: Callable[[Any], torch.Tensor] = mean_square, **kwargs: Any
) -> PrecisionDag:
    return trace(
        Job(
            "hand-made",
            model,
            lambda step, size: Batch(inputs, kwargs),
            lambda output, batch: loss(output),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            inputs[0].shape[0],
        )
    )


def ids(*texts: str) -> tuple[OpId, ...]:
    return tuple(map(OpId.parse, texts))


class Functional(nn.Module):
    """Linear and convolution by function, in the root and in a child."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 6))
            self.b = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, self.w, self.b), self.w)

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()
        self.kernel = nn.Parameter(torch.randn(4, 2, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, self.kernel, stride=(1, 2), padding=(1, 0))
        return self.child(x.flatten(1)[:, :6])


def test_functional_calls_are_named_by_their_weight_and_call() -> None:
    dag = traced(Functional(), torch.randn(3, 2, 5, 7))
    first, second = dag[OpId("child.w", 0)], dag[OpId("child.w", 1)]
    assert first.is_adjustable
    assert first.parameters == ("child.w", "child.b")
    assert second.parameters == ("child.w",)
    assert second.inputs == ids("child.w#0")
    assert first.variant_group == second.variant_group == "child.w"
    assert first.weight_shape == (6, 6)
    conv = dag[OpId("kernel")]
    assert conv.attributes == {"stride": "1,2", "padding": "1,0", "dilation": "1,1", "groups": "1"}
    assert conv.output_shape == (3, 4, 5, 3)
    assert conv.flops == 2 * (3 * 4 * 5 * 3) * (2 * 3 * 3)
    # flatten and slicing are views: the linear reads the convolution, in the shape it receives.
    assert first.inputs == ids("kernel")
    assert first.input_shapes == ((3, 6),)
    assert first.flops == 2 * 3 * 6 * 6


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.layer(x))
        x = self.act(self.again(x))
        return self.tied(self.layer(x))


def test_calls_of_a_shared_module_are_counted_and_share_a_variant() -> None:
    model = Repeated()
    dag = traced(model, torch.randn(2, 4))
    calls = [operator for operator in dag.adjustable if operator.op_id.fqn == "layer"]
    assert [str(operator.op_id) for operator in calls] == ["layer#0", "layer#1", "layer#2"]
    assert {operator.variant_group for operator in calls} == {"layer"}
    assert [str(o.op_id) for o in dag.operators if o.kind == "relu"] == ["act#0", "act#1"]
    assert dag[OpId("layer", 1)].inputs == ids("act#0")
    tied = dag[OpId("tied")]
    assert tied.parameters == ("layer.weight",)
    assert tied.variant_group == "tied"
    assert [parameter.fqn for parameter in dag.parameters] == ["layer.weight", "layer.bias"]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        source = x if memory is None else memory
        return self.attention(x, source, source, need_weights=False)[0]


def test_multihead_attention_makes_its_projections_itself() -> None:
    dag = traced(SelfAttention(), torch.randn(2, 5, 8))
    projections = [operator for operator in dag.operators if operator.kind == "linear"]
    assert [str(operator.op_id) for operator in projections] == ["attention.in_proj_weight#0", "attention.out_proj#0"]
    assert all(operator.is_adjustable for operator in projections)
    assert projections[0].parameters == ("attention.in_proj_weight", "attention.in_proj_bias")
    assert projections[0].weight_shape == (24, 8)
    assert projections[1].parameters == ("attention.out_proj.weight", "attention.out_proj.bias")
    assert projections[0].variant_group != projections[1].variant_group
    attention = dag[OpId("attention.scaled_dot_product_attention")]
    assert attention.op_class is OpClass.DEPENDENT
    assert len(attention.inputs) == 3
    assert attention.flops == 2 * (2 * 2) * 5 * 5 * (4 + 4)


def test_slices_of_a_packed_weight_are_listed_with_a_reason() -> None:
    dag = traced(SelfAttention(), torch.randn(2, 5, 8), torch.randn(2, 3, 8))
    projections = [operator for operator in dag.operators if operator.kind == "linear"]
    assert [operator.is_adjustable for operator in projections] == [False, False, True]
    assert "is a part or another view of parameter 'attention.in_proj_weight'" in projections[0].not_applicable


class Views(nn.Module):
    """chunk, split, in-place work on a slice, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).chunk(2, dim=-1)
        y = self.b(right) * 1
        y[:, :2].add_(left[:, :2])
        values, _ = self.c(y).max(dim=-1)
        one, _, three = torch.split(left.view(-1, 2, 2), [1, 0, 1], dim=1)
        return values.unsqueeze(-1) + (one * three).flatten(1)


def test_views_are_folded_and_writes_through_views_are_seen() -> None:
    dag = traced(Views(), torch.randn(3, 4))
    assert dag[OpId("b")].inputs == ids("a#0")
    assert dag[OpId("b")].input_shapes == ((3, 4),)
    written = dag[OpId("add", 0)]
    assert written.inputs == ids("mul#0", "a#0")
    assert written.input_shapes == ((3, 2), (3, 2))
    # What reads y afterwards reads what was written into it, although it reads another view.
    assert dag[OpId("c")].inputs == ids("add#0")
    assert dag[OpId("max")].inputs == ids("c#0")
    assert dag[OpId("mul", 1)].inputs == ids("a#0", "a#0")
    assert dag[OpId("add", 1)].inputs == ids("max#0", "mul#1")


def test_a_transposition_that_must_copy_is_an_operator() -> None:
    class Transposing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).transpose(1, 2).reshape(-1, 5)) + self.a(x).reshape(-1, 5).sum()

    dag = traced(Transposing(), torch.randn(2, 5, 4))
    assert [str(o.op_id) for o in dag.operators if o.kind == "reshape"] == ["reshape#0"]
    assert dag[OpId("b")].inputs == ids("reshape#0")
    assert dag[OpId("sum")].inputs == ids("a#1")


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embedding(tokens))
        x = x.masked_fill(mask.unsqueeze(-1), 0.0)
        x = F.softmax(x * self.gain, dim=-1)
        x = x * self.scale
        x = F.gelu(x)
        x = x + self.offset
        return x * x.mean()


def test_what_follows_its_inputs_and_what_stays_in_float32() -> None:
    dag = traced(Classes(), torch.randint(10, (2, 3)), mask=torch.zeros(2, 3, dtype=torch.bool))
    classes = {str(o.op_id): o.op_class for o in dag.operators if not o.op_id.fqn.startswith("$loss")}
    assert classes == {
        "embedding#0": OpClass.FIXED,
        "linear#0": OpClass.ADJUSTABLE,
        "masked_fill#0": OpClass.DEPENDENT,
        "mul#0": OpClass.DEPENDENT,  # a parameter without dimensions does not promote
        "softmax#0": OpClass.GUARDED,
        "mul#1": OpClass.FIXED,  # a float32 parameter promotes its product to float32
        "gelu#0": OpClass.DEPENDENT,
        "add#0": OpClass.FIXED,  # so does a buffer
        "mean#0": OpClass.DEPENDENT,
        "mul#2": OpClass.DEPENDENT,
    }
    assert dag[OpId("mul", 1)].parameters == ("scale",)
    assert dag[OpId("mul", 2)].inputs == ids("add#0")  # the mean has no dimensions and does not promote either
    assert not dag[OpId("embedding")].inputs


class Refused(nn.Module):
    """One call of each kind that apply_ cannot address."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.along = nn.Parameter(torch.randn(3, 4, 4))
        self.reflecting = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        self.lopsided = nn.Conv2d(1, 1, 2, padding="same")
        self.mapped = nn.Linear(4, 4)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("fixed", torch.randn(4, 4))
        self.direct = nn.Linear(4, 4)
        self.generated = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(x)
        x = torch.conv_tbc(x, self.along, x.new_zeros(4), 1)
        x = self.lopsided(self.reflecting(x.unsqueeze(1))).squeeze(1)
        x = torch.vmap(self.mapped)(self.mapped(x))
        x = self.recurrent(x)[0]
        x = x @ self.matrix[:].t()
        x = F.linear(x, self.fixed)
        x = F.linear(x, self.matrix * 2)
        x = torch.func.functional_call(self.generated, {"weight": x[0, :1] * self.matrix}, (self.generated(x),))
        return self.direct(x) + F.linear(x, x[0]).sum()


@pytest.mark.filterwarnings("ignore")
def test_what_can_not_be_lowered_says_why() -> None:
    dag = traced(Refused(), torch.randn(2, 3, 4))
    reasons = {str(operator.op_id): operator.not_applicable for operator in dag.operators if operator.not_applicable}
    expected = {
        "conv_tbc#0": "time-first convolution is not supported; a plan lowers linear, conv2d",
        "reflecting.conv2d#0": "its padding_mode is 'reflect'",
        "lopsided#0": "its padding 'same' is wider on one side",
        "mapped#0": "the same weight is used by mapped#1, of which: it is called under torch.vmap",
        "mapped#1": "it is called under torch.vmap",
        "generated#0": "the same weight is used by generated#1, of which: its weight is an activation",
        "generated#1": "its weight is an activation, not a parameter",
        "recurrent.gru#0": "recurrent layers are not supported",
        "matmul#0": "torch.matmul with a parameter is out of reach; use torch.nn.functional.linear",
        "linear#0": "its weight is buffer 'fixed', not a parameter",
        "linear#1": "its weight is computed from parameters in every step",
        "linear#2": "its weight is an activation, not a parameter",
    }
    for name, start in expected.items():
        found = reasons.pop(name, None) or reasons.pop(name.replace("reflecting.conv2d", "reflecting"), "")
        assert found.startswith(start), name
    assert not reasons
    assert [str(operator.op_id) for operator in dag.adjustable] == ["normed#0", "direct#0"]
    assert dag[OpId("linear", 2)].op_class is OpClass.DEPENDENT


def test_symmetric_same_padding_is_numbers() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, (3, 5), padding="same", dilation=(2, 1), groups=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    conv = traced(Same(), torch.randn(1, 2, 8, 8))[OpId("conv")]
    assert conv.is_adjustable
    assert conv.attributes == {"stride": "1,1", "padding": "2,2", "dilation": "2,1", "groups": "2"}
    assert conv.flops == 2 * (4 * 8 * 8) * (1 * 3 * 5)


def test_blocks_without_gradient_and_checkpointed_ones_are_looked_into() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.a(x)
            y = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=False)
            return self.c(y) - target + self.a(y)

    dag = traced(Blocks(), torch.randn(2, 4))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["a#0", "b#0", "c#0", "a#1"]
    assert dag[OpId("sub")].inputs == ids("c#0", "a#0")


def test_a_branch_on_tensor_values_keeps_its_linears_with_a_reason() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return torch.cond(x.sum() > 0, lambda t: F.relu(self.b(t)), lambda t: t.sin(), (x,))

    dag = traced(Branching(), torch.randn(2, 4))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["a#0"]
    refused = dag[OpId("b")]
    assert refused.parameters == ("b.weight", "b.bias")
    assert refused.inputs == ids("a#0")
    assert refused.not_applicable == "it is called inside torch's higher-order operator cond"


def test_a_root_that_is_a_linear_is_named_by_its_weight() -> None:
    dag = traced(nn.Linear(4, 2), torch.randn(3, 4))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["weight#0"]
    assert str(dag.operators[0].op_id) == "$input.input#0"


def test_a_subclass_that_keeps_the_forward_is_the_module_one_that_overrides_it_is_not() -> None:
    class Kept(nn.Linear):
        pass

    class Overridden(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, self.weight) + F.linear(input, self.weight, self.bias)

    dag = traced(nn.Sequential(Kept(4, 4), Overridden(4, 4)), torch.randn(3, 4))
    assert [str(operator.op_id) for operator in dag.adjustable] == ["0#0", "1.weight#0", "1.weight#1"]


@pytest.mark.parametrize(
    ("loss", "kind", "reduction"),
    [
        (lambda y: F.mse_loss(y, torch.zeros_like(y)), "mse", "mean"),
        (lambda y: F.mse_loss(y, torch.zeros_like(y), reduction="sum"), "mse", "sum"),
        (lambda y: F.mse_loss(y, torch.zeros_like(y), reduction="none").mean(), "mse", "mean"),
        (lambda y: F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)), "cross_entropy", "mean"),
        (lambda y: F.nll_loss(F.log_softmax(y, -1), torch.zeros(len(y), dtype=torch.long)), "cross_entropy", "mean"),
        (lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y, torch.zeros(len(y), dtype=torch.long)) * 2, "cross_entropy", "mean"),
        (lambda y: F.binary_cross_entropy_with_logits(y, torch.zeros_like(y)), "binary_cross_entropy", "mean"),
        (lambda y: y.square().sum(), "custom", "sum"),
        (lambda y: F.mse_loss(y, torch.zeros_like(y)) + y.abs().mean(), "custom", "mean"),
    ],
)
def test_loss_kind_and_reduction(loss, kind: str, reduction: str) -> None:
    dag = traced(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4), loss=loss)
    assert (dag.loss, dag.loss_reduction) == (kind, reduction)
    assert all(operator.op_class is OpClass.FIXED for operator in dag.operators if operator.op_id.fqn.startswith("$loss"))
    assert dag.operators[-1].op_id.fqn.startswith("$loss.")


def test_a_loss_that_the_model_computes_itself() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.linear(x), labels)

    dag = traced(WithLoss(), torch.randn(5, 4), loss=lambda y: y, labels=torch.zeros(5, dtype=torch.long))
    assert (dag.loss, dag.loss_reduction) == ("cross_entropy", "mean")
    assert dag.operators[-1].kind == "loss"
    assert dag.operators[-1].inputs == ids("linear#0")


def test_targets_and_float_arguments_are_inputs_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pixels: torch.Tensor, *, weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.linear(pixels) * weights["row"]

    job = Job(
        "two",
        Two(),
        lambda step, size: Batch((torch.randn(size, 4),), {"weights": {"row": torch.randn(size, 1)}}, target=torch.randn(size, 4)),
        lambda output, batch: F.mse_loss(output, batch.target),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        3,
    )
    dag = trace(job)
    inputs = [str(operator.op_id) for operator in dag.operators if operator.kind == "input"]
    assert inputs == ["$input.pixels#0", "$input.weights.row#0", "$input.target#0"]
    assert dag[OpId("mul")].inputs == ids("linear#0", "$input.weights.row#0")
    assert dag[OpId("$loss.mse_loss")].inputs == ids("mul#0", "$input.target#0")


def test_a_frozen_submodule_in_evaluation_mode_stays_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.train()
    model[1].eval()
    dag = traced(model, torch.randn(3, 4))
    assert ",false,0.1," in dag[OpId("1")].attributes["call"]
    assert ",true,0.1," in dag[OpId("2")].attributes["call"]


def test_inputs_without_gradient_are_marked() -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(y.detach()) + y

    dag = traced(Detaching(), torch.randn(3, 4))
    assert {str(o.op_id): o.no_grad_inputs for o in dag.adjustable} == {"a#0": (0,), "b#0": (0,)}
    assert dag[OpId("b")].inputs == ids("a#0")
    assert dag[OpId("add")].no_grad_inputs == ()


class ReadsFormats(nn.Module):
    """What an operator's result is read by, beside operators that take its values."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(self.read(h))


def also_read(read: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, ...]:
    return traced(ReadsFormats(read), torch.randn(4, 8))[OpId("a")].also_read_by


def test_reads_of_a_format_and_by_functions_that_are_no_operators_are_noted() -> None:
    assert also_read(torch.relu) == ()
    assert also_read(lambda h: h.view(2, 16).reshape(4, 8).transpose(0, 1).t()[:, :8]) == ()
    assert also_read(lambda h: h + torch.arange(8, dtype=h.dtype)) == ("dtype",)
    assert "to" in also_read(lambda h: h.float() * 2)
    assert also_read(lambda h: h * (h.argmax(1, keepdim=True) > 3)) == ("argmax",)
    assert also_read(lambda h: torch.softmax(h, -1, dtype=torch.float32)) == ("softmax",)
    assert also_read(lambda h: torch.as_strided(h, (4, 8), (8, 1)) * 2) == ("as_strided",)
    assert also_read(lambda h: h.unfold(1, 2, 2).flatten(1)) == ("unfold",)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    dag = traced(model, torch.randn(4, 8))
    assert [dag[OpId(name)].also_read_by for name in "01"] == [(), ("loss",)]


def test_calls_in_place_are_noted() -> None:
    def add(h: torch.Tensor) -> torch.Tensor:
        h += 1
        return torch.relu_(h) + h.sin().mul_(2)

    dag = traced(ReadsFormats(add), torch.randn(4, 8))
    assert {(o.kind, o.in_place) for o in dag.operators if o.op_class is OpClass.DEPENDENT and o.kind != "square"} == {
        ("add", True), ("relu", True), ("sin", False), ("mul", True), ("add", False),
    }  # fmt: skip
    assert dag.calls_are_known
