"""Random models with chains that producer kernels can fuse, and profiles that know what these cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st
from random_models import RUNGS, TIME, profiles
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import UNFUSED, Chain, ChainForm, ChainVariant
from qsync_core.ir.dag import OpClass, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import ChainCost, DeviceKind, OpCost, Profile
from qsync_core.ir.variant import Variant

IMAGE = (2, 3, 2, 2)
CHOSEN = (UNFUSED, ChainVariant(), ChainVariant(saved=INT8))


class ChainBuilder(GraphBuilder):
    """A builder whose operators carry their calls, as traced ones do."""

    def called(
        self,
        fqn: str,
        kind: str,
        *inputs: OpId,
        affine: int = 0,
        arguments: Sequence[Any] | None = None,
        shape: tuple[int, ...] = (),
        op_class: OpClass | None = None,
    ) -> OpId:
        """A norm, a function, an addition or a product; a norm's weight and bias have ``affine`` elements, where that is not 0."""
        reads: list[Any] = [{"input": i} for i in range(len(inputs))]
        scale: list[Any] = [{"parameter": 0, "shape": [affine]}, {"parameter": 1, "shape": [affine]}] if affine else [None, None]
        shape = shape or self._by_id[inputs[0]].output_shape
        known = {
            "batch_norm": [*reads, *scale, None, None, True, 0.1, 1e-5, False],
            "layer_norm": [*reads, [shape[-1]], *scale, 1e-5, False],
            "rms_norm": [*reads, [shape[-1]], scale[0], 1e-5],
        }
        given = known.get(kind, reads) if arguments is None else arguments
        call = json.dumps({"op": f"aten.{kind}.default", "args": given, "kwargs": {}})
        op_class = op_class or (OpClass.GUARDED if kind.endswith("_norm") else OpClass.DEPENDENT)
        parameters = {"weight": (affine,), "bias": (affine,)} if affine else None
        return self.add(fqn, kind, op_class, inputs, shape, parameter_shapes=parameters, attributes={"call": call})

    def written_out(self, at: str, x: OpId, affine: int = 0) -> OpId:
        """An RMS norm as transformers writes it, with a weight of ``affine`` elements where that is not 0."""
        rows = (*self._by_id[x].output_shape[:-1], 1)
        squares = self.called(f"{at}.pow", "pow", x, arguments=[{"input": 0}, 2])
        mean = self.called(f"{at}.mean", "mean", squares, arguments=[{"input": 0}, [-1], True], shape=rows)
        inside = self.called(f"{at}.add", "add", mean, arguments=[{"input": 0}, 1e-6], shape=rows)
        result = self.called(f"{at}.mul", "mul", x, self.called(f"{at}.rsqrt", "rsqrt", inside))
        if not affine:
            return result
        weight = {"parameter": 0, "shape": [affine]}
        fixed = OpClass.FIXED  # float32 numbers beside whatever arrives
        return self.called(f"{at}.scaled", "mul", result, affine=affine, arguments=[weight, {"input": 0}], op_class=fixed)


def block(at: str, g: ChainBuilder, x: OpId, residual: OpId | None = None) -> OpId:
    """A convolution, a batch norm, perhaps an addition, a ReLU."""
    y = g.called(f"{at}.norm", "batch_norm", g.conv2d(f"{at}.conv", x, 3, 1), affine=3)
    if residual is not None:
        y = g.called(f"{at}.add", "add", y, residual)
    return g.called(f"{at}.relu", "relu", y)


def way(form: ChainForm, precision: Precision, copy: Variant | None, saved: Precision | None) -> tuple[ChainForm, Variant]:
    """How a chain runs, as its kernels are asked for (docs/design/fused-chains.md#kernels)."""
    rounding = copy.rounding if copy else Rounding.STOCHASTIC if saved else Rounding.NEAREST
    return form, Variant(
        copy.compute if copy else precision,
        precision,
        saved or precision,
        precision,
        FLOAT32,
        copy.x_granularity if copy else Granularity.PER_TENSOR,
        Granularity.PER_TENSOR,
        rounding,
    )


