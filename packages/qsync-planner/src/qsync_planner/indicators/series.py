"""Reading observed series: with errors that name operator, term and iteration, averaged over iterations, and shared by variants.

Variants that make the same noise (:mod:`qsync_core.ir.noise`) need to be observed once.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence

import attrs

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.noise import VariantNoise
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant


def check_values(observations: Observations) -> None:
    """Refuse observations that hold NaN or infinite values, or none at all.

    Raises:
        ObservationError: naming the first such operator, variant, term and iteration.
    """
    if not observations.iterations:
        raise ObservationError(
            f"the observations of {observations.model} hold no iterations (stopped: {observations.stopped}); "
            "run 'qsync observe' for at least one update"
        )
    for series in observations.series:
        for iteration, value in zip(observations.iterations, series.values, strict=True):
            if not math.isfinite(value):
                owner = "the whole model" if series.op_id is None else str(series.op_id)
                at = "" if series.variant is None else f" at {series.variant.label}"
                raise ObservationError(
                    f"{series.collector}.{series.term} of {owner}{at} is {value} in iteration {iteration}; the observed training "
                    "diverged or overflowed there: lower the learning rate, check the batch, and observe again"
                )


def require(
    observations: Observations, collector: str, term: str, op_id: OpId, variant: Variant | None = None
) -> tuple[float, ...]:
    """The values of one series, one per observed iteration; zeros where the collector wrote nothing at all of the operator, though
    of others: no gradient came back to it.

    Raises:
        ObservationError: when it was not written, naming operator, term and what to run.
    """
    try:
        return observations.values(collector, term, op_id, variant)
    except KeyError:
        written = {series.op_id for series in observations.series if series.collector == collector}
        if written - {None} and op_id not in written:
            return (0.0,) * len(observations.iterations)
        at = "" if variant is None else f" at {variant.label} ({variant})"
        raise ObservationError(
            f"the observations lack {collector}.{term} of {op_id}{at}; run 'qsync observe' again with collector {collector!r} "
            "and every variant of the cluster's ladders"
        ) from None


def non_negative(values: tuple[float, ...], iterations: Sequence[int], what: str) -> tuple[float, ...]:
    """Check a series of squares and variances.

    Raises:
        ObservationError: naming ``what`` and the iteration of the first negative value.
    """
    for iteration, value in zip(iterations, values, strict=True):
        if value < 0:
            raise ObservationError(
                f"{what} is {value!r} in iteration {iteration}, but a sum of squares is never negative; observe again"
            )
    return values


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; a value of 0 counts as "nothing happened", not as "everything is 0".

    Zeros are left out of the logarithm and scale the result by the share of values that are not zero.
    """
    positive = [value for value in values if value > 0]
    if not positive:
        return 0.0
    mean = math.exp(math.fsum(map(math.log, positive)) / len(positive))
    return mean * (len(positive) / len(values))


@attrs.frozen
class UpdateMean:
    """How squares of gradients are averaged over updates (docs/design/indicator.md#averages-over-updates).

    Each update's value is divided by ‖g‖² of that update, which takes out by how much gradients fall; the quotients are averaged
    arithmetically, which estimates from one random direction need (the mean of a logarithm is low); the geometric mean of ‖g‖²
    makes a magnitude of it again.

    Attributes:
        sq_norms: ‖g‖² by update; None in observations of older versions, whose values are averaged geometrically.
    """

    sq_norms: tuple[float, ...] | None

    @classmethod
    def of(cls, observations: Observations) -> UpdateMean:
        """Average by what the run wrote, or by what the collector of the truth did."""
        written = {
            series.collector: series.values
            for series in observations.series
            if series.op_id is None and series.term == terms.GRADIENT_SQ_NORM
        }
        found = written.get(terms.RUN) or written.get(terms.MONTECARLO)
        return cls(non_negative(found, observations.iterations, f"{terms.GRADIENT_SQ_NORM} of the model") if found else None)

    def over(self, updates: slice) -> UpdateMean:
        """Restrict the mean to some of the updates."""
        return UpdateMean(None if self.sq_norms is None else self.sq_norms[updates])

    def mean(self, values: Sequence[float]) -> float:
        """Average one value an update; an update without a gradient counts as 0."""
        if self.sq_norms is None:
            return geometric_mean(values)
        return math.fsum(self._relative(values)) / len(values) * self._scale

    def error(self, values: Sequence[float]) -> float | None:
        """Standard error of :meth:`mean`, of how updates differ; None where that is not known: one update, or no norms."""
        if self.sq_norms is None or len(values) < 2:
            return None
        return statistics.stdev(self._relative(values)) / math.sqrt(len(values)) * self._scale

    def parts(self, along: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Numbers with a sign, several an update, so scaled that the sum of their squares is the mean of their mean squares.

        Args:
            along: for each direction, one value an update.
        """
        norms = self.sq_norms or (1.0,) * len(along[0])
        scale = math.sqrt(self._scale) if self.sq_norms else 1.0
        scale /= math.sqrt(len(along) * len(norms))
        return tuple(
            value / math.sqrt(norm) * scale if norm > 0 else 0.0
            for values in along
            for value, norm in zip(values, norms, strict=True)
        )

    @property
    def summary(self) -> str:
        """The name of the mean for people, as in "mean over 3 updates"."""
        return "geometric mean (without norms of gradients, as older versions observed)" if self.sq_norms is None else "mean"

    @property
    def _scale(self) -> float:
        return geometric_mean([norm for norm in self.sq_norms or () if norm > 0])

    def _relative(self, values: Sequence[float]) -> list[float]:
        return [value / norm if norm > 0 else 0.0 for value, norm in zip(values, self.sq_norms or (), strict=True)]


Noise = Hashable
"""What one kind of noise depends on, an attribute of :class:`~qsync_core.ir.noise.VariantNoise`; equal ones make equal noise."""


def observed_sources(
    observations: Observations,
    collector: str,
    noise_of_term: Mapping[str, Callable[[VariantNoise], Noise | None]],
    base: Precision,
) -> dict[tuple[OpId, Noise], Variant]:
    """Find an observed variant for every operator and noise that a collector's terms were written for, one that makes that noise.

    Args:
        noise_of_term: by the terms to look for, the noise that each measures.
    """
    noise_of = functools.cache(functools.partial(VariantNoise.of, base=base))
    found: dict[tuple[OpId, Noise], Variant] = {}
    for series in observations.series:
        if series.collector != collector or series.op_id is None or series.variant is None or series.term not in noise_of_term:
            continue
        noise = noise_of_term[series.term](noise_of(series.variant))
        if noise is not None:
            found.setdefault((series.op_id, noise), series.variant)
    return found
