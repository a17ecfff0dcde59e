"""What a variant rounds around an operator: the values that decide how much noise it makes (docs/design/indicator.md#propagation).

Collectors (qsync-torch) measure the noise of each value here, and indicators (qsync-planner) take a measured one for every variant
with an equal value.  Both read this one, so that variants share what was measured exactly where their noise is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage
from qsync_core.ir.semantics import CastTarget, steps_of
from qsync_core.ir.variant import Variant

EXACT = CastTarget(Precision.FLOAT32)
"""Rounds nothing."""


def kept_formats(variants: Iterable[Variant]) -> tuple[Precision, ...]:
    """The 8-bit formats in which plans of these variants may keep the inputs of fused chains, each once."""
    return tuple(dict.fromkeys(variant.compute for variant in variants if variant.compute.needs_scale))


def kept_input(saved: Precision) -> CastTarget:
    """What the kept input of a fused chain is rounded to, as a matrix with a scale for each entry of dimension 0: a batch norm's
    channels, else rows (docs/design/fused-chains.md)."""
    return CastTarget(saved, Granularity.PER_CHANNEL, Rounding.STOCHASTIC)


@attrs.frozen(cache_hash=True)
class OperandCasts:
    """What the operands of the forward product are cast to: all that the noise of its output depends on."""

    x: CastTarget
    weight: CastTarget
    bias: CastTarget


@attrs.frozen(cache_hash=True)
class GradientCopies:
    """Which copies of an operator's incoming gradient a variant makes.

    Attributes:
        to_input, to_weight: the copies that the product for the input's gradient reads, and that for the weight's.
        shared: whether both products read one copy.
        by_column: the activation's cast, where the copy for the weight's gradient is of the gradient times the activation's scales
            of rows, and has a scale for each column, where ``to_weight`` says each row.
        multiplied: the weight's cast, where the copy for the input's gradient is of the gradient times the weight's scale of each
            output channel.
    """

    to_input: CastTarget
    to_weight: CastTarget
    shared: bool
    multiplied: CastTarget | None
    by_column: CastTarget | None = None


@attrs.frozen(cache_hash=True)
class GradientCasts:
    """All that is rounded in backward; None for what stays exact.

    Attributes:
        copies: of the incoming gradient.
        grad_input: the float product for the gradient of the input; exact where the product writes the activation's own format.
        grad_weight: the gradients of weight and bias; exact where the product writes float32.
    """

    copies: GradientCopies | None
    grad_input: CastTarget | None
    grad_weight: CastTarget | None


@attrs.frozen(cache_hash=True)
class StoredError:
    """What storing a weight changes in it, the same in every step: what a product reads of it, less what it would read of the
    weight itself.

    Attributes:
        storage: of the weight.
        read_in: the float format in which the product reads either; float32 where it reads what is stored.
    """

    storage: Storage
    read_in: Precision


@attrs.frozen
class VariantNoise:
    """All that a variant rounds around one operator of a float32 model, beyond what the base rounds too; else None.

    Attributes:
        operands: of the forward product; ``weight``: that of the weight alone.
        output: its result, in the format that the next operator receives.
        gradients: what backward rounds.
        stored: the error of a stored weight, which is fixed and no noise.
    """

    operands: OperandCasts | None
    weight: CastTarget | None
    output: CastTarget | None
    gradients: GradientCasts | None
    stored: StoredError | None = None

    @classmethod
    def of(cls, variant: Variant, base: Precision = Precision.FLOAT32) -> VariantNoise:
        """The steps that ``apply_`` runs, of the table of precision semantics, where the neighbours of the operator are float32.

        Args:
            base: format of a job under AMP: what its plain variant rounds likewise is there without any plan, and not counted.
        """
        if base is not Precision.FLOAT32:
            return cls.of(variant)._beyond(cls.of(Variant.plain(base)))
        steps = steps_of(variant)
        weight = EXACT if variant.reads_stored else steps.weight  # whose error is that of its storage, fixed
        operands = OperandCasts(steps.x, weight, steps.bias)
        multiplied = steps.weight if steps.multiplied else None
        shared = len(steps.grad_output) == 1 and not steps.by_column
        by_column = steps.x if steps.by_column else None
        copies = GradientCopies(steps.grad_input, steps.grad_weight, shared, multiplied, by_column)
        written = Precision.FLOAT32 if steps.is_quantized or variant.grad_weight.needs_scale else variant.grad_weight
        gradients = GradientCasts(
            None if copies.to_input == copies.to_weight == EXACT else copies,
            _rounded(steps.grad_input_result),
            _rounded(written),
        )
        return cls(
            None if steps.x == weight == steps.bias == EXACT else operands,
            None if weight == EXACT else weight,
            _rounded(steps.output),
            _or_none(gradients),
            _stored(variant),
        )

    def _beyond(self, base: VariantNoise) -> VariantNoise:
        gradients, theirs = self.gradients, base.gradients
        if gradients is not None and theirs is not None:
            copies = None if gradients.copies == theirs.copies else gradients.copies
            grad_input = None if gradients.grad_input == theirs.grad_input else gradients.grad_input
            grad_weight = None if gradients.grad_weight == theirs.grad_weight else gradients.grad_weight
            gradients = _or_none(GradientCasts(copies, grad_input, grad_weight))
        return VariantNoise(
            None if self.operands == base.operands else self.operands,
            None if self.weight == base.weight else self.weight,
            None if self.output == base.output else self.output,
            gradients,
            self.stored,
        )


def _stored(variant: Variant) -> StoredError | None:
    if not variant.storage.is_quantized:
        return None
    return StoredError(variant.storage, Precision.FLOAT32 if variant.reads_stored else variant.compute)


def _or_none(gradients: GradientCasts) -> GradientCasts | None:
    return None if gradients == GradientCasts(None, None, None) else gradients


def _rounded(precision: Precision | None) -> CastTarget | None:
    return None if precision in (None, Precision.FLOAT32) else CastTarget(precision)
