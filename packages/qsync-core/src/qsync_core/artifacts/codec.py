"""Artifacts to and from plain msgpack values, strict and canonical, as the type hints of their classes say.

Strict: a value has exactly the type that its field declares (no number from text, no bool for an integer, no list from text),
unknown and missing fields are errors, strings are bounded and printable, floats are finite.  Canonical: one artifact has one
encoding (fields in the order of the class, mappings sorted by key text, operators and variants as their canonical text), and only
that one is read, so that a digest identifies the content.

Each type hint has a :class:`_Codec`, a pair of functions made once.  An error grows a path on its way out:
``intervals[3].op_id: an operator is stored as 'a#0', got 'a'``.  Why not by cattrs: docs/decisions/codec-by-type-hints.md.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import itertools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_core.printable import is_printable, printable

MAX_STRING = 65_536
"""Longest string that an artifact may hold, in characters: names and reasons are a line or two."""

_MAX_MESSAGE = 300
_MAX_KEY_DIGITS = 19
"""Digits of an integer as a mapping's key, at most, so that hostile text never becomes a huge integer."""

T = TypeVar("T")


class CodecError(ValueError):
    """A value does not have the form that its field declares; ``path`` says where inside the artifact."""

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
        # attrs' validators put the sentence first and objects behind it.
        return cls(str(error.args[0]) if error.args else type(error).__name__, (where,))


_CAUGHT = (ValueError, TypeError, AttributeError, OverflowError)
"""What constructing a value from wrong material raises; anything else is a defect of the codec and must surface."""


def to_plain(value: Any) -> dict[str, Any]:
    """An artifact as dictionaries, lists, strings and numbers, in canonical order.

    Raises:
        CodecError: when a field holds what its type does not allow (NaN, a numpy scalar, text for a number).
    """
    kind: Any = type(value)
    plain: dict[str, Any] = _codec(kind).dump(value)
    return plain


def from_plain(value: Any, kind: type[T]) -> T:
    """Make an artifact of a kind from plain values.

    Raises:
        CodecError: naming the place and what was expected there.
    """
    hint: Any = kind
    try:
        artifact: T = _codec(hint).load(value)
    except _CAUGHT as error:
        raise CodecError.at("", error) from None
    return artifact


@attrs.frozen
class _Codec:
    """How values of one type hint are read from plain values and written as such."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any]


@functools.cache
def _codec(hint: Any) -> _Codec:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _tuple(arguments)
    if origin is collections.abc.Mapping:
        return _mapping(*arguments)
    if origin in (types.UnionType, typing.Union):
        (some,) = (argument for argument in arguments if argument is not type(None))
        inner = _codec(some)
        return _Codec(
            lambda value: None if value is None else inner.load(value), lambda value: None if value is None else inner.dump(value)
        )
    return _enum(hint) if issubclass(hint, enum.StrEnum) else _class(hint)


def _wrong_type(expected: str, value: Any) -> CodecError:
    return CodecError(f"expected {expected}, got {type(value).__name__}")


# Single values


def _exactly(kind: type, expected: str) -> _Codec:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise _wrong_type(expected, value)
        return value

    return _Codec(check, check)


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _wrong_type("a string", value)
    if len(value) > MAX_STRING:
        raise CodecError(f"expected a string of at most {MAX_STRING} characters, got {len(value)}")
    return value


def _load_text(value: Any) -> str:
    """A string that may be printed, whatever prints it: a warning, a page, a log."""
    text = _string(value)
    if not is_printable(text):
        raise CodecError(f"expected text without control characters, got {text[:80]!r}")
    return text


def _load_float(value: Any) -> float:
    if type(value) is not float:
        raise _wrong_type("a floating-point number", value)
    if not math.isfinite(value):
        raise CodecError(f"expected a finite number, got {value!r}")
    return value


def _dump_float(value: Any) -> float:
    """A number that was written as ``1`` is a float too where the field is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type("a floating-point number", value)
    return _load_float(float(value))


