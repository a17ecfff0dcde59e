"""How long collectives take among unequal groups, in exact fractions: the fastest of a ring, a
tree and a hierarchy (docs/design/simulator.md).

Shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.profile import CollectiveModel, Profile


def collective_durations(cluster: Cluster, profiles: Mapping[str, Profile], bucket_bytes: list[int]) -> list[int]:
    """Per bucket the time from its start to its end: as long as the slowest group's hops make it."""
    ranks = sum(group.count for group in cluster.groups)
    if ranks < 2:
        return [0 for _ in bucket_bytes]
    return [min(_whole(form, cluster, profiles, ranks, nbytes) for form in (_ring, _tree, _hierarchy)) for nbytes in bucket_bytes]


def _whole(form: Form, cluster: Cluster, profiles: Mapping[str, Profile], ranks: int, nbytes: int) -> int:
    """As long as the slowest group's hops make it."""
    return max(
        round(_of_group(form, cluster, group, profiles[group.name].collective, ranks, Fraction(nbytes))) for group in cluster.groups
    )


def _of_group(
    form: Form, cluster: Cluster, group: DeviceGroup, model: CollectiveModel | None, ranks: int, nbytes: Fraction
) -> Fraction:
    measured = model if model is not None and model.world_size > 1 else None
    between = [
        (Fraction(link.alpha_ns), Fraction(link.beta_ns_per_byte)) for link in cluster.links if link.between[0] != link.between[1]
    ]
    touching = [
        (Fraction(link.alpha_ns), Fraction(link.beta_ns_per_byte))
        for link in cluster.links
        if group.name in link.between and (link.between[0] != link.between[1])
    ]
    inside = [
        (Fraction(link.alpha_ns), Fraction(link.beta_ns_per_byte))
        for link in cluster.links
        if link.between == (group.name, group.name)
    ]
    if measured is not None:
        n = measured.world_size
        inside = [(Fraction(measured.alpha_ns) / (2 * n - 2), Fraction(measured.beta_ns_per_byte) * n / (2 * n - 2))]
    step = max((latency for latency, _ in inside or touching), default=Fraction(0))
    jump = max((latency for latency, _ in between), default=Fraction(0))
    if not touching:
        jump = max(jump, step)
    groups = len(cluster.groups)
    found = [form(latency, per_byte, ranks, nbytes, group.count, groups, step, jump) for latency, per_byte in touching]
    for latency, per_byte in inside:
        own = form(latency, per_byte, ranks, nbytes, group.count, groups, step, jump)
        if measured is not None:
            line = Fraction(measured.alpha_ns) + Fraction(measured.beta_ns_per_byte) * nbytes
            took = Fraction(dict(measured.measured).get(int(nbytes), max(0, round(line))))
            if line > 0 and nbytes in dict(measured.measured):
                own *= took / line
            own = own if ranks < measured.world_size else took if ranks == measured.world_size and form is _ring else max(own, took)
        found.append(own)
    return max(found, default=Fraction(0))


def _depth(count: int) -> int:
    """How often ``count`` is halved, rounding up, until one is left."""
    found = 0
    while count > 1:
        count, found = (count + 1) // 2, found + 1
    return found


def _ring(
    latency: Fraction,
    per_byte: Fraction,
    ranks: int,
    nbytes: Fraction,
    inside: int,
    groups: int,
    step: Fraction,
    jump: Fraction,
) -> Fraction:
    """2 (N-1) rounds, each of which passes bytes/N over the hop."""
    return (latency + per_byte * nbytes / ranks) * 2 * (ranks - 1)


def _tree(
    latency: Fraction,
    per_byte: Fraction,
    ranks: int,
    nbytes: Fraction,
    inside: int,
    groups: int,
    step: Fraction,
    jump: Fraction,
) -> Fraction:
    """Up and down a binary tree of all ranks; all bytes pass the hop twice."""
    return latency * 2 * _depth(ranks) + per_byte * nbytes * 2


def _hierarchy(
    latency: Fraction,
    per_byte: Fraction,
    ranks: int,
    nbytes: Fraction,
    inside: int,
    groups: int,
    step: Fraction,
    jump: Fraction,
) -> Fraction:
    """Along the chain of a group's ranks, up and down a binary tree of groups, and back; all bytes pass the hop twice."""
    return (step * (inside - 1) + jump * _depth(groups)) * 2 + per_byte * nbytes * 2


Form = Callable[[Fraction, Fraction, int, Fraction, int, int, Fraction, Fraction], Fraction]
