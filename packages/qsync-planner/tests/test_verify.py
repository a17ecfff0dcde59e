"""Verification: errors by phase, resource and operator, by hand; and what it refuses."""

from __future__ import annotations

import attrs
import pytest
from hand_models import op

from qsync_core.errors import PlanError
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.op_id import OpId
from qsync_core.ir.timeline import Interval, Timeline
from qsync_planner.verify import Comparison, PhaseRow, verify

F, B, COMM = Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION


def timeline(source: str, period: int, ranks: dict[int, str], *rows: tuple[OpId | None, Phase, int, int], **peaks: int) -> Timeline:
    intervals, free = [], dict.fromkeys(ranks, 0)
    for op_id, phase, rank, duration in rows:
        resource = Resource.COMMUNICATION if phase is COMM else Resource.COMPUTE
        intervals.append(Interval(f"{op_id}", op_id, phase, resource, rank, free[rank], duration))
        free[rank] += duration
    return Timeline(source, "m", period, ranks, tuple(intervals), peaks)


PREDICTED = timeline(
    "predicted",
    1_000,
    {0: "weak"},
    (op("a"), F, 0, 50),
    (op("a"), F, 0, 50),
    (op("b"), F, 0, 300),
    (op("b"), B, 0, 500),
    (op("only_here"), F, 0, 5),
    (None, COMM, 0, 80),
    weak=900,
)
MEASURED = timeline(
    "measured",
    1_250,
    {0: "weak", 1: "weak"},
    (op("a"), F, 0, 90),
    (op("a"), F, 1, 112),
    (op("b"), F, 0, 380),
    (op("b"), F, 1, 420),
    (op("b"), B, 0, 480),
    (op("b"), B, 1, 500),
    (op("only_there"), F, 0, 7),
    (None, COMM, 0, 100),
    (None, COMM, 1, 100),
    weak=1_000,
)


def test_a_comparison_by_hand() -> None:
    found = verify(PREDICTED, MEASURED)
    assert found.iteration == Comparison(1_000, 1_250)
    assert found.iteration.error == -0.2
    phases = {(row.phase, row.resource): (row.time.predicted, row.time.measured) for row in found.phases}
    # The two ranks of the group are averaged: a 101, b 400, only_there 7/2 rounded to even.
    assert phases == {
        (F, Resource.COMPUTE): (405, 101 + 400 + 4),
        (B, Resource.COMPUTE): (500, 490),
        (COMM, Resource.COMMUNICATION): (80, 100),
    }
    assert found.memory == {"weak": Comparison(900, 1_000)}
    assert (found.only_predicted, found.only_measured) == ((op("only_here"),), (op("only_there"),))


def test_waiting_for_the_slowest_rank_is_not_communication() -> None:
    ranks = {0: "weak", 1: "strong"}
    predicted = timeline("predicted", 100, ranks, (None, COMM, 0, 80), (None, COMM, 1, 80))
    measured = timeline("measured", 100, ranks, (None, COMM, 0, 90), (None, COMM, 1, 700))
    rows = verify(predicted, measured).phases
    assert [(row.group, row.time) for row in rows] == [("", Comparison(80, 90))]


def test_operators_are_listed_worst_first() -> None:
    found = verify(PREDICTED, MEASURED)
    rows = [(str(row.op_id), row.phase, row.time.difference) for row in found.operators]
    assert rows == [("b#0", F, -100), ("b#0", B, 10), ("a#0", F, -1)]
    assert found.worst == found.operators[0]


def test_nothing_in_common_among_operators_has_no_worst() -> None:
    empty = attrs.evolve(MEASURED, intervals=())
    found = verify(PREDICTED, empty)
    assert found.worst is None
    assert found.phases[0].time.error is None


def test_what_can_not_be_compared_is_refused() -> None:
    with pytest.raises(PlanError, match="expected a predicted timeline and then a measured one, got measured and predicted"):
        verify(MEASURED, PREDICTED)
    other = attrs.evolve(MEASURED, rank_group={0: "strong", 1: "strong"}, peak_bytes={})
    with pytest.raises(PlanError, match=r"no device group in common: predicted \['weak'\], measured \['strong'\]"):
        verify(PREDICTED, other)
    with pytest.raises(PlanError, match="predicted timeline is of 'm' and the measured one of 'n'; compare runs of one model"):
        verify(PREDICTED, attrs.evolve(MEASURED, model="n"))


def _rank(rank: int, *rows: tuple[str, Phase, Resource, int, int]) -> tuple[Interval, ...]:
    return tuple(Interval(name, None, phase, resource, rank, start, end - start) for name, phase, resource, start, end in rows)


