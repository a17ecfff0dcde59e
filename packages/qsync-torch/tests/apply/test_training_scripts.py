"""Models as training scripts have them: copied, evaluated, wrapped, called in parts, checkpointed, patched.

The reference is the same model called in the plainest way, with the same seed and step: both must agree to the last bit.
"""

import copy
import dataclasses
import functools
import io
import multiprocessing
import pickle
import types
import warnings

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_torch import apply_
from qsync_torch.apply import planned_forwards

from .small_models import BFLOAT16, FLOAT32, INT8, ConvNet, images, named
from .test_apply import plan_of


class TwoLayers(nn.Module):
    """Two layers, called as ``how`` says."""

    def __init__(self, how="modules"):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.how = how

    def body(self, x):
        if self.how == "forward":
            return self.b.forward(torch.relu(self.a.forward(x)))
        if self.how == "functional":
            return F.linear(torch.relu(F.linear(x, self.a.weight, self.a.bias)), weight=self.b.weight, bias=self.b.bias)
        return self.b(torch.relu(self.a(x)))

    def forward(self, x):
        return self.body(x)


BOTH = named(a=INT8, b=BFLOAT16)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def step_of(model, x, variants=BOTH, step=0):
    applied = apply_(model, variants, seed=5)
    applied.step = step
    found = gradients_of(model, model(x).square().sum())
    applied.remove()
    return found


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, 16)


@pytest.mark.parametrize("how", ["forward", "functional"])
@pytest.mark.parametrize("whole", [True, False])
def test_an_operator_is_its_weight_however_it_is_called(x, how, whole):
    variants = plan_of(BOTH) if whole else BOTH
    assert equal(step_of(TwoLayers(how), x, variants), step_of(TwoLayers(), x, variants))


@pytest.mark.parametrize("patch", ["lambda", "partial", "subclass"])
def test_a_forward_of_ones_own_keeps_its_effect_and_runs_as_planned(x, patch):
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * F.linear(input, self.weight, self.bias)

    def model(how):
        found = TwoLayers()
        if how == "subclass":
            layer = Doubled(16, 16)
            layer.load_state_dict(found.b.state_dict())
            found.b = layer
        elif how == "lambda":
            own = found.b.forward
            found.b.forward = lambda input: 2 * own(input)
        elif how == "partial":
            found.b.forward = lambda input: 2 * F.linear(input, found.b.weight, found.b.bias)
        else:
            found.body = lambda x: 2 * found.b(torch.relu(found.a(x)))
        return found

    expected = step_of(model("outside"), x, plan_of(named(a=FLOAT32, b=INT8)))
    assert equal(step_of(model(patch), x, plan_of(named(a=FLOAT32, b=INT8))), expected)
    assert not equal(step_of(model(patch), x, plan_of(named(a=FLOAT32, b=FLOAT32))), expected)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "old_weight_norm"])
def test_computed_weights_run_as_planned(x, norm):
    make = {
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "old_weight_norm": nn.utils.weight_norm,
    }[norm]
    model = TwoLayers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(model.b)
    plain = gradients_of(model, model(x).square().sum())
    lowered = step_of(model, x, named(a=FLOAT32, b=INT8))
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(lowered, plain, strict=True) if b.norm() > 0]
    assert 0 < max(errors) < 0.1


def test_calls_that_the_plan_does_not_name_are_refused_and_unused_weights_are_not(x):
    class Head(TwoLayers):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.randn(16, 16))
            self.uses = False

        def forward(self, x):
            y = self.body(x)
            return F.linear(y, self.extra) if self.uses else y

    model = Head()
    apply_(model, plan_of(BOTH))
    model(x)
    model.uses = True
    with pytest.raises(PlanError, match=r"extra runs but the plan does not name it.*trace this model"):
        model(x)
    assert model.eval()(x).shape == (4, 16)


