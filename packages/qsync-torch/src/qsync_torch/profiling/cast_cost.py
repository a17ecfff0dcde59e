"""Casting costs: every kind of cast timed at sizes that span the model's, and a line fitted through them.

See docs/design/cost-mapper.md#casting-costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.profile import CastKey, CastModel
from qsync_core.ir.semantics import CastSite
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.binding import quantization_of
from qsync_torch.kernels.library_ops import quantize
from qsync_torch.profiling.linear_fit import fit_line
from qsync_torch.timing import Effort, Stopwatch, repeat
from qsync_torch.tuning.chooser import KernelChooser

SIZES = 8
"""Sizes measured per kind of cast."""
_ROTATE_BYTES = 64 << 20
"""Operands are rotated through about this much memory, so that small casts are not always served from the innermost cache."""
_MAX_ROTATION = 8


def cast_shapes(dag: PrecisionDag, sites: Collection[CastSite], granularity: Granularity) -> list[tuple[int, ...]]:
    """Shapes to time: real ones of the model, spread evenly over the logarithm of the number of elements.

    Weights where only weights are cast that way (their channels matter to per-channel scales), else activations and weights.
    """
    shapes: set[tuple[int, ...]] = set()
    for operator in dag.operators:
        if operator.is_adjustable and CastSite.WEIGHT in sites:
            shapes.add(operator.weight_shape)
        if granularity is not Granularity.PER_CHANNEL:
            shapes.update(operator.input_shapes)
            shapes.add(operator.output_shape)
    by_numel = {math.prod(shape): shape for shape in sorted(shapes) if shape and math.prod(shape) > 1}
    return _spread(by_numel, SIZES)


def _spread(by_numel: dict[int, tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """At most ``count`` of the shapes, the smallest and the largest among them; doubled up where there are fewer than three."""
    numels = sorted(by_numel)
    if not numels:
        return [(64, 16), (256, 64), (1024, 256)]
    if len(numels) < 3:
        smallest, largest = by_numel[numels[0]], by_numel[numels[-1]]
        extra = [(smallest[0] * factor, *smallest[1:]) for factor in (2, 4)]
        return sorted({smallest, largest, *extra}, key=math.prod)
    if len(numels) <= count:
        return [by_numel[n] for n in numels]
    low, high = math.log(numels[0]), math.log(numels[-1])
    wanted = [low + (high - low) * i / (count - 1) for i in range(count)]
    chosen = {min(numels, key=lambda n, target=target: abs(math.log(n) - target)) for target in wanted}
    return [by_numel[n] for n in sorted(chosen)]


def measure_cast(
    key: CastKey, shapes: Iterable[tuple[int, ...]], stopwatch: Stopwatch, effort: Effort, chooser: KernelChooser
) -> CastModel:
    """Time one kind of cast at the given shapes, 8-bit ones with the kernels that are chosen for each, and fit its cost model."""
    rows: list[tuple[int, int, int]] = []
    for shape in shapes:
        cast = make_cast(key, chooser.for_cast(key, shape))
        operands = _operands(key.source, shape, stopwatch.device)
        thunks = [partial(cast, x) for x in operands]

        def sample(thunks: Sequence[Callable[[], object]] = thunks) -> tuple[int, int]:
            while True:
                with torch.no_grad():
                    _, dispatch_ns, compute_ns = stopwatch.time_each(thunks)
                if not stopwatch.must_repeat:
                    return dispatch_ns, compute_ns

        timing = repeat(sample, effort)
        rows.append((math.prod(shape), *timing.median_ns))
    if stopwatch.device.type == "cpu":
        # Issuing and computing can not be told apart; what every call pays, whatever its size, counts as issuing.
        issue_ns = min([stopwatch.overhead_ns, *(compute for _, _, compute in rows)])
        rows = [(numel, issue_ns, compute - issue_ns) for numel, _, compute in rows]
    samples = tuple((numel, compute) for numel, _, compute in rows)
    line = fit_line(samples)
    dispatch_ns = sorted(dispatch for _, dispatch, _ in rows)[len(rows) // 2]
    return CastModel(key, dispatch_ns, line.intercept, line.slope, line.r2, samples)


def make_cast(key: CastKey, chosen: KernelChoice) -> Callable[[torch.Tensor], object]:
    """The function that ``apply_`` performs this cast with."""
    if key.target.needs_scale:
        quantization = quantization_of(key.target, key.granularity, key.rounding, chosen)
        return lambda x: quantize(x, quantization, 1, 0)
    dtype = TORCH_DTYPE[key.target]
    return lambda x: x.to(dtype)


def _operands(source: Precision, shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    nbytes = math.prod(shape) * source.nbytes
    count = max(2, min(_MAX_ROTATION, _ROTATE_BYTES // max(1, nbytes)))
    return [torch.randn(shape, device=device).to(TORCH_DTYPE[source]) for _ in range(count)]
