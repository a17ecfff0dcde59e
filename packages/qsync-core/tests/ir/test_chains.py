"""Which chains a graph has, by hand on small graphs, on the stored graphs of real models, and as properties of random ones."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.artifacts.files import load
from qsync_core.chains.calls import eps_of
from qsync_core.chains.finding import chains_of, found_in
from qsync_core.chains.unchained import unchained, unchained_line
from qsync_core.ir.chain import Activation, Chain, ChainVariant, Producer
from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.semantics import ChainResult, chain_result, operands_kept, steps_of
from qsync_core.ir.variant import Variant

DATA = Path(__file__).parents[4] / "tests" / "data"
IMAGE = (2, 8, 4, 4)
INT8, FLOAT8, BFLOAT16, FLOAT32 = (
    Variant.of(p) for p in (Precision.INT8, Precision.FLOAT8_E4M3FN, Precision.BFLOAT16, Precision.FLOAT32)
)


class Graph:
    """Builds a graph with recorded calls; ``calls`` are arguments that differ from a plain call's."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(
        self,
        name: str,
        kind: str,
        *inputs: str,
        shape: tuple[int, ...] = (),
        call: dict[str, Any] | None = None,
        op_class: OpClass | None = None,
    ) -> str:
        shape = shape or (self._shapes[inputs[0]] if inputs else IMAGE)
        reads: list[Any] = [{"input": i} for i in range(len(inputs))]
        weight = [{"parameter": 0, "shape": [8]}, {"parameter": 1, "shape": [8]}]
        running = [{"tensor": [8], "dtype": "float32"}] * 2
        arguments = {
            "batch_norm": [*reads, *weight, *running, True, 0.1, 1e-5, False],
            "layer_norm": [*reads, [shape[-1]], *weight, 1e-5, False],
            "rms_norm": [*reads, [shape[-1]], weight[0], 1e-5],
        }.get(kind, reads)
        op_class = op_class or {"linear": OpClass.ADJUSTABLE, "conv2d": OpClass.ADJUSTABLE, "input": OpClass.FIXED}.get(
            kind, OpClass.DEPENDENT
        )
        text = {"op": f"aten.{kind}.default", "args": arguments, "kwargs": {}} | (call or {})
        self.operators.append(
            Operator(
                OpId(name),
                kind,
                op_class,
                tuple(OpId(i) for i in inputs),
                tuple(self._shapes[i] for i in inputs),
                shape,
                attributes={} if op_class is OpClass.ADJUSTABLE else {"call": json.dumps(text)},
            )
        )
        self._shapes[name] = shape
        return name

    def chains(self) -> list[tuple[str, ...]]:
        """Per chain the producer, then its members."""
        return [(str(c.producer), *(member.fqn for member in c.members)) for c in chains_of(self.dag())]

    def dag(self) -> PrecisionDag:
        return PrecisionDag("m", tuple(self.operators), ())


def test_a_norm_an_addition_and_a_relu_are_one_chain() -> None:
    g = Graph()
    x = g.add("x", "input")
    g.add("sum", "add", g.add("norm", "batch_norm", g.add("conv", "conv2d", x)), x)
    g.add("relu", "relu", "sum")
    g.add("next", "conv2d", "relu")
    g.add("pool", "max_pool2d", "relu")
    (chain,) = chains_of(g.dag())
    assert chain == Chain(
        Producer.BATCH_NORM,
        OpId("norm"),
        (OpId("norm"), OpId("sum"), OpId("relu")),
        OpId("conv"),
        OpId("x"),
        Activation.RELU,
        (OpId("next"), OpId("pool")),
        (OpId("next"),),
        (OpId("conv"),),
    )
    assert (chain.name, chain.last) == (OpId("norm"), OpId("relu"))
    assert chain.form(False).attributes == {"activation": "relu", "residual": "true", "float_result": "false"}


@pytest.mark.parametrize("order", [("main", "shortcut"), ("shortcut", "main")])
def test_of_two_norms_that_are_added_the_later_takes_the_other(order: tuple[str, str]) -> None:
    g = Graph()
    x = g.add("x", "input")
    for name in order:
        g.add(name, "batch_norm", x)
    g.add("relu", "relu", g.add("sum", "add", "main", "shortcut"))
    first, second = order
    assert g.chains() == [("batch_norm", first), ("batch_norm", second, "sum", "relu")]