def test_more_fewer_and_reordered_calls_keep_each_weight_in_its_format(x):
    class Shuffled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.low, self.full = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
            self.order = ("low", "full")

        def forward(self, x):
            return [F.linear(x, getattr(self, name)) for name in self.order]

    model = Shuffled()
    apply_(model, plan_of(named(low=INT8, full=FLOAT32)), seed=2)
    for order in (("full",), ("full", "low"), ("low", "low", "full", "full"), ("low",)):
        model.order = order
        for name, y in zip(order, model(x), strict=True):
            exact = F.linear(x, getattr(model, name))
            assert torch.equal(y, exact) == (name == "full")


def test_parts_that_are_called_by_themselves_are_lowered_in_every_step_with_new_numbers(x):
    model = TwoLayers("functional")
    model.part = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    applied = apply_(model, named(**{"a": INT8, "b": INT8, "part.0": INT8}))
    exact = F.relu(F.linear(x, model.part[0].weight, model.part[0].bias))
    outputs = [model.part(x) for _ in range(3)] + [F.relu(model.part[0](x)) for _ in range(2)]
    assert applied.step == 5
    assert all(0 < (y - exact).norm() / exact.norm() < 0.05 for y in outputs)
    assert len({tuple(y.flatten().tolist()) for y in outputs}) == 5


def test_parts_leave_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply_(model, named(**{"0": BFLOAT16, "1": BFLOAT16}))
    assert model[0](torch.randn(3, 4)).dtype is torch.float32


def test_a_model_that_calls_itself(x):
    class Recursive(TwoLayers):
        def forward(self, x, depth=2):
            return self.body(x) if depth == 0 else self.forward(self.body(x), depth - 1) + self(x, depth - 1)

    model = Recursive()
    applied = apply_(model, BOTH)
    y = model(x)
    y.sum().backward()
    assert (applied.step, y.dtype) == (1, torch.float32)


class Checkpointed(TwoLayers):
    """A block that is checkpointed as a method, a closure, a module, or not at all."""

    def __init__(self, way, use_reentrant, how="modules"):
        super().__init__(how)
        self.way, self.use_reentrant = way, use_reentrant

    def forward(self, x):
        if self.way == "none":
            return self.body(x)
        function = {"method": self.body, "closure": lambda t: self.body(t), "inner": self.body}[self.way]
        return checkpoint(function, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("how", ["modules", "functional", "forward"])
@pytest.mark.parametrize("way", ["method", "closure"])
def test_checkpointed_functions_run_again_as_they_did(x, way, how, use_reentrant):
    x.requires_grad_()
    expected = step_of(Checkpointed("none", False, how), x)
    assert equal(step_of(Checkpointed(way, use_reentrant, how), x), expected)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_inside_checkpoints(x, outer, inner):
    class Nested(TwoLayers):
        def first(self, x):
            return torch.relu(F.linear(x, self.a.weight, self.a.bias))

        def segment(self, x):
            return F.linear(checkpoint(self.first, x, use_reentrant=inner), self.b.weight, self.b.bias)

        def forward(self, x):
            return checkpoint(self.segment, x, use_reentrant=outer)

    x.requires_grad_()
    assert equal(step_of(Nested(), x), step_of(TwoLayers(), x))


def test_a_patch_of_pytorchs_class_stays_in_force(x, monkeypatch):
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: 2 * own(self, input))
    plain = TwoLayers()(x)
    model = TwoLayers()
    apply_(model, plan_of(BOTH))
    assert 0 < (model(x) - plain).norm() / plain.norm() < 0.05


def test_a_patched_padding_stays_in_force():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), images()

    def circular(self, input, weight, bias):
        return F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias)

    model[0]._conv_forward = circular.__get__(model[0])
    plain = model(x)
    apply_(model, named(**{"0": INT8}))
    assert 0 < (model(x) - plain).norm() / plain.norm() < 0.05


def test_a_rank_in_full_precision_checks_what_it_runs_too(x):
    plan = plan_of(named(a=FLOAT32, b=FLOAT32))

    class Inside(TwoLayers):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    inside, cast, longer = Inside(), TwoLayers(), TwoLayers()
    longer.c = nn.Linear(16, 16)
    for model in (inside, cast, longer):
        apply_(model, plan)
    with pytest.raises(PlanError, match="operator a#0 runs under"):
        inside(x)
    with pytest.raises(PlanError, match="weight of a is bfloat16"):
        cast.bfloat16()(x.bfloat16())
    longer.body = lambda t: longer.c(longer.a(t))
    with pytest.raises(PlanError, match="c runs but the plan does not name it"):
        longer(x)


