"""How a job communicates: what is refused, and the buckets that another cap gives."""

from __future__ import annotations

import pytest

from qsync_core.ir.communication import CommunicationSettings, MeasuredCollectives, buckets_under
from qsync_core.ir.dag import Bucket, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.profile import CollectiveModel

MIB = 1 << 20


def graph(*quarter_mib: int, trainable: bool = True) -> PrecisionDag:
    """A graph of parameters of so many quarters of a MiB, the last of which gets its gradient first."""
    operator = Operator(OpId("x"), "input", OpClass.FIXED, (), (), (1,))
    parameters = [Parameter(f"p{i}", (65536 * size,)) for i, size in enumerate(quarter_mib)]
    order = tuple(parameter.fqn for parameter in reversed(parameters))
    extra = [] if trainable else [Parameter("unused", (4,))]
    return PrecisionDag("m", (operator,), (*parameters, *extra), (Bucket(order, MIB * sum(quarter_mib) // 4),))


def test_a_bucket_is_closed_once_it_holds_the_cap() -> None:
    # By hand, cap 1 MiB: p4 (1/4) + p3 (1/2) + p2 (2) → closed at 2.75 MiB; p1 (1) → closed; p0 (1/4) is left.
    found = buckets_under(graph(1, 4, 8, 2, 1), 1.0)
    assert [bucket.parameters for bucket in found] == [("p4", "p3", "p2"), ("p1",), ("p0",)]
    assert [bucket.nbytes / MIB for bucket in found] == [2.75, 1.0, 0.25]


def test_no_cap_is_the_graphs_own_buckets_and_a_large_one_is_one_bucket() -> None:
    dag = graph(1, 4, 8)
    assert buckets_under(dag, None) == dag.buckets
    assert [bucket.parameters for bucket in buckets_under(dag, 1000.0)] == [("p2", "p1", "p0")]


def test_parameters_without_a_gradient_leave_only_the_graphs_own_buckets() -> None:
    dag = graph(1, 4, trainable=False)
    assert buckets_under(dag, None) == dag.buckets
    with pytest.raises(ValueError, match="all of whose trainable parameters"):
        buckets_under(dag, 25.0)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"bucket_cap_mb": 0.0}, ["bucket_cap_mb", "above 0", "0.0"]),
        ({"bucket_cap_mb": float("nan")}, ["bucket_cap_mb", "nan"]),
        ({"max_ctas": 65}, ["max_ctas", "64", "65"]),
        ({"max_ctas": -1}, ["max_ctas", "-1"]),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, float], facts: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        CommunicationSettings(**arguments)  # type: ignore[arg-type]
    assert all(fact in str(refused.value) for fact in facts)


def test_a_group_that_would_never_compute_is_refused() -> None:
    model = CollectiveModel(2, "nccl", 0.0, 0.0)
    with pytest.raises(ValueError, match=r"'infer'.*below 1, got 1"):
        MeasuredCollectives(0, model, {"infer": 1.0})


def test_settings_say_what_differs_from_pytorchs_own() -> None:
    assert CommunicationSettings().label == "PyTorch's defaults"
    assert CommunicationSettings(100, 2, False).label == "buckets of 100 MiB, 2 NCCL CTAs, no broadcast of buffers"
