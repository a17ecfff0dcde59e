"""Observations: the device-independent numbers that indicators need, collected over the first updates of a run.

A *collector* (qsync-torch) writes series of a named *term* for an operator and, where the term depends on it, a variant; an
*indicator* (qsync-planner) is arithmetic on them (docs/design/indicator.md#omega).  The terms:

Notation: an adjustable operator computes ``y = v · x`` from its activation input ``v`` and its weight ``x`` (the paper's letters;
``lossvar`` below writes x and w for the two, as docs/design/indicator.md does).  ``L`` is the loss, all gradients are those of the
loss of the observed batch without any loss scaling.  All values are finite float64 numbers, one per observed iteration.

Observing itself writes as ``run``, of the whole model (op_id and variant None):

====================  ================================================================================================
``loss``              of the observed batch
``gradient_sq_norm``  ‖∂L/∂θ‖², by which indicators weigh updates (docs/design/indicator.md#averages-over-updates); absent from
                      observations of older versions
====================  ================================================================================================

Collector ``lossvar``, one series per (adjustable operator, variant that is not the base precision's):

===============  ====================================================================================================
``x_var_grad``   Σ_j σ²_j · (∂L/∂x_j)² over the elements of the activation copy in ``variant.compute``
``w_var_grad``   the same over the weight copy, with the variant's weight granularity
``y_var_grad``   the same over the output where ``variant.output`` is a 16-bit format; optional, absent means 0
``stored_grad``  Σ_j d²_j · (∂L/∂w_j)² over the fixed error d of a stored weight; of variants that store it
===============  ====================================================================================================

σ²_j is the variance of the rounding of element j: s²·f·(1−f) for stochastic rounding, f being the residual in units of the
spacing s; for nearest the square of the error itself, which is s²/12 on average and 0 where the format holds the value; for floor
s²/12 plus the squared mean error s²/4, and 0 for zeros.
For int8 s is the scale; for floats s = 2^(e−k) with the element's own exponent e, not below the format's smallest.

Collector ``hutchinson``, one series per (adjustable operator, variant that is not the base precision's).  For a random direction u
of independent signs over all parameters, h = ∂⟨∂L/∂θ, u⟩/∂e is the response to noise e added to the named tensors, so that
Σ_j σ²_j·h²_j + (Σ_j μ_j·h_j)² is an unbiased estimate of the first-order E‖Δ∂L/∂θ‖² (μ the mean error of floor rounding).
Calls of one module read one rounded weight; each is written an equal part of what that does:

====================  ================================================================================================
``operands``          that sum over the compute copies of activation and weight, forward and saved
``output``            over the output where ``variant.output`` is a 16-bit format; absent means 0
``gradient``          over the copies of the incoming gradient and over the gradient of the input, in their formats, and the
                      squared rounding error of the weight's gradient where the product writes 16 bits
``operands_flips``    what flips of masks' elements, each by itself, add to ``operands``: the same sum of the response through
                      masks' windowed derivatives with a random sign for every element, times 2√(2/π)·t over the standard
                      deviation that t, the half width of the window, was taken from; absent without ReLU and max pooling
``output_flips``      the same for ``output``
``operands_noise``    squared error that the operands' rounding causes in what masks read, over its variance; mean over the masks
                      behind the operator, by what their flips do to the gradient: flips / √noise over √noise is Σ of these
                      weights, which does not depend on the variant
``output_noise``      the same for rounding the output
====================  ================================================================================================

Of operators whose weight is frozen, and variants that store it, where u_k are the directions of an update:

====================  ================================================================================================
``shift_0`` …         Σ_j d_j·∂⟨∂L/∂θ, u_k⟩/∂w_j, with a sign, over the fixed error d of the stored weight
                      (docs/design/indicator.md#stored-weights): the mean of their squares is ‖Δ∂L/∂θ‖² by it; of calls of one
                      module the first has what all do, and the others have 0
``stored_flips``      as ``operands_flips``, of that error with a random sign for each element
``stored_noise``      likewise ``operands_noise``
====================  ================================================================================================

Of operators that read the result of a batch norm with a residual, and variants that read its int8 copy, rounded stochastically:

====================  ================================================================================================
``copy``              ``operands`` with the activation's scale that a fused chain writes, a bound
                      (docs/design/indicator.md#copies-behind-a-shortcut); absent where the chain's calls were not found
``copy_flips``        likewise ``operands_flips``
``copy_noise``        likewise ``operands_noise``
====================  ================================================================================================

A mask flips with a probability that goes with noise, not its square: flips count ``flips / √noise``
(docs/design/indicator.md#flips).

It also writes one series per (chain, variant under which its kept input is rated), for every 8-bit format on the ladders:

====================  ================================================================================================
``kept_input``        the same sum over what the chain keeps for backward (docs/design/indicator.md#kept-inputs); absent for a
                      chain whose calls were not found, or to which no gradient came back
====================  ================================================================================================

Collector ``montecarlo``, the truth, one series per (adjustable operator, variant that is not the base precision's) with the
operator alone in that variant, and one with ``op_id=None`` for all adjustable operators in it together; where it is asked to, also
one per (chain, variant under which its kept input is rated):

====================  ================================================================================================
``first_half``        mean over the first half of the draws of ‖Δ∂L/∂θ‖², the squared change of all parameters' gradients
``second_half``       the same over the second half
``gradient_sq_norm``  once per iteration (op_id and variant None): ‖∂L/∂θ‖² of the undisturbed step
====================  ================================================================================================

Where nothing is drawn (no stochastic rounding) both halves are the same number.  Calls of one module are lowered at once, and each
is written an equal part of what that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import attrs

from qsync_core.ir import checks
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

RUN = "run"
LOSS = "loss"
GRADIENT_SQ_NORM = "gradient_sq_norm"

LOSSVAR = "lossvar"
X_VAR_GRAD = "x_var_grad"
W_VAR_GRAD = "w_var_grad"
Y_VAR_GRAD = "y_var_grad"
STORED_GRAD = "stored_grad"

HUTCHINSON = "hutchinson"
OPERANDS = "operands"
OUTPUT = "output"
GRADIENT = "gradient"
OPERANDS_FLIPS = "operands_flips"
OUTPUT_FLIPS = "output_flips"
OPERANDS_NOISE = "operands_noise"
OUTPUT_NOISE = "output_noise"
SHIFTS = tuple(f"shift_{number}" for number in range(16))
STORED_FLIPS = "stored_flips"
STORED_NOISE = "stored_noise"
COPY = "copy"
COPY_FLIPS = "copy_flips"
COPY_NOISE = "copy_noise"
KEPT_INPUT = "kept_input"

MONTECARLO = "montecarlo"
FIRST_HALF = "first_half"
SECOND_HALF = "second_half"


@attrs.frozen
class Series:
    """One term over the observed iterations.

    Attributes:
        op_id: the operator; None for a number of the whole model (γ, the loss).
        variant: the variant the term is for; None where it does not depend on one (norms, exponents).
        collector: who wrote it; term: what it is (the collector documents its terms and their units).
        values: one per entry of ``Observations.iterations``.  They may be NaN or infinite in memory, so that a reader can name the
            operator; such observations are not stored.
    """

    op_id: OpId | None
    variant: Variant | None
    collector: str
    term: str
    values: tuple[float, ...]


@attrs.frozen
class Observations:
    """Series of all collectors over the same iterations (docs/design/indicator.md#omega).

    Attributes:
        model, dag_digest: which PrecisionDag they belong to.
        iterations: indices of the observed updates.
        batch_size: samples per observed batch (half the job's, as in the paper, unless asked otherwise).
        stopped: why observing stopped: ``"budget"`` or ``"settled: …"``.
        settings: what else a reader needs to repeat them (seed, rounding, warm-up).
    """

    model: str
    dag_digest: str
    iterations: tuple[int, ...] = attrs.field(validator=checks.each(checks.non_negative_int))
    batch_size: int = attrs.field(validator=checks.positive_int)
    stopped: str
    series: tuple[Series, ...]
    settings: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for series in self.series:
            if len(series.values) != len(self.iterations):
                raise ValueError(
                    f"series {series.collector}.{series.term} of {series.op_id} has {len(series.values)} values "
                    f"for {len(self.iterations)} iterations"
                )
        if any(later <= earlier for earlier, later in itertools.pairwise(self.iterations)):
            raise ValueError(f"the observed iterations must ascend, got {self.iterations[:20]}")
        if twice := checks.first_repeated((s.op_id, s.variant, s.collector, s.term) for s in self.series):
            op_id, variant, collector, term = twice
            raise ValueError(f"{collector}.{term} of {op_id} at {variant.label if variant else variant} has two series")

    @cached_property
    def _by_key(self) -> dict[tuple[OpId | None, Variant | None, str, str], Series]:
        return {(s.op_id, s.variant, s.collector, s.term): s for s in self.series}

    def values(self, collector: str, term: str, op_id: OpId | None = None, variant: Variant | None = None) -> tuple[float, ...]:
        """The values of one series.

        Raises:
            KeyError: when there is no such series.
        """
        return self._by_key[op_id, variant, collector, term].values