def test_prompts_that_are_parameters_of_the_caller_are_activations(x):
    model, prompt = TwoLayers("functional"), nn.Parameter(x.clone())
    apply_(model, BOTH, seed=5)
    assert equal(gradients_of(model, model(prompt).square().sum()), step_of(TwoLayers(), x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["method", "whole"])
def test_two_forwards_before_one_backward(x, way, use_reentrant):
    def gradients(checkpointed):
        model = Checkpointed(way if checkpointed and way != "whole" else "none", use_reentrant, "functional")
        applied = apply_(model, BOTH, seed=5)
        run = model
        if checkpointed and way == "whole":
            run = lambda t: checkpoint(model, t, use_reentrant=use_reentrant)  # noqa: E731
        first, second = run(x), run(2 * x)
        found = gradients_of(model, first.square().sum() + second.square().sum())
        return found, applied.step

    x.requires_grad_()
    expected, steps = gradients(False)
    found, again = gradients(True)
    assert equal(found, expected)
    assert steps == again == 2


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("way", ["method", "closure", "whole", "part"])
@pytest.mark.parametrize("how", ["modules", "functional"])
def test_a_mode_changed_before_the_backward_changes_nothing(x, how, way, use_reentrant, evaluated):
    """The function that runs again does so as in the forward: plain in eval mode, under the plan in training."""

    def gradients(checkpointed):
        model = Checkpointed(way if checkpointed and way in ("method", "closure") else "none", use_reentrant, how)
        applied = apply_(model, BOTH, seed=5)
        model.train(not evaluated)
        function = {"whole": model, "part": model.a}.get(way, model) if checkpointed else model.a if way == "part" else model
        y = checkpoint(function, x, use_reentrant=use_reentrant) if checkpointed and way in ("whole", "part") else function(x)
        model.train(evaluated)
        model.zero_grad()
        y.square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()], applied.step

    x.requires_grad_()
    expected, steps = gradients(False)
    found, again = gradients(True)
    assert steps == again == (0 if evaluated else 1)
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_checkpointing_of_another_make_runs_the_last_forward_again(x):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, x):
            ctx.module = module
            ctx.save_for_backward(x)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.module(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    class Wrapped(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.block, self.own = TwoLayers(), own

        def forward(self, x):
            return Own.apply(self.block, x) if self.own else self.block(x)

    x.requires_grad_()
    variants = named(**{"block.a": INT8, "block.b": BFLOAT16})
    assert equal(step_of(Wrapped(True), x, variants), step_of(Wrapped(False), x, variants))


def test_eval_runs_in_full_precision_and_moves_no_random_numbers(x):
    model = TwoLayers()
    exact, state = model(x), torch.get_rng_state()
    applied = apply_(model, plan_of(BOTH), seed=3)
    first = model(x)
    model.eval()
    assert torch.equal(model(x), exact)
    assert torch.equal(model(x), exact)
    assert torch.equal(model.a(x), F.linear(x, model.a.weight, model.a.bias))
    assert applied.step == 1
    assert torch.equal(torch.get_rng_state(), state)
    applied.step = 0
    assert torch.equal(model.train()(x), first)


def test_eval_under_the_plan_where_that_is_asked_for(x):
    model = TwoLayers().eval()
    exact = model(x)
    applied = apply_(model, BOTH, lower_eval=True)
    assert not torch.equal(model(x), exact)
    assert applied.step == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_feature_extractor_of_the_layers_evaluates_in_full_precision(x, whole):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    variants = {OpId("0"): INT8, OpId("2"): INT8}
    applied = apply_(model, plan_of(variants) if whole else variants)
    features = nn.Sequential(*list(model.children())[:-1]).eval()
    with torch.no_grad():
        assert torch.equal(features(x), F.linear(x, model[0].weight, model[0].bias).relu())
    assert applied.step == 0
    assert not torch.equal(features(x), F.linear(x, model[0].weight, model[0].bias).relu())  # it trains, in eval mode
    assert applied.step == 1


def test_a_part_in_eval_mode_trains_under_reentrant_checkpointing(x):
    def step(run):
        model = TwoLayers()
        model.a.eval()
        apply_(model, BOTH)
        return gradients_of(model, run(model.a, x.requires_grad_()).square().sum() + 0 * model.b(x).sum())

    assert equal(step(lambda part, x: checkpoint(part, x, use_reentrant=True)), step(lambda part, x: part(x)))


def plain_copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "deepcopy": copy.deepcopy(model),
    }


def test_copies_are_plain_models_that_take_a_plan_of_their_own(x):
    model, twin = TwoLayers("functional"), TwoLayers("functional")
    applied = apply_(model, BOTH, seed=5)
    with pytest.warns(UserWarning, match="runs in full precision; apply the plan to it"):
        copies = plain_copies(model)
    for copied in copies.values():
        assert torch.equal(copied(x), twin(x))
        assert applied.step == 0
        handle = apply_(copied, BOTH, seed=5)
        found = gradients_of(copied, copied(x).square().sum())
        assert equal(found, step_of(TwoLayers("functional"), x))
        handle.remove()
        assert torch.equal(copied(x), twin(x))
        assert "forward" not in copied.__dict__
    assert not torch.equal(model(x), twin(x))


def test_a_copy_of_a_part_is_plain(x):
    model = TwoLayers()
    applied = apply_(model, BOTH)
    layer = copy.deepcopy(model.a)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert applied.step == 0


def test_an_average_of_weights_moves_nothing(x):
    model = TwoLayers()
    applied = apply_(model, BOTH)
    with pytest.warns(UserWarning, match="full precision"):
        average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average(x)
    assert applied.step == 0


def _nothing(model):
    """What a spawned process would run."""


def test_a_model_under_a_plan_is_not_sent_to_another_process():
    model = TwoLayers()
    apply_(model, BOTH)
    process = multiprocessing.get_context("spawn").Process(target=_nothing, args=(model,))
    with pytest.raises(PlanError, match=r"cannot be sent to another process.*apply it in the process that trains it"):
        process.start()


def test_a_part_of_a_model_under_a_plan_takes_no_other_plan():
    model = nn.Sequential(TwoLayers(), nn.Linear(16, 2))
    apply_(model, named(**{"0.a": INT8}))
    with pytest.raises(PlanError, match="has a plan already"):
        apply_(model[0], BOTH)
    with pytest.raises(PlanError, match="module '0' of this model has a plan already"):
        apply_(nn.Sequential(model), named(**{"0.1": INT8}))


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    rest: list


class Own:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = "value"


class Rows(list):
    pass


class Named(dict):
    pass


class Private:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value

    def get(self):
        return self.__value


class Pair(tuple):
    def first(self):
        return self[0]


ANEW = ["private slots", "tuple of a class", "set", "read-only dict", "values of a dict"]
LATER = ["iterator", "map", "generator in a list", "closure", "default", "partial", "method of a tensor", "method of an object"]


@pytest.mark.parametrize(
    "wrap", ["dataclass", "own", "slots", "nested", "list of a class", "dict of a class", "distribution", *ANEW, *LATER]
)
def test_outputs_leave_in_float32_whatever_holds_them(x, wrap):
    def hold(y):
        slotted = Slotted()
        slotted.value = y
        return {
            "dataclass": lambda: Result(y, [y, {"y": y}]),
            "own": lambda: Own({"y": y}),
            "slots": lambda: slotted,
            "nested": lambda: {"r": [Result(y, [Own(y)])]},
            "list of a class": lambda: Rows([y]),
            "dict of a class": lambda: Named({"y": y}),
            "distribution": lambda: torch.distributions.Normal(y, torch.ones_like(y), validate_args=False),
            "private slots": lambda: Private(y),
            "tuple of a class": lambda: Pair((y, {"y": y})),
            "set": lambda: {y},
            "read-only dict": lambda: types.MappingProxyType({"y": [y]}),
            "values of a dict": lambda: {"y": y}.values(),
            "iterator": lambda: iter([y]),
            "map": lambda: map(torch.abs, [y]),
            "generator in a list": lambda: [(part for part in [y])],
            "closure": lambda: lambda: y,
            "default": lambda: lambda y=y: y,
            "partial": lambda: functools.partial(torch.mul, y, other=2),
            "method of a tensor": lambda: y.abs,
            "method of an object": lambda: Private(y).get,
        }[wrap]()

    class Holding(TwoLayers):
        def forward(self, x):
            return hold(self.body(x))

    model = Holding()
    apply_(model, BOTH)
    output = model(x)
    tensors = {
        "dataclass": lambda: [output.logits, output.rest[0], output.rest[1]["y"]],
        "own": lambda: [output.value["y"]],
        "slots": lambda: [output.value],
        "nested": lambda: [output["r"][0].logits, output["r"][0].rest[0].value],
        "list of a class": lambda: list(output),
        "dict of a class": lambda: list(output.values()),
        "distribution": lambda: [output.loc, output.scale],
        "private slots": lambda: [output.get()],
        "tuple of a class": lambda: [output.first(), output[1]["y"]],
        "set": lambda: list(output),
        "read-only dict": lambda: output["y"],
        "values of a dict": lambda: list(output),
        "iterator": lambda: list(output),
        "map": lambda: list(output),
        "generator in a list": lambda: list(output[0]),
        **dict.fromkeys(["closure", "default", "partial", "method of a tensor", "method of an object"], lambda: [output()]),
    }[wrap]()
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    tensors[0].sum().backward()
    assert model.a.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("variant", [INT8, BFLOAT16, FLOAT32])
def test_a_bias_in_16_bits_is_refused(variant):
    model = TwoLayers()
    model.b.bias = nn.Parameter(model.b.bias.detach().bfloat16())
    with pytest.raises(PlanError, match=r"the bias of b is bfloat16, and plans are for float32 parameters"):
        apply_(model, named(a=INT8, b=variant))


def test_an_output_that_refers_to_itself(x):
    class Cyclic(TwoLayers):
        def forward(self, x):
            found = Own(self.body(x))
            found.me = found
            return found

    model = Cyclic()
    apply_(model, BOTH)
    assert model(x).value.dtype is torch.float32


def test_objects_of_an_output_that_refer_to_each_other_are_met_once(x):
    """A grid of neighbours has more ways through it than can be walked; what is one object or tuple stays one."""
    side = 6

    class Grid(TwoLayers):
        def forward(self, x):
            y = self.body(x)
            pair = Pair((y, y + 1))
            cells = [[Own(y * (row * side + column)) for column in range(side)] for row in range(side)]
            for row in range(side):
                for column in range(side):
                    cell = cells[row][column]
                    cell.down, cell.right = cells[(row + 1) % side][column], cells[row][(column + 1) % side]
                    cell.up, cell.left = cells[row - 1][column], [cells[row][column - 1]]
                    cell.pair = pair
            return cells[0][0]

    model = Grid()
    apply_(model, BOTH)
    corner = model(x)
    below, cells = corner, []
    for _ in range(side):
        cell = below
        for _ in range(side):
            cells.append(cell)
            cell = cell.right
        assert cell is below
        below = below.down
    assert below is corner
    assert len({id(cell) for cell in cells}) == side * side
    assert {cell.value.dtype for cell in cells} == {torch.float32}
    assert {id(cell.pair) for cell in cells} == {id(corner.pair)}
    assert {part.dtype for part in corner.pair} == {torch.float32}
    assert all(cell.right.left[0] is cell and cell.down.up is cell for cell in cells)


@pytest.mark.parametrize("variants", [BOTH, named(a=FLOAT32, b=FLOAT32)])
def test_an_autocast_that_is_not_the_plans_is_refused(x, variants):
    model = TwoLayers()
    apply_(model, plan_of(variants))
    sentence = r"runs under torch.autocast to bfloat16, but its plan is for a job in float32.*amp='bfloat16'"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match=sentence):
        model(x)
    assert model(x).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model.eval()(x).dtype is torch.bfloat16


