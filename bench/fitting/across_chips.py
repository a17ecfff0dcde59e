"""W1: a transformer block's forward on chips that the rule's constants were fitted without, from its times on another.

The set's times hold the CPU's: an operator takes at least as long as its dispatch.  So the device's own time on the source is the
least per sample of this batch and larger ones, and the target's least time is that of the same operator on all chips but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fitting.public_set import BATCHES, CHIPS, LARGEST, SIZES, Case, Times, block, read, work
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import Place, Reached
from qsync_planner.estimating.scaling import LAUNCH_NS, _on_another_share, scaled_ns

Row = dict[str, Any]
Scaling = Callable[..., float]
SOURCE = "GH-96"
"""Of the generation of the profiles that come with QSync."""
_UNHELD = 0.95
"""A chip that reaches more of its peak than this is not held by its power."""
_FLOAT16, _FLOAT32 = Precision.FLOAT16, Precision.FLOAT32
_NAMES = {_FLOAT16: "float16", _FLOAT32: "float32, TF32 where the chip has it"}


def fitted(times: Times, without: str) -> Reached:
    """The constants that the largest products of all chips but one give.

    A chip's share of a peak, or its energy, is the median of its products; energies are averaged, of shares the largest is what no
    chip exceeds.
    """
    joules, tensor, float32 = [], [], []
    for name, sheet in CHIPS.items():
        if name == without:
            continue
        peaks = sheet.chip.peak_tera
        sixteen = median(_rates(times[name], _FLOAT16))
        if sheet.tf32_tera:
            sixteen = fmean((sixteen, 2 * median(_rates(times[name], _FLOAT32))))
        else:
            float32.append(median(_rates(times[name], _FLOAT32)) / peaks[_FLOAT32])
        if sixteen < _UNHELD * peaks[_FLOAT16]:
            joules.append(sheet.watts / sheet.process_nm / sixteen)
        else:
            tensor.append(sixteen / peaks[_FLOAT16])
    return Reached(joules=fmean(joules), tensor=max(tensor), float32=max(float32))


def _rates(of: dict[Case, float], precision: Precision) -> list[float]:
    """10¹² operations a second that the largest products do."""
    return [
        work(case).products[0][1] / duration / 1e3
        for case, duration in of.items()
        if case.precision is precision and case.operator in LARGEST and case.batch >= max(BATCHES) // 2
    ]


def _estimates(times: Times, source: str, target: str, scaling: Scaling) -> Callable[[Case], float]:
    """What an operator is estimated to take on the target, in nanoseconds."""
    reached = fitted(times, target)
    places = Place(CHIPS[source], 1.0, reached), Place(CHIPS[target], 1.0, reached)

    @cache
    def dispatch(operator: str, precision: Precision) -> float:
        others = (of.items() for name, of in times.items() if name != target)
        return min(t for of in others for case, t in of if (case.operator, case.precision) == (operator, precision))

    def of(case: Case) -> float:
        larger = {batch: times[source].get(case.at(batch)) for batch in BATCHES if batch >= case.batch}
        on_device = min(t * case.batch / batch for batch, t in larger.items() if t)
        scaled = scaling(round(on_device + LAUNCH_NS), work(case), *places, tf32=True)
        return max(scaled, dispatch(case.operator, case.precision))

    return of


def errors(
    times: Times, source: str, target: str, precision: Precision, batches: Sequence[int], scaling: Scaling = scaled_ns
) -> dict[tuple[str, int], float]:
    """Estimated over measured forward of a block, less 1, by model and batch; jobs that did not fit in memory are left out."""
    estimate, found = _estimates(times, source, target, scaling), {}
    for model in SIZES:
        for batch in batches:
            cases = list(block(model, precision, batch))
            if all(case in times[name] for case in cases for name in (source, target)):
                found[model, batch] = sum(map(estimate, cases)) / sum(times[target][case] for case in cases) - 1
    return found


def _old_rule(*arguments: Any, tf32: bool) -> float:
    """The rule by which shares of a chip are estimated, and chips were."""
    return _on_another_share(*arguments, tf32)


def rows(folder: Path) -> Iterator[Row]:
    """W1 and W1b for batches 2 to 8, and what they leave out."""
    times = read(folder)
    targets = [name for name in CHIPS if name != SOURCE]
    for precision, batches, name, target_of in (
        (_FLOAT16, (2, 4, 8), "W1", True),
        (_FLOAT16, (1,), "W1-one", False),
        (_FLOAT32, (2, 4, 8), "W1-float32", True),
        (_FLOAT32, (1,), "W1-float32-one", False),
    ):
        by_chip = {chip: errors(times, SOURCE, chip, precision, batches) for chip in targets}
        where = f"{_NAMES[precision]}, batch {' '.join(map(str, batches))}, from GH200 to five chips, constants without the chip"
        yield from _summary(name, by_chip, where, target_of)
        for chip, found in by_chip.items():
            yield _row(f"{name}-{chip}", f"{where}: to {CHIPS[chip].name}, mean of signed errors", fmean(found.values()))
        old = {chip: errors(times, SOURCE, chip, precision, batches, _old_rule) for chip in targets}
        yield from _summary(f"{name}-old", old, f"{where}, by the rule of shares", False)
    for precision in (_FLOAT16, _FLOAT32):
        everywhere = {
            f"{source} {target}": errors(times, source, target, precision, (2, 4, 8))
            for source in CHIPS
            for target in CHIPS
            if source != target
        }
        where = f"{_NAMES[precision]}, batch 2 4 8, from each of six chips to each other one, constants without it"
        yield from _summary(f"W1-all-{precision}", everywhere, where, False)


def _summary(name: str, by_chip: dict[str, dict[tuple[str, int], float]], where: str, bounded: bool) -> Iterator[Row]:
    """Mean and worst absolute error."""
    found = [abs(error) for of in by_chip.values() for error in of.values()]
    about = f"estimated forward of a block, {where}, {len(found)} jobs"
    yield _row(name, f"{about}: mean error", fmean(found), "≤ 0.10" if bounded else "reported")
    yield _row(f"{name}b", f"{about}: worst error", max(found), "≤ 0.20" if bounded else "reported")


def _row(name: str, what: str, value: float, target: str = "reported") -> Row:
    return {"id": name, "what": what, "value": round(value, 4), "unit": "fraction", "target": target}
