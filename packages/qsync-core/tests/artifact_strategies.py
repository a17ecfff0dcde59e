"""Hypothesis strategies for every kind of artifact: any valid object, small enough to be fast."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from qsync_core.ir.chain import Activation, ChainForm, ChainVariant
from qsync_core.ir.checks import MAX_BATCH, MAX_INT, MAX_MEASURED
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.communication import (
    CollectiveCosts,
    CommunicationChoice,
    CommunicationSettings,
    MeasuredCollectives,
    PlannedCommunication,
)
from qsync_core.ir.dag import Bucket, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.dfg import DfgNode, GlobalDfg, LocalDfg, Phase, Resource
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.observations import Observations, Series
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, PrecisionPlan, Role, Verdict
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import (
    CastKey,
    CastModel,
    ChainCost,
    CollectiveModel,
    Compiled,
    Compiler,
    DeviceKind,
    DeviceMemory,
    DeviceType,
    OpCost,
    Profile,
    RungMemory,
    StepMeasurement,
)
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Interval, Timeline
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_core.printable import is_printable

texts = st.text(st.characters(codec="utf-8").filter(is_printable), max_size=12)
names = st.text("abcdefghij", min_size=1, max_size=6)
counts = st.one_of(st.integers(0, 300), st.integers(0, MAX_INT))
positive = st.integers(1, MAX_INT)
batches = st.integers(0, MAX_BATCH)
measured = st.one_of(st.integers(0, 300), st.integers(0, MAX_MEASURED))
rates = st.floats(-float(MAX_MEASURED), float(MAX_MEASURED))
finite = st.floats(allow_nan=False, allow_infinity=False)
fractions = st.floats(0, 1, exclude_min=True)
string_maps = st.dictionaries(texts, texts, max_size=3)
digests = st.text("0123456789abcdef", max_size=8)

precisions = st.sampled_from(Precision)
bases = st.sampled_from([Precision.FLOAT32, Precision.BFLOAT16, Precision.FLOAT16])
floats_of_output = st.sampled_from([Precision.FLOAT32, Precision.FLOAT16, Precision.BFLOAT16])
variants = st.builds(
    Variant,
    precisions,
    floats_of_output,
    precisions,
    precisions,
    precisions,
    st.sampled_from(Granularity),
    st.sampled_from(Granularity),
    st.sampled_from(Rounding),
    st.booleans(),
)
fqns = st.one_of(
    st.text("abc._$0", min_size=1, max_size=12),
    st.text(st.characters(codec="utf-8", exclude_characters="#"), min_size=1, max_size=8).filter(str.isprintable),
)
op_ids = st.builds(OpId, fqns, st.one_of(st.integers(0, 3), st.integers(0, 10**18 - 1)))
shapes = st.one_of(st.just(()), st.lists(st.integers(0, 2048), max_size=4).map(tuple))


def tuples(items: st.SearchStrategy[Any], max_size: int = 4, **more: Any) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=max_size, **more).map(tuple)


parameters = st.builds(Parameter, names, shapes, st.sampled_from(["float32", "int64"]), st.booleans())


@st.composite
def dags(draw: st.DrawFn) -> PrecisionDag:
    operators: list[Operator] = []
    for op_id in draw(st.lists(op_ids, min_size=1, max_size=5, unique=True)):
        inputs = draw(tuples(st.sampled_from([op.op_id for op in operators]), max_size=3)) if operators else ()
        kind = draw(st.sampled_from([*KINDS, "add", "input"]))
        operators.append(
            Operator(
                op_id=op_id,
                kind=kind,
                op_class=draw(st.sampled_from(OpClass if kind in KINDS else list(OpClass)[1:])),
                inputs=inputs,
                input_shapes=tuple(draw(shapes) for _ in inputs),
                output_shape=draw(shapes),
                parameters=draw(tuples(names)),
                weight_shape=draw(shapes),
                attributes=draw(string_maps),
                flops=draw(counts),
                variant_group=draw(texts),
                depth=draw(counts),
                not_applicable=draw(texts),
                variant=draw(variants),
                in_place=draw(st.booleans()),
                also_read_by=draw(tuples(texts)),
            )
        )
    found = draw(tuples(parameters, unique_by=lambda parameter: parameter.fqn))
    order = draw(st.permutations([parameter.fqn for parameter in found]))
    cut = draw(st.integers(0, len(order)))
    buckets = tuple(Bucket(tuple(part), draw(measured)) for part in (order[:cut], order[cut:]) if draw(st.booleans()))
    return PrecisionDag(
        draw(texts), tuple(operators), found, buckets, draw(texts), draw(texts), draw(batches), draw(bases),
        draw(st.dictionaries(texts, counts, max_size=2)), calls_are_known=draw(st.booleans()),
    )  # fmt: skip


devices = st.builds(DeviceType, texts, st.sampled_from(DeviceKind), fractions, counts, texts)
parts = st.dictionaries(texts, st.integers(-(2**60), 2**60), max_size=2)
op_costs = st.builds(
    OpCost,
    measured,
    measured,
    measured,
    measured,
    tuples(st.integers(0, 5)),
    st.booleans(),
    measured,
    measured,
    texts,
    texts,
    finite,
    st.none() | measured,
)
cast_keys = st.builds(CastKey, precisions, precisions, st.sampled_from(Granularity), st.sampled_from(Rounding))
pairs = tuples(st.tuples(measured, measured))
cast_models = st.builds(CastModel, cast_keys, measured, rates, rates, finite, pairs)
collectives = st.builds(CollectiveModel, counts, texts, rates, rates, pairs, tuples(st.integers(-(2**60), 2**60)), st.floats(0, 1))
steps = st.builds(StepMeasurement, variants, *[measured] * 8, finite, st.none() | measured)
compiled = st.builds(Compiled, st.sampled_from(Compiler), st.booleans(), texts)


forms = st.builds(ChainForm, st.sampled_from(Activation), st.booleans(), st.booleans())
chain_costs = st.builds(ChainCost, tuples(op_ids, 2, unique=True), forms, variants, op_costs)
chain_variants = st.one_of(
    st.builds(ChainVariant, st.booleans()),
    st.builds(ChainVariant, st.just(True), st.sampled_from([Precision.INT8, Precision.FLOAT8_E4M3FN])),
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    costs = draw(st.lists(op_costs, min_size=1, max_size=4).map(tuple))
    by_variant = st.dictionaries(variants, st.integers(0, len(costs) - 1), max_size=3)
    return Profile(
        device=draw(devices),
        software=draw(string_maps),
        model=draw(texts),
        dag_digest=draw(digests),
        costs=costs,
        cost_index=draw(st.dictionaries(op_ids, by_variant, max_size=4)),
        casts=draw(tuples(cast_models, unique_by=lambda model: model.key)),
        optimizer_dispatch_ns=draw(measured),
        optimizer_compute_ns=draw(measured),
        optimizer_state_bytes=draw(measured),
        input_bytes=draw(measured),
        collective=draw(st.none() | collectives),
        steps=draw(tuples(steps, unique_by=lambda step: step.variant)),
        synchronises=draw(st.booleans()),
        memory=draw(st.none() | st.builds(DeviceMemory, measured, tuples(st.builds(RungMemory, variants, measured, measured)))),
        estimated_from=draw(st.sampled_from(["", "NVIDIA H200"])),
        chains=draw(tuples(chain_costs, 2, unique_by=lambda entry: (entry.form, entry.variant))),
        compiled=draw(st.none() | compiled),
    )


@st.composite
def observations(draw: st.DrawFn) -> Observations:
    iterations = draw(st.lists(counts, max_size=4, unique=True).map(sorted).map(tuple))
    values = st.lists(finite, min_size=len(iterations), max_size=len(iterations)).map(tuple)
    series = st.builds(Series, st.none() | op_ids, st.none() | variants, texts, texts, values)
    found = draw(tuples(series, unique_by=lambda one: (one.op_id, one.variant, one.collector, one.term)))
    return Observations(draw(texts), draw(digests), iterations, draw(positive), draw(texts), found, draw(string_maps))


omegas = st.dictionaries(op_ids, st.dictionaries(variants, st.floats(0, 1e300), max_size=3), max_size=4)
sensitivities = st.builds(Sensitivity, texts, digests, digests, texts, omegas, tuples(texts), st.just({}), omegas)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    group_names = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    groups = tuple(
        DeviceGroup(
            name=name,
            device=draw(texts),
            count=draw(positive),
            role=draw(st.sampled_from(Role)),
            base=draw(precisions),
            ladder=draw(tuples(variants, unique=True)),
            memory_bytes=draw(counts),
            share=draw(fractions),
            sync_per_step=draw(st.booleans()),
        )
        for name in group_names
    )
    ends = st.tuples(st.sampled_from(group_names), st.sampled_from(group_names))
    links = tuples(st.builds(Link, ends, finite, finite), unique_by=lambda link: frozenset(link.between))
    return Cluster(draw(texts), groups, draw(links))


@st.composite
def local_dfgs(draw: st.DrawFn, bucket_count: int | None = None) -> LocalDfg:
    remaining = list(range(draw(st.integers(0, 3)) if bucket_count is None else bucket_count))
    phases = draw(st.lists(st.sampled_from([p for p in Phase if p is not Phase.COMMUNICATION]), max_size=4))
    order = draw(st.permutations([*phases, *[Phase.COMMUNICATION] * len(remaining)]))
    nodes = []
    for position, phase in enumerate(order):
        deps = draw(tuples(st.integers(0, position - 1))) if position else ()
        bucket = remaining.pop(0) if phase is Phase.COMMUNICATION else None
        resource = draw(st.sampled_from(Resource))
        nodes.append(DfgNode(position, draw(texts), draw(st.none() | op_ids), phase, resource, draw(counts), deps, bucket))
    return LocalDfg(draw(texts), tuple(nodes), draw(st.booleans()), draw(st.booleans()))


@st.composite
def global_dfgs(draw: st.DrawFn) -> GlobalDfg:
    bucket_count = draw(st.integers(0, 2))
    groups = draw(tuples(local_dfgs(bucket_count), 3, min_size=1, unique_by=lambda group: group.group))
    return GlobalDfg(groups, tuple(draw(positive) for _ in groups))


assignments = st.builds(Assignment, variants, texts, texts, texts)
chain_assignments = st.builds(ChainAssignment, chain_variants, texts, texts, texts)
verdicts = st.builds(Verdict, counts, counts, finite, texts)


output_formats = st.builds(OutputFormats, st.dictionaries(names, tuples(names), max_size=3), st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> PrecisionPlan:
    group_names = draw(st.lists(names, max_size=3, unique=True))
    base = draw(bases)
    ids = draw(tuples(op_ids, 3, unique=True))
    drawn_chains = st.dictionaries(op_ids.filter(lambda name: name not in ids), chain_assignments, max_size=2)
    groups = tuple(
        GroupPlan(
            group=name,
            role=draw(st.sampled_from(Role)),
            count=draw(counts),
            device=draw(devices),
            base=draw(precisions) if base is Precision.FLOAT32 else base,
            assignments={op_id: draw(assignments) for op_id in ids},
            memory_budget_bytes=draw(counts),
            predicted_peak_bytes=draw(counts),
            predicted_busy_ns=draw(counts),
            needs_loss_scaling=draw(st.booleans()),
            chains=chains,
            chain_forms={op_id: draw(forms) for op_id, entry in chains.items() if entry.variant.fused},
        )
        for name, chains in ((name, draw(drawn_chains)) for name in group_names)
    )
    return PrecisionPlan(
        model=draw(texts),
        dag_digest=draw(digests),
        operator_ids=ids,
        input_digests=draw(string_maps),
        solver=draw(texts),
        indicator=draw(texts),
        time_limit_ns=draw(counts),
        predicted_iteration_ns=draw(counts),
        objective=draw(finite),
        bound=draw(st.none() | finite),
        groups=groups,
        rank0_group=draw(st.sampled_from(["", *group_names])),
        verdict=draw(st.none() | verdicts),
        baselines=draw(st.dictionaries(texts, counts, max_size=2)),
        local_batches={name: draw(counts) for name in group_names if draw(st.booleans())},
        notes=draw(tuples(texts)),
        base=base,
        software={name: draw(string_maps) for name in group_names if draw(st.booleans())},
        communication=draw(st.none() | communication),
        memory={name: draw(parts) for name in group_names if draw(st.booleans())},
        batch_axes=draw(st.dictionaries(texts, counts, max_size=2)),
        output_formats=draw(st.none() | output_formats),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    rank_group = draw(st.dictionaries(st.integers(0, 200), texts, min_size=1, max_size=3))
    intervals = st.builds(
        Interval,
        texts,
        st.none() | op_ids,
        st.sampled_from(Phase),
        st.sampled_from(Resource),
        st.sampled_from(sorted(rank_group)),
        counts,
        counts,
    )
    source = draw(st.sampled_from(["predicted", "measured"]))
    peaks = draw(st.dictionaries(st.sampled_from(sorted(rank_group.values())), counts, max_size=2))
    software = draw(st.dictionaries(st.sampled_from(sorted(rank_group.values())), string_maps, max_size=2))
    return Timeline(source, draw(texts), draw(counts), rank_group, draw(tuples(intervals)), peaks, software)


settings = st.builds(
    CommunicationSettings,
    st.none() | st.floats(0.001, 1000.0),
    st.integers(0, 64),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
communication = st.builds(PlannedCommunication, settings, texts, tuples(st.builds(CommunicationChoice, settings, measured)))


@st.composite
def collective_costs(draw: st.DrawFn) -> CollectiveCosts:
    groups = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    ctas = draw(st.lists(st.integers(0, 64), min_size=1, max_size=3, unique=True))
    return CollectiveCosts(
        draw(texts),
        draw(digests),
        {name: draw(positive) for name in groups},
        {name: draw(devices) for name in groups},
        {name: draw(string_maps) for name in groups},
        tuple(
            MeasuredCollectives(
                n,
                draw(collectives),
                {name: draw(st.floats(0.0, 0.99)) for name in groups},
                draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(groups, st.floats(0.0, 1.0)))),
            )
            for n in ctas
        ),
        {name: draw(st.floats(0.0, 10.0)) for name in groups},
        draw(measured),
    )


ARTIFACTS: dict[type, st.SearchStrategy[Any]] = {
    PrecisionDag: dags(),
    Profile: profiles(),
    Observations: observations(),
    Sensitivity: sensitivities,
    Cluster: clusters(),
    LocalDfg: local_dfgs(),
    GlobalDfg: global_dfgs(),
    PrecisionPlan: plans(),
    Timeline: timelines(),
    CollectiveCosts: collective_costs(),
}
"""A strategy for every kind of artifact."""
