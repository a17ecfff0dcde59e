"""Which groups train and which infer: what a person says, and for the others what was measured of them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision, Storage
from qsync_core.ir.profile import DeviceKind
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes, format_ns
from qsync_torch.distributed.ranks import GROUP_VARIABLE
from qsync_torch.prepare.measuring import Probe
from qsync_torch.prepare.participants import Group, Wish
from qsync_torch.profiling.paying import CPU_LADDER, Uncertain

ALIKE = 0.05
"""Steps that differ by less than this part do not say which group is the faster one, nor memories which is the larger one."""
SAME_DEVICE = 0.25
"""Nor do steps of equal devices that differ by less than this part: what else ran on one of them explains that better."""
_SCATTERED = 0.25
"""A step that is uncertain by more than this part of it says little."""
_STORAGES, _MUCH = (Storage.NF4, Storage.INT8_BLOCK), 0.1
"""How frozen weights may be stored where they are at least this part of a group's memory."""
_NAMED = re.compile(r"(train|infer)(?![a-z])", re.IGNORECASE)

StepsNs = Mapping[str, int]
"""Steps of groups in the job's base precision, by name."""


def described_groups(
    groups: Sequence[Group], probes: Mapping[str, Probe], wishes: Mapping[str, Wish], profiled: StepsNs
) -> list[DeviceGroup]:
    """The groups as a cluster has them: the fastest trains, unless a person says otherwise.

    Of those that are alike it is one with the most memory, as it keeps its operators and weights as they are; of these the first.
    A person says otherwise with an option, or by calling a group ``train`` or ``infer``, perhaps with a number behind it.

    Args:
        probes: a few steps of each group, and its rungs; none where one group is all there is.
        profiled: steps of groups that have a profile, which count more than the probes'.
    """
    roles = roles_said(groups, wishes)
    if Role.TRAIN not in roles.values() and (open_ones := [group for group in groups if group.name not in roles]):
        roles[_fastest(open_ones, probes, profiled, wishes)] = Role.TRAIN
    found = []
    for group in groups:
        role, wish, device = roles.get(group.name, Role.INFER), wishes.get(group.name, Wish()), group.first.device
        ladder = probes[group.name].ladder if role is Role.INFER else (Variant.plain(Precision.FLOAT32),)
        if wish.memory_bytes and device.kind is DeviceKind.CPU and len(ladder) == 1 and role is Role.INFER:
            ladder = CPU_LADDER[1:]  # which saves memory, whatever it takes
        found.append(
            DeviceGroup(
                name=group.name,
                device=device.name,
                count=len(group.ranks),
                role=role,
                base=Precision.FLOAT32,
                ladder=ladder,
                memory_bytes=memory_of(group, wishes),
                share=device.share,
            )
        )
    return found


def _stored_rungs(dag: PrecisionDag) -> tuple[Variant, ...]:
    return tuple(attrs.evolve(Variant.plain(dag.base), storage=storage) for storage in _STORAGES)


def frozen_fills(dag: PrecisionDag, memory_bytes: int) -> bool:
    """Whether frozen weights that can be stored otherwise are much of a memory; of one without a limit they are not."""
    stored = _stored_rungs(dag)
    modules = {operator.op_id.fqn: operator for operator in dag.adjustable if operator.runs_in(stored[0])}
    frozen_bytes = sum(operator.stored_bytes(Storage.AS_IS) for operator in modules.values())
    return memory_bytes > 0 and frozen_bytes >= _MUCH * memory_bytes


def memory_of(group: Group, wishes: Mapping[str, Wish]) -> int:
    """The memory that each rank of a group may use; 0 where there is no limit."""
    wished, device = wishes.get(group.name, Wish()).memory_bytes, group.first.device
    own = round(min(member.memory_bytes for member in group.members) * device.share)
    return wished or (own if device.kind is DeviceKind.CUDA else 0)


def short_of_memory(
    groups: Sequence[Group], probes: Mapping[str, Probe], wishes: Mapping[str, Wish], dag: PrecisionDag
) -> Mapping[str, Wish]:
    """The wishes; a group that is all there is infers where its memory is short and frozen weights fill it.

    It keeps up with nobody, but what it stores, and how, is to be planned.  Its memory is short where a person gives a budget, or a
    step did not fit.
    """
    if len(groups) != 1 or roles_said(groups, wishes):
        return wishes
    (group,) = groups
    wish = wishes.get(group.name, Wish())
    short = wish.memory_bytes or (group.name in probes and not probes[group.name].fits)
    if not short or not frozen_fills(dag, memory_of(group, wishes)):
        return wishes
    return {**wishes, group.name: attrs.evolve(wish, role=Role.INFER)}


def with_storages(groups: Sequence[DeviceGroup], dag: PrecisionDag) -> list[DeviceGroup]:
    """The groups, with frozen weights in int8 and NF4 on the ladders of those whose memory they are much of."""
    base, stored = Variant.plain(dag.base), _stored_rungs(dag)

    def of(group: DeviceGroup) -> DeviceGroup:
        if group.role is not Role.INFER or not frozen_fills(dag, group.memory_bytes):
            return group
        below = [rung for rung in group.ladder if rung != base and rung.under(dag.base) is not None]
        above = [rung for rung in group.ladder if rung.under(dag.base) is None]
        return attrs.evolve(group, ladder=(*below, *stored, base, *above))

    return [of(group) for group in groups]