def test_variants_that_are_all_float32_refuse_autocast_in_parts_and_inside(x):
    class Inside(TwoLayers):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x):
            return self.body(x)

    model = Inside()
    apply_(model, named(a=FLOAT32, b=FLOAT32))
    with pytest.raises(PlanError, match=r"operator a#0 runs under torch.autocast to bfloat16, but its plan is for"):
        model(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match=r"operator a#0 runs under torch\.autocast to"):
        model.a(x)


def test_an_autocast_inside_the_model_is_refused_by_operator(x):
    class Inside(TwoLayers):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    model = Inside()
    apply_(model, BOTH)
    with pytest.raises(PlanError, match=r"operator a#0 runs under torch.autocast to bfloat16, but its plan is for"):
        model(x)


def under_amp(variants):
    plan = plan_of(variants)
    groups = tuple(attrs.evolve(group, base=Precision.BFLOAT16) for group in plan.groups)
    return attrs.evolve(plan, base=Precision.BFLOAT16, groups=groups)


def test_a_plan_for_a_job_under_autocast(x):
    model = TwoLayers()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients_of(model, model(x).float().square().sum())
    apply_(model, under_amp(named(a=BFLOAT16, b=BFLOAT16)))
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(gradients_of(model, model(x).float().square().sum()), expected)
    with pytest.raises(PlanError, match=r"without torch.autocast, but its plan is for a job under autocast to bfloat16"):
        model(x)


