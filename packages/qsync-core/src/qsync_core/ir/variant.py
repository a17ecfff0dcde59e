"""A variant: everything about *how* one operator runs that changes its result, its time or its memory.

It keys profiles, sensitivities and plans.  Its text, which artifacts store and users type, is canonical: equal variants have equal
text.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import attrs

from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage

AFFINE = "-affine"
"""What a name ends with that means zero points."""
ALL = "-all"
"""What a name ends with that means all three products in 8 bit, with a scale for each row: ``int8-all``."""
STORED = "@"
"""What stands in a name before the format in which a frozen weight is stored: ``bfloat16@nf4``."""
_FIELD_BY_LABEL = {
    "out": "output",
    "save": "saved",
    "gi": "grad_input",
    "gw": "grad_weight",
    "x": "x_granularity",
    "w": "w_granularity",
    "round": "rounding",
    "sym": "symmetric",
}
_FACTORS = ";factors=channel"
"""What a text ends with that means channel factors; without them it is as it was before there were any."""
_STORE = ";store="
"""What stands, at a text's very end, before the storage of a frozen weight; a weight that is stored as it is has none."""


@attrs.frozen(cache_hash=True)
class Variant:
    """How one operator runs, forward and backward (docs/artifacts.md#variants).

    Attributes:
        compute: format of both operands of the forward product.
        output: format of the result that the next operator receives.
        saved: format in which operands are kept for backward.
        grad_input: format in which the gradient of the input is computed.
        grad_weight: format in which the gradient of the weight is computed; it is delivered to the parameter in float32.
        x_granularity: scales of the quantized activation (8-bit compute only; otherwise per tensor and without effect).  One a row
            goes for the incoming gradient too; an 8-bit product for the weight's gradient, which sums over the rows, then reads the
            activation's copy and one of the gradient times the activation's scales, with a scale for each column.
        w_granularity: scales of the quantized weight (likewise).
        rounding: of the casts to an 8-bit format; float casts round to nearest.
        channel_factors: activation and weight are divided and multiplied by one factor for each input channel before they are
            quantized, from the last step's magnitudes (linear operators in 8-bit formats).
        symmetric: absmax scales, values in -127..127, zero point 0.  False: the int8 activation has a zero point (affine); weight
            and gradients stay symmetric.  Only backend ``aten`` offers it.
        storage: how the weight is stored where it is not trained.  Products in a float format read it dequantized to that format;
            int8 ones read ``int8-row`` as their operand, as it is.
    """

    compute: Precision
    output: Precision
    saved: Precision
    grad_input: Precision
    grad_weight: Precision
    x_granularity: Granularity = Granularity.PER_TENSOR
    w_granularity: Granularity = Granularity.PER_TENSOR
    rounding: Rounding = Rounding.NEAREST
    symmetric: bool = True
    channel_factors: bool = False
    storage: Storage = Storage.AS_IS

    def __attrs_post_init__(self) -> None:
        if self.output.needs_scale:
            raise ValueError(f"an operator's output is a 16- or 32-bit float, got {self.output}")
        if self.storage.is_quantized and self.compute.needs_scale and not self.reads_stored:
            raise ValueError(
                f"a product in {self.compute} does not read a weight stored as {self.storage}: int8 products without channel "
                f"factors read {Storage.INT8_ROW} with w=channel, and float ones any storage"
            )

    @property
    def reads_stored(self) -> bool:
        """Whether the stored weight is the product's operand, and nothing is dequantized: an int8 product of ``int8-row``."""
        return (
            self.storage is Storage.INT8_ROW
            and self.compute is Precision.INT8
            and self.w_granularity is Granularity.PER_CHANNEL
            and not self.channel_factors
        )

    @property
    def has_rows_throughout(self) -> bool:
        """Whether all three products are in int8, with a scale a row: what ``int8-all`` means."""
        formats = {self.compute, self.grad_input, self.grad_weight}
        return formats == {Precision.INT8} and self.x_granularity is Granularity.PER_ROW and self.symmetric

    @property
    def as_is(self) -> Variant:
        """The variant that differs in storing the weight as the script has it."""
        return attrs.evolve(self, storage=Storage.AS_IS) if self.storage.is_quantized else self

    @classmethod
    def of(
        cls,
        precision: Precision,
        *,
        sixteen_bit: Precision = Precision.BFLOAT16,
        output: Precision | None = None,
        rounding: Rounding = Rounding.STOCHASTIC,
        w_granularity: Granularity = Granularity.PER_CHANNEL,
    ) -> Variant:
        """The standard variant of a precision (the table of docs/design/precision-semantics.md#standard-variants).

        int8, float8: 8-bit copies saved, output (unless ``output`` says otherwise) and backward in ``sixteen_bit``.  float16,
        bfloat16, float32: the same format throughout.
        """
        if precision.needs_scale:
            return cls(
                compute=precision,
                output=output or sixteen_bit,
                saved=precision,
                grad_input=sixteen_bit,
                grad_weight=sixteen_bit,
                w_granularity=w_granularity,
                rounding=rounding,
            )
        return cls(precision, output or precision, precision, precision, precision)

    @classmethod
    def named(cls, name: str, **settings: Any) -> Variant:
        """The standard variant of a precision's name, or of ``int8-affine``: int8 with a zero point of the activation; or of
        ``int8-all``: the products for both gradients are int8 too, and activation and gradient have a scale a row.

        Args:
            name: as people write it; the output's format may stand behind it, ``int8>float32``, and behind that how a frozen weight
                is stored, ``bfloat16@nf4``.
            settings: as :meth:`of` takes them.

        Raises:
            ValueError: for any other name.
        """
        name, stored, storage = name.partition(STORED)
        if stored:
            return attrs.evolve(cls.named(name, **settings), storage=Storage(storage))
        name, delivers, output = name.partition(">")
        if delivers:
            settings["output"] = Precision(output)
        word, suffix = next(((name.removesuffix(end), end) for end in (AFFINE, ALL) if name.endswith(end)), (name, ""))
        precision = Precision(word)
        standard = cls.of(precision, **settings)
        if suffix and precision is not Precision.INT8:
            what = "zero points belong to int8 activations" if suffix == AFFINE else "gradients in 8 bit belong to int8"
            raise ValueError(f"{what}, got {name!r}")
        if suffix == ALL:
            return attrs.evolve(standard, grad_input=precision, grad_weight=precision, x_granularity=Granularity.PER_ROW)
        return attrs.evolve(standard, symmetric=not suffix)

    @classmethod
    def plain(cls, precision: Precision) -> Variant:
        """The variant of an operator that simply runs in one float format (dependent and guarded operators)."""
        return cls(precision, precision, precision, precision, precision)

    def under(self, base: Precision) -> Variant | None:
        """This variant on the ladder of a job whose base is that format; None where it is not below the base, nor the base itself.

        Under a 16-bit base (AMP) an 8-bit variant delivers the base, so that every other operator finds the formats of autocast.
        """
        if base is Precision.FLOAT32 or self.as_is == Variant.plain(base):
            return self
        return attrs.evolve(self, output=base) if self.compute.needs_scale else None

    @property
    def in_float32(self) -> Variant:
        """The variant that differs in delivering float32."""
        return self if self.output is Precision.FLOAT32 else attrs.evolve(self, output=Precision.FLOAT32)

    def known_as(self, known: Container[Variant]) -> Variant | None:
        """The variant under which something is known of this one: itself, or where it delivers float32 the same in 16 bits.

        None where neither is known.
        """
        if self in known:
            return self
        if self.output is not Precision.FLOAT32:
            return None
        delivering = (attrs.evolve(self, output=output) for output in (Precision.BFLOAT16, Precision.FLOAT16))
        return next((variant for variant in delivering if variant in known), None)

    @property
    def label(self) -> str:
        """Short text for tables: the compute format, whether it is affine or all three products are in int8 (``int8-all``), and the
        output's where it is not the usual one (of 8-bit formats 16 bit), and how a frozen weight is stored; for what a fused
        chain keeps in 8 bit the format of that."""
        if self.storage.is_quantized:
            return f"{self.as_is.label}{STORED}{self.storage}"
        if self.saved.needs_scale and not self.compute.needs_scale:
            return f"{self.saved} saved"
        compute = str(self.compute) if self.symmetric else f"{self.compute}{AFFINE}"
        if self.has_rows_throughout:
            compute = f"{self.compute}{ALL}"
        is_usual = self.output is not Precision.FLOAT32 if self.compute.needs_scale else self.output is self.compute
        return compute if is_usual else f"{compute}>{self.output}"

    def __str__(self) -> str:
        parts = [str(self.compute)]
        for label, field in _FIELD_BY_LABEL.items():
            value = getattr(self, field)
            parts.append(f"{label}={str(value).lower() if isinstance(value, bool) else value}")
        stored = f"{_STORE}{self.storage}" if self.storage.is_quantized else ""
        return ";".join(parts) + (_FACTORS if self.channel_factors else "") + stored

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read the canonical text, or a name (``int8``, ``int8>float32``, ``int8-affine``, ``int8-all``: :meth:`named`).

        Raises:
            ValueError: when the text names an unknown format, field or value.
        """
        whole, stored, storage = text.partition(_STORE)
        head, *rest = whole.removesuffix(_FACTORS).split(";")
        try:
            if not rest:
                return cls.named(text)
            if stored and storage == Storage.AS_IS:
                raise ValueError(f"a weight that is stored {storage} has no {_STORE.strip(';=')}")
            compute = Precision(head)
            labels = dict(part.split("=", 1) for part in rest)
            if list(labels) != list(_FIELD_BY_LABEL) or len(labels) != len(rest):
                missing = ", ".join(label for label in _FIELD_BY_LABEL if label not in labels)
                raise ValueError(f"it lacks {missing}" if missing else "fields unknown, repeated or out of order")
            return cls(
                compute=compute,
                output=Precision(labels["out"]),
                saved=Precision(labels["save"]),
                grad_input=Precision(labels["gi"]),
                grad_weight=Precision(labels["gw"]),
                x_granularity=Granularity(labels["x"]),
                w_granularity=Granularity(labels["w"]),
                rounding=Rounding(labels["round"]),
                symmetric={"true": True, "false": False}[labels["sym"]],
                channel_factors=whole.endswith(_FACTORS),
                storage=Storage(storage) if stored else Storage.AS_IS,
            )
        except (ValueError, KeyError) as error:
            known = ", ".join((*Precision, f"{Precision.INT8}{AFFINE}", f"{Precision.INT8}{ALL}"))
            raise ValueError(f"not a variant: {text!r} ({error}); a variant starts with one of {known}") from None


def ladder_under(base: Precision, ladder: Iterable[Variant]) -> tuple[tuple[Variant, ...], tuple[Variant, ...]]:
    """A ladder for a job whose base is that format, and the rungs that were cut off because they are not below it.

    Without AMP (a float32 base) the ladder as it is; else it ends with the base, whether or not that was on it.
    """
    if base is Precision.FLOAT32:
        return tuple(ladder), ()
    found = [(rung, rung.under(base)) for rung in ladder]
    top = Variant.plain(base)
    kept = dict.fromkeys(rung for _, rung in found if rung is not None and rung != top)
    return (*kept, top), tuple(rung for rung, under in found if under is None)
