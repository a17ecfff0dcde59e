"""Artifacts with a valid digest whose content does not hold together: what a faulty tool, or a hand, may write.

A *set* is the files of one job by name.  A mutation changes the content of one of them and seals it again; ``mutate`` then makes
the others say that they belong to the changed graph, so that what compares digests does not stand in the way.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgpack

HEADER_BYTES = 68
_LENGTH_AT, _DIGEST_AT = 28, 36

Tree = Any
Mutation = Callable[[random.Random, Tree], str]


def content(data: bytes) -> Tree:
    """The content of an artifact file as plain data."""
    return msgpack.unpackb(data[HEADER_BYTES:], strict_map_key=False)


def sealed(data: bytes, tree: Tree) -> bytes:
    """The file with other content, and the length and digest of that."""
    packed: bytes = msgpack.packb(tree)
    front = data[:_LENGTH_AT] + struct.pack(">Q", len(packed))
    return front + hashlib.sha256(front + packed).digest() + packed


def digest_of(data: bytes) -> str:
    """The digest in a file's header."""
    return data[_DIGEST_AT:HEADER_BYTES].hex()


def _containers(tree: Tree, kind: type) -> Iterator[Any]:
    """Every non-empty mapping or list of a tree, the outermost first."""
    ahead = [tree]
    while ahead:
        node = ahead.pop(0)
        if isinstance(node, kind) and node:
            yield node
        ahead += [child for child in (node.values() if isinstance(node, dict) else node) if isinstance(child, (dict, list))]


def _some(rng: random.Random, tree: Tree, wanted: Callable[[Any], bool], kind: type) -> Any:
    found = [container for container in _containers(tree, kind) if wanted(container)]
    return rng.choice(found) if found else None


def _names_operators(keys: Any) -> bool:
    return all(isinstance(key, str) and "#" in key and "=" not in key for key in keys)


def _names_variants(keys: Any) -> bool:
    return all(isinstance(key, str) and ";out=" in key for key in keys)


def drop_operator(rng: random.Random, tree: Tree) -> str:
    """Take an operator out of a list or mapping of operators, and leave it elsewhere."""
    return _drop(rng, tree, "operator")


def drop_variant(rng: random.Random, tree: Tree) -> str:
    """Take a variant out of what is known of one operator, or of all."""
    name = ""
    chosen = [node for node in _containers(tree, dict) if _names_variants(node)]
    if chosen:
        name = rng.choice(list(chosen[0]))
        for node in chosen if rng.random() < 0.5 else [rng.choice(chosen)]:
            node.pop(name, None)
    return f"without {name[:24]}"


def _drop(rng: random.Random, tree: Tree, what: str) -> str:
    kinds = [node for node in _containers(tree, dict) if _names_operators(node)]
    lists = [node for node in _containers(tree, list) if _is_operator_list(node)]
    node = rng.choice([*kinds, *lists]) if kinds or lists else None
    if node is None:
        return "nothing to drop"
    at = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    del node[at]
    return f"without {what} {at}"


def _is_operator_list(node: list[Any]) -> bool:
    return _names_operators(node) or all(isinstance(entry, dict) and "op_id" in entry for entry in node)


def duplicate(rng: random.Random, tree: Tree) -> str:
    """An entry of a list twice."""
    node = _some(rng, tree, bool, list)
    if node is None:
        return "no list"
    node.insert(rng.randrange(len(node) + 1), rng.choice(node))
    return "an entry twice"


def rename_operator(rng: random.Random, tree: Tree) -> str:
    """Another name for an operator in one place."""
    node = _some(rng, tree, lambda n: any("#" in str(k) and "=" not in str(k) for k in n) or isinstance(n.get("op_id"), str), dict)
    if node is None:
        return "no operator"
    if isinstance(node.get("op_id"), str):
        node["op_id"] = rng.choice(("other#0", node["op_id"][:-1] + "7", "$input.x#0"))
    else:
        key = rng.choice(list(node))
        node[rng.choice(("other#0", f"{key[:-1]}7"))] = node.pop(key)
    return "an operator renamed"


