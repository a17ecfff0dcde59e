"""Operators and variants as text: what is written can be read, and nothing else."""

from __future__ import annotations

import pytest
from artifact_strategies import op_ids, variants
from hypothesis import example, given
from hypothesis import strategies as st

from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant


@given(op_ids)
def test_op_id_round_trip(op_id: OpId) -> None:
    assert OpId.parse(str(op_id)) == op_id


@given(st.text(max_size=20))
@example("a#00")
@example("a#²")
@example("#1")
@example("a#1#2")
def test_op_id_text_is_read_or_refused(text: str) -> None:
    try:
        op_id = OpId.parse(text)
    except ValueError:
        return
    assert str(op_id) in (text, f"{text}#0")


def test_op_id_without_call_is_the_first_call() -> None:
    assert OpId.parse("layer1.0.conv1") == OpId("layer1.0.conv1", 0)
    assert str(OpId("fc", 1)) == "fc#1"


@pytest.mark.parametrize("text", ["a#", "a#x", "a#-1", "a#01", "a#1.0", "a#" + "9" * 30])
def test_bad_call(text: str) -> None:
    with pytest.raises(ValueError, match=r"an operator is written 'fqn#call', for example 'layer1\.0\.conv1#0'"):
        OpId.parse(text)


@pytest.mark.parametrize("fqn", ["", "a#b", "line\nbreak", "x" * 1025])
def test_bad_fqn(fqn: str) -> None:
    with pytest.raises(ValueError, match="an operator's FQN is 1 to 1024 printable characters without '#'"):
        OpId(fqn)


@given(op_ids, op_ids)
def test_op_ids_are_ordered_by_name_then_call(a: OpId, b: OpId) -> None:
    assert (a < b) == ((a.fqn, a.call) < (b.fqn, b.call))
    assert (a <= b) or (b <= a)


@given(variants)
def test_variant_round_trip(variant: Variant) -> None:
    assert Variant.parse(str(variant)) == variant


@given(variants, variants)
def test_equal_variants_have_equal_text(a: Variant, b: Variant) -> None:
    assert (a == b) == (str(a) == str(b))


def test_variant_text() -> None:
    text = "int8;out=bfloat16;save=int8;gi=bfloat16;gw=bfloat16;x=tensor;w=channel;round=stochastic;sym=true"
    assert str(Variant.of(Precision.INT8)) == text
    assert Variant.parse("int8") == Variant.parse("int8>bfloat16") == Variant.parse(text)
    assert Variant.parse("int8>float32") == Variant.parse(text.replace("out=bfloat16", "out=float32"))
    assert Variant.named("int8", sixteen_bit=Precision.FLOAT16) == Variant.parse(text.replace("bfloat16", "float16"))
    assert Variant.parse("int8-affine") == Variant.parse(text.replace("sym=true", "sym=false"))
    assert Variant.parse("int8-affine>float32").label == "int8-affine>float32"
    every = text.replace("gi=bfloat16;gw=bfloat16;x=tensor", "gi=int8;gw=int8;x=row")
    assert Variant.parse("int8-all") == Variant.parse(every)
    assert Variant.named("int8-all", sixteen_bit=Precision.FLOAT16) == Variant.parse(every.replace("bfloat16", "float16"))
    assert Variant.parse("int8-all>float32").label == "int8-all>float32"
    for field, other in (("x=row", "x=tensor"), ("gw=int8", "gw=bfloat16"), ("gi=int8", "gi=bfloat16")):
        assert Variant.parse(every.replace(field, other)).label == "int8"
    assert Variant.parse(every.replace("sym=true", "sym=false")).label == "int8-affine"


INT8_TEXT = str(Variant.of(Precision.INT8))


@pytest.mark.parametrize(
    "text",
    [
        "int9",
        "bfloat16-affine",
        "bfloat16-all",
        "float8_e4m3fn-all",
        "int8-all-affine",
        "int8-affine-all",
        "",
        "int8;",
        "int8>",
        "int8>int8",
        "int8>float32;out=float32",
        "int8;out=float32",
        INT8_TEXT + ";x=tensor",
        INT8_TEXT.replace("out=bfloat16", "out=int8"),
        INT8_TEXT.replace("sym=true", "sym=True"),
        INT8_TEXT.replace("gi=bfloat16;gw=bfloat16", "gw=bfloat16;gi=bfloat16"),
        INT8_TEXT.replace("round=stochastic", "round=up"),
    ],
)
def test_bad_variant_text(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"not a variant: .*a variant starts with one of int8, float8_e4m3fn, bfloat16, float16, float32"
    ):
        Variant.parse(text)


def test_standard_variants() -> None:
    """The table of docs/design/precision-semantics.md#standard-variants: output, saved copies and gradients of each precision."""
    int8 = Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16)
    assert (int8.output, int8.saved, int8.grad_input, int8.grad_weight) == ("float16", "int8", "float16", "float16")
    float8 = Variant.of(Precision.FLOAT8_E4M3FN)
    assert (float8.output, float8.saved, float8.grad_input, float8.grad_weight) == (
        "bfloat16",
        "float8_e4m3fn",
        "bfloat16",
        "bfloat16",
    )
    for precision in (Precision.BFLOAT16, Precision.FLOAT16, Precision.FLOAT32):
        assert Variant.of(precision) == Variant.plain(precision)
    assert int8.label == "int8"
    assert float8.label == "float8_e4m3fn"
    assert Variant.of(Precision.INT8, output=Precision.FLOAT32).label == "int8>float32"
    assert Variant.of(Precision.FLOAT16, output=Precision.FLOAT32).label == "float16>float32"


def test_a_text_without_all_fields_is_told_which_it_lacks():
    with pytest.raises(ValueError, match=r"not a variant: 'int8;out=bfloat16' \(it lacks save, gi, gw, x, w, round, sym\);"):
        Variant.parse("int8;out=bfloat16")
