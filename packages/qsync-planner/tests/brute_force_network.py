"""How long collectives take among unequal groups, in exact fractions: a ring over the slowest hop (docs/design/simulator.md).

Shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.profile import CollectiveModel, Profile


def collective_durations(cluster: Cluster, profiles: Mapping[str, Profile], bucket_bytes: list[int]) -> list[int]:
    """Per bucket the time from its start to its end: as long as the slowest group's hops make it."""
    ranks = sum(group.count for group in cluster.groups)
    if ranks < 2:
        return [0 for _ in bucket_bytes]
    return [
        max(_as_slow_as(cluster, group.name, profiles[group.name].collective, ranks, nbytes) for group in cluster.groups)
        for nbytes in bucket_bytes
    ]


def _as_slow_as(cluster: Cluster, group: str, model: CollectiveModel | None, ranks: int, nbytes: int) -> int:
    """2 (N-1) rounds, each of which passes bytes/N over the group's slowest hop; its own follows from what was measured on it."""
    if model is not None and model.world_size < 2:
        model = None
    rounds, passed = 2 * (ranks - 1), Fraction(nbytes, ranks)
    links = [link for link in cluster.links if group in link.between and not (model and link.between == (group, group))]
    over_links = max((Fraction(link.alpha_ns) + Fraction(link.beta_ns_per_byte) * passed for link in links), default=Fraction(0))
    if model is None:
        return round(rounds * over_links)
    n = model.world_size
    own = Fraction(model.alpha_ns) / (2 * (n - 1)) + Fraction(model.beta_ns_per_byte) * n / (2 * (n - 1)) * passed
    if over_links > own:
        return round(rounds * over_links)
    fitted = Fraction(model.alpha_ns) + Fraction(model.beta_ns_per_byte) * nbytes
    measured = dict(model.measured).get(nbytes, None)
    if n == ranks:
        return round(fitted) if measured is None else measured
    return round(rounds * own * (1 if measured is None else measured / fitted))
