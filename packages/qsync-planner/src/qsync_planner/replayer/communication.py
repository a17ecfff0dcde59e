"""What an all-reduce costs among unequal device groups, from what was measured on each group alone (paper, Simulator).

See docs/design/simulator.md#all-reduce-among-unequal-groups.

A hop passes S bytes to a neighbour in a + b S.  NCCL has three ways to all-reduce S bytes over N ranks, and takes the fastest:

* a *ring*: 2(N-1) rounds in which every rank passes S/N bytes on, each as long as its slowest hop;
* a *tree* over all ranks (two of them, each with half of the data): 2 ceil(log2 N) hops until the first bytes are everywhere, and
  2 S bytes through every rank;
* a *hierarchy*, which is NCCL's tree among nodes: a chain of hops inside each of G groups, a tree among the groups.

A group's own hop (a, b) follows from its measured α + β S over n ranks, which is a ring where n is small: a = α / (2 (n-1)) and
b = β n / (2 (n-1)).  Hops between groups come from the cluster's links.  A group's communication node lasts as long as its own
slowest hop would make it, and the collective as long as the longest of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.profile import CollectiveModel, Profile


@attrs.frozen
class Hop:
    """One rank to its neighbour: latency in ns, inverse bandwidth in ns per byte."""

    alpha_ns: float
    beta_ns_per_byte: float

    def ring_ns(self, ranks: int, nbytes: int) -> float:
        """A ring all of whose hops are like this one."""
        return 2 * (ranks - 1) * (self.alpha_ns + self.beta_ns_per_byte * (nbytes / ranks))

    def tree_ns(self, depth: int, nbytes: int) -> float:
        """A pair of trees all of whose hops are like this one: up and down once for latency, twice the data for bandwidth."""
        return 2 * (depth * self.alpha_ns + nbytes * self.beta_ns_per_byte)


def hop_of(model: CollectiveModel) -> Hop | None:
    """The hop behind a measured all-reduce; None where it was measured on a single rank and says nothing about hops."""
    n = model.world_size
    if n < 2:
        return None
    rounds = 2 * (n - 1)
    return Hop(max(0.0, model.alpha_ns) / rounds, max(0.0, model.beta_ns_per_byte) * n / rounds)


class AllReduce:
    """The all-reduces of all ranks of a cluster.

    Args:
        profiles: by group name; only their collective costs are read.
        together: what was measured over ranks of all groups together: in the place of the groups' own and of the links.

    Raises:
        ClusterError: when several ranks are to communicate and neither a profile nor a link says how fast.
    """

    def __init__(self, cluster: Cluster, profiles: Mapping[str, Profile], together: CollectiveModel | None = None) -> None:
        self._ranks = sum(group.count for group in cluster.groups)
        self._levels = _levels(len(cluster.groups))
        links: dict[str, list[Hop]] = {group.name: [] for group in cluster.groups}
        inside: dict[str, Hop] = {}
        for link in cluster.links if together is None else ():
            hop = Hop(max(0.0, link.alpha_ns), max(0.0, link.beta_ns_per_byte))
            first, second = link.between
            if first == second:
                inside[first] = hop
            else:
                links[first].append(hop)
                links[second].append(hop)
        self._across_ns = max((hop.alpha_ns for hops in links.values() for hop in hops), default=0.0)
        # Groups alike in everything that counts are worked out once.
        alike: dict[_Member, list[str]] = {}
        for group in cluster.groups:
            model = together or (profiles[group.name].collective if group.name in profiles else None)
            model = model if model is not None and model.world_size > 1 else None
            own = inside.get(group.name) if model is None else hop_of(model)
            member = _Member(group.count, own, tuple(dict.fromkeys(links[group.name])), model)
            alike.setdefault(member, []).append(group.name)
        self._members, self._names = tuple(alike), tuple(alike.values())
        if self._ranks > 1 and not any(member.own or member.across for member in alike):
            raise ClusterError(
                f"cluster {cluster.name!r} has {self._ranks} ranks, but no profile holds collective costs and no link is "
                "described; add [[link]] entries with latency_us and bandwidth_gbps, or profile the collectives"
            )

    def group_ns(self, nbytes: int) -> dict[str, int]:
        """Duration of each group's node of an all-reduce of ``nbytes``, in nanoseconds; 0 for a group that nothing is known of.

        Where all ranks are what a group was measured with and no link is slower, exactly the measured duration.  Elsewhere what was
        measured above or below the fitted line keeps its ratio, and more ranks never take less than the measured ones.
        """
        if self._ranks < 2:
            return {name: 0 for names in self._names for name in names}
        ways = (
            [member.ring_ns(self._ranks, nbytes) for member in self._members],
            [member.tree_ns(self._ranks, nbytes) for member in self._members],
            [member.hierarchy_ns(self._ranks, self._levels, self._across_ns, nbytes) for member in self._members],
        )
        return {name: round(ns) for names, ns in zip(self._names, min(ways, key=max), strict=True) for name in names}


def _levels(count: int) -> int:
    """Depth of a binary tree of so many ranks or groups: ceil(log2)."""
    return (count - 1).bit_length()


@attrs.frozen
class _Member:
    """What matters of a group: how many ranks, the hop between them, its hops to other groups, what was measured."""

    count: int
    own: Hop | None
    across: tuple[Hop, ...]
    model: CollectiveModel | None

    def ring_ns(self, ranks: int, nbytes: int) -> float:
        """Predict the group's node in a ring over all ranks."""
        across = (hop.ring_ns(ranks, nbytes) for hop in self.across)
        if self.model is not None and ranks == self.model.world_size:
            return max(float(self.model.cost_ns(nbytes)), *across, 0.0)
        return self._slowest(ranks, nbytes, None if self.own is None else self.own.ring_ns(ranks, nbytes), across)

    def tree_ns(self, ranks: int, nbytes: int) -> float:
        """Predict the group's node in a tree over all ranks."""
        depth = _levels(ranks)
        own = None if self.own is None else self.own.tree_ns(depth, nbytes)
        return self._slowest(ranks, nbytes, own, (hop.tree_ns(depth, nbytes) for hop in self.across))

    def hierarchy_ns(self, ranks: int, levels: int, across_ns: float, nbytes: int) -> float:
        """Predict the group's node in a hierarchy: a chain inside, then ``levels`` hops of latency ``across_ns`` among groups."""
        inside_ns = self.own.alpha_ns if self.own is not None else max((hop.alpha_ns for hop in self.across), default=0.0)
        latency = 2 * ((self.count - 1) * inside_ns + levels * (across_ns if self.across else max(across_ns, inside_ns)))
        own = None if self.own is None else latency + self.own.tree_ns(0, nbytes)
        return self._slowest(ranks, nbytes, own, (latency + hop.tree_ns(0, nbytes) for hop in self.across))

    def _slowest(self, ranks: int, nbytes: int, own_ns: float | None, across_ns: Iterable[float]) -> float:
        """The longest of what the hops would make it; the own one's is corrected by what was measured."""
        if own_ns is not None and self.model is not None:
            own_ns *= self._ratio(nbytes)
            if ranks >= self.model.world_size:
                own_ns = max(own_ns, float(self.model.cost_ns(nbytes)))
        return max(own_ns or 0.0, *across_ns, 0.0)

    def _ratio(self, nbytes: int) -> float:
        """What was measured of this size, over the fitted line; 1 where that is the line, rounded to nanoseconds."""
        assert self.model is not None
        fitted, cost_ns = self.model.alpha_ns + self.model.beta_ns_per_byte * nbytes, self.model.cost_ns(nbytes)
        return cost_ns / fitted if fitted > 0 and abs(cost_ns - fitted) > 0.5 else 1.0


def compute_share(profile: Profile) -> float:
    """Share of a collective's duration that it takes from its own rank's compute (0 where nothing was measured)."""
    return max(0.0, profile.collective.compute_share) if profile.collective is not None else 0.0