def _dump_instance(kind: type, dump: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def dump_checked(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong_type(f"a {kind.__name__}", value)
        return dump(value)

    return dump_checked


def _canonical(kind: Any, what: str, size: int) -> _Codec:
    """A class whose instances are stored as their text."""

    @functools.lru_cache(maxsize=size)
    def parse(text: str) -> Any:
        value = kind.parse(text)
        if str(value) != text:
            raise CodecError(f"{what} is stored as {str(value)!r}, got {text!r}")
        return value

    return _Codec(lambda value: parse(_string(value)), _dump_instance(kind, functools.lru_cache(maxsize=size)(str)))


def _enum(hint: type[enum.StrEnum]) -> _Codec:
    members = {member.value: member for member in hint}

    def load(value: Any) -> Any:
        member = members.get(_string(value))
        if member is None:
            raise CodecError(f"expected one of {', '.join(members)}; got {value[:80]!r}")
        return member

    return _Codec(load, _dump_instance(hint, lambda value: value.value))


_INTEGER = _exactly(int, "an integer")
_SCALARS: dict[Any, _Codec] = {
    str: _Codec(_load_text, lambda value: printable(_string(value))),
    int: _INTEGER,
    bool: _exactly(bool, "true or false"),
    float: _Codec(_load_float, _dump_float),
    OpId: _canonical(OpId, "an operator", 65_536),
    Variant: _canonical(Variant, "a variant", 4_096),
}


def _load_integer_key(key: Any) -> int:
    text = _string(key)
    if len(text) > _MAX_KEY_DIGITS or not text.isascii() or not text.isdigit() or str(int(text)) != text:
        raise CodecError(f"expected a non-negative integer as key, got {text[:40]!r}")
    return int(text)


_INTEGER_KEY = _Codec(_load_integer_key, lambda key: str(_INTEGER.dump(key)))

# Values that hold others


def _tuple(arguments: tuple[Any, ...]) -> _Codec:
    if arguments[-1] is Ellipsis:
        codecs, inner = None, _codec(arguments[0])
    else:
        codecs, inner = tuple(map(_codec, arguments)), None

    def convert(direction: str, items: Any) -> list[Any]:
        """Each item by its codec; an error remembers the position."""
        if codecs is None:
            each = [getattr(inner, direction)] * len(items)
        elif len(items) == len(codecs):
            each = [getattr(codec, direction) for codec in codecs]
        else:
            raise CodecError(f"expected {len(codecs)} items, got {len(items)}")
        found: list[Any] = []
        try:
            for convert_item, item in zip(each, items, strict=True):
                found.append(convert_item(item))
        except _CAUGHT as error:
            raise CodecError.at(f"[{len(found)}]", error) from None
        return found

    def load(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _wrong_type("a list", value)
        return tuple(convert("load", value))

    def dump(value: Any) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            raise _wrong_type("a tuple", value)
        return convert("dump", value)

    return _Codec(load, dump)


def _mapping(key_hint: Any, value_hint: Any) -> _Codec:
    keys, values = _INTEGER_KEY if key_hint is int else _codec(key_hint), _codec(value_hint)

    def convert(items: Any, convert_key: Callable[[Any], Any], convert_value: Callable[[Any], Any]) -> dict[Any, Any]:
        key: Any = None
        found: dict[Any, Any] = {}
        try:
            for key, item in items:
                found[convert_key(key)] = convert_value(item)
        except _CAUGHT as error:
            raise CodecError.at(f"[{str(key)[:120]}]", error) from None
        return found

    def load(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _wrong_type("a mapping", value)
        found = convert(value.items(), keys.load, values.load)
        for previous, key in itertools.pairwise(value):
            if previous >= key:
                raise CodecError(f"keys are stored in ascending order, got it after {previous[:80]!r}", (f"[{key[:120]}]",))
        return found

    def dump(value: Any) -> dict[str, Any]:
        if not isinstance(value, collections.abc.Mapping):
            raise _wrong_type("a mapping", value)
        return dict(sorted(convert(value.items(), keys.dump, values.dump).items()))

    return _Codec(load, dump)


def _class(hint: Any) -> _Codec:
    attrs.resolve_types(hint)
    fields = [(field.name, _codec(field.type)) for field in attrs.fields(hint)]
    names = [name for name, _ in fields]
    # Whole numbers and truths are written as they are, which most fields are: a call for each of them takes half the time.
    plain = [hint if hint in (int, bool) else None for hint in (field.type for field in attrs.fields(hint))]
    dumps = [(name, kind, codec.dump) for (name, codec), kind in zip(fields, plain, strict=True)]

    def load(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong_type(f"the fields of a {hint.__name__}", value)
        if list(value) != names:
            raise CodecError(_field_problem(hint.__name__, names, value))
        name, found = "", {}
        try:
            for name, codec in fields:
                found[name] = codec.load(value[name])
        except _CAUGHT as error:
            raise CodecError.at(f".{name}", error) from None
        return hint(**found)

    def dump(value: Any) -> dict[str, Any]:
        if not isinstance(value, hint):
            raise _wrong_type(f"a {hint.__name__}", value)
        name, found = "", {}
        try:
            for name, kind, write in dumps:
                item = getattr(value, name)
                found[name] = item if type(item) is kind else write(item)
        except _CAUGHT as error:
            raise CodecError.at(f".{name}", error) from None
        return found

    return _Codec(load, dump)


def _field_problem(kind: str, names: list[str], value: dict[Any, Any]) -> str:
    if missing := [name for name in names if name not in value]:
        return f"{kind} lacks {', '.join(missing)}"
    if unknown := [str(name)[:40] for name in value if name not in names]:
        return f"{kind} has no field {', '.join(unknown[:5])}"
    return f"the fields of {kind} are stored in the order {', '.join(names)}"