def test_a_layer_norm_takes_the_addition_before_it_if_nothing_else_reads_the_sum() -> None:
    g = Graph()
    x = g.add("x", "input", shape=(4, 8))
    y = g.add("y", "dropout", x)
    g.add("norm", "layer_norm", g.add("sum", "add", y, x))
    assert g.chains() == [("layer_norm", "sum", "norm")]
    assert (chains_of(g.dag())[0].x, chains_of(g.dag())[0].residual, chains_of(g.dag())[0].name) == (
        OpId("y"),
        OpId("x"),
        OpId("norm"),
    )
    g.add("stream", "add", "sum", "norm")
    assert g.chains() == [("layer_norm", "norm")]


ROWS = (4, 8)
WEIGHT = {"parameter": 0, "shape": [8]}


def written_out(
    g: Graph,
    x: str,
    square: list[Any] | None = None,
    mean: list[Any] | None = None,
    weight: list[Any] | None = None,
    shape: tuple[int, ...] = ROWS,
) -> str:
    """x·rsqrt(mean(x²) + eps), perhaps times a weight; arguments of its calls that differ from transformers'."""
    rows = (*shape[:-1], 1)
    pow_ = g.add("pow", "pow", x, call={"args": square or [{"input": 0}, 2]})
    total = g.add("mean", "mean", pow_, shape=rows, call={"args": mean or [{"input": 0}, [-1], True]})
    root = g.add("rsqrt", "rsqrt", g.add("eps", "add", total, call={"args": [{"input": 0}, 1e-6]}))
    result = g.add("normal", "mul", x, root, shape=shape)
    if weight is None:
        return result
    return g.add("scaled", "mul", result, op_class=OpClass.FIXED, call={"args": weight})


MEMBERS = ("pow", "mean", "eps", "rsqrt", "normal")


@pytest.mark.parametrize("weight", [None, [WEIGHT, {"input": 0}], [{"input": 0}, WEIGHT]])
def test_an_rms_norm_that_is_written_out_is_one_chain_named_after_its_root(weight: list[Any] | None) -> None:
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    y = g.add("y", "dropout", x)
    last = written_out(g, g.add("sum", "add", x, y), weight=weight)
    g.add("fc", "linear", last)
    members = MEMBERS if weight is None else (*MEMBERS, "scaled")
    (chain,) = chains_of(g.dag())
    assert (chain.producer, chain.members) == (Producer.RMS_NORM, tuple(map(OpId, ("sum", *members))))
    assert (chain.name, chain.x, chain.residual, chain.product_readers) == (*map(OpId, ("rsqrt", "y", "x")), (OpId("fc"),))
    assert chain.normalizes_a_sum
    g.add("stream", "add", "sum", last)
    (chain,) = chains_of(g.dag())
    assert (chain.members, chain.x, chain.residual) == (tuple(map(OpId, members)), OpId("sum"), None)
    assert (chain.operands, chain.normalizes_a_sum) == ((OpId("sum"),), False)


def test_a_weight_may_be_computed() -> None:
    """As Gemma writes it: 1 + weight."""
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    weight = g.add("one", "add", shape=(8,), call={"args": [WEIGHT, 1.0]})
    g.add("scaled", "mul", written_out(g, x), weight)
    (chain,) = chains_of(g.dag())
    assert (chain.members[-1], chain.weight) == (OpId("scaled"), OpId("one"))


@pytest.mark.parametrize(
    "given",
    [
        {"square": [{"input": 0}, 4]},
        {"mean": [{"input": 0}, [-2], True]},
        {"mean": [{"input": 0}, [-1]]},
    ],
)
def test_what_is_nearly_an_rms_norm_is_none(given: dict[str, Any]) -> None:
    g = Graph()
    written_out(g, g.add("x", "input", shape=ROWS), **given)
    assert g.chains() == []


def test_a_norm_whose_parts_something_else_reads_is_none_and_says_so() -> None:
    g = Graph()
    written_out(g, g.add("x", "input", shape=ROWS))
    g.add("log", "log", "mean")
    assert g.chains() == []
    assert found_in(g.dag()).reasons == {OpId("normal"): "something else reads a part of the norm, which is written out"}


def test_rms_norm_as_a_function() -> None:
    g = Graph()
    g.add("norm", "rms_norm", g.add("x", "input", shape=ROWS))
    assert g.chains() == [("rms_norm", "norm")]
    g.add("several", "rms_norm", "norm", call={"args": [{"input": 0}, [4, 8], None, 1e-5]})
    g.add("unsaid", "rms_norm", "several", call={"args": [{"input": 0}, [8]]})
    assert g.chains() == [("rms_norm", "norm"), ("rms_norm", "unsaid")], "of float32 PyTorch adds its epsilon"
    assert (eps_of(g.dag(), OpId("unsaid")), eps_of(g.dag(), OpId("norm"))) == (2.0**-23, 1e-5)
    dag = attrs.evolve(g.dag(), base=Precision.BFLOAT16)
    assert [chain.name for chain in chains_of(dag)] == [OpId("norm")]
    assert "give eps" in found_in(dag).reasons[OpId("unsaid")]


