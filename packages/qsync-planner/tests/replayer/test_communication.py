"""Re-costing of all-reduces for unequal groups, against the ring's closed form."""

from __future__ import annotations

import pytest
from hand_models import LADDER, profile
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic import FLOAT32, GraphBuilder

from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import CollectiveModel, Profile
from qsync_planner.replayer.communication import AllReduce, Hop, hop_of


def model(world: int, alpha: float, beta: float, measured: tuple[tuple[int, int], ...] = ()) -> CollectiveModel:
    return CollectiveModel(world, "any", alpha, beta, measured)


def cluster(*counts: int, links: tuple[Link, ...] = ()) -> Cluster:
    groups = tuple(DeviceGroup(f"g{i}", "hand", count, Role.INFER, FLOAT32, LADDER) for i, count in enumerate(counts))
    return Cluster("c", groups, links)


def collective_ns(ranks: Cluster, profiles: dict[str, Profile], nbytes: int) -> dict[str, int]:
    return AllReduce(ranks, profiles).group_ns(nbytes)


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
    # Hop 100 + 2 per byte; 8 ranks: 14 rounds of 8,000/8 bytes; a tree: 2 · 3 hops and 16,000 bytes, 32,600.
    assert collective_ns(cluster(8), measured_on(model(4, 600.0, 3.0)), 8000) == {"g0": 14 * (100 + 2000)}


def test_a_tree_by_hand_where_latency_counts() -> None:
    # 8 ranks, 3 levels up and 3 down, twice 800 bytes: 600 + 3,200.  The ring would take 14 · (100 + 200).
    assert collective_ns(cluster(8), measured_on(model(4, 600.0, 3.0)), 800) == {"g0": 2 * 3 * 100 + 2 * 800 * 2}
    # 5 ranks need as many levels as 8.
    assert collective_ns(cluster(5), measured_on(model(4, 600.0, 3.0)), 0) == {"g0": 2 * 3 * 100}


def test_4096_ranks_are_no_ring() -> None:
    # Hop 100 µs: the ring would take 2 · 4,095 · 100 µs = 819 ms; 12 levels take 2.4 ms, and 25 MB twice over 10 GB/s 5 ms.
    found = collective_ns(cluster(4096), measured_on(model(2, 200_000.0, 0.1)), 25_000_000)
    assert found == {"g0": 2 * 12 * 100_000 + 2 * 2_500_000}


def test_a_hierarchy_by_hand_where_the_links_inside_are_fast() -> None:
    # Inside 4 ranks a hop takes 10 + 1 a byte, the link 500 + 4 a byte.  For 100 bytes:
    # chains of 3 hops and one level across, up and down: 2 · (30 + 500), and 200 bytes at 4, or at 1 in a group's own node.
    # The ring takes 14 · (500 + 50) and the tree 2 · 3 · 500 + 800.
    links = (Link(("g0", "g1"), 500.0, 4.0),)
    found = collective_ns(cluster(4, 4, links=links), measured_on(model(4, 60.0, 1.5), model(4, 60.0, 1.5)), 100)
    assert found == {"g0": 1060 + 800, "g1": 1060 + 800}
    # A third group of one rank, over the same kind of link: two levels.
    links = (*links, Link(("g1", "g2"), 500.0, 4.0))
    found = collective_ns(cluster(4, 4, 1, links=links), measured_on(model(4, 60.0, 1.5), model(4, 60.0, 1.5), None), 100)
    assert found == {"g0": 2 * (30 + 1000) + 800, "g1": 2 * (30 + 1000) + 800, "g2": 2 * 1000 + 800}


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(2, 8), st.floats(0, 1e5), st.floats(0, 1)), min_size=4, max_size=4),
    st.tuples(st.floats(0, 1e5), st.floats(0, 1)),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
)
@example([1, 1, 7], [(2, 0.0, 0.0), (2, 0.0, 0.0), (2, 0.0, 0.625), (2, 0.0, 0.0)], (1.0, 0.0), 1, 1)  # .625 ns are no ratio of 1.6
def test_never_shorter_for_more_bytes_or_more_ranks(
    counts: list[int], models: list[tuple[int, float, float]], across: tuple[float, float], nbytes: int, more: int
) -> None:
    links = tuple(Link((f"g{i}", f"g{i + 1}"), *across) for i in range(len(counts) - 1))
    profiles = measured_on(*(model(*entry) for entry in models))

    def whole(ranks: list[int], size: int) -> int:
        return max(collective_ns(cluster(*ranks, links=links), profiles, size).values())

    # Floating point: one part in 10^12.
    now = whole(counts, nbytes) * (1 - 1e-12)
    assert now <= whole(counts, nbytes + more) + 1
    for position in range(len(counts)):
        assert now <= whole([count + (i == position) for i, count in enumerate(counts)], nbytes) + 1


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
