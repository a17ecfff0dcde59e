"""Configurations are objects and texts, one for the other, and no other text is taken."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_kernels_cutlass.configs.config import AddressIterator, ConvConfig, Family, GemmConfig, Raster, Schedule, Scheduler

SIZE = st.integers(0, 10**6)
SHAPE = st.tuples(SIZE, SIZE, SIZE)
SHARED = {
    "path": st.sampled_from(Family),
    "tile": SHAPE,
    "warp": SHAPE,
    "instruction": SHAPE,
    "stages": SIZE,
    "cluster": st.tuples(SIZE, SIZE),
    "schedule": st.sampled_from(Schedule),
    "splits": SIZE,
    "raster": st.sampled_from(Raster),
    "swizzle": SIZE,
}
GEMM = st.builds(GemmConfig, scheduler=st.sampled_from(Scheduler), **SHARED)
CONV = st.builds(ConvConfig, iterator=st.sampled_from(AddressIterator), **SHARED)


@given(st.one_of(GEMM, CONV))
def test_text_and_object_say_the_same(config):
    assert type(config).parse(config.text) == config
    # What plans may hold: no separator of theirs.
    assert re.fullmatch(r"[A-Za-z0-9_.,;:=x-]+", config.text)


@given(GEMM, GEMM)
def test_different_configurations_have_different_texts(first, second):
    assert (first.text == second.text) == (first == second)


@given(GEMM)
def test_run_time_knobs_do_not_choose_the_library(config):
    other = attrs.evolve(config, raster=Raster.ALONG_N, swizzle=8, splits=3)
    assert other.compiled == config.compiled
    assert config.compiled.compiled == config.compiled
    assert attrs.evolve(config, stages=config.stages + 1).compiled != config.compiled


def test_the_text_names_what_differs_from_the_defaults():
    assert GemmConfig(Family.TMA, (128, 256, 128), cluster=(2, 1), raster=Raster.ALONG_N, swizzle=2).text == (
        "path=tma;tile=128x256x128;cluster=2x1;raster=n;swizzle=2"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"'' is not one of path, tile, "),
        ("path=tma", r"canonical text is 'path=tma;tile=128x128x128'"),
        ("tile=128x128x128;path=tma", "canonical text"),
        ("path=tma;tile=128x128x128;swizzle=1", "canonical text"),
        ("path=tma;tile=128x128x128;swizzle=01", "canonical text"),
        ("path=tma;tile=128x128", "tile: expected 3 numbers joined by 'x', got '128x128'"),
        ("path=tma;tile=128x128x-1", "tile: expected a whole number, got '-1'"),
        ("path=tma;tile=128x128x²", "tile: expected a whole number"),
        ("path=tma;tile=128x128x99999999999", "tile: expected a whole number"),
        ("path=cuda;tile=128x128x128", "path: 'cuda' is not a valid Family"),
        ("path=tma;path=tma;tile=128x128x128", "path is given twice"),
        ("path=tma;tile=128x128x128;block=3", "'block=3' is not one of path, tile"),
        ("path=tma;tile=128x128x128;iterator=analytic", "'iterator=analytic' is not one of"),
        ("path=tma;tile=128x128x128;", "'' is not one of"),
    ],
)
def test_other_texts_are_refused_with_the_knob(text, complaint):
    with pytest.raises(ValueError, match="not a configuration: .*" + complaint):
        GemmConfig.parse(text)


@given(st.text(alphabet="pathtile=;x0123456789mn", max_size=40))
def test_arbitrary_text_is_a_configuration_or_a_value_error(text):
    try:
        config = GemmConfig.parse(text)
    except ValueError:
        return
    assert config.text == text
