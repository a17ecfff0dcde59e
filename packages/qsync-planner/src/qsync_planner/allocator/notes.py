"""What a reader of a plan must know: baselines that could not run, uniform precision, and what was not measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from qsync_core.chains.unchained import unchained_line
from qsync_core.devices import find_chip
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant
from qsync_core.units import format_bytes
from qsync_planner.allocator.baselines import EXPECTED, UniformStart
from qsync_planner.allocator.problem import GroupProblem, Problem
from qsync_planner.allocator.solution import Solution
from qsync_planner.matching import Inputs
from qsync_planner.replayer.chains import Chains, Variants
from qsync_planner.replayer.memory import MemoryEstimate
from qsync_planner.replayer.prediction import GroupPrediction

_NEARLY_ALL = 0.9
"""A step that was measured to keep less than this part of what its forward would has checkpointed layers."""
_TF32_SINCE = (8, 0)
"""Compute capability."""


def waiting_notes(inputs: Inputs) -> Iterator[str]:
    """Groups whose own step was measured to wait for its device."""
    for group in inputs.described.groups:
        if inputs.profiles[group.name].synchronises and not group.sync_per_step:
            yield (
                f"group {group.name}: its step waits for the device by itself, so CPU and device begin every step level: a loop "
                "and a model that read no number of a step let the CPU run ahead (docs/your-script.md)"
            )


def chain_notes(problem: Problem) -> Iterator[str]:
    """Which chains of the graph no plan can fuse, and what no chain is there for, where profiles have chains; a line each."""
    chains = Chains.of(problem.dag).all if any(profile.chains for profile in problem.profiles.values()) else ()
    for group in problem.groups if chains else ():
        units = {unit.operators[0] for unit in group.units if unit.is_chain}
        counts = Counter(str(chain.producer) for chain in chains if chain.name not in units)
        if group.group.role is not Role.TRAIN and units and counts:
            shown = ", ".join(f"{count} × {producer}" for producer, count in counts.items())
            yield (
                f"group {group.group.name}: {shown} stay unfused, because its profile does not have their costs in all formats "
                "that may arrive and be read; 'qsync profile --chains' measures those that a kernel backend has"
            )
    if chains and (alone := unchained_line(problem.dag)):
        yield f"in 8 bit these activations are quantized by themselves: {alone}"


def accumulation_notes(dag: PrecisionDag) -> Iterator[str]:
    """Note that steps have several micro-batches."""
    if dag.accumulate > 1:
        yield (f"a step is {dag.accumulate} micro-batches: batches are of one of them, and the last one alone exchanges gradients")


def baseline_notes(problem: Problem, solver: str, full: Solution, does_not_fit: str) -> list[str]:
    """What a baseline's time leaves out: that it could not run for lack of memory."""
    notes = []
    for group in problem.groups:
        peak = full.prediction.groups[group.name].peak_bytes
        if not group.fits(peak):
            notes.append(
                f"full precision does not fit group {group.name}: "
                f"{format_bytes(problem.process_bytes(group.name, peak))} of {format_bytes(problem.budgets[group.name])}"
            )
    if does_not_fit and solver != "dynamic-batch":
        notes.append(f"the dynamic-batch baseline is not possible: {does_not_fit}")
    return notes


def uniform_notes(problem: Problem, starts: Mapping[str, UniformStart]) -> list[str]:
    """Note which rung T comes from."""
    notes = []
    for group in problem.groups:
        index = starts[group.name].ladder_index
        if index is None:
            notes.append(f"no single rung fits group {group.name}; the leanest mixed plan stands in for uniform precision")
        else:
            wanted = group.group.ladder[index]
            higher = sum(wanted not in unit.rungs for unit in group.units)
            but = (
                f"; {higher} of {len(group.units)} operators may not run so, or were not measured so, and run higher"
                if higher
                else ""
            )
            why = starts[group.name].why
            because = "" if why == EXPECTED or len(group.group.ladder) == 1 else f", {why}"
            notes.append(f"uniform precision of group {group.name} is {wanted.label}{because}{but}")
    return notes


