"""The sequence tree: texts, whose concatenation does not commute, against joining everything anew."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from qsync_planner.replayer.incremental import Node, SequenceTree

LETTERS = st.sampled_from("abcdefgh")


def fold_of(letters: list[str]) -> Callable[[int, int], Node]:
    return lambda first, last: (None, None, "".join(letters[first:last]))


def tree_of(letters: list[str], *, stays: bool = False) -> SequenceTree:
    def join(left: Node, right: Node) -> Node:
        return (left, right, left[2] + right[2])

    return SequenceTree(len(letters), fold_of(letters), join, stays=stays)


@given(st.integers(0, 300), st.data())
def test_changed_entries_make_the_root_of_the_changed_sequence_and_leave_the_old_one(count: int, data: st.DataObject) -> None:
    letters = [data.draw(LETTERS)] * count
    tree = tree_of(letters)
    assert tree.root[2] == "".join(letters)
    roots = [(tree.root, "".join(letters))]
    places = st.lists(st.integers(0, count - 1), max_size=6) if count else st.just([])
    for positions in data.draw(st.lists(places, max_size=5)):
        for position in positions:
            letters[position] = data.draw(LETTERS)
        tree.refresh(positions, fold_of(letters))
        assert tree.root[2] == "".join(letters)
        roots.append((tree.root, "".join(letters)))
    assert all(root[2] == text for root, text in roots)


@given(st.integers(0, 300))
def test_what_stays_is_one_leaf(count: int) -> None:
    tree = tree_of([*"abc"] * count, stays=True)
    assert (tree.half, tree.root[2]) == (0, "abc" * count)


@given(st.integers(1, 300), st.data())
def test_a_change_makes_few_new_nodes(count: int, data: st.DataObject) -> None:
    letters = ["a"] * count
    tree = tree_of(letters)
    before = _nodes(tree.root)
    tree.refresh([data.draw(st.integers(0, count - 1))], fold_of(letters))
    assert len(_nodes(tree.root) - before) <= 1 + tree.half.bit_length()


def _nodes(root: Node) -> set[int]:
    """Identities of all nodes; those of both trees are alive while they are compared."""
    found, ahead = set(), [root]
    while ahead:
        node = ahead.pop()
        if node is not None and id(node) not in found:
            found.add(id(node))
            ahead += node[:2]
    return found
