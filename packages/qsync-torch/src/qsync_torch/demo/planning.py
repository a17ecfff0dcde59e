"""The demo's plans, made from measurements: the baselines, QSync's own, and probes that test the prediction."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, GroupPlan, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_planner.allocator import Inputs, Request, allocate
from qsync_planner.replayer.replay import Replayer
from qsync_planner.reporting.ways_to_run import Job
from qsync_torch.demo.probe import LADDER

GROUPS = ("train", "infer")
"""Device group of each rank; rank 0 is the strong worker."""
TRAIN, INFER = GROUPS
RANDOM_SEEDS = (11, 12)
"""Seeds of the two random mixed plans by which the prediction is tested."""


@attrs.frozen
class Plans:
    """Plans by method, and what their search was given."""

    cluster: Cluster
    compared: Mapping[str, PrecisionPlan]
    probes: Mapping[str, PrecisionPlan]


def cluster_toml(share: float, ladder: Sequence[Variant] = LADDER) -> str:
    """The demo's cluster file: one strong and one weak worker on this machine's CPU."""
    return (
        'name = "demo"\n\n'
        f'[[group]]\nname = "{TRAIN}"\ndevice = "cpu"\ncount = 1\nrole = "train"\nbase = "float32"\n\n'
        f'[[group]]\nname = "{INFER}"\ndevice = "cpu"\ncount = 1\nrole = "infer"\nbase = "float32"\n'
        f"ladder = {[rung.label for rung in ladder]}\nshare = {share}\n"
    )


def make_plans(job: Job, *, memory_budget: str | int, predict_check: bool) -> Plans:
    """All plans.

    Args:
        job: what ``qsync prepare`` has measured, and its plan without a limit of memory.
        memory_budget: bytes that the weak worker may use; ``auto`` for a budget that float32 does not fit; ``none`` for no limit.
    """
    inputs, cluster = job.inputs, job.inputs.described
    compared = {solver: allocate(inputs, Request(solver)) for solver in ("full", "uniform", "dynamic-batch")} | {"qsync": job.plan}
    if memory_budget != "none":
        budget = _tight_budget(job) if memory_budget == "auto" else int(memory_budget)
        groups = (attrs.evolve(group, memory_bytes=budget) if group.name == INFER else group for group in cluster.groups)
        cluster = attrs.evolve(cluster, groups=tuple(groups))
        tight = Inputs(job.dag, cluster, inputs.profiles, inputs.sensitivity, communication=inputs.communication)
        compared |= {"uniform": allocate(tight, Request("uniform")), "qsync": allocate(tight)}
    return Plans(cluster, compared, _probes(job, compared["full"]) if predict_check else {})


def _tight_budget(job: Job) -> int:
    """Halfway between what float32 and the lowest uniform rung that saves memory are predicted to need on the weak worker."""
    replayer, op_ids = Replayer(job.inputs), [operator.op_id for operator in job.dag.adjustable]
    ladder = job.cluster.group(INFER).ladder
    peaks = [replayer.replay({INFER: dict.fromkeys(op_ids, rung)}).groups[INFER].peak_bytes for rung in ladder]
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


def _probes(job: Job, template: PrecisionPlan) -> dict[str, PrecisionPlan]:
    """Uniform int8, uniform bfloat16 and two random mixtures, as plans that no solver made."""
    ladder, op_ids = job.cluster.group(INFER).ladder, [operator.op_id for operator in job.dag.adjustable]
    wanted = {f"uniform {rung.label}": dict.fromkeys(op_ids, rung) for rung in ladder[:-1]}
    for seed in RANDOM_SEEDS:
        choice = random.Random(seed).choice
        wanted[f"random {seed}"] = {op_id: choice(ladder) for op_id in op_ids}
    replayer, formats = Replayer(job.inputs), OutputFormats.of(job.dag)
    made = {}
    for name, variants in wanted.items():
        prediction = replayer.replay({INFER: variants})
        groups = tuple(
            _with_variants(group, variants, job.inputs.profiles[INFER], name, formats) if group.group == INFER else group
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
