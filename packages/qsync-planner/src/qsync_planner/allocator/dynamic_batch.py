"""``dynamic-batch``: full precision everywhere, and smaller local batches where devices are slower (DBS, the paper's baseline).

The global batch stays what it was.  What that does to every local batch, on which BatchNorm's statistics are taken and from which
gradients must be weighted, is said in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.cluster import DeviceGroup
from qsync_core.dag import PrecisionDag
from qsync_core.errors import InfeasibleError
from qsync_core.profile import Profile
from qsync_planner.allocator.balance import balance
from qsync_planner.allocator.batch_scaling import BatchProfile, BatchScaling
from qsync_planner.allocator.problem import Problem, build_problem
from qsync_planner.allocator.solution import Solution
from qsync_planner.memory import MemoryEstimate
from qsync_planner.replay import Prediction, Replayer, Variants


@attrs.frozen
class Balanced:
    """Balanced batches with their prediction; ``does_not_fit`` is empty, or says why memory does not take them."""

    solution: Solution
    does_not_fit: str

    def require_fitting(self) -> Solution:
        """The solution where memory takes it.

        Raises:
            InfeasibleError: saying which batches fit.
        """
        if self.does_not_fit:
            raise InfeasibleError(
                f"dynamic-batch is not possible: {self.does_not_fit}; add memory, or make the global batch smaller"
            )
        return self.solution


def balance_batches(problem: Problem, replayer: Replayer, full: Solution, further: Mapping[str, BatchProfile]) -> Balanced:
    """Balance the local batches of all groups and predict the job with them.

    Args:
        replayer: of the job at equal batches, in the state of the base precision.
        full: the solution at base precision and equal batches.
        further: per group a second profile, at another batch size.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    dag, groups = problem.dag, problem.cluster.groups
    scalings = {g.name: BatchScaling(problem, g, full.prediction.groups[g.name].busy_ns, further.get(g.name)) for g in groups}
    memory = {g.name: _MemoryScaling.of(dag, replayer.present_memory(g.name)) for g in groups}
    counts = [group.count for group in groups]
    traced = max(1, dag.batch_size)
    total = traced * sum(counts)
    unlimited = [(total - sum(counts)) // count + 1 for count in counts]
    limited = [min(most, memory[g.name].largest_batch(g, most)) for g, most in zip(groups, unlimited, strict=True)]
    times = [scalings[group.name].busy_ns for group in groups]
    batches = balance(counts, total, limited, times, traced)
    does_not_fit = ""
    if batches is None:
        most = ", ".join(f"{group.name} takes at most {limit}" for group, limit in zip(groups, limited, strict=True))
        does_not_fit = f"the global batch of {total} does not fit the groups' memory ({most} per rank)"
        batches = balance(counts, total, unlimited, times, traced)
        assert batches is not None, "equal batches always add up to the global batch"
    local = {group.name: batch for group, batch in zip(groups, batches, strict=True)}
    balanced = Replayer(dag, problem.cluster, _scaled_profiles(problem, scalings, local, further))
    predicted = balanced.replay({})
    predicted = _with_peaks(predicted, {name: entry.peak_bytes(local[name]) for name, entry in memory.items()})
    notes = tuple(_batch_note(traced, name, batch, name in further) for name, batch in local.items())
    solution = Solution(full.rungs, predicted, local_batches=local, notes=notes)
    return Balanced(solution.with_one_reason(problem, "dynamic-batch changes local batches, not precisions"), does_not_fit)


def _scaled_profiles(
    problem: Problem, scalings: Mapping[str, BatchScaling], local: Mapping[str, int], further: Mapping[str, BatchProfile]
) -> dict[str, Profile]:
    """Every group's profile at its batch; groups of one profile and one batch share the object."""
    known: dict[tuple[int, int, int], Profile] = {}
    found = {}
    for name, scaling in scalings.items():
        key = (id(problem.profiles[name]), id(further.get(name)), local[name])
        if key not in known:
            known[key] = scaling.profile_at(local[name])
        found[name] = known[key]
    return found


def replay_batches(
    replayer: Replayer,
    variants: Mapping[str, Variants],
    local_batches: Mapping[str, int],
    further: Mapping[str, BatchProfile],
) -> tuple[Replayer, Prediction]:
    """Predict a job whose groups have other local batches than the traced one, as :func:`balance_batches` does.

    Args:
        replayer: of the job at equal batches.
        variants: of every group.
        local_batches: by group; those that are not named keep the traced one.
        further: per group a second profile, at another batch size.

    Returns:
        A replayer of the job at these batches, whose times hold, and the prediction, whose peaks do as well.

    Raises:
        PlanError: when a second profile does not go with the first.
    """
    dag, cluster = replayer.dag, replayer.cluster
    problem = build_problem(dag, cluster, replayer.profiles, None)
    profiles: dict[str, Profile] = {}
    peaks: dict[str, int] = {}
    for group in cluster.groups:
        batch = local_batches.get(group.name, dag.batch_size)
        profiles[group.name] = BatchScaling(problem, group, 0, further.get(group.name)).profile_at(batch)
        peaks[group.name] = _MemoryScaling.of(dag, replayer.memory(group.name, variants[group.name])).peak_bytes(batch)
    scaled = Replayer(dag, cluster, profiles)
    return scaled, _with_peaks(scaled.replay(variants), peaks)


@attrs.frozen
class _MemoryScaling:
    """Peak memory as a function of the local batch: what is not static is proportional to it."""

    static_bytes: int
    rest_bytes: int
    batch_size: int

    @classmethod
    def of(cls, dag: PrecisionDag, estimate: MemoryEstimate) -> _MemoryScaling:
        """What an estimate at the traced batch size says of others."""
        rest = max(0, estimate.peak_bytes - estimate.static_bytes)
        return cls(estimate.peak_bytes - rest, rest, max(1, dag.batch_size))

    def peak_bytes(self, batch: int) -> int:
        return self.static_bytes + -(-self.rest_bytes * batch // self.batch_size)

    def largest_batch(self, group: DeviceGroup, most: int) -> int:
        """The largest batch up to ``most`` whose peak fits the group's budget; 0 where one sample does not."""
        if group.memory_bytes == 0 or self.peak_bytes(most) <= group.memory_bytes:
            return most
        if group.memory_bytes < self.static_bytes:
            return 0
        return (group.memory_bytes - self.static_bytes) * self.batch_size // max(1, self.rest_bytes)


def _with_peaks(prediction: Prediction, peaks: Mapping[str, int]) -> Prediction:
    groups = {name: attrs.evolve(entry, peak_bytes=peaks[name]) for name, entry in prediction.groups.items()}
    return attrs.evolve(prediction, groups=groups)


def _batch_note(before: int, group: str, batch: int, two_profiles: bool) -> str:
    change = "unchanged" if batch == before else f"{100 * (batch - before) / before:+.0f}%"
    source = "two profiles" if two_profiles else "one profile, compute taken as proportional to the batch"
    return f"{group}: local batch {before} → {batch} ({change}; from {source})"