class Loss(nn.Module):
    def forward(self, y, labels):
        return F.cross_entropy(y, labels)


@pytest.mark.parametrize("variants", [named(a=INT8, b=BFLOAT16), named(a=BFLOAT16, b=BFLOAT16)])
def test_a_loss_that_is_a_child_of_the_model_may_run_outside_of_autocast(x, variants):
    model = TwoLayers()
    model.loss = Loss()
    apply_(model, under_amp(variants))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    labels = torch.arange(len(y))
    assert torch.equal(model.loss(y.float(), labels), F.cross_entropy(y.float(), labels))
    with pytest.raises(PlanError, match=r"runs without torch\.autocast, but its plan is for a job under autocast to bfloat16"):
        model.a(x)


def test_low_precision_under_autocast(x):
    model = TwoLayers()
    with torch.autocast("cpu", torch.bfloat16):
        exact = model(x)
    apply_(model, under_amp(named(a=INT8, b=BFLOAT16)))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    assert 0 < (y - exact).norm() / exact.norm() < 0.05
    y.float().sum().backward()
    assert model.a.weight.grad.dtype is torch.float32


def test_a_plan_for_other_widths_is_refused():
    plan = attrs.evolve(plan_of(BOTH), weight_shapes={"a": (16, 16), "b": (32, 16)})
    with pytest.raises(PlanError, match=r"the weight of b has shape \[16, 16\] in this TwoLayers and \[32, 16\] in the plan"):
        apply_(TwoLayers(), plan)


