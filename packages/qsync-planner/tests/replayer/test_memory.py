"""The memory model: by hand, against a naive walk through the step, and what must hold of any peak."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from hand_models import BF16, FP32, I8, LADDER, op, profile
from hypothesis import assume, given
from hypothesis import strategies as st
from random_models import assignments, changes, dags, profiles
from synthetic import GraphBuilder

from hypothesis_profiles import tries
from qsync_core.ir.dag import Bucket, OpClass, Operator, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType, OpCost, Profile
from qsync_core.ir.semantics import CastSite, casts, output_precision, steps_of
from qsync_core.ir.variant import Variant
from qsync_planner.replayer.cost_mapper import CostMapper
from qsync_planner.replayer.cost_model import CostModel
from qsync_planner.replayer.memory import MemoryEstimate, MemoryLedger

KEEPS_INPUT = OpCost(0, 0, 0, 0, saves_inputs=(0,))
INT8_COPY = OpCost(0, 0, 0, 0, saved_own_bytes=32)


def estimate_memory(
    dag: PrecisionDag,
    profile: Profile,
    variants: Mapping[OpId, Variant],
    *,
    model: CostModel | None = None,
    distributed: bool = True,
    bucket_views: bool = False,
) -> MemoryEstimate:
    mapper = CostMapper(dag, model or CostModel(dag, profile), variants)
    return MemoryLedger(mapper, distributed=distributed, bucket_views=bucket_views).estimate()


def one_layer() -> PrecisionDag:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.linear("fc", x, 16, bias=False))
    return g.build()


def test_one_linear_by_hand() -> None:
    dag = one_layer()
    measured = profile(dag, {"fc": KEEPS_INPUT}, optimizer_state_bytes=1000, input_bytes=128)
    # Weights 16·8·4 = 512, optimizer 1,000, batch 128, no bucket outside DDP.
    # Kept: norm's output, 32·4 = 128.  Moments: norm, fc, loss forward; loss, fc, norm backward.
    # Peak at fc's backward: kept 128 + gradient of fc's output 256 + weight gradient 512 + gradient of fc's input 128 = 1,024
    # (the loss' output and its gradient, 4 bytes each, are gone; norm's gradient lives from fc's backward on).
    assert estimate_memory(dag, measured, {op("fc"): FP32}, distributed=False) == MemoryEstimate(
        static_bytes=1640, saved_bytes=128, peak_bytes=2664
    )


def test_ddp_keeps_a_bucket_copy_of_all_gradients() -> None:
    dag = attrs.evolve(one_layer(), buckets=(Bucket(("fc.weight",), 512),))
    measured = profile(dag, {})
    alone = estimate_memory(dag, measured, {op("fc"): FP32}, distributed=False)
    assert estimate_memory(dag, measured, {op("fc"): FP32}).static_bytes == alone.static_bytes + 512


def two_layers() -> PrecisionDag:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.linear("fc2", g.linear("fc1", x, 16, bias=False), 8, bias=False))
    return attrs.evolve(g.build(), buckets=(Bucket(("fc2.weight", "fc1.weight"), 1024),))


@given(batch=st.integers(1, 64), bucket_views=st.booleans())
def test_another_batch_is_as_if_it_had_been_traced(batch: int, bucket_views: bool) -> None:
    """With few samples the peak is at the end of the backward pass, where all gradients are; with many at its start."""

    def traced(batch: int) -> MemoryEstimate:
        g = GraphBuilder("m", batch)
        x = g.unary("norm", "layer_norm", g.input("x", (batch, 8)), guarded=True)
        g.loss(g.linear("fc2", g.linear("fc1", x, 16, bias=False), 8, bias=False))
        dag = attrs.evolve(g.build(), buckets=(Bucket(("fc2.weight", "fc1.weight"), 1024),))
        measured = profile(dag, {"fc1": KEEPS_INPUT, "fc2": KEEPS_INPUT}, input_bytes=32 * batch, optimizer_state_bytes=1000)
        return estimate_memory(dag, measured, {op("fc1"): FP32, op("fc2"): FP32}, bucket_views=bucket_views)

    scaled, direct = traced(4).at_batch(batch), traced(batch)
    loss = 2 * 4 * batch  # the loss and its gradient are one number whatever the batch is, and were taken as proportional
    assert abs(scaled.peak_bytes - direct.peak_bytes) <= loss
    assert (scaled.static_bytes, sum(scaled.parts.values())) == (direct.static_bytes, scaled.peak_bytes)
    for name, nbytes in direct.parts.items():
        assert abs(scaled.parts[name] - nbytes) <= loss


def test_gradients_in_the_buckets_are_there_once() -> None:
    dag = two_layers()
    measured = profile(dag, {"fc1": KEEPS_INPUT, "fc2": KEEPS_INPUT})
    variants = {op("fc1"): FP32, op("fc2"): FP32}
    mapper = CostMapper(dag, CostModel(dag, measured), variants)
    # Weights 512 + 512 and buckets of 1,024 are always there.
    # fc2's backward: kept 128 + 256, gradients of both its sides 128 + 256, of its weight 512: 1,280.
    # fc1's backward: kept 128, gradients of both its sides 256 + 128, of its weight 512: 1,024, and fc2's, 512, if the bucket has
    # but a copy of it: 1,536.
    assert MemoryLedger(mapper).peak_bytes() == 2048 + 1536
    assert MemoryLedger(mapper, bucket_views=True).peak_bytes() == 2048 + 1280
    alone = MemoryLedger(mapper, distributed=False, bucket_views=True)
    assert alone.peak_bytes() == MemoryLedger(mapper, distributed=False).peak_bytes() == 1024 + 1536
    on_gpu = CostMapper(dag, CostModel(dag, attrs.evolve(measured, device=DeviceType("gpu", DeviceKind.CUDA))), variants)
    assert MemoryLedger(on_gpu, bucket_views=True).peak_bytes() == 2048 + 1280 + 1024  # DDP's first buckets, in the second step
    assert MemoryLedger(on_gpu, distributed=False).peak_bytes() == 1024 + 1536
    parts = MemoryLedger(mapper, bucket_views=True).estimate().parts
    assert (parts["gradients"], parts["activations"], sum(parts.values())) == (1024 + 512, 768, 2048 + 1280)


def fan_out(count: int) -> PrecisionDag:
    g = GraphBuilder("m")
    x = g.unary("norm", "layer_norm", g.input("x", (4, 8)), guarded=True)
    g.loss(g.join("sum", "add", [g.linear(f"fc{i}", x, 8) for i in range(count)]))
    return g.build()


def saved(dag: PrecisionDag, cost: OpCost, variant: Variant) -> int:
    measured = profile(dag, {o.op_id.fqn: cost for o in dag.adjustable})
    return estimate_memory(dag, measured, {o.op_id: variant for o in dag.adjustable}).saved_bytes


def test_consumers_share_one_saved_activation() -> None:
    assert saved(fan_out(1), KEEPS_INPUT, FP32) == 32 * 4
    assert saved(fan_out(3), KEEPS_INPUT, FP32) == 32 * 4


def test_consumers_share_one_saved_cast_copy() -> None:
    assert saved(fan_out(3), KEEPS_INPUT, BF16) == 32 * 2


def test_three_own_int8_copies_are_three() -> None:
    assert saved(fan_out(3), INT8_COPY, I8) == 3 * 32


def test_a_shared_int8_copy_is_one() -> None:
    assert saved(fan_out(3), KEEPS_INPUT, I8) == 32


def test_original_and_copy_both_count_where_both_are_kept() -> None:
    dag = fan_out(2)
    measured = profile(dag, {o.op_id.fqn: KEEPS_INPUT for o in dag.adjustable})
    kept = estimate_memory(dag, measured, {op("fc0"): FP32, op("fc1"): BF16}).saved_bytes
    assert kept == 32 * 4 + 32 * 2


def test_a_kept_output_is_the_one_that_its_consumer_keeps() -> None:
    g = GraphBuilder("m")
    x = g.unary("relu", "relu", g.linear("fc0", g.input("x", (4, 8)), 8))
    g.loss(g.linear("fc1", x, 8))
    dag = g.build()
    keeps_output = OpCost(0, 0, 0, 0, saves_output=True)
    variants = {op("fc0"): FP32, op("fc1"): FP32}
    assert estimate_memory(dag, profile(dag, {"relu": keeps_output}), variants).saved_bytes == 128
    assert estimate_memory(dag, profile(dag, {"relu": keeps_output, "fc1": KEEPS_INPUT}), variants).saved_bytes == 128


def test_a_batch_that_is_kept_is_counted_once_with_the_batch() -> None:
    g = GraphBuilder("m")
    g.loss(g.linear("fc", g.input("x", (4, 8)), 8))
    dag = g.build()
    measured = profile(dag, {"fc": KEEPS_INPUT}, input_bytes=128)
    assert estimate_memory(dag, measured, {op("fc"): FP32}).saved_bytes == 0


def after_attention(handed_on: tuple[OpId, ...]) -> MemoryEstimate:
    """Attention that keeps its result, ``contiguous``, a linear that keeps what it reads: 128 bytes each, 2 linears of 256."""
    g = GraphBuilder("m")
    x = g.unary("attention", "attention", g.linear("qkv", g.input("x", (4, 8)), 8))
    g.loss(g.linear("out", g.unary("contiguous", "contiguous", x), 8))
    dag = g.build()
    measured = profile(dag, {"attention": OpCost(0, 0, 0, 0, saves_output=True), "out": KEEPS_INPUT})
    return estimate_memory(dag, attrs.evolve(measured, handed_on=handed_on), {op("qkv"): FP32, op("out"): FP32}, distributed=False)


def test_what_an_operator_hands_on_as_it_is_counts_once() -> None:
    copied, same = after_attention(()), after_attention((op("contiguous"),))
    assert copied.saved_bytes == 2 * 128
    assert same.saved_bytes == 128
    # The highest moment is the backward of qkv, or of a linear before: by then the gradient has one tensor less to be in as well.
    assert same.peak_bytes < copied.peak_bytes


def test_what_is_handed_on_lives_until_its_readers_have_run() -> None:
    g = GraphBuilder("m")
    first = g.linear("fc0", g.input("x", (4, 8)), 8)
    handed = g.unary("contiguous", "contiguous", first)
    other = g.linear("fc1", first, 8)
    g.loss(g.join("add", "add", [g.linear("fc2", other, 8), handed]))
    dag = g.build()
    measured = attrs.evolve(profile(dag, {}), handed_on=(op("contiguous"),))
    mapper = CostMapper(dag, CostModel(dag, measured), {op(f"fc{i}"): FP32 for i in range(3)})
    moments = MemoryLedger(mapper, distributed=False).moments_bytes()
    gradients, size = (8 * 8 + 8) * 4, 128  # of one linear; a tensor
    # Forward: x, fc0, contiguous, fc1, fc2, add, loss: fc0's result is there until add has read it, under either name.
    assert moments[:6] == [0, size, size, 2 * size, 3 * size, 3 * size]
    # Backward of add makes the gradients of fc2's result and of fc0's; contiguous makes none.
    by_name = {o.op_id.fqn: moments[2 * len(dag.operators) - 1 - i] for i, o in enumerate(dag.operators)}
    assert by_name["add"] == 3 * size
    assert by_name["fc2"] == 3 * size + gradients
    assert by_name["fc1"] == 2 * size + 2 * gradients
    assert by_name["contiguous"] == by_name["fc0"] - gradients == size + 2 * gradients


def naive_peak(dag: PrecisionDag, measured: Profile, variants: dict[OpId, Variant], *, bucket_views: bool) -> int:
    """Walk the step moment by moment and ask of every piece of memory whether it is alive: a reference written the slow way."""
    operators = dag.operators
    count = len(operators)
    formats: dict[OpId, Precision] = {}
    runs: list[Variant] = []
    arriving: list[list[Precision]] = []
    for o in operators:
        incoming = [formats[i] for i in o.inputs]
        adjustable = o.op_class is OpClass.ADJUSTABLE
        chosen = variants.get(o.op_id, o.variant) if adjustable else None
        formats[o.op_id] = output_precision(o, chosen, incoming)
        runs.append(chosen or Variant.plain(formats[o.op_id]))
        arriving.append(incoming)

    def cost(i: int) -> OpCost:
        return OpCost(0, 0, 0, 0) if operators[i].kind == "input" else measured.cost(operators[i].op_id, runs[i])

    def input_casts(i: int) -> dict[int, object]:
        o = operators[i]
        chosen = runs[i] if o.op_class is OpClass.ADJUSTABLE else None
        return {c.input_index: c.key for c in casts(o, chosen, arriving[i]) if c.site is CastSite.INPUT}

    def reads(i: int, producer: Operator) -> list[int]:
        return [k for k, source in enumerate(operators[i].inputs) if source == producer.op_id]

    def tensor_of(i: int) -> int:
        o = operators[i]
        if o.op_id not in measured.handed_on or o.op_class is not OpClass.DEPENDENT or len(o.inputs) != 1 or o.parameters:
            return i
        return tensor_of(dag.index[o.inputs[0]])

    def starts(i: int) -> list[int]:
        """When gradients of an operator's output are made."""
        readers = [r for r in range(count) if reads(r, operators[i])]
        makers = [r for r in readers if any(k not in operators[r].no_grad_inputs for k in reads(r, operators[i]))]
        made = [start for r in makers for start in ([backward[r]] if tensor_of(r) == r else starts(r))]
        return made if readers else [backward[i]]

    backward = {i: 2 * count - 1 - i for i in range(count)}
    peak = 0
    for moment in range(2 * count):
        alive = 0
        for p, producer in enumerate(operators):
            size = producer.output_numel * formats[producer.op_id].nbytes
            readers = [i for i in range(count) if reads(i, producer)]
            if producer.kind != "input" and tensor_of(p) == p:
                names = [i for i in range(count) if tensor_of(i) == p]
                uses = [(i, k, n) for n in names for i in range(count) for k in reads(i, operators[n])]
                ends = [p, *(i for i, _, _ in uses)]
                ends += [backward[i] for i, k, _ in uses if k in cost(i).saves_inputs and k not in input_casts(i)]
                ends += [backward[n] for n in names if cost(n).saves_output]
                alive += size * (p <= moment <= max(ends))
                if starts(p):
                    alive += size * (min(starts(p)) <= moment <= backward[p])
            for key in {input_casts(i)[k] for i in readers for k in reads(i, producer) if k in input_casts(i)}:
                users = [(i, k) for i in readers for k in reads(i, producer) if input_casts(i).get(k) == key]
                ends = [i for i, _ in users] + [backward[i] for i, k in users if k in cost(i).saves_inputs]
                copy = operators[users[0][0]].input_numel(users[0][1]) * key.target.nbytes  # type: ignore[attr-defined]
                alive += copy * (users[0][0] <= moment <= max(ends))
            alive += cost(p).saved_own_bytes * (p <= moment <= backward[p])
            alive += cost(p).workspaces[0] * (moment == p) + cost(p).workspaces[1] * (moment == backward[p])
            if moment == backward[p] and producer.op_class is OpClass.ADJUSTABLE:
                needed = steps_of(runs[p]).gradient_copies(0 not in producer.no_grad_inputs)
                copies = {copy.precision for copy in needed} - {formats[producer.op_id]}
                alive += producer.output_numel * sum(copy.nbytes for copy in copies)
        for parameter in dag.parameters:
            users_of = [i for i, o in enumerate(operators) if parameter.fqn in o.parameters]
            if users_of and moment >= backward[max(users_of)] and not (bucket_views and moment > backward[min(users_of)]):
                alive += parameter.numel * 4
        peak = max(peak, alive)
    weights = sum(parameter.numel * 4 for parameter in dag.parameters)
    buckets = (1 if measured.device.kind is DeviceKind.CPU else 2) * sum(b.nbytes for b in dag.buckets)  # as of the second step
    return weights + measured.optimizer_state_bytes + measured.input_bytes + buckets + peak


