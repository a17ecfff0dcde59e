"""The demo's plans, made from measurements: the baselines, QSync's own, and probes that test the prediction."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer
from qsync_torch.demo.messages import GROUPS, INFER, TRAIN
from qsync_torch.demo.probe import LADDER

RANDOM_SEEDS = (11, 12)
"""Seeds of the two random mixed plans by which the prediction is tested."""


@attrs.frozen
class Plans:
    """Plans by method, and what their search was given."""

    cluster: Cluster
    compared: Mapping[str, PrecisionPlan]
    probes: Mapping[str, PrecisionPlan]


def cluster_toml(share: float, memory_bytes: int = 0, ladder: Sequence[Variant] = LADDER) -> str:
    """The demo's cluster file: one strong and one weak worker on this machine's CPU."""
    memory = f"memory = {memory_bytes}\n" if memory_bytes else ""
    return (
        'name = "demo"\n\n'
        f'[[group]]\nname = "{TRAIN}"\ndevice = "cpu"\ncount = 1\nrole = "train"\nbase = "float32"\n\n'
        f'[[group]]\nname = "{INFER}"\ndevice = "cpu"\ncount = 1\nrole = "infer"\nbase = "float32"\n'
        f"ladder = {[rung.label for rung in ladder]}\nshare = {share}\n{memory}"
    )


def make_plans(
    dag: PrecisionDag,
    profiles: Mapping[str, Profile],
    sensitivity: Sensitivity,
    *,
    memory_budget: str | int,
    predict_check: bool,
    ladder: Sequence[Variant] = LADDER,
) -> Plans:
    """All plans.

    Args:
        memory_budget: bytes that the weak worker may use; ``auto`` for a budget that float32 does not fit; ``none`` for no limit.
        predict_check: also make the probes.
        ladder: rungs of the weak worker.
    """
    share = profiles[INFER].device.share
    unlimited = parse_cluster(cluster_toml(share, ladder=ladder), "the demo's cluster")
    roomy = Inputs(dag, unlimited, profiles, sensitivity)
    full, balanced = (allocate(roomy, Request(solver)) for solver in ("full", "dynamic-batch"))
    budget = 0
    if memory_budget == "auto":
        budget = _tight_budget(roomy)
    elif memory_budget != "none":
        budget = int(memory_budget)
    cluster = parse_cluster(cluster_toml(share, budget, ladder), "the demo's cluster") if budget else unlimited
    inputs = Inputs(dag, cluster, profiles, sensitivity)
    compared = {"full": full, "uniform": allocate(inputs, Request("uniform"))}
    compared |= {"dynamic-batch": balanced, "qsync": allocate(inputs)}
    probes = _probes(roomy, full) if predict_check else {}
    return Plans(cluster, compared, probes)


def _tight_budget(inputs: Inputs) -> int:
    """Halfway between what float32 and the lowest uniform rung that saves memory are predicted to need on the weak worker."""
    dag, replayer = inputs.dag, Replayer(inputs)
    peaks = []
    for rung in inputs.cluster.group(INFER).ladder:
        peaks.append(replayer.replay({INFER: dict.fromkeys((o.op_id for o in dag.adjustable), rung)}).groups[INFER].peak_bytes)
    return (peaks[-1] + min(peaks)) // 2


def infer_variants(plan: PrecisionPlan) -> dict[OpId, Variant]:
    """What the weak worker runs under a plan."""
    return {op_id: assignment.variant for op_id, assignment in plan.group(INFER).assignments.items()}


def low_precision_flops(dag: PrecisionDag, plan: PrecisionPlan) -> dict[OpId, int]:
    """Forward operations of the operators that the weak worker runs below float32."""
    variants = infer_variants(plan)
    return {o.op_id: o.flops for o in dag.adjustable if variants[o.op_id].compute is not Precision.FLOAT32}


def recovered_share(dag: PrecisionDag, uniform: PrecisionPlan, plan: PrecisionPlan) -> float:
    """Share of uniform's low-precision compute (operations) that a plan runs in float32; 0 where uniform lowers nothing."""
    low = low_precision_flops(dag, uniform)
    still_low = low_precision_flops(dag, plan)
    total = sum(low.values())
    return sum(flops for op_id, flops in low.items() if op_id not in still_low) / total if total else 0.0


def _probes(inputs: Inputs, template: PrecisionPlan) -> dict[str, PrecisionPlan]:
    """Uniform int8, uniform bfloat16 and two random mixtures, as plans that no solver made."""
    dag, profiles, ladder = inputs.dag, inputs.profiles, inputs.cluster.group(INFER).ladder
    op_ids = [operator.op_id for operator in dag.adjustable]
    wanted: dict[str, dict[OpId, Variant]] = {}
    for rung in ladder[:-1]:
        wanted[f"uniform {rung.label}"] = dict.fromkeys(op_ids, rung)
    for seed in RANDOM_SEEDS:
        choice = random.Random(seed).choice
        wanted[f"random {seed}"] = {op_id: choice(ladder) for op_id in op_ids}
    replayer = Replayer(inputs)
    made = {}
    for name, variants in wanted.items():
        prediction = replayer.replay({INFER: variants})
        groups = tuple(
            _with_variants(group, variants, profiles[INFER], name, OutputFormats.of(dag)) if group.group == INFER else group
            for group in template.groups
        )
        made[name] = attrs.evolve(
            template, solver="probe", objective=0.0, groups=groups, predicted_iteration_ns=prediction.iteration_ns
        )
    return made


def _with_variants(
    group: GroupPlan, variants: Mapping[OpId, Variant], profile: Profile, name: str, formats: OutputFormats
) -> GroupPlan:
    assignments = {}
    for op_id, variant in formats.decided(variants).items():
        cost = profile.cost(op_id, variant)
        assignments[op_id] = Assignment(variant, cost.backend, cost.config, f"probe: {name}")
    return attrs.evolve(group, assignments=assignments)


def local_batches(plan: PrecisionPlan, batch_size: int) -> dict[str, int]:
    """Samples a step of each group's rank under a plan."""
    return {group: plan.local_batches.get(group, batch_size) for group in GROUPS}
