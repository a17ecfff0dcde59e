"""Single values of artifacts to and from msgpack: each has exactly its type, or gives an error that can grow a path."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any

from qsync_core.op_id import OpId
from qsync_core.variant import Variant

MAX_STRING = 65_536
"""Longest string that an artifact may hold, in characters: names and reasons are a line or two."""

_MAX_MESSAGE = 300

Hook = Callable[[Any], Any]


class CodecError(ValueError):
    """A value does not have the form its field declares; ``path`` says where inside the artifact."""

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        problem = self.problem if len(self.problem) <= _MAX_MESSAGE else self.problem[:_MAX_MESSAGE] + "…"
        return f"{''.join(self.path).lstrip('.') or 'the whole'}: {problem}"

    @classmethod
    def at(cls, where: str, error: Exception) -> CodecError:
        """The same error seen from one level further out."""
        if isinstance(error, CodecError):
            return cls(error.problem, (where, *error.path))
        return cls(first_words(error), (where,))


CAUGHT = (ValueError, TypeError, AttributeError, OverflowError)
"""What constructing a value from wrong material raises; anything else is a defect of the codec and must surface."""


def first_words(error: Exception) -> str:
    """What an exception says; attrs' validators put the sentence first and objects behind it."""
    return str(error.args[0]) if error.args else type(error).__name__


def wrong_type(expected: str, value: Any) -> CodecError:
    """The error for a value of another type."""
    return CodecError(f"expected {expected}, got {type(value).__name__}")


@functools.lru_cache(maxsize=65_536)
def parse_op_id(text: str) -> OpId:
    """The operator that the canonical text names."""
    op_id = OpId.parse(text)
    if str(op_id) != text:
        raise CodecError(f"an operator is stored as {str(op_id)!r}, got {text!r}")
    return op_id


@functools.lru_cache(maxsize=4_096)
def parse_variant(text: str) -> Variant:
    """The variant that the canonical text names."""
    variant = Variant.parse(text)
    if str(variant) != text:
        raise CodecError(f"a variant is stored as {str(variant)!r}, got {text!r}")
    return variant


@functools.lru_cache(maxsize=4_096)
def format_variant(variant: Variant) -> str:
    """The canonical text of a variant."""
    return str(variant)


def check_string(value: Any) -> str:
    """A string of bounded length."""
    if type(value) is not str:
        raise wrong_type("a string", value)
    if len(value) > MAX_STRING:
        raise CodecError(f"expected a string of at most {MAX_STRING} characters, got {len(value)}")
    return value


def check_int(value: Any) -> int:
    """An integer; a bool is none."""
    if type(value) is not int:
        raise wrong_type("an integer", value)
    return value


def check_bool(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise wrong_type("true or false", value)
    return value


def check_float(value: Any) -> float:
    """A finite float; an integer is none."""
    if type(value) is not float:
        raise wrong_type("a floating-point number", value)
    if not math.isfinite(value):
        raise CodecError(f"expected a finite number, got {value!r}")
    return value


def dump_float(value: Any) -> float:
    """A number that was written as ``1`` is a float too where the field is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type("a floating-point number", value)
    return check_float(float(value))


def parse_int_key(text: str) -> int:
    """The integer that a mapping key is the decimal text of."""
    # At most 19 digits, so that hostile text never becomes a huge integer.
    if len(text) > 19 or not text.isascii() or not text.isdigit() or str(int(text)) != text:
        raise CodecError(f"expected a non-negative integer as key, got {text[:40]!r}")
    return int(text)


def dump_instance(kind: type, dump: Hook) -> Hook:
    """A hook that refuses what is no instance of the class."""

    def dump_checked(value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong_type(f"a {kind.__name__}", value)
        return dump(value)

    return dump_checked


def parse_string(parse: Callable[[str], Any]) -> Hook:
    """A hook that reads a value from its text."""
    return lambda value: parse(check_string(value))


def enum_load(hint: type[enum.StrEnum]) -> Hook:
    """A hook that finds the member of an enum by its value."""
    members = {member.value: member for member in hint}

    def load(value: Any) -> Any:
        member = members.get(check_string(value))
        if member is None:
            raise CodecError(f"expected one of {', '.join(members)}; got {value[:80]!r}")
        return member

    return load


def enum_dump(hint: type[enum.StrEnum]) -> Hook:
    """A hook that writes a member of an enum as its value."""
    return dump_instance(hint, lambda value: value.value)