@tries(60)
@given(st.data())
def test_the_peak_equals_a_naive_walk_through_the_step(data: st.DataObject) -> None:
    dag = data.draw(dags())
    measured = data.draw(profiles(dag, data.draw(st.sampled_from(list(DeviceKind)))))
    # Operators deliver as they are decided to: a result that is turned to float32 is another tensor, which this walk does not know.
    variants = OutputFormats.of(dag).decided(data.draw(assignments(dag)))
    assume(all(variant in measured.cost_index[op_id] for op_id, variant in variants.items()))
    bucket_views = data.draw(st.booleans())
    estimate = estimate_memory(dag, measured, variants, bucket_views=bucket_views)
    assert estimate.peak_bytes == naive_peak(dag, measured, variants, bucket_views=bucket_views)
    assert estimate.peak_bytes >= estimate.static_bytes + estimate.saved_bytes


@tries(60)
@given(st.data())
def test_a_ledger_kept_up_to_date_equals_one_made_anew_at_every_moment(data: st.DataObject) -> None:
    dag = data.draw(dags(most=24))
    model = CostModel(dag, data.draw(profiles(dag, data.draw(st.sampled_from(list(DeviceKind))))))
    variants = data.draw(assignments(dag))
    mapper = CostMapper(dag, model, variants)
    ledger = MemoryLedger(mapper)
    for change, keep in data.draw(st.lists(st.tuples(changes(dag), st.booleans()), max_size=5)):
        touched = mapper.update(change)
        before = ledger.refresh(touched.evaluated, touched.producers)
        assert state(ledger) == state(MemoryLedger(CostMapper(dag, model, {**variants, **change})))
        if keep:
            mapper.commit()
            variants = {**variants, **change}
        else:
            mapper.rollback()
            ledger.restore(before)
        assert state(ledger) == state(MemoryLedger(CostMapper(dag, model, variants)))


def state(ledger: MemoryLedger) -> tuple[list[int], MemoryEstimate]:
    moments = ledger.moments_bytes()
    assert ledger.peak_bytes() == ledger.static_bytes + max(moments)
    return moments, ledger.estimate()


@tries(40)
@given(st.data())
def test_keeping_more_never_lowers_the_peak(data: st.DataObject) -> None:
    dag = data.draw(dags())
    measured = data.draw(profiles(dag, data.draw(st.sampled_from(list(DeviceKind)))))
    variants = data.draw(assignments(dag))
    more = tuple(attrs.evolve(c, saved_own_bytes=c.saved_own_bytes + 7, saves_output=True) for c in measured.costs)
    before = estimate_memory(dag, measured, variants)
    after = estimate_memory(dag, attrs.evolve(measured, costs=more), variants)
    assert after.peak_bytes >= before.peak_bytes
    assert after.saved_bytes >= before.saved_bytes


def test_lower_rungs_of_the_hand_ladder_keep_fewer_bytes() -> None:
    dag = fan_out(4)
    kept = [saved(dag, KEEPS_INPUT, rung) for rung in LADDER if rung in (I8, BF16, FP32)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3