def test_parameters_of_sixteen_bits_are_refused(x):
    with pytest.raises(PlanError, match=r"weight of a is bfloat16.*call model.float\(\).*amp='bfloat16'"):
        apply_(TwoLayers().bfloat16(), BOTH)
    model = TwoLayers()
    apply_(model, BOTH)
    model.bfloat16()
    with pytest.raises(PlanError, match="weight of a is bfloat16"):
        model(x.bfloat16())


def test_a_plan_of_the_inner_or_outer_model_names_where_it_fits():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = TwoLayers()

    with pytest.raises(PlanError, match=r"it fits the module 'net' inside this one: call apply_ on model\.net"):
        apply_(Wrapper(), plan_of(BOTH))
    outer = plan_of(named(**{"net.a": INT8, "net.b": INT8}))
    with pytest.raises(PlanError, match=r"a module that holds this one as 'net': call apply_ on that one"):
        apply_(TwoLayers(), outer)


def test_a_model_on_the_meta_device_takes_its_plan_and_is_checked_when_it_runs(x):
    with torch.device("meta"):
        model = TwoLayers()
    apply_(model, BOTH, seed=5)
    model.to_empty(device="cpu")
    model.load_state_dict(TwoLayers().state_dict())
    assert equal(gradients_of(model, model(x).square().sum()), step_of(TwoLayers(), x))


