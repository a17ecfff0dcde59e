"""Collector ``montecarlo``: the truth that indicators are judged by (docs/design/indicator.md#truth).

One operator runs in a variant and everything else at the base (float32, or as autocast runs it); how far that moves the gradients
of all parameters is measured, draw by draw.  It costs a forward and a backward pass for every operator, variant and draw, so it is
for checking, not planning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import torch

from qsync_core.chains.finding import chains_of
from qsync_core.errors import NumericsError, ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.chain import Chain, ChainVariant
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.noise import kept_formats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.progress import ProgressCallback, silent
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.apply.apply import apply_
from qsync_torch.apply.first_step import device_of
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.kernels.selection import default_backend
from qsync_torch.observing.collector import ObservedStep, StepTerm, low_precision
from qsync_torch.observing.kept_inputs import RoundedInput
from qsync_torch.observing.producer_calls import ProducerCalls
from qsync_torch.observing.replaced_functions import PairedDropout

DRAWS = 8
"""Draws for each operator and variant that rounds at random, on every observed batch."""


def is_random(variant: Variant) -> bool:
    """Whether two passes in a variant may round differently: an 8-bit format, rounded stochastically."""
    formats = (variant.compute, variant.saved, variant.grad_input, variant.grad_weight)
    return variant.rounding is Rounding.STOCHASTIC and any(precision.needs_scale for precision in formats)


def subjects(dag: PrecisionDag, operators: Collection[OpId] | None = None) -> list[tuple[Operator, ...]]:
    """What is lowered at a time: the calls that share a variant (those of one module), in order of execution.

    Args:
        operators: only these; None for all adjustable ones.

    Raises:
        ObservationError: when one of ``operators`` is not an adjustable operator of the model.
    """
    groups: dict[str, list[Operator]] = {}
    for operator in dag.adjustable:
        groups.setdefault(operator.variant_group or str(operator.op_id), []).append(operator)
    if operators is None:
        return [tuple(group) for group in groups.values()]
    known = {operator.op_id for operator in dag.adjustable}
    if unknown := sorted(str(op_id) for op_id in operators if op_id not in known):
        raise ObservationError(
            f"{dag.model} has no linear or convolution {', '.join(unknown[:3])} whose precision a plan may change; "
            "'qsync show' lists those of its graph"
        )
    wanted = set(operators)
    return [tuple(group) for group in groups.values() if wanted.intersection(operator.op_id for operator in group)]


def passes(n_operators: int, variants: Iterable[Variant], draws: int = DRAWS, *, together: bool = True, kept: int = 0) -> int:
    """Forward and backward passes over one observed batch.

    Args:
        n_operators: how many are lowered one by one: ``len(subjects(dag))``.
        variants: those that lose nothing cost nothing.
        draws: for each operator in a variant that rounds at random; others take one.
        together: all operators are also lowered at once.
        kept: inputs of chains that are kept in an 8-bit format one by one (:func:`kept_inputs`).
    """
    each = sum(draws if is_random(variant) else 1 for variant in low_precision(variants))
    return 1 + (n_operators + together) * each + kept * draws


def kept_inputs(dag: PrecisionDag, variants: Sequence[Variant]) -> int:
    """How many inputs fused chains may keep in 8 bit, each in every 8-bit format of the variants."""
    return sum(chain.may_round_input for chain in chains_of(dag)) * len(kept_formats(variants))


class MonteCarloCollector:
    """‖Δ∂L/∂θ‖² over all trainable parameters, one operator in one variant at a time; in units of squared gradients.

    Calls that share a module cannot be lowered apart (``apply_`` gives them one variant): they are lowered at once, and each call
    is written an equal part, so that the sum over the calls is what was measured.

    Dropout masks are the same in every pass; the stochastic rounding draws anew in each.  Memory: that of a training step without
    its optimizer state, and one more copy of the gradients.

    Args:
        draws: passes for each operator in a variant that rounds at random, even and at least 2.
        operators: lower only these one by one; None for all adjustable ones.
        together: also lower all adjustable operators at once, in each variant.
        chains: also keep the input of each fused chain in each 8-bit format of the variants, one at a time.
        progress: receives ``(passes done, passes of this batch, operator and variant)``.
    """

    name = terms.MONTECARLO
    by_default = False

    def __init__(
        self,
        draws: int = DRAWS,
        operators: Collection[OpId] | None = None,
        together: bool = True,
        chains: bool = False,
        progress: ProgressCallback = silent,
    ) -> None:
        if draws < 2 or draws % 2:
            raise ValueError(f"draws is an even number of at least 2, so that halves can be compared; got {draws}")
        self.draws, self.together, self.chains = draws, together, chains
        self.operators = None if operators is None else tuple(operators)
        self._progress = progress

    def passes(self, dag: PrecisionDag, variants: Sequence[Variant]) -> int:
        """Forward and backward passes over each observed batch."""
        lowered = [(v, group) for v in low_precision(variants) for group in self._groups(dag, v)]
        kept = kept_inputs(dag, variants) if self.chains else 0
        return 1 + sum(self.draws if is_random(variant) else 1 for variant, _ in lowered) + kept * self.draws

    def _groups(self, dag: PrecisionDag, variant: Variant) -> list[tuple[Operator, ...]]:
        """What is lowered to a variant at once: the calls of each module, and, last, all operators that run in it."""
        groups = [group for group in subjects(dag, self.operators) if group[0].runs_in(variant)]
        if self.together and groups:
            groups.append(tuple(operator for operator in dag.adjustable if operator.runs_in(variant)))
        return groups

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """Both halves for every (operator, variant), and the squared norm of the gradient.

        Raises:
            ObservationError: when a gradient is NaN or infinite, naming the operator and the variant that made it so; when the
                loss has no trainable parameter.
            BackendError: when no kernel of this device can run an operator in a variant.
        """
        if step.dag.base is not Precision.FLOAT32:
            step = attrs.evolve(step, job=attrs.evolve(step.job, amp=str(step.dag.base)))
        lowered = low_precision(variants)
        total = self.passes(step.dag, lowered)
        done = 1
        self._progress(0, total, "full precision")
        with ProducerCalls(step.dag) as calls:
            undisturbed = step_gradients(step)
        squared = squared_norm(undisturbed)
        if not math.isfinite(squared):
            raise ObservationError(
                f"the gradients of {step.job.name} in full precision are not finite at update {step.update}; train with a smaller "
                "learning rate"
            )
        found: dict[StepTerm, float] = {(None, None, terms.GRADIENT_SQ_NORM): squared}
        for variant in lowered:
            groups = self._groups(step.dag, variant)
            for index, group in enumerate(groups):
                is_alone = not self.together or index < len(groups) - 1
                name = str(group[0].op_id) if is_alone else "all operators together"
                self._progress(done, total, f"{name} in {variant.label}")
                halves = self._halves(step, group, variant, undisturbed, name)
                done += self.draws if is_random(variant) else 1
                for term, value in zip((terms.FIRST_HALF, terms.SECOND_HALF), halves, strict=True):
                    for op_id in [operator.op_id for operator in group] if is_alone else [None]:
                        found[op_id, variant, term] = value / len(group) if is_alone else value
        for saved, chain in itertools.product(kept_formats(lowered), calls.found()) if self.chains else ():
            variant = ChainVariant(saved=saved).rated_as
            self._progress(done, total, f"input of {chain.name} kept in {saved}")
            first, second = self._kept(step, chain, variant, undisturbed)
            found |= {(chain.name, variant, terms.FIRST_HALF): first, (chain.name, variant, terms.SECOND_HALF): second}
            done += self.draws
        self._progress(total, total, "")
        return found

    def _kept(
        self, step: ObservedStep, chain: Chain, variant: Variant, undisturbed: Sequence[torch.Tensor | None]
    ) -> tuple[float, float]:
        """Mean squared change over the first and over the second half of the draws."""
        changes = []
        for draw in range(self.draws):
            with RoundedInput(step.dag, chain.name, variant, stream_key(step.seed, step.update * self.draws + draw)):
                changes.append(squared_norm(step_gradients(step), undisturbed))
        half = self.draws // 2
        return sum(changes[:half]) / half, sum(changes[half:]) / half

    @staticmethod
    def _change(step: ObservedStep, applied: AppliedPlan, undisturbed: Sequence[torch.Tensor | None]) -> float:
        """Squared change of the gradients by one draw."""
        change = squared_norm(step_gradients(step), undisturbed)
        applied.advance()
        return change

    def _halves(
        self,
        step: ObservedStep,
        group: Sequence[Operator],
        variant: Variant,
        undisturbed: Sequence[torch.Tensor | None],
        name: str,
    ) -> tuple[float, float]:
        """Mean squared change over the first and over the second half of the draws; equal where nothing is drawn."""
        # Rounds differently at every update, and in every pass.
        seed = stream_key(step.seed, step.update)
        half = self.draws // 2
        try:
            applied: AppliedPlan = apply_(
                step.model,
                whole_plan(step, {operator.op_id: variant for operator in group}),
                seed=seed,
                base=step.dag.base,
                keep_stored=True,
            )
            try:
                sums = [
                    sum(self._change(step, applied, undisturbed) for _ in range(half if is_random(variant) else 1))
                    for _ in range(2 if is_random(variant) else 1)
                ]
            finally:
                applied.remove()
        except NumericsError as error:
            raise ObservationError(f"{name} of {step.job.name} in {variant.label} at update {step.update}: {error}") from None
        if not all(map(math.isfinite, sums)):
            raise ObservationError(
                f"with {name} in {variant.label} a gradient of {step.job.name} is not finite at update {step.update}; its range is "
                "too small for this model: leave that variant out"
            )
        first, second = (value / half for value in sums) if is_random(variant) else (sums[0], sums[0])
        return first, second


def whole_plan(step: ObservedStep, lowered: Mapping[OpId, Variant]) -> dict[OpId, Assignment]:
    """A whole plan that lowers these operators alone: one that delivers 16 bits only together with others delivers float32."""
    plain = {operator.op_id: Variant.plain(step.dag.base) for operator in step.dag.adjustable}
    decided = OutputFormats.of(step.dag).decided({**plain, **lowered})
    backend = default_backend(device_of(step.model))
    return {op_id: Assignment(entry, backend if entry.compute.needs_scale else "", "", "") for op_id, entry in decided.items()}


def step_gradients(step: ObservedStep) -> list[torch.Tensor | None]:
    """Gradients of all trainable parameters in one pass over the batch, in their order; None where none arrives."""
    parameters = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    with step.undisturbed():
        for parameter in parameters:
            parameter.grad = None
        with PairedDropout():
            loss = step.loss()
        if not loss.requires_grad:
            raise ObservationError(
                f"the loss of {step.job.name} depends on no trainable parameter, so there is no gradient to disturb"
            )
        torch.autograd.backward(loss)
        return [parameter.grad for parameter in parameters]


def squared_norm(gradients: Sequence[torch.Tensor | None], minus: Sequence[torch.Tensor | None] | None = None) -> float:
    """Squared Euclidean norm over all tensors, summed in float64; of the difference where ``minus`` is given."""
    parts = []
    for index, gradient in enumerate(gradients):
        other = None if minus is None else minus[index]
        change = gradient if other is None else other if gradient is None else gradient - other
        if change is not None:
            dense = change.to_dense() if change.is_sparse else change
            numbers = torch.view_as_real(dense) if dense.is_complex() else dense
            parts.append(torch.linalg.vector_norm(numbers, dtype=torch.float64).square())
    return float(torch.stack([part.to(parts[0].device) for part in parts]).sum()) if parts else 0.0
