"""Which operators may deliver 16 bits, on graphs that a person can decide."""

from __future__ import annotations

import attrs
import pytest

from qsync_core.ir.dag import OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant

BF16, FP16, INT8, FP32 = map(Variant.parse, ("bfloat16", "float16", "int8", "float32"))
GUARDED, FIXED = OpClass.GUARDED, OpClass.FIXED


def called(name: str, kind: str, *inputs: str, op_class: OpClass = OpClass.DEPENDENT, **more: object) -> Operator:
    shapes = tuple((4, 8) for _ in inputs)
    return Operator(OpId(name), kind, op_class, tuple(map(OpId, inputs)), shapes, (4, 8), **more)  # type: ignore[arg-type]


def linear(name: str, x: str, **more: object) -> Operator:
    return called(name, "linear", x, op_class=OpClass.ADJUSTABLE, parameters=("w",), weight_shape=(8, 8), **more)


def graph(*operators: Operator, **more: object) -> PrecisionDag:
    first = (called("x", "input", op_class=FIXED), called("e", "embedding", op_class=FIXED))
    return PrecisionDag("m", (*first, *operators), (Parameter("w", (8, 8)),), **more)  # type: ignore[arg-type]


def together(*operators: Operator, **more: object) -> dict[str, set[str]]:
    found = OutputFormats.of(graph(*operators, linear("last", operators[-1].op_id.fqn), loss("last"), **more)).together
    assert "last" not in found  # the loss reads float32
    return {name: set(names) for name, names in found.items()}


def loss(x: str) -> Operator:
    return called("loss", "loss", x, op_class=FIXED)


def test_functions_that_take_16_bits_pass_them_on_to_an_operator_of_the_plan() -> None:
    assert together(linear("a", "x")) == {"a": {"a"}}
    chain = [linear("a", "x"), called("bn", "batch_norm", "a", op_class=GUARDED, parameters=("w",)), called("r", "relu", "bn")]
    assert together(*chain) == {"a": {"a"}}


@pytest.mark.parametrize(
    "reader",
    [
        called("r", "layer_norm", "a", op_class=GUARDED, parameters=("w",)),  # CUDA's refuses a float32 weight beside 16 bits
        called("r", "group_norm", "a", op_class=GUARDED),
        called("r", "index", "a"),  # a CPU adds the gradients of its entries in 16 bits
        called("r", "all_reduce", "a"),
        called("r", "cdist", "a", op_class=FIXED),
        called("r", "conv1d", "a", op_class=FIXED, parameters=("w",)),
        linear("r", "a", not_applicable="its bias is computed"),
        called("r", "matmul", "a", "e"),
        called("r", "add", "a", op_class=FIXED, in_place=True),  # h += a buffer
    ],
    ids=lambda operator: operator.kind,
)
def test_what_takes_float32_alone_gets_it_from_operators_behind_other_functions_too(reader: Operator) -> None:
    assert together(linear("a", "x"), reader) == {}
    behind = attrs.evolve(reader, inputs=(OpId("relu"), *reader.inputs[1:]))
    assert together(linear("a", "x"), called("relu", "relu", "a"), behind) == {}


@pytest.mark.parametrize("reader", ["argmax", "to", "dtype", "loss"])
def test_what_else_reads_a_result_reads_float32(reader: str) -> None:
    assert together(linear("a", "x", also_read_by=(reader,))) == {}
    assert together(linear("a", "x"), called("relu", "relu", "a", also_read_by=(reader,))) == {}


def test_pytorch_promotes_what_is_added_to_a_float32_stream() -> None:
    assert together(linear("a", "x"), called("add", "add", "e", "a")) == {"a": {"a"}}
    assert together(linear("a", "x"), called("scale", "mul", "a", op_class=FIXED, parameters=("w",))) == {"a": {"a"}}


def test_a_result_that_nothing_reads_is_float32() -> None:
    assert OutputFormats.of(graph(linear("a", "x"))).together == {}


