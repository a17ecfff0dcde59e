"""Re-costing of all-reduces for unequal groups, against the ring's closed form."""

from __future__ import annotations

import pytest
from hand_models import LADDER, profile
from synthetic import FLOAT32, GraphBuilder

from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import CollectiveModel, Profile
from qsync_planner.replayer.communication import Hop, collective_ns, hop_of


def model(world: int, alpha: float, beta: float, measured: tuple[tuple[int, int], ...] = ()) -> CollectiveModel:
    return CollectiveModel(world, "any", alpha, beta, measured)


def cluster(*counts: int, links: tuple[Link, ...] = ()) -> Cluster:
    groups = tuple(DeviceGroup(f"g{i}", "hand", count, Role.INFER, FLOAT32, LADDER) for i, count in enumerate(counts))
    return Cluster("c", groups, links)


def measured_on(*models: CollectiveModel | None) -> dict[str, Profile]:
    g = GraphBuilder("m")
    g.loss(g.input("x", (1,)))
    dag = g.build()
    return {f"g{i}": profile(dag, {}, collective=found) for i, found in enumerate(models)}


def test_the_hop_behind_a_measured_ring() -> None:
    # 4 ranks: 6 rounds of S/4 bytes: alpha 600 = 6·100, beta 3 = 6/4·2.
    assert hop_of(model(4, 600.0, 3.0)) == Hop(100.0, 2.0)
    assert hop_of(model(1, 600.0, 3.0)) is None


def test_what_was_measured_on_all_ranks_stays_as_measured() -> None:
    found = collective_ns(cluster(2), measured_on(model(2, 10.0, 1.0, ((1000, 1234),))), 1000)
    assert found == {"g0": 1234}
    assert collective_ns(cluster(2), measured_on(model(2, 10.0, 1.0, ((1000, 1234),))), 500) == {"g0": 510}


def test_a_ring_over_more_ranks_by_hand() -> None:
    # Hop 100 + 2 per byte; 8 ranks: 14 rounds of 800/8 bytes.
    assert collective_ns(cluster(8), measured_on(model(4, 600.0, 3.0)), 800) == {"g0": 14 * (100 + 200)}


def test_every_group_takes_part_in_one_ring_and_the_slowest_hop_counts() -> None:
    links = (Link(("g0", "g1"), 50.0, 5.0),)
    found = collective_ns(cluster(2, 2, links=links), measured_on(model(2, 200.0, 2.0), model(2, 20.0, 8.0)), 400)
    # 4 ranks, 6 rounds of 100 bytes.  Hops: g0 100 + 2 a byte = 300; g1 10 + 8 = 810; link 50 + 5 = 550.
    assert found == {"g0": 6 * 550, "g1": 6 * 810}


def test_what_was_measured_beside_the_line_keeps_its_ratio() -> None:
    # On 2 ranks 1,000 bytes were to take 1,000 ns but took 1,500.
    found = collective_ns(cluster(4), measured_on(model(2, 0.0, 1.0, ((1000, 1500),))), 1000)
    assert found == {"g0": round(6 * 250 * 1.0 * 1.5)}


def test_a_group_without_measurement_counts_its_links_only() -> None:
    links = (Link(("g0", "g1"), 10.0, 1.0),)
    found = collective_ns(cluster(1, 1, links=links), measured_on(None, None), 100)
    assert found == {"g0": 2 * 60, "g1": 2 * 60}
    assert collective_ns(cluster(1, 2), measured_on(None, model(2, 20.0, 2.0)), 90) == {"g0": 0, "g1": (4 * (10 + 2 * 30))}


def test_a_measured_group_is_not_slowed_by_a_description_of_its_own_link() -> None:
    links = (Link(("g0", "g0"), 1e6, 1e6),)
    assert collective_ns(cluster(2, links=links), measured_on(model(2, 10.0, 1.0)), 100) == {"g0": 110}
    assert collective_ns(cluster(2, links=links), measured_on(None), 2) == {"g0": 2 * 2_000_000}


def test_one_rank_does_not_communicate() -> None:
    assert collective_ns(cluster(1), measured_on(None), 10**9) == {"g0": 0}


def test_unknown_speed_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        ClusterError, match=r"has 3 ranks, but no profile holds collective costs and no link is described; add \[\[link"
    ):
        collective_ns(cluster(1, 2), measured_on(None, None), 100)
