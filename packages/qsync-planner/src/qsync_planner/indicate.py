"""``indicate``: Observations → Sensitivity (docs/design/indicator.md#omega).  Pure arithmetic; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from qsync_core.artifacts.files import digest
from qsync_core.chains.finding import chains_of
from qsync_core.errors import ObservationError
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant, ladder_under
from qsync_planner.indicators import Indicator, get_indicator
from qsync_planner.indicators.interface import Omega, RatesCopies, RatesErrors, RatesFlips, RatesKeptInputs, RatesStored
from qsync_planner.indicators.registry import AUTO, automatic, guarded
from qsync_planner.indicators.series import check_values
from qsync_planner.matching import check_observations

T = TypeVar("T")


def indicate(
    observations: Observations | None,
    dag: PrecisionDag,
    variants: Iterable[Variant] = (),
    indicator: str | Indicator = AUTO,
) -> Sensitivity:
    """Ω of every adjustable operator in every variant.

    Args:
        observations: numbers over the first updates; may be None for an indicator that needs none.
        dag: the model that they belong to.
        variants: what to rate; empty means every variant that the observations mention.
        indicator: a name, or an indicator object; ``auto`` is the best that was observed: ``hutchinson``, else ``lossvar``, and
            says so.

    Raises:
        ObservationError: for NaN or infinite values (names operator, term and iteration), missing terms, observations of another
            model, an unknown indicator, none that ``auto`` could be, or no variants at all.
        PluginError: naming an indicator that fails.
    """
    because: tuple[str, ...] = ()
    if indicator == AUTO:
        chosen, because = automatic(observations)
    else:
        chosen = get_indicator(indicator) if isinstance(indicator, str) else indicator
    if observations is None:
        if chosen.collectors:
            raise ObservationError(
                f"indicator {chosen.name!r} needs observations by the collectors {', '.join(chosen.collectors)}; "
                "make them with 'qsync observe'"
            )
    else:
        check_observations(observations, dag)
        check_values(observations)
    ladder, _ = ladder_under(dag.base, variants)
    # Without AMP, plain float32 is rated 0 where it is named; the base of a job under AMP is 0 without being rated.
    rated = [v for v in ladder if dag.base is Precision.FLOAT32 or v != Variant.plain(dag.base)]
    rated = rated or _observed_variants(observations, dag)
    if not rated:
        raise ObservationError(
            f"no variants to rate with indicator {chosen.name!r}: the observations mention none; "
            "name a cluster whose ladders say which are wanted"
        )
    rated.sort(key=str)
    if (stored := [v.label for v in rated if v.storage.is_quantized]) and not isinstance(chosen, RatesStored):
        raise ObservationError(
            f"indicator {chosen.name!r} does not rate weights that are stored in another format, and {', '.join(stored)} are asked "
            "for; choose hutchinson or lossvar, or leave them off the ladder"
        )
    with guarded(chosen, observations):
        omega = _of_those_that_run(chosen.omega(dag, rated, observations), dag)
        _check_omega(chosen.name, omega, dag, rated)
        flips = _of_those_that_run(chosen.flips(dag, rated, observations), dag) if isinstance(chosen, RatesFlips) else {}
        flips = {op_id: {v: part for v, part in by_variant.items() if part > 0} for op_id, by_variant in flips.items()}
        masks = chosen.masks(dag, rated, observations) if isinstance(chosen, RatesFlips) else {}
        kept = chosen.kept_inputs(observations) if isinstance(chosen, RatesKeptInputs) and observations is not None else {}
        _check_kept(chosen.name, kept, dag)
        copies = chosen.copies(dag, rated, observations) if isinstance(chosen, RatesCopies) and observations is not None else {}
        copies = {
            op_id: {v: gain for v, gain in by_variant.items() if gain != 0}
            for op_id, by_variant in _of_those_that_run(copies, dag).items()
        }
        shifts = chosen.shifts(dag, rated, observations) if isinstance(chosen, RatesStored) and observations is not None else {}
        errors = _of_those_that_run(chosen.errors(dag, rated, observations), dag) if isinstance(chosen, RatesErrors) else {}
        errors = {op_id: {v: error for v, error in by_variant.items() if error > 0} for op_id, by_variant in errors.items()}
        notes = tuple(chosen.notes(dag, observations))
        blind = unreached(observations, dag, chosen.collectors)
    return Sensitivity(
        model=dag.model,
        dag_digest=digest(dag),
        observations_digest=digest(observations) if observations is not None else "",
        indicator=chosen.name,
        omega={**lowered_last(omega, blind), **kept},
        notes=(*because, *notes, *unreached_note(blind)),
        flips=flips,
        copies=copies,
        errors={op_id: by_variant for op_id, by_variant in errors.items() if by_variant and op_id not in blind},
        masks={op_id: weight for op_id, weight in masks.items() if weight > 0},
        shifts={op_id: by_variant for op_id, by_variant in shifts.items() if op_id not in blind},
    )


def _observed_variants(observations: Observations | None, dag: PrecisionDag) -> list[Variant]:
    if observations is None:
        return []
    chains = {chain.name for chain in chains_of(dag)}
    series = (one for one in observations.series if one.op_id not in chains)
    return list(dict.fromkeys(one.variant for one in series if one.variant is not None))


def _check_omega(name: str, omega: Mapping[OpId, Mapping[Variant, float]], dag: PrecisionDag, variants: Iterable[Variant]) -> None:
    """Hold an indicator (a plugin's included) to its contract, so that a fault is blamed on it and not on the allocator."""
    for operator in dag.adjustable:
        for variant in filter(operator.runs_in, variants):
            value = omega.get(operator.op_id, {}).get(variant)
            if value is None or not math.isfinite(value) or value < 0:
                got = "nothing" if value is None else repr(value)
                raise ObservationError(
                    f"indicator {name!r} gave {got} for {operator.op_id} at {variant.label}; Ω must be a finite number ≥ 0"
                )


def _of_those_that_run(rated: Mapping[OpId, Mapping[Variant, T]], dag: PrecisionDag) -> dict[OpId, dict[Variant, T]]:
    """What an indicator says of operators, without variants that their kind does not run in."""
    adjustable = {operator.op_id: operator for operator in dag.adjustable}
    return {
        op_id: {v: value for v, value in by_variant.items() if op_id not in adjustable or adjustable[op_id].runs_in(v)}
        for op_id, by_variant in rated.items()
    }


def _check_kept(name: str, kept: Omega, dag: PrecisionDag) -> None:
    """The same for what it says of chains."""
    chains = {chain.name for chain in chains_of(dag)} if kept else set()
    for op_id, by_variant in kept.items():
        for variant, value in by_variant.items():
            if op_id not in chains or not math.isfinite(value) or value < 0:
                what = f"{value!r} for the kept input of {op_id} at {variant.saved}"
                raise ObservationError(f"indicator {name!r} gave {what}; Ω must be a finite number ≥ 0, of a chain of {dag.model}")


def unreached(observations: Observations | None, dag: PrecisionDag, collectors: Sequence[str]) -> list[OpId]:
    """Operators of which these collectors wrote nothing, though of others; zeros are something."""
    if observations is None:
        return []
    written = {series.op_id for series in observations.series if series.collector in collectors}
    return [operator.op_id for operator in dag.adjustable if operator.op_id not in written] if written - {None} else []


def lowered_last(omega: Omega, operators: Sequence[OpId]) -> Omega:
    """Ω with these operators as sensitive as the most sensitive of the others."""
    known = [by_variant for op_id, by_variant in omega.items() if op_id not in operators]
    if not known:
        return omega
    return {
        op_id: {v: max((by[v] for by in known if v in by), default=own) for v, own in by_variant.items()}
        if op_id in operators
        else by_variant
        for op_id, by_variant in omega.items()
    }


def unreached_note(operators: Sequence[OpId]) -> tuple[str, ...]:
    """What a reader must know of them."""
    if not operators:
        return ()
    names = ", ".join(map(str, operators))
    return (f"no gradient came back to {names}: what rounding there does is not known, and Ω is set to the largest of the model",)