def storage_notes(
    problem: Problem,
    at_rungs: Callable[[GroupProblem], Sequence[GroupPrediction]],
    solution: Solution,
    memory: Callable[[str, Variants], MemoryEstimate],
) -> Iterator[str]:
    """What each group stores of its frozen weights, beside what each rung for all operators would take and do, and whether it is
    activations for which it does.
    """
    for group in problem.groups:
        ladder = group.group.ladder
        if not any(rung.storage.is_quantized for rung in ladder):
            continue

        def told(peak: int, omega: float, name: str = group.name) -> str:
            return f"{format_bytes(problem.process_bytes(name, peak))} at Ω {omega:.3g}"

        uniform = ", ".join(
            f"{rung.label} {told(predicted.peak_bytes, group.omega(group.uniform(index)))}"
            for index, (rung, predicted) in enumerate(zip(ladder, at_rungs(group), strict=True))
        )
        rungs = solution.rungs[group.name]
        chosen = [unit.rungs[rung] for unit, rung in zip(group.units, rungs, strict=True)]
        stored = Counter(str(one.storage) for one in chosen if isinstance(one, Variant) and one.storage.is_quantized)
        what = ", ".join(f"{count} as {storage}" for storage, count in stored.most_common()) or "none"
        peak = solution.prediction.groups[group.name].peak_bytes
        yield (
            f"group {group.name} stores {what} of its frozen weights in another format, and takes "
            f"{told(peak, group.omega(rungs))}; one rung for all takes: {uniform}"
        )
        if not stored:
            continue
        whole = memory(group.name, group.variants(group.uniform(len(ladder) - 1)))
        kept = whole.kept_bytes
        keeps_all = kept >= _NEARLY_ALL * whole.saved_bytes
        if keeps_all and not group.fits(whole.peak_bytes) and group.fits(whole.peak_bytes - kept):
            yield (
                f"what forward keeps for backward is {format_bytes(kept)} of what group {group.name} takes with all "
                "weights as they are: layers that the script checkpoints on its ranks alone free most of that, and round nothing"
            )


def contention_notes(inputs: Inputs) -> list[str]:
    """Note that it was not measured what all-reduces take from compute, on GPUs that have any."""
    groups = inputs.cluster.groups
    on_gpus = any(not inputs.profiles[group.name].device.is_synchronous for group in groups)
    if inputs.communication is not None or not on_gpus or sum(group.count for group in groups) < 2:
        return []
    return [
        "what all-reduces take from compute was not measured, so the time limit may be missed (by 3 to 9% where all ranks finish "
        "together): run 'qsync communicate' on all ranks, and plan with --communication"
    ]


def slow_base_notes(inputs: Inputs) -> list[str]:
    """Note that jobs on these GPUs are mostly trained faster than their base precision: under autocast, or with TF32.

    Gains over such a baseline are not gains over what people train with.
    """
    if not _in_float32(inputs):
        return []
    without = groups_without_tf32(inputs)
    tf32 = f", on {' and '.join(without)} even without TF32" if without else ""
    help_ = ' (with TF32 alone: torch.set_float32_matmul_precision("high"))' if without else ""
    return [
        f"the baseline is slower than what people train with: the job runs in float32 without autocast{tf32}, and gains are over "
        f"that; trace and profile it as you would train it, for example under autocast{help_}"
    ]


def groups_without_tf32(inputs: Inputs) -> list[str]:
    """Groups whose base is float32, measured without the TF32 that their device has; estimates take it from their source."""
    return [g.name for g in _in_float32(inputs) if _may_have_tf32(g.device) and _lacks_tf32(inputs.profiles[g.name])]


def _in_float32(inputs: Inputs) -> list[DeviceGroup]:
    """Groups of GPUs that train in float32 without autocast."""
    if inputs.dag.base is not Precision.FLOAT32:
        return []
    groups = [group for group in inputs.cluster.groups if group.base is Precision.FLOAT32]
    return [group for group in groups if not inputs.profiles[group.name].device.is_synchronous]


def _may_have_tf32(device: str) -> bool:
    """Whether a device's generation has TF32 (Ampere and later); one that is not known counts as one that has."""
    chip = find_chip(device)
    return chip is None or not chip.compute_capability or tuple(map(int, chip.compute_capability.split("."))) >= _TF32_SINCE


def _lacks_tf32(profile: Profile) -> bool:
    """Whether products or convolutions were measured with TF32 off; one of a version that did not say counts as on."""
    return profile.software.get("float32_matmul", "high") == "highest" or profile.software.get("cudnn_tf32", "True") == "False"
