"""The text of a choice of kernels: read back as it was written, and refused where it is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import Op
from qsync_core.kernels.choice import KernelChoice, OpChoice, split_chain

backends = st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True)
configs = st.from_regex(r"[A-Za-z0-9_.,;:=x-]{0,20}", fullmatch=True)
ops = st.sampled_from([*Op.CHOSEN, "quantize.weight", "quantize.gradient"])


@given(st.dictionaries(ops, st.builds(OpChoice, backends, configs), max_size=5))
def test_what_is_written_is_read_back(chosen: dict[str, OpChoice]) -> None:
    choice = KernelChoice(("aten",), tuple(chosen.items()))
    assert KernelChoice.parse(choice.backend, choice.config) == choice
    assert dict(choice.pins) == chosen
    assert all(choice.of(op) == found for op, found in chosen.items())


def test_the_text_does_not_depend_on_the_order() -> None:
    one = {"quantize": OpChoice("triton", "block=4096;warps=8"), "linear.output": OpChoice("cutlass", "t128x256x64:s4")}
    text = "linear.output=cutlass/t128x256x64:s4&quantize=triton/block=4096;warps=8"
    for pins in (one, dict(reversed(one.items()))):
        assert KernelChoice(("a",), tuple(pins.items())).config == text


def test_what_is_not_named_is_not_chosen() -> None:
    assert KernelChoice.parse("aten", "").of("quantize") is None
    assert KernelChoice.parse("aten", "linear.output=aten/").of("linear.output") == OpChoice("aten")
    assert KernelChoice.parse("aten", "linear.output=aten/").of("quantize") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block=4096;warps=8", "not a choice of kernels: 'block=4096;warps=8' .* one is written 'operator=backend/configuration'"),
        ("quantize", "not a choice of kernels: 'quantize' in 'quantize'"),
        ("quantize=triton", "not a choice of kernels: 'quantize=triton'"),
        ("quantize=a/&quantize=b/", "names quantize twice"),
        ("quantize=/x", "a backend's name has letters, digits, .* got ''"),
        ("quantize=a b/x", "a backend's name has .* got 'a b'"),
        ("quantize=a/x|y", r"a configuration's text has .* got 'x\|y' of backend a"),
        ("quantize=a/x/y", "a configuration's text has .* got 'x/y'"),
        ("Quantize=a/x", "a choice of kernels is for one of quantize, .*quantize.weight, quantize.gradient; got 'Quantize'"),
        ("=a/x", "a choice of kernels is for one of .* got ''"),
        ("linear.outpt=a/x", "a choice of kernels is for one of .*linear.output, .* got 'linear.outpt'"),
    ],
)
def test_what_is_no_choice_is_refused(text: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        KernelChoice.parse("aten", text)


@given(st.lists(backends.filter(lambda name: name != "auto"), min_size=1, max_size=4, unique=True))
def test_chains_keep_their_order(names: list[str]) -> None:
    assert split_chain("+".join(names)) == tuple(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "not a kernel backend: '' in ''; write names such as 'aten'"),
        ("aten+", r"not a kernel backend: '' in 'aten\+'"),
        ("a b", "not a kernel backend: 'a b'"),
        ("aten+triton+aten", "names a kernel backend twice"),
        ("auto+aten", "'auto' stands alone"),
    ],
)
def test_what_is_no_chain_is_refused(names: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        split_chain(names)


def test_nobody_is_pinned_to_dequantize():
    with pytest.raises(BackendError, match=r"a choice of kernels is for one of quantize, .*; got 'dequantize'"):
        KernelChoice.parse("aten", "dequantize=triton/")