@pytest.mark.parametrize("order", [("silu", "up"), ("up", "silu")])
def test_a_function_times_a_second_tensor_is_a_gated_unit(order: tuple[str, str]) -> None:
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    g.add("silu", "silu", g.add("gate", "linear", x))
    g.add("up", "linear", x)
    g.add("down", "linear", g.add("product", "mul", *order))
    (chain,) = chains_of(g.dag())
    assert (chain.producer, chain.name, chain.activation) == (Producer.GLU, OpId("silu"), Activation.SILU)
    assert (chain.members, chain.operands) == ((OpId("silu"), OpId("product")), (OpId("gate"), OpId("up")))
    assert (chain.residual, chain.product_readers, chain.may_round_input) == (None, (OpId("down"),), True)
    g.add("beside", "tanh", "silu")
    assert g.chains() == [("activation", "silu")]
    assert "something else reads its silu" in found_in(g.dag()).reasons[OpId("product")]


HALF: dict[str, Any] = {"input": 0, "stride": [16, 1]}


def test_of_what_is_not_laid_out_in_rows_the_chain_keeps_copies() -> None:
    """Halves of one tensor, and a norm of a transposed one."""
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    g.add("product", "mul", g.add("silu", "silu", x, call={"args": [HALF]}), g.add("up", "tanh", x))
    g.add("norm", "layer_norm", x, call={"args": [HALF, [8], None, None, 1e-5, False]})
    gated, norm = chains_of(g.dag())
    assert (gated.producer, gated.x, gated.operands) == (Producer.GLU, OpId("x"), (OpId("up"),))
    assert (norm.x, norm.operands) == (OpId("x"), ())
    assert operands_kept(gated, ChainVariant()) == (OpId("up"),)
    assert operands_kept(gated, ChainVariant(saved=Precision.INT8)) == ()


def test_a_gated_unit_of_relu_keeps_its_operands_as_they_are() -> None:
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    g.add("product", "mul", g.add("relu", "relu", x), x)
    assert [(chain.producer, chain.may_round_input) for chain in chains_of(g.dag())] == [(Producer.GLU, False)]


def test_one_addition_between_two_norms_is_in_one_chain() -> None:
    g = Graph()
    x = g.add("x", "input")
    g.add("after", "layer_norm", g.add("sum", "add", g.add("norm", "batch_norm", x), x))
    assert g.chains() == [("batch_norm", "norm", "sum"), ("layer_norm", "after")]


EVALUATING = {"args": [{"input": 0}, None, None, None, None, False, 0.1, 1e-5, False]}
COMPUTED = {"args": [{"input": 0}, {"tensor": [8], "dtype": "float32"}, None, None, None, True, 0.1, 1e-5, False]}


@pytest.mark.parametrize(
    ("kind", "shape", "call"),
    [
        ("batch_norm", (2, 8), {}),
        ("batch_norm", IMAGE, EVALUATING),
        ("batch_norm", IMAGE, COMPUTED),
        ("layer_norm", IMAGE, {"args": [{"input": 0}, [4, 4], None, None, 1e-5, False]}),
        ("gelu", IMAGE, {"kwargs": {"approximate": "fast"}}),
        ("tanh", IMAGE, {}),
        ("group_norm", IMAGE, {}),
    ],
)
def test_what_no_producer_computes_is_no_chain(kind: str, shape: tuple[int, ...], call: dict[str, Any]) -> None:
    g = Graph()
    g.add("op", kind, g.add("x", "input", shape=shape), call=call)
    assert g.chains() == []


@pytest.mark.parametrize(
    "call", [{"kwargs": {"alpha": 2}}, {"args": [{"input": 0}, {"input": 1}, 2]}, {"args": [{"input": 0}, 3.0]}]
)
def test_an_addition_that_scales_is_not_fused(call: dict[str, Any]) -> None:
    g = Graph()
    x = g.add("x", "input")
    inputs = ("norm",) if call.get("args", [])[1:] == [3.0] else ("norm", x)
    g.add("norm", "batch_norm", x)
    g.add("sum", "add", *inputs, call=call)
    assert g.chains() == [("batch_norm", "norm")]