def unstorable(cluster: Cluster, dag: PrecisionDag) -> str:
    """A sentence on frozen weights that are much of an inferring group's memory and cannot be stored otherwise; or none."""
    found = {operator.op_id.fqn: operator for operator in dag.adjustable if operator.frozen and operator.not_storable}
    nbytes = sum(operator.stored_bytes(Storage.AS_IS) for operator in found.values())
    filled = [group.name for group in cluster.groups if group.role is Role.INFER and 0 < group.memory_bytes <= nbytes / _MUCH]
    if not filled:
        return ""
    first = next(iter(found.values()))
    return (
        f"{format_bytes(nbytes)} of frozen weights stay as they are on {' and '.join(filled)}: that of {first.op_id} cannot be "
        f"stored otherwise, because {first.not_storable}" + (f" ({len(found) - 1} others cannot either)" if len(found) > 1 else "")
    )


def roles_said(groups: Sequence[Group], wishes: Mapping[str, Wish]) -> dict[str, Role]:
    """What a person says of some of the groups: with an option, which stands above a name."""
    named = {group.name: Role(found[1].lower()) for group in groups if (found := _NAMED.match(group.name))}
    return named | {name: wish.role for name, wish in wishes.items() if wish.role}


def _fastest(groups: Sequence[Group], probes: Mapping[str, Probe], profiled: StepsNs, wishes: Mapping[str, Wish]) -> str:
    """Name the fastest group: the first guess, unless profiles of all say otherwise of unlike groups with unequal devices."""
    steps = {group.name: _step(probes, group.name) for group in groups}
    least = min(groups, key=lambda group: steps[group.name].value)
    as_fast = [group for group in groups if alike(group, least, probes)]
    memories = {group.name: memory_of(group, wishes) or math.inf for group in as_fast}
    guess = next(group for group in as_fast if memories[group.name] >= (1 - ALIKE) * max(memories.values()))
    if {group.name for group in groups} - set(profiled):
        return guess.name
    # A profile's steps are more, but were measured under the same circumstances as the first ones.
    steps = {name: Uncertain(profiled[name], _step(probes, name).relative * profiled[name]) for name in steps}
    least = min(groups, key=lambda group: steps[group.name].value)
    settled = guess.first.device == least.first.device or alike(guess, least, probes)
    return (guess if settled or _overlap(guess, least, steps[guess.name], steps[least.name]) else least).name


def _moments(probes: Mapping[str, Probe], name: str) -> list[Uncertain]:
    """A group's step as it was at one or two moments."""
    if name not in probes:
        return [Uncertain(0)]
    probe = probes[name]
    first = Uncertain(probe.step_ns, probe.spread_ns)
    return [first, Uncertain(probe.again_ns, probe.again_spread_ns)] if probe.again_ns else [first]


def _step(probes: Mapping[str, Probe], name: str) -> Uncertain:
    """Return a group's step, with the uncertainty of all moments."""
    moments = _moments(probes, name)
    if len(moments) == 1:
        return moments[0]
    least, most = min(step.value - step.spread for step in moments), max(step.value + step.spread for step in moments)
    return Uncertain((least + most) / 2, (most - least) / 2)


def alike(one: Group, other: Group, probes: Mapping[str, Probe]) -> bool:
    """Whether the steps of two groups do not say which is the faster one; those of equal devices have to say the same twice.

    What else runs on one of two equal machines makes it slower for a while, without its steps being more uncertain.
    """
    if one.first.device != other.first.device:
        return _overlap(one, other, _step(probes, one.name), _step(probes, other.name))
    moments = list(zip(_moments(probes, one.name), _moments(probes, other.name), strict=False))
    faster = {own.value < its.value for own, its in moments}
    return len(moments) < 2 or len(faster) > 1 or any(_overlap(one, other, own, its) for own, its in moments)


def to_repeat(groups: Sequence[Group], probes: Mapping[str, Probe]) -> list[Group]:
    """List the groups whose first steps differ from those of a group with the same device."""

    def differs(one: Group, other: Group) -> bool:
        first = (_moments(probes, group.name)[0] for group in (one, other))
        return one.first.device == other.first.device and not _overlap(one, other, *first)

    return [one for one in groups if any(differs(one, other) for other in groups if other is not one)]


def _overlap(one: Group, other: Group, own: Uncertain, its: Uncertain) -> bool:
    """Whether steps that were measured at one moment are too close to tell two groups apart."""
    return not own.differs(its) or abs(own.value - its.value) < _part_alike(one, other) * max(own.value, its.value)


def _part_alike(one: Group, other: Group) -> float:
    """The part of the slower one's step by less than which two groups that are alike differ."""
    equal = one.first.device == other.first.device and one.first.software == other.first.software
    return SAME_DEVICE if equal else ALIKE