COMPUTE, LINK = Resource.COMPUTE, Resource.COMMUNICATION
WAITING_IN_TURN = attrs.evolve(
    MEASURED,
    rank_group={0: "weak", 1: "strong"},
    peak_bytes={},
    intervals=(
        *_rank(0, ("all-reduce", COMM, LINK, 100, 400), ("all-reduce", COMM, LINK, 400, 450)),
        *_rank(1, ("all-reduce", COMM, LINK, 380, 420), ("all-reduce", COMM, LINK, 420, 620), ("broadcast", COMM, LINK, 0, 9)),
    ),
)


def test_ranks_that_wait_in_turn() -> None:
    """Each collective transfers for as long as the rank that comes last to it; everything else is waiting."""
    found = verify(attrs.evolve(WAITING_IN_TURN, source="predicted"), WAITING_IN_TURN)
    assert [row.time.measured for row in found.phases] == [40 + 50 + 9]
    assert found.waiting == {"weak": Comparison(300 - 40, 300 - 40), "strong": Comparison(200 - 50, 200 - 50)}
    assert verify(PREDICTED, attrs.evolve(MEASURED, intervals=())).waiting == {}


def test_the_parts_of_a_step_add_up_to_it() -> None:
    step = _rank(
        0,
        ("f", F, Resource.DISPATCH, 0, 30),
        ("f", F, COMPUTE, 10, 100),
        ("f beside it", F, COMPUTE, 50, 120),  # of a file whose kernels overlap
        ("b", B, COMPUTE, 130, 300),
        ("all-reduce", COMM, LINK, 250, 500),
        ("optimizer", Phase.OPTIMIZER, COMPUTE, 510, 600),
    )
    measured = attrs.evolve(MEASURED, iteration_ns=590, rank_group={0: "weak"}, intervals=step)
    compared = verify(PREDICTED, measured)
    predicted, found = compared.parts["weak"]
    # 600 were recorded, 30 of them idle; steps that are not recorded take 590.
    assert (found.forward, found.backward, found.optimizer, found.communication, found.idle) == (110, 170, 90, 200, 20)
    assert found.total == 590
    assert predicted.total == PREDICTED.iteration_ns
    assert compared.ranks == {0: found}


def test_cpu_dispatch_is_the_last_to_blame() -> None:
    """The profiler slows it, so that its rows would always be the worst."""
    dispatch = (Interval("b", op("b"), F, Resource.DISPATCH, 0, 0, 700), Interval("b", op("b"), F, COMPUTE, 0, 0, 300))
    slowed = (attrs.evolve(dispatch[0], duration_ns=9_000), attrs.evolve(dispatch[1], duration_ns=310))
    found = verify(attrs.evolve(PREDICTED, intervals=dispatch), attrs.evolve(MEASURED, rank_group={0: "weak"}, intervals=slowed))
    assert [(row.resource, row.time.difference) for row in found.operators] == [(COMPUTE, -10), (Resource.DISPATCH, -8_300)]


def test_work_of_no_operator_is_told_apart() -> None:
    """As of weights that are prepared together at the start of forward."""
    step = _rank(0, ("quantize", F, COMPUTE, 0, 70), ("all-reduce", COMM, LINK, 70, 80), ("sgd", Phase.OPTIMIZER, COMPUTE, 80, 99))
    found = verify(PREDICTED, attrs.evolve(MEASURED, rank_group={0: "weak"}, intervals=step))
    assert found.unattributed == (PhaseRow("weak", F, COMPUTE, Comparison(0, 70)),)


def test_settings_that_the_job_has_otherwise_are_named() -> None:
    predicted = attrs.evolve(PREDICTED, software={"weak": {"cudnn_tf32": "True", "torch": "2.13.0"}})
    measured = attrs.evolve(MEASURED, software={"weak": {"cudnn_tf32": "False", "torch": "2.13.0"}})
    (difference,) = verify(predicted, measured).differences["weak"]
    assert (difference.name, difference.profile, difference.job) == ("cudnn_tf32", "True", "False")
    assert verify(PREDICTED, MEASURED).differences == {}


@pytest.mark.parametrize(("was", "job"), [("False", "True"), ("True", "False"), ("True", "True")])
def test_a_compiled_step_beside_one_that_is_not_is_said_and_tells_no_operators(was: str, job: str) -> None:
    predicted = attrs.evolve(PREDICTED, software={"weak": {"compiled": was}})
    rows = MEASURED.intervals if job == "False" else tuple(attrs.evolve(one, op_id=None) for one in MEASURED.intervals)
    found = verify(predicted, attrs.evolve(MEASURED, intervals=rows, software={"weak": {"compiled": job}}))
    said = [f"compiled (whether the model is compiled) was {was} when group 'weak' was profiled and is {job} in this job"]
    assert [d.sentence("weak").partition(";")[0] for d in found.differences.get("weak", ())] == (said if was != job else [])
    assert bool(found.only_predicted) == (job == "False")
    if job == "True":
        times = {row.phase: row.time for row in found.unattributed}
        assert (times[F].measured, times[B].measured) == (round((90 + 112 + 380 + 420 + 7) / 2), 490)
