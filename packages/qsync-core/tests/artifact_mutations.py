"""Ways to damage an artifact file, for the fuzz tests: at the level of bits, of bytes, of lengths and of the msgpack structure.

Every mutation takes a random generator and the bytes of a valid file and returns other bytes.  ``resealed`` ones get a header whose
length and digest match again, so that what lies behind these checks is reached.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack

HEADER_BYTES = 68
_FRONT_BYTES = 36
_LENGTH_AT = 28

Mutation = Callable[[random.Random, bytes], bytes]


def reseal(data: bytes) -> bytes:
    """The same file with the length and the digest that its content has."""
    content = data[HEADER_BYTES:]
    front = data[:_LENGTH_AT] + struct.pack(">Q", len(content))
    return front + hashlib.sha256(front + content).digest() + content


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Copy, move or delete a run of bytes, or put random ones in its place."""
    start = rng.randrange(len(data))
    run = data[start : start + rng.choice((1, 2, 4, 9, 40, 300))]
    at = rng.randrange(len(data))
    replacement = rng.choice((run, b"", rng.randbytes(len(run)), run * 2))
    return data[:at] + replacement + data[at + rng.choice((0, len(run))) :]


def inflate_length(rng: random.Random, data: bytes) -> bytes:
    """Put the header of a large string, list, mapping, byte string or extension where some byte was."""
    at = rng.randrange(HEADER_BYTES, len(data))
    announced = rng.choice((2**32 - 1, 2**31, 2**31 - 1, 2**24, 70_000, len(data)))
    marker = rng.choice((b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"))
    return data[:at] + marker + struct.pack(">I", announced) + data[at + rng.choice((0, 1, 5)) :]


def inflate_header(rng: random.Random, data: bytes) -> bytes:
    """Another length, version or kind in the header."""
    at, width = rng.choice(((_LENGTH_AT, 8), (24, 4), (8, 16), (0, 8), (_FRONT_BYTES, 32)))
    return data[:at] + rng.choice((rng.randbytes(width), b"\xff" * width, b"\0" * width)) + data[at + width :]


_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**62, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e308),
    *("", "x", "a#0", "a#1", "#", "int8", "float32", "forward", "\ud7ff", "\u202e", "x" * 70_000, "9" * 5_000),
    *(b"", b"bytes", [], [[]], {}, {"": None}, msgpack.Timestamp(1), msgpack.ExtType(3, b"x")),
)


def change_structure(rng: random.Random, data: bytes) -> bytes:
    """Decode, change one place or a few (another type, a missing, further, repeated or reordered entry), and encode again."""
    tree = msgpack.unpackb(data[HEADER_BYTES:], strict_map_key=False)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change_somewhere(rng, tree)
    return data[:HEADER_BYTES] + msgpack.packb(tree, unicode_errors="surrogatepass")


def _change_somewhere(rng: random.Random, tree: Any) -> None:
    container = tree
    while True:
        children = list(container.values()) if isinstance(container, dict) else list(container)
        inner = [child for child in children if isinstance(child, (dict, list)) and child]
        if not inner or rng.random() < 0.2:
            break
        container = rng.choice(inner)
    if not container:
        return
    if isinstance(container, list):
        _change_list(rng, container)
    else:
        _change_mapping(rng, container)


def _change_list(rng: random.Random, items: list[Any]) -> None:
    at = rng.randrange(len(items))
    match rng.randrange(5):
        case 0:
            items[at] = _other(rng, items[at])
        case 1:
            del items[at]
        case 2:
            items.insert(at, items[rng.randrange(len(items))])
        case 3:
            rng.shuffle(items)
        case 4:
            items.extend([items[at]] * rng.choice((1, 50)))


def _change_mapping(rng: random.Random, fields: dict[Any, Any]) -> None:
    key = rng.choice(list(fields))
    match rng.randrange(5):
        case 0:
            fields[key] = _other(rng, fields[key])
        case 1:
            del fields[key]
        case 2:
            fields[rng.choice(("", "surprise", "a#0", 7, "\u202e", "x" * 70_000))] = fields[key]
        case 3:
            fields[key] = fields.pop(key)  # last
        case 4:
            fields[key] = fields[rng.choice(list(fields))]


def _other(rng: random.Random, value: Any) -> Any:
    """A value of another type, or near the old one."""
    if rng.random() < 0.4:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return min(value + rng.choice((-1, 1, 2**31, 2**62)), 2**64 - 1)
        if isinstance(value, float):
            return rng.choice((-value, value * 1e300, int(value) if math.isfinite(value) else 0))
        if isinstance(value, str):
            return rng.choice((value[:-1], value + "0", value.upper(), value * 2, value.encode("utf-8", "surrogatepass")))
    nested: Any = rng.choice(_VALUES)
    for _ in range(rng.choice((0, 0, 0, 0, 3, 400))):
        nested = [nested]
    return nested


MUTATIONS: tuple[tuple[Mutation, bool], ...] = (
    (flip_bits, False),
    (truncate, False),
    (splice, False),
    (inflate_length, False),
    (inflate_header, False),
    (flip_bits, True),
    (splice, True),
    (inflate_length, True),
    (change_structure, True),
    (change_structure, True),
)
"""(mutation, resealed): half of them resealed; each is as likely as the others."""


def mutate(rng: random.Random, data: bytes, mutation: Mutation, resealed: bool) -> bytes:
    """One damaged file.  A resealed mutation leaves the header alone, so that all its damage lies in the content."""
    if not resealed:
        return mutation(rng, data)
    changed = mutation(rng, data)
    return reseal(data[:HEADER_BYTES] + changed[HEADER_BYTES:])