def compared(groups: Sequence[Group], probes: Mapping[str, Probe], base: Precision) -> str:
    """A sentence on the first steps of the groups, and whether they are all alike."""
    steps = {group.name: _step(probes, group.name) for group in groups if group.name in probes}
    if len(steps) < 2:
        return ""
    told = ", ".join(
        f"{format_ns(round(step.value))} ± {format_ns(round(step.spread))} on {name}"
        if probes[name].fits
        else f"more than the memory of {name}"
        for name, step in steps.items()
    )
    said = f"a step in {_named(base)} takes {told}"
    if scattered := [name for name, step in steps.items() if probes[name].fits and step.spread > _SCATTERED * step.value]:
        return (
            f"{said}; so uncertain a step of {' and '.join(scattered)} says little, and the verdict may be wrong: see that nothing "
            "else runs there, and prepare again with --fresh"
        )
    return f"{said}: by these first steps the groups are alike" if all_alike(groups, probes) else said


def of_one_kind(groups: Sequence[Group]) -> str:
    """A sentence on several ranks that are one group: what that means, and how to name more; empty for others."""
    (one, *others) = groups
    if others or len(one.ranks) < 2:
        return ""
    why = f"{GROUP_VARIABLE} names no other" if one.first.group else "their devices look alike"
    return (
        f"all {len(one.ranks)} ranks are one group, {one.name}, because {why}: none has to keep up with another, and where all "
        f"have the memory there is nothing for QSync to do; where some are slower, name them in {GROUP_VARIABLE} when they are "
        f"started, as {GROUP_VARIABLE}=a for some and {GROUP_VARIABLE}=b for the others"
    )


def alike_at_last(groups: Sequence[Group], probes: Mapping[str, Probe], profiled: StepsNs, base: Precision) -> str:
    """A sentence on groups whose first steps were alike: that there is nothing for QSync to do, unless their profiles differ."""
    if not all_alike(groups, probes) or {group.name for group in groups} - set(profiled):
        return ""
    slow, fast = max(groups, key=lambda group: profiled[group.name]), min(groups, key=lambda group: profiled[group.name])
    more = 1 - profiled[fast.name] / profiled[slow.name]
    if more < _part_alike(slow, fast):
        return (
            "these groups are alike by their profiles too: none has to keep up with another, and where all have the memory there "
            "is nothing for QSync to do; train without it"
        )
    told = ", ".join(f"{format_ns(profiled[group.name])} on {group.name}" for group in groups)
    return (
        f"groups whose first steps were alike are not by their profiles, which plans go by: a step in {_named(base)} takes {told}; "
        f"where {slow.name} is not the slower one, something else ran there: prepare again with --fresh while nothing does"
    )


def all_alike(groups: Sequence[Group], probes: Mapping[str, Probe]) -> bool:
    """Whether there are several groups, and the first steps of no two differ by more than they are uncertain."""
    pairs = [(one, other) for one in groups for other in groups if one is not other]
    return bool(pairs) and {group.name for group in groups} <= set(probes) and all(alike(*pair, probes) for pair in pairs)


def _named(base: Precision) -> str:
    return "full precision" if base is Precision.FLOAT32 else str(base)


def otherwise(was: Cluster, now: Cluster, profiled: StepsNs, base: Precision) -> str:
    """A sentence on roles that are not what the first steps had said."""
    first, settled = (next(group.name for group in cluster.groups if group.role is Role.TRAIN) for cluster in (was, now))
    return (
        f"{settled} trains, and not {first} as the first few steps had it: by the profiles its step in {_named(base)} takes "
        f"{format_ns(profiled[settled])}, that of {first} {format_ns(profiled[first])}; what depends on the roles is made again"
    )


def contradiction(cluster: Cluster, profiled: StepsNs, base: Precision) -> str:
    """A sentence on roles that a person gave and the profiles speak against: a group infers that is faster than one that trains."""
    training, inferring = ([g.name for g in cluster.groups if g.role is role and g.name in profiled] for role in Role)
    if not training or not inferring:
        return ""
    slow, fast = max(training, key=lambda name: profiled[name]), min(inferring, key=lambda name: profiled[name])
    devices = {(cluster.group(name).device, cluster.group(name).share) for name in (slow, fast)}
    if profiled[fast] >= (1 - (SAME_DEVICE if len(devices) == 1 else ALIKE)) * profiled[slow]:
        return ""
    return (
        f"{slow} trains and {fast} infers, as was said, but by the profiles {slow} is the slower one: its step in {_named(base)} "
        f"takes {format_ns(profiled[slow])}, that of {fast} {format_ns(profiled[fast])}; exchange the roles, unless it is meant so"
    )


def renamed(before: Collection[str], now: Collection[str]) -> str:
    """A sentence on groups that a folder does not know, where some that it knows are absent: a name may be mistyped."""
    new, gone = sorted({*now} - {*before}), sorted({*before} - {*now})
    if not new or not gone:
        return ""
    return (
        f"this folder was made with {', '.join(gone)}, not here now, and does not know {', '.join(new)}; where QSYNC_GROUP is "
        "mistyped, set it right and start this again"
    )
