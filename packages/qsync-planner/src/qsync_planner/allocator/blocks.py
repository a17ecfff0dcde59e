"""Isomorphic building blocks of a model: where brute force is affordable (paper, Allocator).

See docs/design/allocator.md#isomorphic-blocks.

A block is a subtree of the module tree with few enough combinations of rungs to try them all: an attention layer, a bottleneck.
Single-operator children of one parent that follow each other (VGG's ``features.0``, ``features.2``, …) are packed together.
Blocks are isomorphic if their operators have the same types, shapes and attributes and are wired alike, and their units have the
same rungs; what is found for one of a class then holds for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from qsync_core.ir.dag import PrecisionDag
from qsync_planner.allocator.problem import GroupProblem

MAX_COMBINATIONS = 1024
"""Most combinations of rungs tried in one class: six operators with three rungs (729), five with four (1,024)."""


@attrs.frozen
class Block:
    """Indices of units that are decided together, in order of execution."""

    name: str
    units: tuple[int, ...]


def find_blocks(group: GroupProblem, max_combinations: int = MAX_COMBINATIONS) -> tuple[Block, ...]:
    """Split all units into blocks of at most ``max_combinations`` combinations (a single unit may always be a block)."""
    paths = [tuple(unit.name.split(".")) for unit in group.units]
    blocks: list[Block] = []
    _split(group, paths, list(range(len(paths))), 0, max_combinations, blocks)
    return tuple(blocks)


def _combinations(group: GroupProblem, units: Sequence[int]) -> int:
    return math.prod(len(group.units[index].rungs) for index in units)


def _split(
    group: GroupProblem,
    paths: Sequence[tuple[str, ...]],
    units: list[int],
    depth: int,
    limit: int,
    blocks: list[Block],
) -> None:
    """Take ``units``, whose paths agree in their first ``depth`` names, as one block or split them by the next name."""
    if not units:
        return
    if len(units) == 1 or _combinations(group, units) <= limit:
        blocks.append(Block(".".join(paths[units[0]][:depth]) or "model", tuple(units)))
        return
    children: dict[tuple[str, ...], list[int]] = {}
    for index in units:
        children.setdefault(paths[index][: depth + 1], []).append(index)
    packed: list[int] = []

    def flush() -> None:
        if packed:
            prefix = ".".join(paths[packed[0]][:depth]) or "model"
            blocks.append(Block(f"{prefix}[{packed[0]}..{packed[-1]}]", tuple(packed)))
            packed.clear()

    for child in children.values():
        if len(child) > 1:
            flush()
            _split(group, paths, child, depth + 1, limit, blocks)
            continue
        if packed and _combinations(group, [*packed, *child]) > limit:
            flush()
        packed.extend(child)
    flush()


def classes(dag: PrecisionDag, group: GroupProblem, blocks: Sequence[Block]) -> tuple[tuple[Block, ...], ...]:
    """Group blocks into isomorphism classes, in the order of each class's first block."""
    found: dict[object, list[Block]] = {}
    for block, positions in zip(blocks, members(dag, group, blocks), strict=True):
        found.setdefault(_signature(dag, group, block, positions), []).append(block)
    return tuple(tuple(entry) for entry in found.values())


def members(dag: PrecisionDag, group: GroupProblem, blocks: Sequence[Block]) -> list[list[int]]:
    """Positions of all operators of each block: its adjustable ones and, in its module or between them, those that follow them."""
    block_of_unit = {index: number for number, block in enumerate(blocks) for index in block.units}
    block_of: dict[int, int] = {}
    for index, unit in enumerate(group.units):
        for op_id in unit.operators:
            block_of[dag.index[op_id]] = block_of_unit[index]
    last = {number: position for position, number in sorted(block_of.items())}
    found: list[list[int]] = [[] for _ in blocks]
    owner: dict[int, int] = dict(block_of)
    for position, operator in enumerate(dag.operators):
        if position not in owner:
            # A dependent operator belongs to the block of its latest producer that has one.
            owners = [owner[dag.index[p]] for p in operator.inputs if dag.index[p] in owner]
            owners.sort(key=lambda number: found[number][-1])
            if owners and (position < last[owners[-1]] or operator.op_id.fqn.startswith(f"{blocks[owners[-1]].name}.")):
                owner[position] = owners[-1]
        if position in owner:
            found[owner[position]].append(position)
    return found


def _signature(dag: PrecisionDag, group: GroupProblem, block: Block, members: Sequence[int]) -> object:
    """Equal for two blocks exactly when types, shapes, attributes, inner wiring and choices are."""
    local = {position: i for i, position in enumerate(members)}
    unit_of = {dag.index[op_id]: i for i, index in enumerate(block.units) for op_id in group.units[index].operators}
    rows = []
    for position in members:
        operator = dag.operators[position]
        wiring = tuple(local.get(dag.index[producer], -1) for producer in operator.inputs)
        rows.append((operator.cost_key, operator.op_class, wiring, unit_of.get(position, -1)))
    return (tuple(rows), tuple(group.units[index].rungs for index in block.units))
