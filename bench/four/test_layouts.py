"""Layouts of jobs of several ranks, and where their ranks are."""

from __future__ import annotations

import pytest

from four.layouts import EIGHT, FOUR, SHARED, THREE_GROUPS, Layout, UnsuitedLayout, is_shared, machines_by_rank, on_gpus


@pytest.mark.parametrize("text", [*FOUR, *THREE_GROUPS, *EIGHT, *SHARED[1], *SHARED[2]])
def test_a_layout_is_written_as_it_is_read(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["2", "2+2+2+2", "0+2", "2@0+2", "2@100+2", "two+2", ""])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(UnsuitedLayout, match=r"two or three groups, such as 2\+2@50"):
        Layout.parse(text)


def test_each_rank_has_a_gpu_and_each_group_a_machine():
    place = on_gpus(Layout.parse("2+1@50+1@25"), ["0", "1", "2", "3"], {"PIPE": "p"})
    assert place.ranks == {"a": 2, "b": 1, "c": 1}
    assert not is_shared(place)
    own = [(machine.group, machine.environment) for machine in place.machines]
    seen = [(group, named["CUDA_VISIBLE_DEVICES"], named.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")) for group, named in own]
    assert seen == [("a", "0,1", None), ("b", "2", "50"), ("c", "3", "25")]
    assert [m.environment["CUDA_VISIBLE_DEVICES"] for m in machines_by_rank(place)] == ["0", "1", "2", "3"]
    assert {m.environment["PIPE"] for m in place.machines} == {"p"}


def test_of_fewer_gpus_ranks_stand_side_by_side_over_gloo():
    place = on_gpus(Layout.parse("2@75+2@25"), ["4", "5"], {})
    assert is_shared(place)
    seen = [(machine.group, machine.environment["CUDA_VISIBLE_DEVICES"]) for machine in place.machines]
    assert seen == [("a", "4"), ("a", "5"), ("b", "4"), ("b", "5")]
    assert {m.environment["BACKEND"] for m in place.machines} == {"gloo"}


def test_shares_that_do_not_fit_on_the_gpus_are_refused_with_some_that_do():
    with pytest.raises(UnsuitedLayout, match=r"2\+2@50 has 4 ranks and there are 2 GPUs: .* GPU 0 add up to 150%.*2@75\+2@25"):
        on_gpus(Layout.parse("2+2@50"), ["0", "1"], {})


@pytest.mark.parametrize(("gpus", "texts"), SHARED.items())
def test_layouts_for_few_gpus_fit(gpus, texts):
    for text in texts:
        assert on_gpus(Layout.parse(text), [str(gpu) for gpu in range(gpus)], {}).ranks == {"a": 2, "b": 2}
