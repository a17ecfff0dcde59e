"""Synthetic graphs and profiles: transformers and ResNets of real size with roofline costs for T4 and V100; nothing is measured.

Shapes, operator counts and parameter counts are those of BERT-base and ResNet50; a kernel's time is the larger of its flops over
half the chip's peak and its bytes over its bandwidth, plus a launch.  Used by the replayer's and the allocator's tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from qsync_core.artifacts.files import digest
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.dag import Bucket, OpClass, Operator, Parameter, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.profile import CastKey, CastModel, CollectiveModel, DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.variant import Variant

FLOAT32, FLOAT16, BFLOAT16, INT8 = Precision.FLOAT32, Precision.FLOAT16, Precision.BFLOAT16, Precision.INT8
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


class GraphBuilder:
    """Builds a PrecisionDag operator by operator, with parameters and DDP's default buckets."""

    def __init__(self, model: str, batch_size: int = 1) -> None:
        self.model, self.batch_size = model, batch_size
        self.operators: list[Operator] = []
        self.parameters: list[Parameter] = []
        self._by_id: dict[OpId, Operator] = {}
        self._calls: dict[str, int] = {}

    def add(
        self,
        fqn: str,
        kind: str,
        op_class: OpClass,
        inputs: Sequence[OpId],
        output_shape: tuple[int, ...],
        *,
        weight_shape: tuple[int, ...] = (),
        parameter_shapes: Mapping[str, tuple[int, ...]] | None = None,
        flops: int = 0,
        attributes: Mapping[str, str] | None = None,
        not_applicable: str = "",
    ) -> OpId:
        """Append an operator; a repeated FQN is a further call of the same module."""
        call = self._calls.get(fqn, 0)
        self._calls[fqn] = call + 1
        names = [f"{fqn}.{name}" for name in parameter_shapes or {}]
        if call == 0:
            self.parameters += [Parameter(f"{fqn}.{name}", shape) for name, shape in (parameter_shapes or {}).items()]
        operator = Operator(
            OpId(fqn, call),
            kind,
            op_class,
            tuple(inputs),
            tuple(self._by_id[i].output_shape for i in inputs),
            output_shape,
            parameters=tuple(names),
            weight_shape=weight_shape,
            attributes=dict(attributes or {}),
            flops=flops,
            variant_group=fqn,
            depth=1 + max((self._by_id[i].depth for i in inputs), default=-1),
            not_applicable=not_applicable,
            no_grad_inputs=tuple(k for k, i in enumerate(inputs) if self._by_id[i].kind == "input"),
        )
        self.operators.append(operator)
        self._by_id[operator.op_id] = operator
        return operator.op_id

    def input(self, name: str, shape: tuple[int, ...]) -> OpId:
        """A graph input."""
        return self.add(f"$input.{name}", "input", OpClass.FIXED, (), shape)

    def linear(self, fqn: str, x: OpId, features: int, *, bias: bool = True, not_applicable: str = "") -> OpId:
        """A linear layer."""
        *rows, inner = self._by_id[x].output_shape
        shapes = {"weight": (features, inner)} | ({"bias": (features,)} if bias else {})
        return self.add(
            fqn,
            "linear",
            OpClass.ADJUSTABLE,
            [x],
            (*rows, features),
            weight_shape=(features, inner),
            parameter_shapes=shapes,
            flops=2 * math.prod(rows) * inner * features,
            not_applicable=not_applicable,
        )

    def conv2d(self, fqn: str, x: OpId, channels: int, kernel: int = 3, stride: int = 1) -> OpId:
        """A convolution with same padding, without bias."""
        n, c, h, w = self._by_id[x].output_shape
        out = (n, channels, -(-h // stride), -(-w // stride))
        weight = (channels, c, kernel, kernel)
        return self.add(
            fqn,
            "conv2d",
            OpClass.ADJUSTABLE,
            [x],
            out,
            weight_shape=weight,
            parameter_shapes={"weight": weight},
            flops=2 * math.prod(out) * c * kernel * kernel,
            attributes={
                "stride": f"{stride},{stride}",
                "padding": f"{kernel // 2},{kernel // 2}",
                "dilation": "1,1",
                "groups": "1",
            },
        )

    def unary(self, fqn: str, kind: str, x: OpId, *, guarded: bool = False, affine: int = 0, shape: tuple[int, ...] = ()) -> OpId:
        """An element-wise or normalising operator, with a weight and a bias of ``affine`` elements where that is not 0."""
        parameters = {"weight": (affine,), "bias": (affine,)} if affine else None
        op_class = OpClass.GUARDED if guarded else OpClass.DEPENDENT
        return self.add(fqn, kind, op_class, [x], shape or self._by_id[x].output_shape, parameter_shapes=parameters)

    def join(self, fqn: str, kind: str, inputs: Sequence[OpId], shape: tuple[int, ...] = (), flops: int = 0) -> OpId:
        """A dependent operator of several inputs."""
        return self.add(fqn, kind, OpClass.DEPENDENT, inputs, shape or self._by_id[inputs[0]].output_shape, flops=flops)

    def loss(self, x: OpId) -> OpId:
        """The loss."""
        return self.add("loss", "loss", OpClass.FIXED, [x], (1,))

    def build(self, first_bucket: int = FIRST_BUCKET_BYTES, bucket: int = BUCKET_BYTES) -> PrecisionDag:
        """The graph, with buckets filled in the order in which gradients become ready."""
        return PrecisionDag(
            self.model,
            tuple(self.operators),
            tuple(self.parameters),
            buckets_of(self.operators, self.parameters, first_bucket, bucket),
            loss="cross_entropy",
            batch_size=self.batch_size,
        )


def buckets_of(operators: Iterable[Operator], parameters: Iterable[Parameter], first: int, other: int) -> tuple[Bucket, ...]:
    """Gradient buckets by DDP's rule: filled in backward order, closed when the limit is reached; the first is smaller."""
    size = {parameter.fqn: parameter.numel * 4 for parameter in parameters}
    order: dict[str, None] = {}
    for operator in operators:
        for name in reversed(operator.parameters):
            order.setdefault(name)
    buckets: list[Bucket] = []
    names: list[str] = []
    filled = 0
    for name in reversed(order):
        names.append(name)
        filled += size[name]
        if filled >= (first if not buckets else other):
            buckets.append(Bucket(tuple(names), filled))
            names, filled = [], 0
    if names:
        buckets.append(Bucket(tuple(names), filled))
    return tuple(buckets)


def transformer(
    layers: int = 12, hidden: int = 768, heads: int = 12, batch: int = 12, tokens: int = 384, model: str = "bert"
) -> PrecisionDag:
    """A BERT encoder with a question-answering head: 6 linears a layer, 15 operators a layer, 6·layers + 1 adjustable."""
    g = GraphBuilder(model, batch)
    rows = (batch, tokens, hidden)
    ids = g.input("input_ids", (batch, tokens))
    x = g.add("embeddings.word", "embedding", OpClass.FIXED, [ids], rows, parameter_shapes={"weight": (30522, hidden)})
    x = g.unary("embeddings.norm", "layer_norm", x, guarded=True, affine=hidden)
    x = g.unary("embeddings.dropout", "dropout", x)
    for i in range(layers):
        at = f"layer.{i}"
        q, k, v = (g.linear(f"{at}.attention.{name}", x, hidden) for name in ("query", "key", "value"))
        scores = g.join(f"{at}.attention.scores", "matmul", [q, k], (batch, heads, tokens, tokens), 2 * batch * tokens**2 * hidden)
        weights = g.unary(f"{at}.attention.softmax", "softmax", scores, guarded=True)
        weights = g.unary(f"{at}.attention.dropout", "dropout", weights)
        context = g.join(f"{at}.attention.context", "matmul", [weights, v], rows, 2 * batch * tokens**2 * hidden)
        out = g.linear(f"{at}.attention.output", context, hidden)
        out = g.unary(f"{at}.attention.output_dropout", "dropout", out)
        out = g.join(f"{at}.attention.add", "add", [out, x])
        x = g.unary(f"{at}.attention.norm", "layer_norm", out, guarded=True, affine=hidden)
        up = g.linear(f"{at}.intermediate", x, 4 * hidden)
        up = g.unary(f"{at}.gelu", "gelu", up)
        down = g.linear(f"{at}.output", up, hidden)
        down = g.unary(f"{at}.output_dropout", "dropout", down)
        down = g.join(f"{at}.add", "add", [down, x])
        x = g.unary(f"{at}.norm", "layer_norm", down, guarded=True, affine=hidden)
    g.loss(g.linear("qa_outputs", x, 2))
    return g.build()


def resnet(
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    batch: int = 64,
    image: int = 224,
    classes: int = 1000,
    model: str = "resnet",
) -> PrecisionDag:
    """A bottleneck ResNet (50 with the default blocks): 53 convolutions and one linear layer, all adjustable."""
    g = GraphBuilder(model, batch)

    def conv_norm(at: str, x: OpId, channels: int, kernel: int, stride: int) -> OpId:
        return g.unary(
            f"{at}.norm", "batch_norm", g.conv2d(f"{at}.conv", x, channels, kernel, stride), guarded=True, affine=channels
        )

    x = g.unary("stem.relu", "relu", conv_norm("stem", g.input("image", (batch, 3, image, image)), width, 7, 2))
    side = image // 4
    x = g.unary("stem.pool", "max_pool2d", x, shape=(batch, width, side, side))
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for i in range(count):
            at, stride = f"layer{stage + 1}.{i}", 2 if stage and not i else 1
            y = g.unary(f"{at}.relu1", "relu", conv_norm(f"{at}.1", x, inner, 1, 1))
            y = g.unary(f"{at}.relu2", "relu", conv_norm(f"{at}.2", y, inner, 3, stride))
            y = conv_norm(f"{at}.3", y, 4 * inner, 1, 1)
            shortcut = x if i else conv_norm(f"{at}.downsample", x, 4 * inner, 1, stride)
            x = g.unary(f"{at}.relu3", "relu", g.join(f"{at}.add", "add", [y, shortcut]))
    x = g.unary("pool", "adaptive_avg_pool2d", x, shape=(batch, 4 * width * 2 ** (len(blocks) - 1)))
    g.loss(g.linear("fc", x, classes))
    return g.build()


@attrs.frozen
class Chip:
    """Peak tera-operations per second by format, memory bandwidth in GB/s, host time per launch in ns."""

    name: str
    tera: Mapping[Precision, float]
    bandwidth_gbs: float
    launch_ns: int = 6_000

    def compute_ns(self, precision: Precision, flops: float, nbytes: float) -> int:
        """Roofline time of a kernel that reaches half the peak rate."""
        rate = self.tera.get(precision, self.tera[FLOAT32]) * 0.5
        return 3_000 + round(max(flops / rate / 1e3, nbytes / self.bandwidth_gbs))


T4 = Chip("T4", {FLOAT32: 8.1, FLOAT16: 65.0, INT8: 130.0}, 300.0)
V100 = Chip("V100", {FLOAT32: 15.7, FLOAT16: 125.0}, 900.0)

INT8_RUNG = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT32)
INT8_TO_FLOAT16_RUNG = Variant.of(INT8, sixteen_bit=FLOAT16, output=FLOAT16)
FLOAT16_RUNG = Variant.of(FLOAT16)
FLOAT32_RUNG = Variant.of(FLOAT32)
LADDER = (INT8_RUNG, FLOAT16_RUNG, FLOAT32_RUNG)

_SAVES_OUTPUT = {"relu", "softmax"}
_SAVES_NOTHING = {"add", "input", "avg_pool"}


def operator_cost(operator: Operator, variant: Variant, chip: Chip) -> OpCost:
    """Roofline cost of one operator: backward takes two products where the operator has a weight, else twice the bytes."""
    size = variant.compute.nbytes
    inputs = sum(math.prod(shape) for shape in operator.input_shapes)
    moved = size * (inputs + operator.weight_numel) + variant.output.nbytes * operator.output_numel
    gradient = variant.grad_input if operator.op_class is OpClass.ADJUSTABLE else variant.compute
    eight_bit = variant.compute.needs_scale
    weight_copy = operator.weight_numel * size if variant.compute is not FLOAT32 else 0
    saves = () if operator.kind in _SAVES_NOTHING or operator.kind in _SAVES_OUTPUT else tuple(range(len(operator.inputs)))
    return OpCost(
        forward_dispatch_ns=chip.launch_ns,
        forward_compute_ns=chip.compute_ns(variant.compute, operator.flops, moved),
        backward_dispatch_ns=2 * chip.launch_ns,
        backward_compute_ns=chip.compute_ns(gradient, 2 * operator.flops, 2 * gradient.nbytes / size * moved),
        saves_inputs=() if eight_bit else saves,
        saves_output=operator.kind in _SAVES_OUTPUT,
        saved_own_bytes=weight_copy + (inputs if eight_bit else 0) + (operator.output_numel if operator.kind == "dropout" else 0),
        workspace_bytes=0,
        backend="roofline",
        config=f"{chip.name}/{variant.label}",
    )


def cast_models(chip: Chip) -> tuple[CastModel, ...]:
    """Every cast between formats: two passes over memory, and one more to find the scales of an 8-bit target."""
    models = []
    floats = (FLOAT32, FLOAT16, BFLOAT16)
    for source in floats:
        for target in (*floats, INT8):
            kinds = [(Granularity.PER_TENSOR, Rounding.NEAREST)]
            if target.needs_scale:
                kinds = [(granularity, rounding) for granularity in Granularity for rounding in Rounding]
            passes = source.nbytes * (2 if target.needs_scale else 1) + target.nbytes
            models += [
                CastModel(CastKey(source, target, *kind), chip.launch_ns, 3_000.0, passes / chip.bandwidth_gbs, 1.0)
                for kind in kinds
                if source is not target
            ]
    return tuple(models)


def roofline_profile(
    dag: PrecisionDag,
    chip: Chip,
    rungs: Sequence[Variant] = LADDER,
    *,
    kind: DeviceKind = DeviceKind.CUDA,
    world_size: int = 2,
    gbps: float = 80.0,
) -> Profile:
    """A profile of the model on the chip, with Adam as the optimizer and a ring of ``world_size`` ranks at ``gbps``."""
    costs: list[OpCost] = []
    index: dict[OpId, dict[Variant, int]] = {}
    plain = [Variant.plain(FLOAT32), Variant.plain(FLOAT16), Variant.plain(BFLOAT16)]
    for operator in dag.operators:
        if operator.kind == "input":
            continue
        variants = rungs if operator.is_adjustable else [operator.variant] if operator.op_class is OpClass.ADJUSTABLE else plain
        index[operator.op_id] = {}
        for variant in variants:
            index[operator.op_id][variant] = len(costs)
            costs.append(operator_cost(operator, variant, chip))
    parameters = sum(p.numel for p in dag.parameters)
    beta = 8.0 / gbps * 2 * (world_size - 1) / max(1, world_size)
    return Profile(
        device=DeviceType(chip.name, kind),
        software={"made": "by roofline"},
        model=dag.model,
        dag_digest=digest(dag),
        costs=tuple(costs),
        cost_index=index,
        casts=cast_models(chip),
        optimizer_dispatch_ns=20 * chip.launch_ns,
        optimizer_compute_ns=chip.compute_ns(FLOAT32, 0, 28 * parameters),
        optimizer_state_bytes=8 * parameters,
        input_bytes=4 * sum(o.output_numel for o in dag.operators if o.kind == "input"),
        collective=CollectiveModel(world_size, "nccl", 20_000.0, beta),
    )


def hybrid_cluster(
    train: int = 2, infer: int = 2, ladder: Sequence[Variant] = LADDER, memory_bytes: int = 0, *, sync_per_step: bool = False
) -> Cluster:
    """V100s that train and T4s that help, 32 Gbit/s between them."""
    groups = (
        DeviceGroup("train", "V100", train, Role.TRAIN, FLOAT32, (FLOAT32_RUNG,), sync_per_step=sync_per_step),
        DeviceGroup("infer", "T4", infer, Role.INFER, FLOAT32, tuple(ladder), memory_bytes, sync_per_step=sync_per_step),
    )
    return Cluster("hybrid", groups, (Link(("train", "infer"), 20_000.0, 8.0 / 32),))


def hybrid_profiles(dag: PrecisionDag, ladder: Sequence[Variant] = LADDER) -> dict[str, Profile]:
    """Profiles for :func:`hybrid_cluster`."""
    return {"train": roofline_profile(dag, V100, (FLOAT32_RUNG,)), "infer": roofline_profile(dag, T4, ladder)}
