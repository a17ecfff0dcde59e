"""How a job exchanges its gradients, in numbers that no plan changes: buckets, durations, copies, slowdowns, broadcasts.

See docs/design/simulator.md#what-communication-costs.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.errors import PlanError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.communication import CollectiveCosts, CommunicationSettings, MeasuredCollectives, buckets_under
from qsync_core.ir.dag import Bucket, PrecisionDag
from qsync_core.ir.profile import Profile
from qsync_planner.replayer.communication import AllReduce, compute_share
from qsync_planner.replayer.contention import slowdown_parts


@attrs.frozen
class GradientExchange:
    """What communication adds to a job's steps.

    Attributes:
        buckets: in the order of their collectives.
        group_ns: per group the duration of its node of each bucket's collective.
        collective_ns: of each bucket, as long as in the slowest group.
        compute_share: per group the share of its collectives that takes as long of its compute: a CPU's own threads, and what a
            GPU's transfers take beyond open collectives.
        copies_ns: per group the device time of each bucket's copies.
        slowdown: per group, in parts of :data:`~qsync_planner.replayer.contention.PARTS`.
        start_delay_ns: how long after the last rank's optimizer every forward starts; 0: ranks do not wait for each other there.
    """

    buckets: tuple[Bucket, ...]
    group_ns: Mapping[str, tuple[int, ...]]
    collective_ns: tuple[int, ...]
    compute_share: Mapping[str, float]
    copies_ns: Mapping[str, tuple[int, ...]]
    slowdown: Mapping[str, int]
    start_delay_ns: int

    @classmethod
    def of(
        cls,
        dag: PrecisionDag,
        cluster: Cluster,
        profiles: Mapping[str, Profile],
        costs: CollectiveCosts | None,
        settings: CommunicationSettings,
    ) -> GradientExchange:
        """The exchange of a job, under measured costs where there are any.

        Raises:
            ClusterError: when nothing says how fast the groups communicate.
            PlanError: when the costs were not measured under these settings, or the graph's buckets cannot have their size.
        """
        try:
            buckets = buckets_under(dag, settings.bucket_cap_mb)
        except ValueError as error:
            raise PlanError(f"{dag.model} cannot have {settings.label}: {error}; leave bucket_cap_mb out") from None
        measured = None if costs is None else _measured(costs, settings)
        all_reduce = AllReduce(cluster, profiles, None if measured is None else measured.all_reduce)
        durations = [all_reduce.group_ns(bucket.nbytes) for bucket in buckets]
        names = [group.name for group in cluster.groups]
        transfers: Mapping[str, float] = {} if measured is None else measured.transfer_share
        alone = sum(group.count for group in cluster.groups) < 2
        return cls(
            buckets,
            {name: tuple(duration[name] for duration in durations) for name in names},
            tuple(max(duration.values()) for duration in durations),
            {name: min(1.0, compute_share(profiles[name]) + (0.0 if alone else transfers.get(name, 0.0))) for name in names},
            {
                name: tuple(round(rate * bucket.nbytes) for bucket in buckets)
                for name in names
                for rate in [0.0 if costs is None or alone else _copy_rate(costs, settings, name, profiles[name])]
            },
            {name: 0 if measured is None or alone else slowdown_parts(measured.slowdown[name]) for name in names},
            0 if costs is None or alone or not settings.broadcast_buffers else costs.broadcast_ns,
        )

    def without_contention(self) -> GradientExchange:
        """The same exchange, which takes nothing of the computation beside it; copies and durations stay."""
        return attrs.evolve(self, slowdown=dict.fromkeys(self.slowdown, 0), compute_share=dict.fromkeys(self.compute_share, 0.0))


def _measured(costs: CollectiveCosts, settings: CommunicationSettings) -> MeasuredCollectives:
    try:
        return costs.under(settings.max_ctas)
    except KeyError:
        known = ", ".join(str(entry.max_ctas) for entry in costs.measured)
        raise PlanError(
            f"collectives with max_ctas = {settings.max_ctas} were not measured, only with {known} (0: NCCL's own choice); "
            "run 'qsync communicate' with that number of CTAs too"
        ) from None


def _copy_rate(costs: CollectiveCosts, settings: CommunicationSettings, group: str, profile: Profile) -> float:
    """Device time of copies per byte of gradients.

    Of the way into the bucket and back, gradients that live in the bucket keep the half that divides them by the number of ranks.
    0 where copies are in the profile's steps already: among several ranks these run in DistributedDataParallel.
    """
    in_profile = profile.collective is not None and profile.collective.world_size > 1
    rate = 0.0 if in_profile else max(0.0, costs.copy_ns_per_byte[group])
    return rate / 2 if settings.gradient_as_bucket_view else rate