def test_operands_of_a_product_of_activations_go_together() -> None:
    q, k, v = (linear(name, "x") for name in "qkv")
    products = (
        called("scores", "matmul", "q", "k"),
        called("p", "softmax", "scores", op_class=GUARDED),
        called("c", "bmm", "p", "v"),
    )
    assert together(q, k, v, *products) == {name: {"q", "k", "v"} for name in "qkv"}
    # One tensor twice is in one format.
    assert together(q, called("square", "matmul", "q", "q")) == {"q": {"q"}}


def test_scores_whose_mask_some_steps_leave_out_are_float32_with_it_and_without() -> None:
    """The value goes with the probabilities, which are float32 where there is a mask, and would have 16 bits without one."""
    q, k, v = (linear(name, "x") for name in "qkv")
    mask = called("mask", "where", "x", op_class=FIXED)
    scores = called("scores", "matmul", "q", "k")
    rest = (
        called("p", "softmax", "sum", op_class=GUARDED),
        called("dropped", "dropout", "p", op_class=GUARDED),
        called("c", "matmul", "dropped", "v"),
    )
    assert together(q, k, v, mask, scores, called("sum", "add", "scores", "mask"), *rest) == {}
    # A bias that is learned is there in every step.
    bias = called("mask", "embedding", "x", op_class=FIXED, parameters=("w",))
    with_bias = together(q, k, v, bias, scores, called("sum", "add", "scores", "mask"), *rest)
    assert with_bias == {"q": {"q", "k"}, "k": {"q", "k"}}
    # What else is added to is float32 by the sum alone, and its operator need not be.
    assert together(q, mask, called("sum", "add", "q", "mask"), called("r", "relu", "sum")) == {"q": {"q"}}


def test_what_is_added_in_place_must_be_as_narrow_as_what_it_is_added_to_and_not_the_other_way_round() -> None:
    a, b = linear("a", "x"), linear("b", "x")
    assert together(a, b, called("add", "add", "a", "b", in_place=True)) == {"a": {"a", "b"}, "b": {"b"}}
    assert together(a, called("add", "add", "a", "e", in_place=True)) == {}
    assert together(a, called("add", "add", "e", "a", in_place=True)) == {"a": {"a"}}


def test_graphs_that_do_not_say_which_calls_are_in_place_count_all_that_mix_as_such() -> None:
    a, b, add = linear("a", "x"), linear("b", "x"), called("add", "add", "a", "b")
    assert together(a, b, add) == {"a": {"a"}, "b": {"b"}}
    assert together(a, b, add, calls_are_known=False) == {"a": {"a", "b"}, "b": {"b"}}


def test_a_plan_delivers_16_bits_where_all_that_go_together_do() -> None:
    q, k = linear("q", "x"), linear("k", "x")
    formats = OutputFormats.of(graph(q, k, called("scores", "matmul", "q", "k"), linear("out", "scores"), loss("out")))

    def decided(**variants: Variant) -> list[str]:
        found = formats.decided({OpId(name): variant for name, variant in variants.items()})
        return [found[OpId(name)].label for name in ("q", "k", "out")]

    assert decided(q=INT8, k=BF16, out=INT8) == ["int8", "bfloat16", "int8>float32"]
    assert decided(q=INT8, k=FP32, out=FP32) == ["int8>float32", "float32", "float32"]
    assert decided(q=FP16, k=BF16, out=BF16) == ["float16>float32", "bfloat16>float32", "bfloat16>float32"]


def test_an_operator_that_must_not_deliver_16_bits_is_named_with_the_reason() -> None:
    q, k = linear("q", "x"), linear("k", "x")
    formats = OutputFormats.of(graph(q, k, called("scores", "matmul", "q", "k"), linear("out", "scores"), loss("out")))
    plan = {OpId("q"): INT8, OpId("k"): FP32, OpId("out"): FP32}
    assert formats.first_wrong(plan) == (OpId("q"), "it is read beside the result of k, which delivers float32")
    assert formats.first_wrong(formats.decided(plan)) is None
    assert formats.first_wrong({**formats.decided(plan), OpId("out"): BF16}) == (OpId("out"), "what reads it takes float32")


def test_under_amp_outputs_are_those_of_autocast() -> None:
    formats = OutputFormats.of(graph(linear("a", "x"), loss("a"), base=Precision.BFLOAT16))
    assert formats.decided({OpId("a"): BF16}) == {OpId("a"): BF16}