def test_parameters_that_are_replaced_after_apply_are_found(x):
    model = TwoLayers("functional")
    apply_(model, BOTH, seed=5)
    model.load_state_dict(TwoLayers().state_dict(), assign=True)
    assert equal(gradients_of(model, model(x).square().sum()), step_of(TwoLayers(), x))
    swapped = {name: parameter.detach().clone() for name, parameter in TwoLayers().named_parameters()}
    y = torch.func.functional_call(model, swapped, (x,))
    assert not torch.equal(y, torch.func.functional_call(TwoLayers(), swapped, (x,)))


class Hyper(nn.Module):
    """A base that runs with its own weight, and with others by ``torch.func.functional_call``; ``order`` says when."""

    def __init__(self, order, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.task = Projection(), nn.Parameter(torch.randn(16, 16) / 4)
        self.order, self.checkpointed = order, checkpointed

    def forward(self, x):
        others = {"computed": self.base.weight * 2, "task": self.task}
        run = {
            "own": self.base,
            **{name: functools.partial(self.put_in, weight) for name, weight in others.items()},
        }
        if self.checkpointed is not None:
            run = {name: functools.partial(checkpoint, each, use_reentrant=self.checkpointed) for name, each in run.items()}
        return {name: run[name](x) for name in self.order}

    def put_in(self, weight, x):
        return torch.func.functional_call(self.base, {"weight": weight}, (x,))


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        return F.linear(x, self.weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", [("own", "computed", "task"), ("computed", "task", "own"), ("task", "own", "computed")])
def test_what_a_forward_puts_into_a_weights_place_runs_as_the_trace_names_it(x, order, compiled):
    """A weight that is computed is no parameter, and no operator of a plan; another parameter is an operator of its own."""

    def outputs(variants, model):
        apply_(model, variants, seed=5)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        return [run(x) for _ in range(2)]

    variants = {OpId("base.weight"): INT8, OpId("task"): BFLOAT16}
    for name in order:
        alone = outputs(variants, Hyper((name,)))
        for found, expected in zip(outputs(variants, Hyper(order)), alone, strict=True):
            assert torch.equal(found[name], expected[name])
        plain = Hyper((name,))(x)[name]
        assert torch.equal(alone[0][name], plain) == (name == "computed")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_puts_the_same_into_a_weights_place_again(x, reentrant):
    def gradients(checkpointed):
        model = Hyper(("computed", "own", "task"), checkpointed)
        apply_(model, {OpId("base.weight"): INT8, OpId("task"): BFLOAT16}, seed=5)
        return gradients_of(model, sum(y.square().sum() for y in model(x.clone().requires_grad_()).values()))

    assert equal(gradients(reentrant), gradients(None))


def test_data_parallel_is_refused():
    model = ConvNet()
    apply_(model, named(fc=INT8))
    with pytest.raises(PlanError, match="before it is wrapped"):
        apply_(nn.DataParallel(ConvNet()), named(fc=INT8))
    assert model(images()).shape == (4, 4)


def test_an_operator_of_the_plan_that_the_first_step_does_not_run_is_named(x):
    class Off(TwoLayers):
        def body(self, x):
            return x @ self.b.weight.t() + self.a(x)

    model = Off()
    apply_(model, plan_of(BOTH))
    with pytest.warns(UserWarning, match="the plan lowers b#0, which the first step did not run"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_an_unknown_weight_is_no_operator():
    with pytest.raises(PlanError, match="has no linear or convolution emb"):
        apply_(nn.ModuleDict({"emb": nn.Embedding(4, 4)}), {OpId("emb"): INT8})


def test_a_second_derivative_is_refused_by_the_operators_name(x):
    model = TwoLayers()
    apply_(model, BOTH)
    (slope,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(PlanError, match=r"operator a#0 runs in int8, which has no second derivative"):
        slope.square().sum().backward()


def of_the_loss(model, x):
    p = list(model.parameters())
    g = torch.autograd.grad(model(x).square().mean(), p, create_graph=True)
    torch.autograd.grad(g, p, grad_outputs=[torch.ones_like(one) for one in p])


def of_a_sum_and_its_own_weight(model, x):
    weight = model[0].weight
    (g,) = torch.autograd.grad(model(x).sum(), weight, create_graph=True)
    torch.autograd.grad(g, weight, torch.ones_like(g), allow_unused=True)


def of_a_penalty(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.autograd.grad(g.square().sum(), list(model.parameters()), allow_unused=True)


def of_a_penalty_by_backward(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward(inputs=list(model.parameters()))


def of_a_product_with_the_hessian(model, x):
    torch.autograd.functional.hvp(lambda z: model(z).square().sum(), x, torch.ones_like(x))


@pytest.mark.parametrize(
    "differentiate",
    [of_the_loss, of_a_sum_and_its_own_weight, of_a_penalty, of_a_penalty_by_backward, of_a_product_with_the_hessian],
    ids=lambda one: one.__name__,
)
def test_second_derivatives_of_chosen_tensors_are_refused(differentiate):
    """The engine runs what lies on a path to the chosen tensors, and the refusal must; in float formats they are computed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    applied = apply_(model, {OpId("2"): BFLOAT16})
    differentiate(model, x)
    applied.remove()
    apply_(model, {OpId("2"): INT8})
    with pytest.raises(PlanError, match=r"operator 2#0 runs in int8, which has no second derivative"):
        differentiate(model, x)


def test_padding_that_is_circular_since_the_plan_was_applied_is_refused():
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(1, 2, 5, 5)
    applied = apply_(model, {OpId("0"): INT8})
    model[0].padding_mode = "circular"
    with pytest.raises(PlanError, match=r"Conv2d\(2, 3, .*padding_mode=circular\) has another padding_mode than when the plan"):
        model(x)
    applied.remove()
    model(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def another_class(model, monkeypatch):
    model.fc.__class__ = Doubled


def another_forward(model, monkeypatch):
    monkeypatch.setattr(Body, "forward", lambda self, x: 2 * self.fc(x))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("changed", [another_class, another_forward])
@pytest.mark.parametrize("called", ["model", "part", "compiled"])
def test_a_class_that_is_patched_after_apply_is_refused(changed, called, monkeypatch):
    model, x = nn.Sequential(Body()), torch.randn(4, 16)
    apply_(model, named(**{"0.fc": FLOAT32}))
    if called != "compiled":
        model(x)
    changed(model[0], monkeypatch)
    torch._dynamo.reset()
    run = {"model": model, "part": model[0], "compiled": torch.compile(model, backend="eager")}[called]
    name, cls = ("0.fc", "Doubled") if changed is another_class else ("0", "Body")
    error = InternalTorchDynamoError if called == "compiled" else PlanError
    with pytest.raises(error, match=f"the class of '{name}', {cls}, has another forward than when the plan was applied"):
        run(x)


def test_classes_that_keep_a_forward_run_as_planned():
    class Tagged(nn.Linear):
        pass

    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    apply_(model, named(**{"0": FLOAT32}))
    expected = model(x)
    model[0].__class__ = Tagged
    assert torch.equal(model(x), expected)


class Remembers(nn.Module):
    """Puts another tensor into the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.fc(x)
        self.mean = y.detach().mean(0)
        return y + self.mean


@pytest.mark.parametrize("part", [True, False])
def test_buffers_that_a_forward_replaces_stay_in_float32(part):
    model = nn.Sequential(Remembers())
    apply_(model, named(**{"0.fc": BFLOAT16}))
    (model[0] if part else model)(torch.randn(4, 16))
    assert model.state_dict()["0.mean"].dtype is torch.float32
    assert model[0].mean.any()


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_script_around_the_model_is_named():
    planned_forwards._say_once.cache_clear()
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    apply_(model, named(**{"0": FLOAT32}))
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    with Counts(), pytest.warns(UserWarning, match="Counts, a TorchFunctionMode, is active around a model under a plan"):
        model(x)
