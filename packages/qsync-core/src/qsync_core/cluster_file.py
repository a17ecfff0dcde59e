"""Reading cluster descriptions: TOML written by people, checked against what the named chips can do."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from qsync_core.artifacts.whole_file import read_whole
from qsync_core.devices import find_chip, precision_problem, same_device, sized_chip
from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage, join
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import AFFINE, ALL, STORED, Variant
from qsync_core.units import parse_memory

MAX_FILE_BYTES = 1 << 20
GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""A group's name; files of a run folder are called after it."""
GROUP_NAME_RULE = "a group's name has up to 64 letters, digits, '_', '-' and '.', and begins with a letter or a digit"
_TOP_KEYS = ("name", "group", "link")
_GROUP_KEYS = (
    *("name", "device", "count", "role", "base", "ladder", "memory", "share", "sync_per_step"),
    *("rounding", "w_granularity", "output"),
)
_LINK_KEYS = ("between", "latency_us", "bandwidth_gbps")

E = TypeVar("E", bound=StrEnum)


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file.

    Raises:
        ClusterError: when the file cannot be read, is not TOML, or describes something impossible; the message says where.
    """
    name = os.fspath(path)
    try:
        text = read_whole(path, MAX_FILE_BYTES, "cluster files").decode("utf-8")
    except OSError as error:
        raise ClusterError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ClusterError(f"{name} is not UTF-8 text (byte {error.start}); a cluster file is written in TOML") from None
    return parse_cluster(text, where=name, default_name=os.path.splitext(os.path.basename(name))[0])


def parse_cluster(text: str, where: str = "the cluster description", *, default_name: str = "cluster") -> Cluster:
    """The cluster that a TOML text describes (format: module :mod:`qsync_core.ir.cluster`).

    Bare precision names in a ladder mean that precision's standard variant on the group's device: int8 with the group's
    ``rounding``, ``w_granularity`` and ``output``, and gradients in bfloat16 (float16 where the chip has no bfloat16).

    Args:
        where: how error messages call it: the file name.
        default_name: the cluster's name where the text gives none.

    Raises:
        ClusterError: saying where and what.
    """
    import tomllib  # here and not above, as difflib below: only those who read a cluster file wait for it

    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # which editors on Windows begin a file with
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError(f"{where} is not valid TOML: {error or type(error).__name__}") from None
    _check_keys(table, _TOP_KEYS, where)
    entries = _tables(table, "group", where)
    if not entries:
        raise ClusterError(f"{where} describes no device group; add a [[group]] table with name, device, count and role")
    groups = tuple(_parse_group(entry, f"{where}, group {position + 1}") for position, entry in enumerate(entries))
    names = [group.name for group in groups]
    for position, group_name in enumerate(names):
        if group_name in names[:position]:
            raise ClusterError(f"{where} has two groups called {group_name!r}; give each its own name")
    links = tuple(
        _parse_link(entry, names, f"{where}, link {position + 1}") for position, entry in enumerate(_tables(table, "link", where))
    )
    for position, link in enumerate(links):
        if any(set(link.between) == set(other.between) for other in links[:position]):
            raise ClusterError(f"{where} has two links between {link.between[0]!r} and {link.between[1]!r}; keep one")
    return Cluster(name=_get(table, "name", str, where, default_name), groups=groups, links=links)


def check_profile_matches(group: DeviceGroup, profile: Profile) -> None:
    """Refuse a profile of another device type, or of another share of it, than the group's.

    Raises:
        ClusterError: saying what the group is and what the profile was measured on.
    """
    device = profile.device
    if not same_device(group.device, device.name):
        raise ClusterError(
            f"group {group.name!r} is made of {group.device}, but its profile was measured on {device.name}; "
            f"run 'qsync profile' on a {group.device}, or correct the group's device"
        )
    if abs(group.share - device.share) > 1e-9:
        raise ClusterError(
            f"group {group.name!r} gets share {group.share:g} of each {group.device}, but its profile was measured at share "
            f"{device.share:g}; profile with that share, or correct the group's"
        )


def check_profiles(cluster: Cluster, profiles: Mapping[str, Profile]) -> None:
    """Check that every group has a profile of its device type, and that there are no others.

    Args:
        profiles: by group name.

    Raises:
        ClusterError: naming the group.
    """
    names = [group.name for group in cluster.groups]
    for name in profiles:
        if name not in names:
            raise ClusterError(f"there is a profile for group {name!r}, but cluster {cluster.name!r} has {', '.join(names)}")
    for group in cluster.groups:
        if group.name not in profiles:
            raise ClusterError(
                f"group {group.name!r} of cluster {cluster.name!r} has no profile; run 'qsync profile' on a {group.device} "
                f"and pass it with --profile {group.name}=PATH"
            )
        check_profile_matches(group, profiles[group.name])


def _parse_group(entry: dict[str, Any], where: str) -> DeviceGroup:
    name = _get(entry, "name", str, where)
    if not GROUP_NAME.fullmatch(name):
        raise ClusterError(f"{where}: {GROUP_NAME_RULE}, got {name[:80]!r}")
    where = f"{where} ({name})"
    _check_keys(entry, _GROUP_KEYS, where)
    device = _get(entry, "device", str, where)
    if not device.strip():
        raise ClusterError(f"{where}: device is empty; name the device type as its profile does, for example 'T4'")
    count = _get(entry, "count", int, where)
    if not 1 <= count <= 1_000_000:
        raise ClusterError(f"{where}: count is the number of ranks, at least 1, got {count}")
    role = _enum(Role, _get(entry, "role", str, where), "role", where)
    base = _enum(Precision, _get(entry, "base", str, where, "float32"), "base", where)
    if base.needs_scale:
        raise ClusterError(
            f"{where}: base is the precision of what a plan does not lower: float32, bfloat16 or float16, got {base}"
        )
    _check_supported(device, base, "base", where)
    share = _number(entry, "share", where, 1.0)
    if not 0 < share <= 1:
        raise ClusterError(f"{where}: share is a fraction of each device, above 0 and at most 1, got {share:g}")
    return DeviceGroup(
        name=name,
        device=device,
        count=count,
        role=role,
        base=base,
        ladder=_parse_ladder(entry, device, role, base, where),
        memory_bytes=_parse_memory(entry, device, where),
        share=share,
        sync_per_step=_get(entry, "sync_per_step", bool, where, False),
    )


def _parse_ladder(entry: dict[str, Any], device: str, role: Role, base: Precision, where: str) -> tuple[Variant, ...]:
    if role is Role.TRAIN:
        if _get(entry, "ladder", list, where, [str(base)]) != [str(base)]:
            raise ClusterError(f"{where}: a training group stays at its base precision ({base}); leave its ladder out")
        return (Variant.plain(base),)
    texts = _get(entry, "ladder", list, where)
    rungs = tuple(_parse_rung(text, entry, device, where) for text in texts)
    if not rungs or rungs[-1] != Variant.plain(base):
        raise ClusterError(f"{where}: the ladder must end with the base precision, {base}; got {texts}")
    for lower, higher in itertools.pairwise(rungs):
        if lower == higher or join(lower.compute, higher.compute) is not higher.compute:
            raise ClusterError(
                f"{where}: the ladder goes from the lowest precision to the highest (int8 < float8_e4m3fn < float16 or bfloat16 "
                f"< float32), but {higher.label} does not come above {lower.label}"
            )
    return rungs


def _parse_rung(text: Any, entry: dict[str, Any], device: str, where: str) -> Variant:
    if not isinstance(text, str):
        raise ClusterError(f"{where}: a ladder holds precision names or variants as text, got {text!r}")
    chip = find_chip(device)
    try:
        if ";" in text:
            variant = Variant.parse(text)
        else:
            name, stored, storage = text.partition(STORED)
            name, _, output = name.partition(">")
            precision = _enum(Precision, name.removesuffix(AFFINE).removesuffix(ALL), "ladder", where)
            if stored:
                _enum(Storage, storage, "the storage of a ladder's entry", where)
            output = output or (_get(entry, "output", str, where, "") if precision.needs_scale else "")
            variant = Variant.named(
                f"{name}{stored}{storage}",
                sixteen_bit=chip.sixteen_bit if chip else Precision.BFLOAT16,
                output=_enum(Precision, output, "output", where) if output else None,
                rounding=_enum(Rounding, _get(entry, "rounding", str, where, "stochastic"), "rounding", where),
                w_granularity=_parse_w_granularity(entry, where),
            )
    except ValueError as error:
        raise ClusterError(f"{where}: {error}") from None
    # The compute precision first: it is the one that the person named.
    for precision in dict.fromkeys((variant.compute, variant.output, variant.saved, variant.grad_input, variant.grad_weight)):
        _check_supported(device, precision, f"ladder entry {str(variant.compute)!r}", where)
    return variant


def _parse_w_granularity(entry: dict[str, Any], where: str) -> Granularity:
    text = _get(entry, "w_granularity", str, where, "channel")
    if text not in (Granularity.PER_CHANNEL, Granularity.PER_TENSOR):
        raise ClusterError(f"{where}: w_granularity must be one of channel, tensor, got {text!r}")
    return Granularity(text)


def _check_supported(device: str, precision: Precision, what: str, where: str) -> None:
    problem = precision_problem(device, precision)
    if problem:
        raise ClusterError(f"{where}: {what} asks for {precision}, but {problem}")


def _parse_memory(entry: dict[str, Any], device: str, where: str) -> int:
    value = entry.get("memory", 0)
    try:
        nbytes = parse_memory(str(value)) if isinstance(value, str) or (type(value) is int and 0 < value < 2**62) else value
    except ValueError as error:
        raise ClusterError(f"{where}: memory is {error}") from None
    if type(nbytes) is not int or nbytes < 0 or nbytes > 2**62 or ("memory" in entry and nbytes == 0):
        raise ClusterError(f"{where}: memory is a positive size such as '15 GiB' (leave it out for no limit), got {value!r}")
    chip = sized_chip(device)
    if chip and chip.memory_gb and nbytes > chip.memory_gb << 30:
        raise ClusterError(
            f"{where}: memory is {value!r}, but {chip.name} has at most {chip.memory_gb} GB; correct it or the device"
        )
    return nbytes


def _parse_link(entry: dict[str, Any], names: list[str], where: str) -> Link:
    _check_keys(entry, _LINK_KEYS, where)
    between = _get(entry, "between", list, where)
    if len(between) != 2 or not all(isinstance(end, str) and end in names for end in between):
        raise ClusterError(f"{where}: between names two groups out of {', '.join(names)}, got {between!r}")
    latency_us = _number(entry, "latency_us", where, 0.0)
    bandwidth_gbps = _number(entry, "bandwidth_gbps", where)
    if not 0 <= latency_us <= 1e9:
        raise ClusterError(f"{where}: latency_us is in microseconds, 0 or more, got {latency_us:g}")
    if not 1e-6 <= bandwidth_gbps <= 1e9:
        raise ClusterError(f"{where}: bandwidth_gbps is in gigabits per second, above 0, got {bandwidth_gbps:g}")
    return Link(between=(between[0], between[1]), alpha_ns=latency_us * 1e3, beta_ns_per_byte=8 / bandwidth_gbps)


def _check_keys(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ClusterError(f"{where}: unknown key {key[:80]!r}; {hint}")


def _tables(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ClusterError(f"{where}: write each {key} as a table of its own, [[{key}]]")
    return entries


def _get(table: dict[str, Any], key: str, kind: type, where: str, default: Any = None) -> Any:
    value = table.get(key, default)
    if value is None:
        raise ClusterError(f"{where} lacks {key!r}")
    if type(value) is not kind:
        words = {str: "a string", int: "an integer", bool: "true or false", list: "a list"}
        raise ClusterError(f"{where}: {key} must be {words[kind]}, got {value!r}")
    return value


def _number(table: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if value is None:
        raise ClusterError(f"{where} lacks {key!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise ClusterError(f"{where}: {key} must be a number, got {value!r}")
    return float(value)


def _enum(kind: type[E], text: str, key: str, where: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise ClusterError(f"{where}: {key} must be one of {', '.join(kind)}, got {text!r}") from None
