"""Artifacts to and from plain msgpack values: cattrs' msgpack converter, made strict and canonical.

Strict: a value has exactly the type its field declares (no number from text, no bool for an integer, no list from text), unknown
and missing fields are errors, strings are bounded, floats are finite.  Canonical: one artifact has one encoding (fields in the
order of the class, mappings sorted by key text, operators and variants as their canonical text), and only that one is read, so a
digest identifies the content.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

if TYPE_CHECKING:
    from cattrs.preconf.msgpack import MsgpackConverter


# ---- merged from qsync_core.artifacts.codec
# Single values of artifacts to and from msgpack: each has exactly its type, or gives an error that can grow a path.

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


# ---- from here on: qsync_core.artifacts.codec

T = TypeVar("T")


def _make_converter() -> MsgpackConverter:
    # Here, because importing cattrs takes a third of the time of importing all of core.
    from cattrs.preconf.msgpack import make_converter

    converter = make_converter(detailed_validation=False)

    def register(kind: type, load: Hook, dump: Hook) -> None:
        converter.register_structure_hook(kind, lambda value, _: load(value))
        converter.register_unstructure_hook(kind, dump)

    register(str, check_string, check_string)
    register(int, check_int, check_int)
    register(bool, check_bool, check_bool)
    register(float, check_float, dump_float)
    register(OpId, parse_string(parse_op_id), dump_instance(OpId, str))
    register(Variant, parse_string(parse_variant), dump_instance(Variant, format_variant))

    # Enums are not left to the converter: they are strings, and it would take the hook of str for them.
    def load_hook(hint: Any) -> Hook:
        if _is_enum(hint):
            return enum_load(hint)
        hook = converter.get_structure_hook(hint)
        return lambda value: hook(value, hint)

    def dump_hook(hint: Any) -> Hook:
        if _is_enum(hint):
            return enum_dump(hint)
        return converter.get_unstructure_hook(hint)

    for applies, load_factory, dump_factory in (
        (_is_optional, _optional_hook, _optional_hook),
        (_is_tuple, _tuple_load, _tuple_dump),
        (_is_mapping, _mapping_load, _mapping_dump),
        (_is_artifact_class, _class_load, _class_dump),
    ):
        converter.register_structure_hook_factory(applies, _structure_factory(load_factory, load_hook))
        converter.register_unstructure_hook_factory(applies, functools.partial(_call_factory, dump_factory, dump_hook))
    return converter


HookFactory = Callable[[Any, Callable[[Any], Hook]], Hook]
"""Takes a type hint and the way to the hooks of the types inside it."""


def _call_factory(factory: HookFactory, inner: Callable[[Any], Hook], hint: Any) -> Hook:
    return factory(hint, inner)


def _structure_factory(factory: HookFactory, inner: Callable[[Any], Hook]) -> Callable[[Any], Callable[[Any, Any], Any]]:
    def make(hint: Any) -> Callable[[Any, Any], Any]:
        load = factory(hint, inner)
        return lambda value, _: load(value)

    return make


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.StrEnum)


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union) and len(typing.get_args(hint)) == 2


def _optional_hook(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    (some,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
    hook = inner(some)
    return lambda value: None if value is None else hook(value)


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _tuple_hooks(hint: Any, inner: Callable[[Any], Hook]) -> tuple[Hook, ...] | Hook:
    arguments = typing.get_args(hint)
    return inner(arguments[0]) if arguments[-1] is Ellipsis else tuple(inner(argument) for argument in arguments)


def _convert_items(hooks: tuple[Hook, ...] | Hook, value: Any) -> list[Any]:
    """Each item through its hook; an error remembers the position."""
    if isinstance(hooks, tuple):
        if len(value) != len(hooks):
            raise CodecError(f"expected {len(hooks)} items, got {len(value)}")
        each: list[Hook] = list(hooks)
    else:
        each = [hooks] * len(value)
    found: list[Any] = []
    try:
        for hook, item in zip(each, value, strict=True):
            found.append(hook(item))
    except CAUGHT as error:
        raise CodecError.at(f"[{len(found)}]", error) from None
    return found


def _tuple_load(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    hooks = _tuple_hooks(hint, inner)

    def load(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type("a list", value)
        return tuple(_convert_items(hooks, value))

    return load


def _tuple_dump(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    hooks = _tuple_hooks(hint, inner)

    def dump(value: Any) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            raise wrong_type("a tuple", value)
        return _convert_items(hooks, value)

    return dump


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is collections.abc.Mapping


def _mapping_load(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    key_type, value_type = typing.get_args(hint)
    load_key = parse_string(parse_int_key) if key_type is int else inner(key_type)
    load_value = inner(value_type)

    def load(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise wrong_type("a mapping", value)
        found: dict[Any, Any] = {}
        previous: str | None = None
        key: Any = None
        try:
            for key, item in value.items():
                found[load_key(key)] = load_value(item)
                if previous is not None and previous >= key:
                    raise CodecError(f"keys are stored in ascending order, got it after {previous[:80]!r}")
                previous = key
        except CAUGHT as error:
            raise CodecError.at(f"[{str(key)[:120]}]", error) from None
        return found

    return load


def _mapping_dump(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    key_type, value_type = typing.get_args(hint)
    dump_inner = inner(key_type)
    dump_key: Hook = (lambda key: str(check_int(key))) if key_type is int else dump_inner
    dump_value = inner(value_type)

    def dump(value: Any) -> dict[str, Any]:
        if not isinstance(value, collections.abc.Mapping):
            raise wrong_type("a mapping", value)
        found: dict[str, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                found[dump_key(key)] = dump_value(item)
        except CAUGHT as error:
            raise CodecError.at(f"[{str(key)[:120]}]", error) from None
        return dict(sorted(found.items()))

    return dump


def _is_artifact_class(hint: Any) -> bool:
    return isinstance(hint, type) and attrs.has(hint) and hint not in (OpId, Variant)


def _class_hooks(hint: Any, inner: Callable[[Any], Hook]) -> list[tuple[str, Hook]]:
    attrs.resolve_types(hint)
    return [(field.name, inner(field.type)) for field in attrs.fields(hint)]


def _class_load(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    hooks = _class_hooks(hint, inner)
    names = [name for name, _ in hooks]

    def load(value: Any) -> Any:
        if type(value) is not dict:
            raise wrong_type(f"the fields of a {hint.__name__}", value)
        if list(value) != names:
            raise CodecError(_field_problem(hint.__name__, names, value))
        arguments = {}
        name = ""
        try:
            for name, hook in hooks:
                arguments[name] = hook(value[name])
        except CAUGHT as error:
            raise CodecError.at(f".{name}", error) from None
        return hint(**arguments)

    return load


def _field_problem(kind: str, names: list[str], value: dict[Any, Any]) -> str:
    missing = [name for name in names if name not in value]
    unknown = [str(name)[:40] for name in value if name not in names]
    if missing:
        return f"{kind} lacks {', '.join(missing)}"
    if unknown:
        return f"{kind} has no field {', '.join(unknown[:5])}"
    return f"the fields of {kind} are stored in the order {', '.join(names)}"


def _class_dump(hint: Any, inner: Callable[[Any], Hook]) -> Hook:
    hooks = _class_hooks(hint, inner)

    def dump(value: Any) -> dict[str, Any]:
        if not isinstance(value, hint):
            raise wrong_type(f"a {hint.__name__}", value)
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, hook in hooks:
                found[name] = hook(getattr(value, name))
        except CAUGHT as error:
            raise CodecError.at(f".{name}", error) from None
        return found

    return dump


_CONVERTER = functools.cache(_make_converter)


def to_plain(value: Any) -> dict[str, Any]:
    """An artifact as dictionaries, lists, strings and numbers, in canonical order.

    Raises:
        CodecError: when a field holds what its type does not allow (NaN, a numpy scalar, text for a number).
    """
    plain: dict[str, Any] = _CONVERTER().unstructure(value)
    return plain


def from_plain(value: Any, kind: type[T]) -> T:
    """The artifact of that kind.

    Raises:
        CodecError: naming the place and what was expected there.
    """
    try:
        return _CONVERTER().structure(value, kind)
    except CAUGHT as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(first_words(error)) from None
