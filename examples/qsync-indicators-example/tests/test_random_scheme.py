"""The indicator ``random``: numbers that depend on seed and name alone."""

from __future__ import annotations

from qsync_indicators_example.random_scheme import RandomScheme
from synthetic import FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import to_bytes
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_planner.indicate import indicate

I8, F16, F32 = Variant.of(INT8), Variant.of(FLOAT16), Variant.of(FLOAT32)
A, B = OpId("a"), OpId("b")


def test_random_halves_per_rung_and_depends_on_seed_and_name_alone() -> None:
    g = GraphBuilder("two", batch_size=4)
    g.loss(g.linear("b", g.linear("a", g.input("x", (4, 8)), 6), 5))
    dag = g.build()
    found = indicate(None, dag, [F32, F16, I8], RandomScheme())
    again = indicate(None, dag, [I8, F16, F32], RandomScheme())
    assert to_bytes(found) == to_bytes(again)
    for by_variant in found.omega.values():
        assert 0 <= by_variant[I8] < 1
        assert by_variant[F16] == by_variant[I8] / 2
        assert by_variant[F32] == 0
    assert found.omega[A][I8] != found.omega[B][I8]
    other = indicate(None, dag, [I8], RandomScheme(seed=1))
    assert other.omega[A][I8] != found.omega[A][I8]
    assert other.notes == ("random numbers from seed 1",)
