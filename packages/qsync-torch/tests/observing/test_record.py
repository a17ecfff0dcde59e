import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.ir import observations as terms
from qsync_core.ir.op_id import OpId
from qsync_torch.observing.record import Record, SettledRule, spearman

RULE = SettledRule(warmup=4, window=3, quiet_windows=2, window_alone=0.9)


def _rows(length, value):
    return {"term": [[value(operator, step) for operator in range(12)] for step in range(length)]}


def _first_stop(value, most=60):
    return next((n for n in range(1, most) if RULE.reason(_rows(n, value))), None)


def test_constant_rankings_settle_at_the_earliest_moment():
    # Warm-up 4, one window to compare with, two quiet windows of three.
    assert _first_stop(lambda operator, step: (operator + 1) * 0.9**step) == 4 + 3 * 3


def test_what_happens_in_the_warmup_does_not_count():
    assert _first_stop(lambda operator, step: (12 - operator) if step < 4 else operator + 1) == 13


def test_a_drifting_ranking_does_not_settle():
    assert _first_stop(lambda operator, step: (operator + step * 2) % 12 + 1) is None


def test_noise_without_a_ranking_does_not_settle():
    noise = random.Random(0)
    table = [[noise.random() for _ in range(12)] for _ in range(60)]
    assert _first_stop(lambda operator, step: table[step][operator]) is None


def test_noise_on_a_clear_ranking_settles():
    noise = random.Random(0)
    table = [[10.0**operator * noise.uniform(0.5, 2) for operator in range(12)] for _ in range(60)]
    assert _first_stop(lambda operator, step: table[step][operator]) == 13


def test_every_term_has_to_settle():
    calm = _rows(13, lambda operator, step: operator + 1)["term"]
    wild = _rows(13, lambda operator, step: (operator + step * 2) % 12 + 1)["term"]
    assert RULE.reason({"calm": calm})
    assert not RULE.reason({"calm": calm, "wild": wild})


def test_the_reason_says_what_was_seen():
    reason = RULE.reason(_rows(13, lambda operator, step: operator + 1))
    assert reason.startswith("settled: over the last 6 iterations every ranking kept a rank correlation of 1.000")


def test_negative_values_are_ranked_by_their_mean():
    assert _first_stop(lambda operator, step: operator - 20) == 13


def test_nothing_collected_yet():
    assert RULE.reason({}) == ""


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),  # 1 - 6·4/(5·24)
        ([1, 1, 2], [1, 2, 3], 0.8660254),  # ties take the mean rank
        ([7, 7], [7, 7], 1.0),
        ([7, 7], [1, 2], 0.0),
    ],
)
def test_spearman(a, b, expected):
    assert spearman(a, b) == pytest.approx(expected)


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=20))
def test_rank_correlation_sees_only_ranks(values):
    assert spearman(values, [v**3 for v in values]) == pytest.approx(1.0)


def test_by_default_three_updates_are_enough_where_all_agree():
    rule = SettledRule()
    settled = [n for n in range(1, 7) if rule.reason(_rows(n, lambda operator, step: operator + 1))]
    assert settled == [3, 4, 5, 6]


def test_only_the_best_collector_that_ran_has_to_settle():
    record = Record("net")
    for step in range(4):
        record.add(
            {
                (OpId(f"op{operator}"), None, collector, term): value
                for operator in range(12)
                for collector, term, value in (
                    (terms.HUTCHINSON, terms.OPERANDS, operator + 1.0),
                    (terms.HUTCHINSON, terms.OUTPUT, (operator + 5.0 * step) % 12),
                    (terms.LOSSVAR, terms.X_VAR_GRAD, (operator + 5.0 * step) % 12),
                )
            },
            step,
        )
    assert list(record.rankings()) == [(None, terms.HUTCHINSON, terms.OPERANDS)]
    assert SettledRule().reason(record.rankings())
    record.forget(terms.HUTCHINSON)
    assert list(record.rankings()) == [(None, terms.LOSSVAR, terms.X_VAR_GRAD)]
    assert not SettledRule().reason(record.rankings())


def test_updates_that_agree_only_roughly_do_not_settle_by_default():
    noise = random.Random(1)
    table = [[1.2**operator * noise.uniform(0.5, 2) for operator in range(12)] for _ in range(12)]
    rows = {"term": table}
    assert not any(SettledRule().reason({"term": table[:n]}) for n in range(3, 13))
    assert SettledRule(window_alone=0.3, running=0.9).reason(rows)