def ways(chain: Chain, rungs: Sequence[Variant] = RUNGS) -> list[tuple[ChainForm, Variant]]:
    """Every way in which a chain may run, whatever reads it."""
    copies = [rung for rung in rungs if rung.compute.needs_scale]
    distinct = {(rung.compute, rung.x_granularity, rung.rounding): rung for rung in copies}
    found = []
    for precision in (FLOAT32, FLOAT16, BFLOAT16):
        for copy in (None, *distinct.values()):
            for float_result in (True, False) if copy else (True,):
                form = ChainForm(chain.activation, chain.residual is not None, float_result)
                found += [way(form, precision, copy, saved) for saved in (None, INT8)]
    return found


def with_chains(measured: Profile, dag: PrecisionDag, costs: Mapping[OpId, Mapping[tuple[ChainForm, Variant], OpCost]]) -> Profile:
    """The same with costs of chains, by name and way to run."""
    rows = [ChainCost((name,), form, variant, cost) for name, table in costs.items() for (form, variant), cost in table.items()]
    return attrs.evolve(measured, chains=tuple(rows))


@st.composite
def chained_dags(draw: st.DrawFn, most: int = 10, image: tuple[int, ...] = IMAGE) -> PrecisionDag:
    g = ChainBuilder("chained")
    known = [g.input("x", image)]
    for i in range(draw(st.integers(1, most))):
        kinds = ["conv", "conv", "block", "block", "residual", "batch_norm", "layer_norm", "add", "relu", "pool"]
        kind = draw(st.sampled_from([*kinds, "rms_norm", "written", "gated"]))
        x = draw(st.sampled_from(known[-3:]))
        if kind == "conv":
            known.append(g.conv2d(f"op{i}", x, 3, 1))
        elif kind == "block":
            known.append(block(f"op{i}", g, x))
        elif kind == "residual":
            known.append(block(f"op{i}", g, x, draw(st.sampled_from(known))))
        elif kind == "add":
            known.append(g.called(f"op{i}", "add", x, draw(st.sampled_from(known))))
        elif kind == "written":
            known.append(g.written_out(f"op{i}", x, affine=draw(st.sampled_from([0, 2]))))
        elif kind == "gated":
            function = g.called(f"op{i}.silu", "silu", x)
            known.append(g.called(f"op{i}", "mul", function, draw(st.sampled_from(known))))
        elif kind == "pool":
            known.append(g.unary(f"op{i}", "pool", x))
        else:
            known.append(g.called(f"op{i}", kind, x, affine=0 if kind == "relu" else draw(st.sampled_from([0, 3]))))
    g.loss(known[-1])
    return g.build(first_bucket=20, bucket=20)


@st.composite
def chained_profiles(draw: st.DrawFn, dag: PrecisionDag, kind: DeviceKind) -> Profile:
    """Random costs; of chains those of one way to run depend on the way, not on the chain."""
    measured = draw(profiles(dag, kind))
    fusible = {member for chain in chains_of(dag) for member in chain.members}  # which compute something
    measured = attrs.evolve(measured, handed_on=tuple(op_id for op_id in measured.handed_on if op_id not in fusible))
    times = st.tuples(*[TIME] * 8)
    forms: dict[tuple[ChainForm, Variant], OpCost] = {}
    for chain in chains_of(dag):
        for run in ways(chain):
            if run not in forms:
                *phases, own, forward, backward, _ = draw(times)
                cost = OpCost(*phases, saved_own_bytes=own, workspace_bytes=forward, backward_workspace_bytes=backward)
                forms[run] = cost
    return with_chains(measured, dag, {c.name: {run: forms[run] for run in ways(c)} for c in chains_of(dag)})


def chosen(dag: PrecisionDag) -> st.SearchStrategy[dict[OpId, ChainVariant]]:
    """Something said of some chains."""
    names = [chain.name for chain in chains_of(dag)]
    return st.dictionaries(st.sampled_from(names), st.sampled_from(CHOSEN), max_size=4) if names else st.just({})
