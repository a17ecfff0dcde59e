"""``hutchinson`` (default): first-order propagation of rounding noise into all weight gradients.

See docs/design/indicator.md#hutchinson.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import attrs

from qsync_core.ir import observations as terms
from qsync_core.ir.chain import Producer
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.noise import VariantNoise
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.semantics import readable_copy
from qsync_core.ir.variant import Variant
from qsync_planner.indicators.interface import Omega, Shifts
from qsync_planner.indicators.series import Noise, UpdateMean, non_negative, observed_sources, require

_NOISE_OF_TERM = {
    terms.OPERANDS: attrgetter("operands"),
    terms.OUTPUT: attrgetter("output"),
    terms.GRADIENT: attrgetter("gradients"),
    terms.SHIFTS[0]: attrgetter("stored"),
}
_Sources = dict[tuple[OpId, Noise], Variant]


class Hutchinson:
    """Ω = mean over updates of A + B/√(relative noise at masks).

    A = Σ σ²·h² + (Σ μ·h)² is the smooth part: forward operands, output and gradients.  B is what masks that flip add: it goes with
    the noise, not its square, hence the root (:mod:`qsync_core.ir.observations`).
    """

    name = "hutchinson"
    collectors: tuple[str, ...] = (terms.HUTCHINSON,)
    summary = "rounding noise carried into all weight gradients by Hessian-vector products (default)"

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator; see :meth:`Indicator.omega`."""
        assert observations is not None
        mean = UpdateMean.of(observations).mean
        return {
            op_id: {variant: mean(parts.whole) for variant, parts in by_variant.items()}
            for op_id, by_variant in _parts(dag, variants, observations).items()
        }

    def errors(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Standard errors of Ω; see :class:`RatesErrors`."""
        assert observations is not None
        averaged = UpdateMean.of(observations)
        by_name = {
            op_id: {variant: averaged.error(parts.whole) for variant, parts in by_variant.items()}
            for op_id, by_variant in _parts(dag, variants, observations).items()
        }
        for name, variant, values in _kept(observations):
            by_name.setdefault(name, {})[variant] = averaged.error(values)
        return {
            name: {variant: error for variant, error in by_variant.items() if error is not None}
            for name, by_variant in by_name.items()
        }

    def flips(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """What Ω loses without B; see :class:`RatesFlips`."""
        assert observations is not None
        if not _has_flips(observations):
            return {}
        mean = UpdateMean.of(observations).mean
        return {
            op_id: {variant: max(0.0, mean(parts.whole) - mean(parts.smooth)) for variant, parts in by_variant.items()}
            for op_id, by_variant in _parts(dag, variants, observations).items()
        }

    def masks(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Mapping[OpId, float]:
        """B/√noise over √noise, which is the same for all variants that make noise; see :class:`RatesFlips`."""
        assert observations is not None
        if not _has_flips(observations):
            return {}
        mean = UpdateMean.of(observations).mean
        return {
            op_id: mean([max(weights) for weights in zip(*(parts.masks for parts in by_variant.values()), strict=True)])
            for op_id, by_variant in _parts(dag, variants, observations).items()
            if by_variant  # none of what is trained, where all are stored
        }

    def copies(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Omega:
        """What Ω gains where a fused chain's copy is read; see :class:`RatesCopies`."""
        written: _Sources = {
            (series.op_id, VariantNoise.of(series.variant, dag.base).operands): series.variant
            for series in observations.series
            if series.term == terms.COPY and series.collector == terms.HUTCHINSON and series.op_id and series.variant
        }
        readers = [operator.op_id for operator in dag.adjustable if operator.op_id in {op_id for op_id, _ in written}]
        readable = [variant for variant in variants if readable_copy(Producer.BATCH_NORM, variant)]
        if not readers or not readable:
            return {}
        plain, copied = _parts(dag, readable, observations), _parts(dag, readable, observations, written)
        mean = UpdateMean.of(observations).mean
        return {
            op_id: {
                variant: max(0.0, mean(parts.whole) - mean(plain[op_id][variant].whole)) for variant, parts in copied[op_id].items()
            }
            for op_id in readers
        }

    def shifts(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Shifts:
        """What fixed errors of stored weights do, along each direction of each update; see :class:`RatesStored`."""
        sources = observed_sources(observations, terms.HUTCHINSON, _NOISE_OF_TERM, dag.base)
        averaged = UpdateMean.of(observations)
        found: dict[OpId, dict[Variant, tuple[float, ...]]] = {}
        for operator, variant in itertools.product(dag.adjustable, variants):
            stored = VariantNoise.of(variant, dag.base).stored
            if stored is None or operator.not_stored_as(variant.storage):
                continue
            observed = sources.get((operator.op_id, stored), variant)
            along = [require(observations, terms.HUTCHINSON, name, operator.op_id, observed) for name in terms.SHIFTS]
            found.setdefault(operator.op_id, {})[variant] = averaged.parts(along)
        return found

    def kept_inputs(self, observations: Observations) -> Omega:
        """Ω of what chains keep in 8 bit; see :class:`RatesKeptInputs`."""
        averaged = UpdateMean.of(observations)
        found: dict[OpId, dict[Variant, float]] = {}
        for name, variant, values in _kept(observations):
            found.setdefault(name, {})[variant] = averaged.mean(values)
        return found

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """How it was averaged, and whether masks flip."""
        assert observations is not None
        how, count = UpdateMean.of(observations).summary, len(observations.iterations)
        flips = "flips of ReLU and max pooling included" if _has_flips(observations) else "no masks that could flip"
        return (f"{how} over {count} updates of one random direction each; {flips}",)


def _kept(observations: Observations) -> Iterator[tuple[OpId, Variant, Sequence[float]]]:
    """Chains, the variant under which their kept input is rated, and what was observed of it."""
    for series in observations.series:
        if series.term == terms.KEPT_INPUT and series.collector == terms.HUTCHINSON and series.op_id and series.variant:
            what = f"{terms.HUTCHINSON}.{terms.KEPT_INPUT} of {series.op_id} at {series.variant.saved}"
            yield series.op_id, series.variant, non_negative(series.values, observations.iterations, what)


def _has_flips(observations: Observations) -> bool:
    """Also where all that is asked about is stored, and no operand is rounded."""
    written = {terms.OPERANDS_FLIPS, terms.OUTPUT_FLIPS, terms.STORED_FLIPS}
    return any(series.collector == terms.HUTCHINSON and series.term in written for series in observations.series)


@attrs.frozen
class _Parts:
    """A, B over the root of the noise, and that over the root once more, of every update."""

    smooth: Sequence[float]
    flips: Sequence[float]
    masks: Sequence[float]

    @property
    def whole(self) -> list[float]:
        return [a + b for a, b in zip(self.smooth, self.flips, strict=True)]


def _parts(
    dag: PrecisionDag, variants: Sequence[Variant], observations: Observations, copies: _Sources | None = None
) -> dict[OpId, dict[Variant, _Parts]]:
    """Compute A and B of all adjustable operators and variants, from terms of a chain's copy for operands that ``copies`` has."""
    sources = observed_sources(observations, terms.HUTCHINSON, _NOISE_OF_TERM, dag.base)
    flips = _has_flips(observations)
    return {
        operator.op_id: {
            variant: _per_update(
                operator.op_id, VariantNoise.of(variant, dag.base), variant, observations, sources, copies or {}, flips
            )
            for variant in variants
            if not operator.not_stored_as(variant.storage)
        }
        for operator in dag.adjustable
    }


def _per_update(
    op_id: OpId,
    made: VariantNoise,
    variant: Variant,
    observations: Observations,
    sources: _Sources,
    copies: _Sources,
    flips: bool,
) -> _Parts:
    count = len(observations.iterations)
    smooth, flipping, noise = [0.0] * count, [0.0] * count, [0.0] * count
    of_operands = (terms.OPERANDS, terms.OPERANDS_FLIPS, terms.OPERANDS_NOISE)
    if (op_id, made.operands) in copies:
        of_operands = (terms.COPY, terms.COPY_FLIPS, terms.COPY_NOISE)
    parts = (
        (made.operands, *of_operands),
        (made.output, terms.OUTPUT, terms.OUTPUT_FLIPS, terms.OUTPUT_NOISE),
        (made.gradients, terms.GRADIENT, "", ""),
        (made.stored, terms.SHIFTS[0], terms.STORED_FLIPS, terms.STORED_NOISE),
    )
    for part, term, flip_term, noise_term in parts:
        if part is None:
            continue
        observed = (copies if term == terms.COPY else sources).get((op_id, part), variant)

        def read(name: str, observed: Variant = observed) -> tuple[float, ...]:
            return require(observations, terms.HUTCHINSON, name, op_id, observed)

        what = f"{terms.HUTCHINSON}.{term} of {op_id} at {variant.label}"
        if part is made.stored:
            along = [read(name) for name in terms.SHIFTS]
            found: Sequence[float] = [statistics.fmean(shift**2 for shift in shifts) for shifts in zip(*along, strict=True)]
        else:
            found = non_negative(read(term), observations.iterations, what)
        smooth = [a + b for a, b in zip(smooth, found, strict=True)]
        if flips and flip_term:
            flipping = [a + b for a, b in zip(flipping, read(flip_term), strict=True)]
            noise = [a + b for a, b in zip(noise, read(noise_term), strict=True)]
    # Where it is negative, an older version wrote it, as a difference.
    roots = [math.sqrt(relative) if relative > 0 else math.inf for relative in noise]
    flips_by_update = [max(0.0, b) / root for b, root in zip(flipping, roots, strict=True)]
    return _Parts(smooth, flips_by_update, [b / root for b, root in zip(flips_by_update, roots, strict=True)])
