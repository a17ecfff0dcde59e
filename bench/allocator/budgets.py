"""Memory budgets that bind: between what the leanest plan takes and what uniform precision takes."""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

LEAST_SHARE, LARGEST_SHARE = 0.1, 0.9


def with_budgets(dag: PrecisionDag, cluster: Cluster, profiles: Mapping[str, Profile], draw: random.Random) -> Cluster:
    """The cluster with a memory budget for each inference group.

    Drawn: the share of the way, 0.1 to 0.9, from the peak of the leanest single rung to the peak of the rung below the base
    precision.  Where no rung is leaner than that one, from it to the peak of the base precision.
    """
    replayer = Replayer(Inputs(dag, cluster, profiles))
    groups = []
    peaks_of: dict[tuple[str, tuple[Variant, ...]], list[int]] = {}
    for group in cluster.groups:
        if group.role is Role.INFER:
            key = (group.device, group.ladder)
            if key not in peaks_of:
                variants = [dict.fromkeys((o.op_id for o in dag.adjustable), rung) for rung in group.ladder]
                peaks_of[key] = [replayer.memory(group.name, rung).peak_bytes for rung in variants]
            leanest, uniform, base = min(peaks_of[key]), peaks_of[key][-2], peaks_of[key][-1]
            low, high = (leanest, uniform) if leanest < uniform else (uniform, base)
            group = attrs.evolve(group, memory_bytes=low + round(draw.uniform(LEAST_SHARE, LARGEST_SHARE) * (high - low)))
        groups.append(group)
    return attrs.evolve(cluster, groups=tuple(groups))
