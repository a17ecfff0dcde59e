"""Values that are worked out when they are asked for."""

from __future__ import annotations

from qsync_planner.replayer.incremental import Deferred


def test_a_value_is_worked_out_once_and_only_when_asked_for() -> None:
    calls: list[int] = []

    def make() -> int:
        calls.append(len(calls))
        return 5

    deferred = Deferred(make)
    assert calls == []
    assert (deferred.value, deferred.value, repr(deferred)) == (5, 5, "5")
    assert calls == [0]


def test_deferred_values_compare_as_the_values_do() -> None:
    one, uno, two = Deferred(lambda: 1), Deferred(lambda: 1), Deferred(lambda: 2)
    assert one == uno
    assert hash(one) == hash(uno)
    assert one != two
    assert one < two <= two
    assert one != 1
    assert (0, one) <= (0, uno)
    assert (0, two) < (1, one)