def test_an_addition_that_broadcasts_or_doubles_is_not_fused() -> None:
    g = Graph()
    x = g.add("x", "input")
    one = g.add("one", "input", shape=(1, 8, 1, 1))
    g.add("wide", "add", g.add("norm", "batch_norm", x), one, shape=IMAGE)
    g.add("double", "add", g.add("norm2", "batch_norm", x), "norm2")
    assert g.chains() == [("batch_norm", "norm"), ("batch_norm", "norm2")]


def test_functions_by_their_call() -> None:
    g = Graph()
    x = g.add("x", "input")
    g.add("erf", "gelu", x)
    g.add("tanh", "gelu", x, call={"kwargs": {"approximate": "tanh"}})
    g.add("silu", "silu", x)
    g.add("behind", "gelu", g.add("norm", "batch_norm", x))
    assert [(c.producer, c.activation) for c in chains_of(g.dag())] == [
        (Producer.ACTIVATION, Activation.GELU),
        (Producer.ACTIVATION, Activation.GELU_TANH),
        (Producer.ACTIVATION, Activation.SILU),
        (Producer.BATCH_NORM, Activation.NONE),
        (Producer.ACTIVATION, Activation.GELU),
    ]


def test_what_no_chain_delivers_says_why() -> None:
    g = Graph()
    x = g.add("x", "input", shape=ROWS)
    g.add("m.first", "linear", x)
    g.add("m.q", "linear", g.add("tanh", "tanh", "m.first"))
    g.add("m.k", "linear", "tanh")
    g.add("m.o", "linear", g.add("norm", "layer_norm", "m.q"))
    g.add("pooler", "linear", "norm", shape=(2, 8))
    g.operators[-1] = attrs.evolve(g.operators[-1], input_shapes=((2, 8),))
    g.add("m.down", "linear", g.add("wide", "layer_norm", "m.o", call={"args": [{"input": 0}, [4, 8], None, None, 1e-5, False]}))
    g.add("up", "mul", g.add("silu", "silu", "m.down"), g.add("other", "tanh", "m.down"))
    g.add("beside", "tanh", "silu")
    g.add("m.last", "linear", "up")
    assert list(map(str, unchained(g.dag()))) == [
        "tanh before q, k: no producer computes it",
        "layer_norm before pooler: a view of it is read",
        "layer_norm before down: it normalizes several dimensions, or its weight is computed",
        "mul before last: something else reads its silu, or that is written over its operand",
    ]
    assert unchained_line(g.dag()).startswith("1 × tanh before q, k: no producer computes it; 1 × layer_norm before pooler")


def counted(name: str) -> Counter[tuple[str, str, bool, int]]:
    dag = load(DATA / name / "dag.qsync", PrecisionDag)
    return Counter((str(c.producer), str(c.activation), c.residual is not None, len(c.product_readers)) for c in chains_of(dag))


def test_resnet50() -> None:
    # 16 blocks: norms 1 and 2 with a ReLU, read by one convolution; norm 3 with shortcut and ReLU, read by the next block's first
    # convolution, by its projection as well where a stage begins (3), and in the last block by the pooling.  Four projections'
    # norms are the shortcut.  The stem's chain is read by the pooling.
    assert counted("h200/resnet50") == {
        ("batch_norm", "relu", False, 1): 32,
        ("batch_norm", "relu", True, 1): 12,
        ("batch_norm", "relu", True, 2): 3,
        ("batch_norm", "relu", True, 0): 1,
        ("batch_norm", "none", False, 0): 4,
        ("batch_norm", "relu", False, 0): 1,
    }


def test_vgg16_bn() -> None:
    # 13 norms with a ReLU, 5 before a pooling; the classifier's two ReLUs are before a dropout.
    assert counted("cpu/vgg16-bn") == {
        ("batch_norm", "relu", False, 1): 8,
        ("batch_norm", "relu", False, 0): 5,
        ("activation", "relu", False, 0): 2,
    }


def test_bert_base() -> None:
    # Per layer: the norm behind attention is read by one linear, the GELU by one, the norm behind the feed-forward by Q, K and V of
    # the next layer, in the last one by the head.  The embeddings' norm (their sum broadcasts positions) is before a dropout.
    assert counted("h200/bert-base") == {
        ("layer_norm", "none", True, 1): 12 + 1,
        ("layer_norm", "none", True, 3): 11,
        ("activation", "gelu", False, 1): 12,
        ("layer_norm", "none", False, 0): 1,
    }


