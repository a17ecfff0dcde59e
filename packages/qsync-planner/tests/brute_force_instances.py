"""Small random planning problems that have something of everything, from a seed.

Two to nine adjustable operators with two to four rungs, not all of them measured; modules that run twice; residual additions,
guarded and fixed operators, calls that no plan can address, several readers of one tensor, detached inputs; several gradient
buckets with collectives that take time; devices with and without a CPU clock of their own, synchronising or not; one to three
inference groups beside up to two training groups.  Whole steps and memory budgets are added in ``brute_force``,
which knows what plans need.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import attrs
from synthetic import BFLOAT16, FLOAT16, FLOAT32, INT8, GraphBuilder

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import Bucket, OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant

FULL, HALF, BRAIN = Variant.of(FLOAT32), Variant.of(FLOAT16), Variant.of(BFLOAT16)
EIGHT_HALF = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32)
EIGHT_BRAIN = Variant.of(INT8, sixteen_bit=BFLOAT16, output=FLOAT32)
EIGHT_TO_HALF = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT16)
EIGHT_TO_BRAIN = Variant.of(INT8, sixteen_bit=BFLOAT16, output=BFLOAT16)
EIGHT_BACKWARD = attrs.evolve(EIGHT_TO_BRAIN, grad_input=INT8)
LADDERS = (
    (HALF, FULL),
    (EIGHT_BRAIN, FULL),
    (EIGHT_HALF, HALF, FULL),
    (EIGHT_BRAIN, BRAIN, FULL),
    (EIGHT_TO_HALF, HALF, FULL),
    (EIGHT_BACKWARD, BRAIN, FULL),
    (HALF, BRAIN, FULL),
    (EIGHT_HALF, EIGHT_TO_HALF, HALF, FULL),
    (EIGHT_BACKWARD, EIGHT_TO_BRAIN, BRAIN, FULL),
    (EIGHT_HALF, HALF, BRAIN, FULL),
    (EIGHT_TO_HALF, HALF),
)
"""Lowest first; the last one is of a job whose base precision is float16."""
RUNGS = tuple(dict.fromkeys(variant for ladder in LADDERS for variant in ladder))
SPEED = {INT8: (0.15, 0.9), FLOAT16: (0.3, 0.9), BFLOAT16: (0.3, 1.0), FLOAT32: (0.8, 1.2)}
SENSITIVITY = {INT8: (5.0, 100.0), FLOAT16: (0.01, 1.0), BFLOAT16: (0.1, 8.0), FLOAT32: (0.0, 0.0)}
MOST_CHOICES = 20_000
"""Assignments of one group; a drawn ladder that gives more is drawn again."""


Choice = tuple[tuple[OpId, ...], tuple[Variant, ...]]
"""Operators that share a variant, and the rungs that each may take."""


@attrs.frozen
class Instance:
    """Inputs of ``allocate``."""

    name: str
    dag: PrecisionDag
    cluster: Cluster
    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity

    def with_budget(self, group: str, memory_bytes: int) -> Instance:
        """The same with another memory budget of one group."""
        groups = tuple(attrs.evolve(g, memory_bytes=memory_bytes) if g.name == group else g for g in self.cluster.groups)
        return attrs.evolve(self, cluster=attrs.evolve(self.cluster, groups=groups))


def handing_on(instance: Instance) -> Instance:
    """The same on devices on which some operators hand on their input as it is."""
    rng = random.Random(f"handing on {instance.name}")
    profiles: dict[str, Profile] = {}
    for name, profile in instance.profiles.items():
        named = tuple(o.op_id for o in instance.dag.operators if o.op_class is OpClass.DEPENDENT and rng.random() < 0.8)
        profiles[name] = attrs.evolve(profile, handed_on=named)
    return attrs.evolve(instance, name=f"{instance.name}, handing on", profiles=profiles)


def accumulating(instance: Instance) -> Instance:
    """The same with a step of several micro-batches."""
    count = random.Random(f"micro-batches of {instance.name}").choice((2, 3, 7))
    dag = attrs.evolve(instance.dag, accumulate=count)
    known = {id(profile): attrs.evolve(profile, dag_digest=digest(dag)) for profile in instance.profiles.values()}
    profiles = {name: known[id(profile)] for name, profile in instance.profiles.items()}
    sensitivity = attrs.evolve(instance.sensitivity, dag_digest=digest(dag))
    return Instance(f"{instance.name}, accumulating {count}", dag, instance.cluster, profiles, sensitivity)


def delivering_float32(instance: Instance) -> Instance:
    """The same with all rungs of the groups that help delivering float32, at the costs that they have: few plans are left."""

    def wide(variant: Variant) -> Variant:
        return attrs.evolve(variant, output=Precision.FLOAT32)

    def costs(profile: Profile) -> Profile:
        adjustable = {operator.op_id for operator in instance.dag.adjustable}
        index = {o: {wide(v): i for v, i in own.items()} | own if o in adjustable else own for o, own in profile.cost_index.items()}
        steps = {wide(step.variant): attrs.evolve(step, variant=wide(step.variant)) for step in profile.steps}
        return attrs.evolve(profile, cost_index=index, steps=tuple(steps.values()))

    groups = tuple(
        group if group.role is Role.TRAIN else attrs.evolve(group, ladder=tuple(dict.fromkeys(map(wide, group.ladder))))
        for group in instance.cluster.groups
    )
    known = {id(profile): costs(profile) for profile in instance.profiles.values()}
    omega = {op_id: {wide(v): value for v, value in rated.items()} for op_id, rated in instance.sensitivity.omega.items()}
    return attrs.evolve(
        instance,
        cluster=attrs.evolve(instance.cluster, groups=groups),
        profiles={name: known[id(profile)] for name, profile in instance.profiles.items()},
        sensitivity=attrs.evolve(instance.sensitivity, omega=omega),
    )


def random_instance(seed: int, number: int) -> Instance:
    """The instance of that number in the series of a seed, without memory budgets."""
    rng = random.Random(f"{seed}/{number}")
    dag = _model(rng)
    groups: list[DeviceGroup] = []
    profiles: dict[str, Profile] = {}
    infer, train = rng.choice((1, 1, 2, 2, 3)), rng.choice((0, 1, 1, 1, 2, 2))
    for name in [f"train{i}" for i in range(train)] + [f"infer{i}" for i in range(infer)]:
        is_train = name.startswith("train")
        if not is_train and "infer0" in profiles and rng.random() < 0.3:  # more devices of a type that is there already
            like = groups[-1]
            group = attrs.evolve(like, name=name, sync_per_step=rng.random() < 0.3)
            profiles[name] = profiles[like.name]
        else:
            device = DeviceType(f"device of {name}", rng.choice((DeviceKind.CUDA, DeviceKind.CUDA, DeviceKind.CPU)))
            slowness = rng.uniform(0.3, 1.2) if is_train else rng.uniform(0.6, 1.6)
            base = rng.choice((FULL, FULL, FULL, FULL, FULL, HALF))
            profiles[name] = _profile(rng, dag, device, slowness, base)
            ladder = (base,) if is_train else _ladder(rng, dag, profiles[name], base)
            role, sync = Role.TRAIN if is_train else Role.INFER, rng.random() < 0.35
            group = DeviceGroup(name, device.name, rng.randrange(1, 4), role, base.compute, ladder, sync_per_step=sync)
        groups.append(group)
    pairs = itertools.combinations([group.name for group in groups], 2)
    links = tuple(Link(pair, rng.uniform(0, 6_000), rng.uniform(0, 60)) for pair in pairs if rng.random() < 0.6)
    sensitivity = Sensitivity(dag.model, digest(dag), "", "drawn", _omega(rng, dag))
    return Instance(f"{seed}/{number}", dag, Cluster("drawn", tuple(groups), links), profiles, sensitivity)


def choices(dag: PrecisionDag, ladder: Sequence[Variant], profile: Profile) -> list[Choice]:
    """What is to be decided for a group: operators that share a variant, and the rungs that were measured for all of them."""
    together: dict[str, list[OpId]] = {}
    for operator in dag.operators:
        if operator.op_class is OpClass.ADJUSTABLE and not operator.not_applicable:
            together.setdefault(operator.variant_group, []).append(operator.op_id)
    return [
        (tuple(names), tuple(rung for rung in ladder if all(rung in profile.cost_index[name] for name in names)))
        for names in together.values()
    ]


def _ladder(rng: random.Random, dag: PrecisionDag, profile: Profile, base: Variant) -> tuple[Variant, ...]:
    while True:
        ladder = rng.choice([ladder for ladder in LADDERS if ladder[-1] == base])
        if math.prod(len(rungs) for _, rungs in choices(dag, ladder, profile)) <= MOST_CHOICES:
            return ladder


class _Drawing:
    """A model that grows piece by piece around one tensor."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.g = rng, GraphBuilder("drawn", batch_size=4)
        self.width, self.count = 8, 0
        self.x = self.g.input("x", (4, 16, self.width))
        self.left = rng.randrange(2, 10)
        self.remembered = self.x

    def name(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    def linear(self, x: OpId, features: int = 0) -> OpId:
        self.left -= 1
        return self.g.linear(self.name("linear"), x, features or self.width, bias=self.rng.random() < 0.7)

    def small(self, x: OpId) -> OpId:
        """An operator that follows its input."""
        kind = self.rng.choice(("relu", "gelu", "softmax", "layer_norm"))
        affine = self.width if kind == "layer_norm" and x in (self.x, self.remembered) else 0
        return self.g.unary(self.name(kind), kind, x, guarded=kind in ("softmax", "layer_norm"), affine=affine)

    def fixed(self) -> None:
        shape, parameters = (4, 16, self.width), {"weight": (5, self.width)} if self.rng.random() < 0.5 else None
        self.x = self.g.add(self.name("fixed"), "fixed", OpClass.FIXED, [self.x], shape, parameter_shapes=parameters)

    def unaddressed(self) -> None:
        self.x = self.g.linear(self.name("frozen"), self.x, self.width, not_applicable="it is called by another name")

    def straight(self) -> None:
        self.x = self.linear(self.x)

    def bottleneck(self) -> None:
        """A residual block."""
        inner = self.linear(self.x, self.rng.choice((4, 8, 32)))
        if self.left > 0:
            inner = self.small(inner) if self.rng.random() < 0.8 else inner
            inner = self.linear(inner)
        else:
            inner = self.g.join(self.name("pool"), "pool", [inner], (4, 16, self.width))
        self.x = self.g.join(self.name("add"), "add", [inner, self.x])

    def fan(self) -> None:
        """Several readers of one tensor."""
        branches = [self.linear(self.x) for _ in range(min(self.left, self.rng.randrange(2, 4)))]
        if self.rng.random() < 0.3:
            branches.append(self.small(self.x))
        self.x = self.g.join(self.name("join"), "matmul", branches)

    def twice(self) -> None:
        """One module that runs twice: its two calls share a variant and a weight."""
        fqn = self.name("tied")
        self.left -= 2
        first = self.g.linear(fqn, self.x, self.width)
        first = self.small(first) if self.rng.random() < 0.5 else first
        self.x = self.g.linear(fqn, first, self.width)

    def skip(self) -> None:
        """An addition of what was remembered."""
        self.x = self.g.join(self.name("add"), "add", [self.x, self.remembered])

    def follow(self) -> None:
        self.x = self.small(self.x)

    def grow(self) -> None:
        if self.rng.random() < 0.3:
            self.fixed()
        while self.left > 0:
            pieces = [self.straight, self.bottleneck, self.follow]
            pieces += [self.fan, self.fan] if self.left > 1 else []
            pieces += [self.twice] if self.left > 1 and self.rng.random() < 0.4 else []
            pieces += [self.skip] if self.rng.random() < 0.5 else []
            pieces += [self.rng.choice((self.fixed, self.unaddressed))] if self.rng.random() < 0.2 else []
            self.rng.choice(pieces)()
            if self.rng.random() < 0.4:
                self.remembered = self.x
        if self.rng.random() < 0.5:
            self.follow()
        self.g.loss(self.x)


def _model(rng: random.Random) -> PrecisionDag:
    drawing = _Drawing(rng)
    drawing.grow()
    limit = rng.choice((64, 512, 2048, 10**6))
    dag = drawing.g.build(first_bucket=limit, bucket=rng.choice((256, 1024, 4096)))
    if rng.random() < 0.2:  # an order that does not follow the backward pass
        names = [parameter.fqn for parameter in dag.parameters]
        rng.shuffle(names)
        sizes = {parameter.fqn: 4 * parameter.numel for parameter in dag.parameters}
        parts = [tuple(names[i::3]) for i in range(3) if names[i::3]]
        dag = attrs.evolve(dag, buckets=tuple(Bucket(part, sum(sizes[name] for name in part)) for part in parts))
    if rng.random() < 0.15:
        dag = attrs.evolve(dag, operators=tuple(_detached(rng, operator) for operator in dag.operators))
    return dag


def _detached(rng: random.Random, operator: Operator) -> Operator:
    if len(operator.inputs) < 2 or rng.random() < 0.5:
        return operator
    return attrs.evolve(operator, no_grad_inputs=tuple(sorted({*operator.no_grad_inputs, len(operator.inputs) - 1})))


def _profile(rng: random.Random, dag: PrecisionDag, device: DeviceType, slowness: float, base: Variant) -> Profile:
    costs: list[OpCost] = []
    index: dict[OpId, dict[Variant, int]] = {}
    dispatch_ns = rng.choice((1, 500, 3_000, 30_000)) if device.kind is DeviceKind.CUDA else 1_000
    casts_ns = rng.choice((200, 2_000, 10_000))
    symmetric, gaps = rng.random() < 0.15, rng.choice((0.0, 0.0, 0.15))
    drawn: dict[object, OpCost] = {}
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        index[operator.op_id] = {}
        if operator.op_class is not OpClass.ADJUSTABLE:
            variants = [Variant.plain(precision) for precision in (FLOAT32, FLOAT16, BFLOAT16)]
        elif operator.not_applicable:
            variants = [FULL]
        else:
            variants = [rung for rung in RUNGS if rung == base or rng.random() >= gaps]
        for variant in variants:
            key = (operator.cost_key, variant) if symmetric else (operator.op_id, variant)
            if key not in drawn:
                drawn[key] = _cost(rng, operator, variant, slowness, dispatch_ns)
            index[operator.op_id][variant] = len(costs)
            costs.append(drawn[key])
    sizes = dict.fromkeys(bucket.nbytes for bucket in dag.buckets)
    alpha, beta = rng.uniform(100, 20_000), rng.uniform(0.5, 20.0)
    measured = tuple((nbytes, round((alpha + beta * nbytes) * rng.uniform(0.8, 1.3))) for nbytes in sizes)
    share = rng.choice((0.0, 0.0, 0.25, 0.7)) if device.kind is DeviceKind.CPU else rng.choice((0.0, 0.0, 0.1))
    return Profile(
        device=device,
        software={},
        model=dag.model,
        dag_digest=digest(dag),
        costs=tuple(costs),
        cost_index=index,
        casts=_cast_models(rng, casts_ns),
        optimizer_dispatch_ns=rng.randrange(0, dispatch_ns),
        optimizer_compute_ns=rng.randrange(0, 40_000),
        optimizer_state_bytes=8 * sum(parameter.numel for parameter in dag.parameters),
        input_bytes=rng.randrange(0, 4_096),
        collective=CollectiveModel(rng.randrange(2, 5), "drawn", alpha, beta, measured, compute_share=share),
    )


def _cost(rng: random.Random, operator: Operator, variant: Variant, slowness: float, dispatch_ns: int) -> OpCost:
    scale = slowness * (40_000 if operator.op_class is OpClass.ADJUSTABLE else 5_000)
    eight_bit = variant.compute is INT8
    keeps = rng.random()
    own = rng.choice((0, 64, operator.weight_numel * variant.compute.nbytes))
    if eight_bit:
        own += operator.input_numel(0)
    arguments = range(len(operator.inputs))
    if operator.op_class is OpClass.ADJUSTABLE:
        saves: tuple[int, ...] = () if eight_bit else (0,)
    else:
        saves = tuple(i for i in arguments if rng.random() < 0.4)
    cost = OpCost(
        forward_dispatch_ns=rng.randrange(dispatch_ns // 2, dispatch_ns),
        forward_compute_ns=round(scale * rng.uniform(*SPEED[variant.compute])),
        backward_dispatch_ns=2 * rng.randrange(dispatch_ns // 2, dispatch_ns),
        backward_compute_ns=round(2 * scale * rng.uniform(*SPEED[variant.compute])),
        saves_inputs=saves,
        saves_output=operator.op_class is not OpClass.ADJUSTABLE and keeps < 0.4,
        saved_own_bytes=own,
        workspace_bytes=rng.choice((0, 0, rng.randrange(2_048))),
    )
    # No further draw: what is drawn after it stays.
    backward = None if cost.workspace_bytes % 2 else cost.workspace_bytes * 7 % 2_048
    return attrs.evolve(cost, backward_workspace_bytes=backward)


def _cast_models(rng: random.Random, casts_ns: int) -> tuple[CastModel, ...]:
    models = []
    for source, target in itertools.product((FLOAT32, FLOAT16, BFLOAT16), Precision):
        for granularity, rounding in itertools.product(Granularity, Rounding):
            plain = granularity is Granularity.PER_TENSOR and rounding is Rounding.NEAREST
            if source is target or not (plain or target is INT8):
                continue
            key = CastKey(source, target, granularity, rounding)
            intercept, slope = rng.uniform(-50, casts_ns), casts_ns / 500 * rng.random()
            models.append(CastModel(key, rng.randrange(casts_ns), intercept, slope, 1.0))
    return tuple(models)


def _omega(rng: random.Random, dag: PrecisionDag) -> dict[OpId, dict[Variant, float]]:
    """Lower precision tends to be worse, but not always; some operators are equal, and a base precision may be left out."""
    alike, leave_out = rng.random() < 0.2, rng.random() < 0.3
    common = {variant: _draw(rng, variant) for variant in RUNGS}
    return {
        operator.op_id: {
            variant: common[variant] if alike else _draw(rng, variant) for variant in RUNGS if not (leave_out and variant == FULL)
        }
        for operator in dag.adjustable
    }


def _draw(rng: random.Random, variant: Variant) -> float:
    low, high = SENSITIVITY[variant.compute]
    return 0.0 if high == 0 or rng.random() < 0.03 else math.exp(rng.uniform(math.log(low), math.log(high)))
