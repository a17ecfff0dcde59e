"""Collector ``hessian``: top eigenvalue of the loss's Hessian for each operator's weight, as HAWQ has it.

See docs/design/indicator.md#hessian.

Dong et al., *HAWQ: Hessian AWare Quantization of Neural Networks with Mixed-Precision*, ICCV 2019, arXiv:1905.03696: the block of
the Hessian that belongs to a layer's weight is never formed; its top eigenvalue comes from power iteration on products of that
block with a vector, each of them one more backward pass through the graph of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import attrs
import torch

from qsync_core.geometry import Geometry
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.semantics import steps_of
from qsync_core.ir.variant import Variant
from qsync_indicators_example import terms
from qsync_torch.kinds.products import product
from qsync_torch.observing.call_hooks import hooked_calls
from qsync_torch.observing.collector import ObservedStep, StepTerm, low_precision, parameter_of
from qsync_torch.observing.rounding_noise import element_variance
from qsync_torch.observing.second_derivatives import Uncheckpointed, second_derivatives

FEWEST_PRODUCTS, MOST_PRODUCTS = 4, 8
"""Hessian-vector products an operator."""
TOLERANCE = 0.01
"""Relative change of the eigenvalue from one product to the next at which an operator is done."""


@attrs.define(eq=False)
class _Weights:
    """Notes which tensor each operator takes as its weight, and whether it takes its transpose; calls of one module share it."""

    by_operator: dict[OpId, tuple[torch.Tensor, bool]] = attrs.field(factory=dict)
    _trainable: dict[int, torch.Tensor] = attrs.field(factory=dict)

    @property
    def distinct(self) -> list[torch.Tensor]:
        """Every weight once."""
        return list(self._trainable.values())

    def start_forward(self) -> None:
        """Forget the forward before."""
        self.by_operator.clear()
        self._trainable.clear()

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """The operator's own product; a frozen weight is differentiated for like any other."""
        stored, is_transposed = parameter_of(weight)
        used = self._trainable.setdefault(id(stored), stored if stored.requires_grad else stored.detach().requires_grad_())
        self.by_operator[operator.op_id] = used, is_transposed
        return product(x, used.transpose(0, 1) if is_transposed else used, bias, geometry)


@attrs.frozen(eq=False)
class _Earlier:
    """What was found at the first observed update of a run; ``update`` is that or, in a continued run, the last before it."""

    model: weakref.ref[torch.nn.Module]
    update: int
    variants: tuple[Variant, ...]
    found: Mapping[StepTerm, float]


class HessianCollector:
    """The eigenvalue of largest magnitude of ∂²L/∂w² for every operator's weight w, and ‖Q(w) − w‖² in every variant.

    Measured at the first observed update; later updates of the same run repeat its numbers, because the products of every operator
    would cost more than the training that is observed.  The products go through one graph that is kept meanwhile, which takes two
    to three times the memory of a training step.  Attention runs unfused, for fused kernels have no second derivative.

    Args:
        most_products: Hessian-vector products an operator at most.
        tolerance: relative change of the eigenvalue that ends the iteration earlier, after at least ``FEWEST_PRODUCTS``.
    """

    name = terms.HESSIAN
    by_default = False
    measures_once = True

    def __init__(self, most_products: int = MOST_PRODUCTS, tolerance: float = TOLERANCE) -> None:
        self.most_products, self.tolerance = most_products, tolerance
        self._earlier: _Earlier | None = None

    def passes(self, dag: PrecisionDag, variants: Sequence[Variant]) -> int:
        """Forward and backward passes over the first observed batch at most, a Hessian-vector product counted as one.

        One pass gives the gradients, one backward pass looks for functions that can be differentiated only once, and every weight
        takes its products; calls that share a module share a weight.
        """
        weights = {operator.variant_group or str(operator.op_id) for operator in dag.adjustable}
        return 2 + self.most_products * len(weights)

    def restore(self, model: torch.nn.Module, update: int, variants: Sequence[Variant], found: Mapping[StepTerm, float]) -> None:
        """Repeat what was measured before an interruption; see :class:`RestoredCollector`."""
        if found:
            self._earlier = _Earlier(weakref.ref(model), update, low_precision(variants), found)

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """``top_eigenvalue`` (loss over squared weight), ``weight_numel`` and, per variant, ``weight_error``.

        Raises:
            CollectorUnavailable: where an operation has no second derivative, which is named, or a checkpoint runs one again.
        """
        lowered = low_precision(variants)
        earlier = self._earlier
        if earlier and earlier.model() is step.model and earlier.update < step.update and earlier.variants == lowered:
            return earlier.found
        found = self._measure(step, lowered)
        self._earlier = _Earlier(weakref.ref(step.model), step.update, lowered, found)
        return found

    def _measure(self, step: ObservedStep, variants: Sequence[Variant]) -> dict[StepTerm, float]:
        weights = _Weights()
        with second_derivatives(step.job.name), step.undisturbed(), Uncheckpointed(step.model) as model:
            with hooked_calls(step.model, step.dag.adjustable, weights), model.forward():
                loss = step.loss()
            with model.backward():
                eigenvalues = self._eigenvalues(loss, weights.distinct, step.seed)
        found: dict[StepTerm, float] = {}
        for op_id, (weight, is_transposed) in weights.by_operator.items():
            if id(weight) not in eigenvalues:
                continue  # no gradient came back to it: nothing is known
            found[op_id, None, terms.TOP_EIGENVALUE] = eigenvalues[id(weight)]
            found[op_id, None, terms.WEIGHT_NUMEL] = float(weight.numel())
            for variant in variants:
                cast = steps_of(variant).weight
                read = weight.transpose(0, 1) if is_transposed else weight
                error = element_variance(read, cast.precision, cast.granularity, cast.rounding)
                found[op_id, variant, terms.WEIGHT_ERROR] = float(error.sum(dtype=torch.float64))
        return found

    def _eigenvalues(self, loss: torch.Tensor, weights: Sequence[torch.Tensor], seed: int) -> dict[int, float]:
        """Compute eigenvalues by their weights' identity; none of one on which the loss does not depend differentiably."""
        if not weights or not loss.requires_grad:
            return {}
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        curved = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        if curved:
            # What may be differentiated only once hangs an error into the graph beside the way to the weights, where a product
            # would not meet it and come out too small: this pass goes everywhere.
            torch.autograd.backward(curved, [torch.ones_like(gradient) for gradient in curved], retain_graph=True)
        return {
            id(weight): self._top(gradient, weight, generator) if gradient.requires_grad else 0.0
            for weight, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        }

    def _top(self, gradient: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> float:
        """Power iteration: the Rayleigh quotient of the last vector, which has the sign of the eigenvalue."""
        vector = torch.randn(weight.shape, generator=generator).to(weight)
        vector /= torch.linalg.vector_norm(vector)
        value = 0.0
        for count in range(1, self.most_products + 1):
            (product,) = torch.autograd.grad(gradient, weight, vector, retain_graph=True, allow_unused=True)
            if product is None:
                return 0.0
            before, value = value, float(torch.sum(vector * product, dtype=torch.float64))
            norm = float(torch.linalg.vector_norm(product))
            if norm == 0:
                return 0.0
            if count >= FEWEST_PRODUCTS and abs(value - before) <= self.tolerance * abs(value):
                break
            vector = product / norm
        return value