def test_roberta_base() -> None:
    # As BERT, but positions are those of every sample (no broadcast), and the head reads a part of the last result (a token).
    assert counted("cpu/roberta-base") == {
        ("layer_norm", "none", True, 1): 12,
        ("layer_norm", "none", True, 3): 11,
        ("layer_norm", "none", True, 0): 2,
        ("activation", "gelu", False, 1): 12,
    }


@pytest.mark.parametrize(
    # ResNet50: norms 1 and 2 of every block, and the last block before each of three stages, whose projection reads it too.
    ("name", "without_floats"),
    [("h200/resnet50", 32 + 3), ("h200/bert-base", 12 + 1), ("cpu/vgg16-bn", 8)],
)
def test_in_uniform_int8_chains_that_products_alone_read_write_no_floats(name: str, without_floats: int) -> None:
    dag = load(DATA / name / "dag.qsync", PrecisionDag)
    for variant, expected in ((INT8, without_floats), (BFLOAT16, 0)):
        results = [chain_result(chain, {o.op_id: variant for o in dag.adjustable}) for chain in chains_of(dag)]
        assert sum(not result.float_result for result in results) == expected


def result(producer: Producer, *variants: Variant, others: bool = False) -> ChainResult:
    readers = tuple(OpId(f"r{i}") for i in range(len(variants)))
    more = (OpId("other"),) if others else ()
    chain = Chain(producer, OpId("op"), (OpId("op"),), OpId("x"), None, Activation.NONE, (*readers, *more), readers)
    return chain_result(chain, dict(zip(readers, variants, strict=True)))


def test_the_copy_is_the_first_readers_and_floats_are_written_for_all_others() -> None:
    layer, batch = Producer.LAYER_NORM, Producer.BATCH_NORM
    int8, float8 = steps_of(INT8).x, steps_of(FLOAT8).x
    rows = attrs.evolve(INT8, x_granularity=Granularity.PER_ROW)
    assert result(layer, INT8, INT8) == ChainResult(int8, False)
    assert result(layer, INT8, others=True) == ChainResult(int8, True)
    assert result(layer, BFLOAT16, INT8) == ChainResult(int8, True)
    assert result(layer, FLOAT8, INT8) == ChainResult(float8, True)
    assert result(layer, FLOAT32) == ChainResult(None, True)
    assert result(layer) == ChainResult(None, True)
    assert result(layer, rows) == ChainResult(steps_of(rows).x, False)
    assert result(batch, rows) == ChainResult(None, True)
    assert result(layer, attrs.evolve(INT8, grad_weight=Precision.INT8)) == ChainResult(None, True)
    assert result(layer, attrs.evolve(INT8, symmetric=False)) == ChainResult(None, True)


@st.composite
def graphs(draw: st.DrawFn) -> PrecisionDag:
    g = Graph()
    names = [g.add("x", "input")]
    for i in range(draw(st.integers(1, 14))):
        kinds = ["batch_norm", "layer_norm", "rms_norm", "add", "relu", "gelu", "conv2d", "max_pool2d", "mul", "mul"]
        kind = draw(st.sampled_from(kinds))
        count = 2 if kind in ("add", "mul") else 1
        recent = st.sampled_from(names[-3:])
        names.append(g.add(f"op{i}", kind, *[draw(recent) for _ in range(count)]))
    return g.dag()


@tries(150)
@given(graphs())
def test_chains_of_random_graphs(dag: PrecisionDag) -> None:
    chains = chains_of(dag)
    members = [member for chain in chains for member in chain.members]
    assert len(members) == len(set(members))
    assert {o.op_id for o in dag.operators if o.kind in ("batch_norm", "layer_norm", "rms_norm", "gelu", "relu")} == {
        member for member in members if dag[member].kind not in ("add", "mul")
    }
    for chain in chains:
        inside = [dag.index[member] for member in chain.members]
        assert inside == sorted(inside)
        for position, following in itertools.pairwise(inside):
            assert set(dag.consumers[position]) == {following}
        assert list(chain.readers) == list(dict.fromkeys(dag.operators[i].op_id for i in dag.consumers[inside[-1]]))
        convolves = chain.producer is not Producer.GLU
        assert set(chain.product_readers) == {name for name in chain.readers if convolves and dag[name].kind == "conv2d"}
        outside = [source for member in chain.members for source in dag[member].inputs if source not in chain.members]
        assert sorted(outside) == sorted([*chain.operands] + ([chain.residual] if chain.residual else []))
        assert all(dag.index[source] < inside[-1] for source in outside)
