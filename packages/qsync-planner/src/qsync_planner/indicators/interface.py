"""The interface that every indicator, built in or third-party, implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant

Omega = Mapping[OpId, Mapping[Variant, float]]
"""Ω per adjustable operator and variant: finite, not negative, 0 for the base precision."""


Shifts = Mapping[OpId, Mapping[Variant, tuple[float, ...]]]
"""Numbers with a sign per operator and variant, along the same directions for all."""


@runtime_checkable
class Indicator(Protocol):
    """Arithmetic from Observations to Ω.  Constructing one must be cheap and must not import torch.

    Attributes:
        name: how commands and Sensitivity artifacts call it; unique among installed indicators.
        collectors: collectors whose terms it reads; empty where it needs no observations.
        summary: one line for ``qsync indicate --list``.
    """

    name: str
    collectors: tuple[str, ...]
    summary: str

    def omega(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """Ω of every adjustable operator of ``dag`` in every one of ``variants``.

        Args:
            variants: what to rate, without repetitions; includes the base precision's where a ladder does.
            observations: finite numbers over the first updates; None only where ``collectors`` is empty.

        Raises:
            ObservationError: when a term it needs is missing or cannot be used.
        """
        ...

    def notes(self, dag: PrecisionDag, observations: Observations | None) -> tuple[str, ...]:
        """What a reader of the Sensitivity must know: how values were averaged, which assumption was made."""
        ...


@runtime_checkable
class RatesFlips(Protocol):
    """What an indicator may offer beside :class:`Indicator`."""

    def flips(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """The part of Ω that comes from masks that flip, at most Ω; operators share the masks, so that it does not add up.

        Arguments as in :meth:`Indicator.omega`.
        """
        ...

    def masks(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Mapping[OpId, float]:
        """What flips of all masks behind an operator would do to the gradients under noise as large as what they read.

        An operator whose number is larger reaches all masks of one whose number is smaller, and some before them.  One that is
        absent shares no masks.  Arguments as in :meth:`Indicator.omega`.
        """
        ...


@runtime_checkable
class RatesErrors(Protocol):
    """What an indicator may offer beside :class:`Indicator`."""

    def errors(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations | None) -> Omega:
        """The standard error of Ω, of operators and of what chains keep; absent where it is not known.

        Arguments as in :meth:`Indicator.omega`.
        """
        ...


@runtime_checkable
class RatesCopies(Protocol):
    """What an indicator may offer beside :class:`Indicator`."""

    def copies(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Omega:
        """What Ω of an operator gains where it reads the copy that a fused chain with a residual writes; absent is 0."""
        ...


@runtime_checkable
class RatesStored(Protocol):
    """What an indicator may offer beside :class:`Indicator`; one without it rates no variant that stores a weight."""

    def shifts(self, dag: PrecisionDag, variants: Sequence[Variant], observations: Observations) -> Shifts:
        """How the fixed error of a stored weight moves the gradients, along sampled directions: the sum of squares is its part of
        Ω, and those of operators add up before they are squared.  Empty where that is not known."""
        ...


@runtime_checkable
class RatesKeptInputs(Protocol):
    """What an indicator may offer beside :class:`Indicator`; without it, no plan keeps the input of a fused chain in 8 bit."""

    def kept_inputs(self, observations: Observations) -> Omega:
        """Ω of keeping a chain's input in 8 bit, by the chain's name and :attr:`~qsync_core.ir.chain.ChainVariant.rated_as`; those
        of chains that it knows something of."""
        ...
