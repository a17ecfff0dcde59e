"""What an all-reduce costs among unequal device groups, from what was measured on each group alone (paper, Simulator).

See docs/design/simulator.md#all-reduce-among-unequal-groups.

A ring all-reduce of S bytes over N ranks takes 2(N-1) rounds; in a round every rank passes S/N bytes to its neighbour, and the
round lasts as long as its slowest hop: ``2 (N - 1) max over hops (a + b S / N)``.  A group's own hop (a, b) follows from its
measured α + β S over n ranks by the same formula, a = α / (2 (n-1)) and b = β n / (2 (n-1)); hops between groups come from the
cluster's links. A group's communication node lasts as long as its own slowest hop would make it, and the collective as long as
the longest of these.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.profile import CollectiveModel, Profile


@attrs.frozen
class Hop:
    """One ring neighbour to the next: latency in ns, inverse bandwidth in ns per byte."""

    alpha_ns: float
    beta_ns_per_byte: float

    def round_ns(self, nbytes: float) -> float:
        """Time of one round that passes ``nbytes``."""
        return self.alpha_ns + self.beta_ns_per_byte * nbytes


def hop_of(model: CollectiveModel) -> Hop | None:
    """The hop behind a measured all-reduce; None where it was measured on a single rank and says nothing about hops."""
    n = model.world_size
    if n < 2:
        return None
    rounds = 2 * (n - 1)
    return Hop(max(0.0, model.alpha_ns) / rounds, max(0.0, model.beta_ns_per_byte) * n / rounds)


def collective_ns(cluster: Cluster, profiles: Mapping[str, Profile], nbytes: int) -> dict[str, int]:
    """Duration of one group's node of an all-reduce over all ranks of the cluster, per group, in nanoseconds.

    Where all ranks are what a group was measured with and no link is slower, exactly the measured duration.  Elsewhere what was
    measured above or below the fitted line keeps its ratio.

    Raises:
        ClusterError: when several ranks are to communicate and neither a profile nor a link says how fast.
    """
    ranks = sum(group.count for group in cluster.groups)
    if ranks < 2:
        return {group.name: 0 for group in cluster.groups}
    models = {name: p.collective for name, p in profiles.items() if p.collective is not None and p.collective.world_size > 1}
    durations = {group.name: _group_ns(cluster, models.get(group.name), group.name, ranks, nbytes) for group in cluster.groups}
    if all(duration is None for duration in durations.values()):
        raise ClusterError(
            f"cluster {cluster.name!r} has {ranks} ranks, but no profile holds collective costs and no link is described; "
            "add [[link]] entries with latency_us and bandwidth_gbps, or profile the collectives"
        )
    return {name: duration or 0 for name, duration in durations.items()}


def _group_ns(cluster: Cluster, model: CollectiveModel | None, group: str, ranks: int, nbytes: int) -> int | None:
    hops = [
        Hop(max(0.0, link.alpha_ns), max(0.0, link.beta_ns_per_byte))
        for link in cluster.links
        if group in link.between and (model is None or link.between != (group, group))
    ]
    rounds, share = 2 * (ranks - 1), nbytes / ranks
    slowest_link = max((hop.round_ns(share) for hop in hops), default=None)
    own = hop_of(model) if model is not None else None
    if model is None or own is None:
        return None if slowest_link is None else round(rounds * slowest_link)
    own_round = own.round_ns(share)
    if slowest_link is not None and slowest_link > own_round:
        return round(rounds * slowest_link)
    if model.world_size == ranks:
        return model.cost_ns(nbytes)
    fitted = model.alpha_ns + model.beta_ns_per_byte * nbytes
    ratio = model.cost_ns(nbytes) / fitted if fitted > 0 else 1.0
    return round(rounds * own_round * ratio)


def compute_share(profile: Profile) -> float:
    """Share of a collective's duration that it takes from its own rank's compute (0 where nothing was measured)."""
    return max(0.0, profile.collective.compute_share) if profile.collective is not None else 0.0
