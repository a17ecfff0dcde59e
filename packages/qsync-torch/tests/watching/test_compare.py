"""Which rank is named, with which phase: from what ranks have told, worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_torch.watching.compare import OWN, Told, slowest
from qsync_torch.watching.phases import Phase, StepPhases

MS = 1_000_000
USUAL = {Phase.INPUT: 2, Phase.FORWARD: 20, Phase.BACKWARD: 40, Phase.COMMUNICATION: 1, Phase.OPTIMIZER: 5, Phase.WAIT: 8}


def told(more: Mapping[Phase, float] | None = None, *, error_ms: float = 0.1, **change: object) -> Told:
    """One rank's, in ms above the usual."""
    phases = {phase: (ms + (more or {}).get(phase, 0)) * MS for phase, ms in USUAL.items()}
    made = Told(3, sum(phases.values()), phases, dict.fromkeys(Phase, error_ms * MS), [], "a machine")
    return attrs.evolve(made, **change)


def job(slow: Mapping[int, Mapping[Phase, float]], ranks: int, **change: object) -> dict[int, Told]:
    """Ranks that all take as long as the slowest, because they wait for it."""
    latest = max((sum(more.values()) for more in slow.values()), default=0)
    found = {}
    for rank in range(ranks):
        more = dict(slow.get(rank, {}))
        more[Phase.WAIT] = latest - sum(more.values())
        found[rank] = told(more, **change)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("phase", OWN)
def test_the_slow_rank_is_named_with_its_phase_and_by_how_much(ranks, phase):
    found = slowest(job({1: {phase: 25}}, ranks))
    assert (found.rank, found.phase, found.more) == (1, phase, {})
    assert found.excess_ns == pytest.approx(25 * MS)
    assert found.delay_ns == pytest.approx(25 * MS)
    assert found.phase_ns == pytest.approx((USUAL[phase] + 25) * MS)
    assert found.step_ns == pytest.approx(101 * MS)
    assert found.sentence.startswith(f"rank 1 is slow in its {phase}: it takes {USUAL[phase] + 25}.00 ms of a step of 101.00 ms, ")
    assert "25.00 ms more than the other ranks take; the others wait 25.00 ms (25%) for it in every step. " in found.sentence


@given(st.lists(st.tuples(st.sampled_from(OWN), st.floats(0, 100)), min_size=3, max_size=6))
def test_it_is_never_one_that_waits_for_another(delays):
    slow = {rank: {phase: ms} for rank, (phase, ms) in enumerate(delays)}
    found = slowest(job(slow, len(delays)))
    if found is not None:
        assert slow[found.rank][delays[found.rank][0]] == max(ms for _, ms in delays)


def test_a_slow_device_is_slow_in_several_phases():
    found = slowest(job({0: {Phase.FORWARD: 10, Phase.BACKWARD: 20, Phase.OPTIMIZER: 1}}, 4))
    assert (found.rank, found.phase, found.delay_ns) == (0, Phase.BACKWARD, pytest.approx(31 * MS))
    assert found.more == {Phase.FORWARD: pytest.approx(10 * MS)}
    assert ", and its forward 10.00 ms more; the others wait 31.00 ms" in found.sentence


@pytest.mark.parametrize(
    "ranks",
    [
        {0: told()},
        job({}, 4),
        job({1: {Phase.INPUT: 7}}, 4),  # 8% of a step
        job({1: {Phase.INPUT: 12}}, 4, error_ms=2),  # four standard errors of five phases are 18 ms
        {0: told({Phase.FORWARD: 10}), 1: told({Phase.BACKWARD: 10})},  # nobody waits
        {0: told({Phase.FORWARD: 10, Phase.WAIT: 12}), 1: told({Phase.WAIT: 0})},  # slower, and waits all the same
    ],
)
def test_nobody_is_named_where_nobody_waits_for_one_rank(ranks):
    assert slowest(ranks) is None


def test_gradients_that_a_rank_has_later_than_others_of_its_machine_are_its_communication():
    """Durations alone do not tell: it has its gradients late, and the others wait as long in the next step."""
    ranks = job({}, 3)
    steps = [1000 * MS, 1110 * MS, 1220 * MS]
    for rank in ranks:
        late = 30 * MS if rank == 2 else 0
        ranks[rank] = attrs.evolve(ranks[rank], received_ns=[step + late for step in steps])
    found = slowest(ranks)
    assert (found.rank, found.phase, found.excess_ns) == (2, Phase.COMMUNICATION, pytest.approx(30 * MS))
    apart = {rank: attrs.evolve(one, machine=f"machine {rank}") for rank, one in ranks.items()}  # of clocks that tell nothing
    assert slowest(apart) is None


def test_under_a_plan_a_rank_may_take_what_the_plan_expects():
    weak = told({Phase.FORWARD: 20, Phase.BACKWARD: 40}, group="infer", weight=2.0)
    strong = told({Phase.WAIT: 60}, group="train", weight=1.0)
    assert slowest({0: strong, 1: weak}) is None
    late = attrs.evolve(weak, phases_ns=weak.phases_ns | {Phase.BACKWARD: 100.0 * MS})
    waits = attrs.evolve(strong, phases_ns=strong.phases_ns | {Phase.WAIT: 88.0 * MS})
    found = slowest({0: waits, 1: late})
    assert (found.rank, found.group, found.phase, found.excess_ns) == (1, "infer", Phase.BACKWARD, pytest.approx(20 * MS))
    assert "rank 1 (group 'infer') is slow in its backward" in found.sentence
    assert "more than its plan expects beside the other ranks" in found.sentence


def test_a_window_keeps_stalls_of_some_steps_and_leaves_out_single_ones():
    steps = [StepPhases({Phase.INPUT: (MS, 41 * MS)[step % 4 == 0]}, 0) for step in range(20)]
    stalls = Told.of(0, steps, "", "", 1.0)
    assert stalls.phases_ns[Phase.INPUT] == pytest.approx((13 * 1 + 3 * 41) / 16 * MS)  # two of each end are left out
    once = Told.of(0, [*steps[1:4] * 6, steps[1], StepPhases({Phase.INPUT: 5000 * MS}, 7)], "", "", 1.0)
    assert (once.phases_ns[Phase.INPUT], once.received_ns) == (pytest.approx(MS), [7])
