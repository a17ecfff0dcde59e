"""Blocks: they partition the units, stay small enough, and isomorphism means equal types, shapes and wiring."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import FULL, LADDERS
from synthetic import FLOAT32, GraphBuilder, resnet, transformer

from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_planner.allocator.blocks import MAX_COMBINATIONS, classes, find_blocks
from qsync_planner.allocator.problem import GroupProblem, Unit


def group_of(dag: PrecisionDag, rungs: int = 3) -> GroupProblem:
    ladder = {1: (FULL,), 2: LADDERS[3], 3: LADDERS[0], 4: LADDERS[2]}[rungs]
    units: dict[str, list] = {}
    for operator in dag.adjustable:
        units.setdefault(operator.variant_group, []).append(operator.op_id)
    found = tuple(Unit(name, tuple(op_ids), ladder, (0.0,) * len(ladder)) for name, op_ids in units.items())
    return GroupProblem(DeviceGroup("g", "T4", 1, Role.INFER, FLOAT32, ladder), found)


def test_a_bert_layer_is_a_block_and_all_layers_are_one_class() -> None:
    dag = transformer(layers=5, hidden=32, heads=2, batch=2, tokens=8)
    group = group_of(dag)
    blocks = find_blocks(group)
    assert [block.name for block in blocks[:2]] == ["layer.0", "layer.1"]
    assert [len(block.units) for block in blocks] == [6, 6, 6, 6, 6, 1]
    found = classes(dag, group, blocks)
    assert [len(entry) for entry in found] == [5, 1]


def test_with_four_rungs_a_layer_is_split_at_its_modules() -> None:
    group = group_of(transformer(layers=2, hidden=32, heads=2, batch=2, tokens=8), rungs=4)
    sizes = [len(block.units) for block in find_blocks(group)]
    assert sizes[:2] == [4, 2]


def test_resnet_stages_have_a_class_for_the_first_block_and_one_for_the_rest() -> None:
    dag = resnet(width=8, batch=2, image=32)
    group = group_of(dag)
    found = classes(dag, group, find_blocks(group))
    sizes = {entry[0].name: len(entry) for entry in found}
    assert sizes["layer3.0"] == 1
    assert sizes["layer3.1"] == 5
    assert sizes["layer4.1"] == 2


def test_equal_types_with_other_shapes_are_not_isomorphic() -> None:
    g = GraphBuilder("two")
    x = g.input("x", (2, 8))
    x = g.linear("layer.0.b", g.linear("layer.0.a", x, 8), 8)
    x = g.linear("layer.1.b", g.linear("layer.1.a", x, 9), 8)
    x = g.linear("layer.2.b", g.linear("layer.2.a", x, 8), 8)
    g.loss(x)
    dag = g.build()
    group = group_of(dag)
    blocks = find_blocks(group, max_combinations=9)
    assert [[block.name for block in entry] for entry in classes(dag, group, blocks)] == [["layer.0", "layer.2"], ["layer.1"]]


def test_other_wiring_is_not_isomorphic() -> None:
    g = GraphBuilder("wired")
    x = g.input("x", (2, 8))
    a = g.linear("layer.0.a", x, 8)
    x = g.join("layer.0.add", "add", [g.linear("layer.0.b", a, 8), a])
    a = g.linear("layer.1.a", x, 8)
    x = g.join("layer.1.add", "add", [g.linear("layer.1.b", x, 8), a])
    g.loss(x)
    dag = g.build()
    group = group_of(dag)
    assert [len(entry) for entry in classes(dag, group, find_blocks(group, 9))] == [1, 1]


def test_single_operators_that_follow_each_other_are_packed() -> None:
    g = GraphBuilder("vgg")
    x = g.input("x", (2, 8))
    for i in range(0, 20, 2):
        x = g.unary(f"features.{i + 1}", "relu", g.linear(f"features.{i}", x, 8))
    g.loss(x)
    group = group_of(g.build())
    blocks = find_blocks(group)
    assert [block.units for block in blocks] == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9)]


PATHS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join), min_size=1, max_size=20, unique=True)


@given(paths=PATHS, rungs=st.integers(1, 4), limit=st.sampled_from([1, 4, 30, MAX_COMBINATIONS]))
def test_blocks_partition_the_units_within_the_limit(paths: list[str], rungs: int, limit: int) -> None:
    g = GraphBuilder("any")
    x = g.input("x", (1, 4))
    for path in paths:
        x = g.linear(path, x, 4)
    g.loss(x)
    group = group_of(g.build(), rungs)
    blocks = find_blocks(group, limit)
    assert sorted(index for block in blocks for index in block.units) == list(range(len(paths)))
    for block in blocks:
        size = math.prod(len(group.units[index].rungs) for index in block.units)
        assert size <= max(limit, rungs if len(block.units) == 1 else limit)


@pytest.mark.parametrize("rungs", [1, 2, 3, 4])
def test_a_module_with_an_operator_of_its_own_and_children_is_split(rungs: int) -> None:
    g = GraphBuilder("mixed")
    x = g.linear("m", g.linear("m.child", g.input("x", (1, 4)), 4), 4)
    g.loss(x)
    group = group_of(g.build(), rungs)
    assert sorted(i for block in find_blocks(group, 1) for i in block.units) == [0, 1]
