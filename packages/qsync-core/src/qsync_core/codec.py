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
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from qsync_core.codec_scalars import (
    CAUGHT,
    CodecError,
    Hook,
    check_bool,
    check_float,
    check_int,
    check_string,
    dump_float,
    dump_instance,
    enum_dump,
    enum_load,
    first_words,
    format_variant,
    parse_int_key,
    parse_op_id,
    parse_string,
    parse_variant,
    wrong_type,
)
from qsync_core.op_id import OpId
from qsync_core.variant import Variant

if TYPE_CHECKING:
    from cattrs.preconf.msgpack import MsgpackConverter

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