def change_number(rng: random.Random, tree: Tree) -> str:
    """A number that is negative, not finite, zero or very large; in one place, or in all of one name."""
    places = [(node, key) for node in _containers(tree, dict) for key, value in node.items() if _is_number(value)]
    if not places:
        return "no number"
    _, name = rng.choice(places)
    value = rng.choice((-1, 0, 1, 2**31, 2**62, -(2**40), math.nan, math.inf, -math.inf, -1.0, 1e-300, 1e300))
    chosen = [(node, key) for node, key in places if key == name]
    for node, key in chosen if rng.random() < 0.5 else [rng.choice(chosen)]:
        node[key] = float(value) if isinstance(node[key], float) else value
    return f"{str(name)[:24]} = {value}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def change_shape(rng: random.Random, tree: Tree) -> str:
    """A shape, or a list of positions, with other numbers or none."""
    node = _some(rng, tree, lambda n: all(type(v) is int for v in n), list)
    if node is None:
        return "no shape"
    node[:] = rng.choice(([], [0], [1], [2**40], [*node, 1], node[1:], node[::-1], [-1]))
    return f"a shape {node}"


def change_word(rng: random.Random, tree: Tree) -> str:
    """A kind, class, format, role, group or phase that is another one."""
    words = (
        "linear",
        "conv2d",
        "relu",
        "input",
        "adjustable",
        "dependent",
        "fixed",
        "guarded",
        "train",
        "infer",
        "float32",
        "int8",
    )
    words = (*words, "float16", "cpu", "cuda", "forward", "backward", "communication", "", "mean", "sum", "stochastic", "x" * 500)
    places = [
        (node, key)
        for node in _containers(tree, dict)
        for key, value in node.items()
        if isinstance(value, str) and key not in ("op_id", "dag_digest", "reason")
    ]
    if not places:
        return "no word"
    node, key = rng.choice(places)
    node[key] = rng.choice([word for word in words if word != node[key]])
    return f"{key} = {node[key][:20]!r}"


def swap_variants(rng: random.Random, tree: Tree) -> str:
    """What is known of a variant under another variant's name, or an assigned variant that is another."""
    names = sorted({key for node in _containers(tree, dict) if _names_variants(node) for key in node})
    places = [node for node in _containers(tree, dict) if ";out=" in str(node.get("variant"))]
    names += sorted({node["variant"] for node in places})
    if places and rng.random() < 0.7:
        rng.choice(places)["variant"] = rng.choice(names)
    elif names:
        node = _some(rng, tree, _names_variants, dict)
        if node is not None:
            node[rng.choice(names)] = node.pop(rng.choice(list(node)))
    return "variants exchanged"


def empty(rng: random.Random, tree: Tree) -> str:
    """A list or mapping without entries."""
    holders = [(n, k) for n in _containers(tree, dict) for k, v in n.items() if isinstance(v, (dict, list)) and v]
    if not holders:
        return "nothing to empty"
    node, key = rng.choice([place for place in holders if rng.random() < 0.3] or holders)
    node[key] = type(node[key])()
    return f"{str(key)[:24]} empty"


def absent(rng: random.Random, tree: Tree) -> str:
    """Something optional that is not there."""
    places = [
        (n, k) for n in _containers(tree, dict) for k in n if k in ("collective", "verdict", "bound", "bucket", "op_id", "variant")
    ]
    if not places:
        return "nothing optional"
    node, key = rng.choice(places)
    node[key] = None
    return f"{key} absent"


MUTATIONS: tuple[Mutation, ...] = (
    *(drop_operator, drop_variant, duplicate, rename_operator, change_number, change_number, change_shape),
    *(change_word, swap_variants, empty, absent),
)


def mutate(rng: random.Random, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], str]:
    """A set with one file changed, in one or two ways, and what was changed.

    In most cases the other files then name the digest of the graph as it now is: see :func:`relinked`.
    """
    changed, said = dict(files), []
    name = rng.choice(sorted(files))
    tree = content(files[name])
    for _ in range(rng.choice((1, 1, 1, 2))):
        mutation = rng.choice(MUTATIONS)
        said.append(f"{name}: {mutation.__name__}: {mutation(rng, tree)}")
    changed[name] = sealed(files[name], tree)
    if rng.random() < 0.9:
        changed = relinked(changed)
    return changed, "; ".join(said)


def relinked(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The set with every file that belongs to a graph naming the digest of the graph's file: ``NAME@GRAPH`` or, plain, ``dag``."""
    found = dict(files)
    for name, data in files.items():
        tree = content(data)
        graph = name.partition("@")[2] or "dag"
        if isinstance(tree, dict) and "dag_digest" in tree and graph in files:
            tree["dag_digest"] = digest_of(files[graph])
            found[name] = sealed(data, tree)
    return found
