"""Casting costs: every kind of cast that a ladder can lead to, timed at sizes that span the model's, and a line through the times.

See docs/design/cost-mapper.md#casting-costs and docs/design/precision-semantics.md#casts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.ir.dag import OpClass, Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, promote
from qsync_core.ir.profile import CastKey, CastModel
from qsync_core.ir.semantics import CastSite, casts
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.kinds import KINDS
from qsync_torch.aten.stored_weights import StoredWeight, quantize_weight
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.binding import quantization_of
from qsync_torch.kernels.library_ops import quantize
from qsync_torch.operators.stored import dequantize
from qsync_torch.profiling.linear_fit import fit_line
from qsync_torch.timing import Effort, Stopwatch, Thunk, repeat, rotation_count
from qsync_torch.tuning.chooser import KernelChooser

SIZES = 8
"""Sizes measured per kind of cast."""
_CACHE_BYTES, _MOST_SETS = 32 << 20, 8
"""Operands are rotated so that small casts are not always served from a CPU's innermost cache."""


def activation_precisions(ladder: Sequence[Variant]) -> tuple[Precision, ...]:
    """Every format in which an activation can arrive: float32, the ladder's outputs, and what they promote to."""
    formats = {Precision.FLOAT32, *(variant.output for variant in ladder)}
    formats |= {promote(a, b) for a, b in itertools.combinations(formats, 2)}
    return tuple(sorted(formats, key=list(Precision).index))


def possible_casts(
    ladder: Sequence[Variant], held: Collection[Precision] = (Precision.FLOAT32,)
) -> dict[CastKey, frozenset[CastSite]]:
    """Each kind of cast that some operator of some model may need, with the places where it happens.

    Args:
        ladder: all variants that a plan may use, the base precision's included.
        held: formats in which the model holds its weights.
    """
    formats = activation_precisions(ladder)
    if any(precision is not Precision.FLOAT32 for precision in held):
        formats = tuple(sorted({*formats, *held, Precision.FLOAT32}, key=list(Precision).index))
    found: dict[CastKey, set[CastSite]] = {}

    def ask(operator: Operator, variant: Variant | None, inputs: Sequence[Precision]) -> None:
        for cast in casts(operator, variant, inputs):
            found.setdefault(cast.key, set()).add(cast.site)

    adjustable = _any_operator(OpClass.ADJUSTABLE, 1)
    for variant, source, weight_format in itertools.product(ladder, formats, held):
        ask(attrs.evolve(adjustable, weight_format=weight_format), variant, (source,))
    dependent, fixed = _any_operator(OpClass.DEPENDENT, 2), _any_operator(OpClass.FIXED, 1)
    for pair in itertools.product(formats, repeat=2):
        ask(dependent, None, pair)
    for source, result_format in itertools.product(formats, {Precision.FLOAT32, *held}):
        ask(attrs.evolve(fixed, result_format=result_format), None, (source,))
    return {key: frozenset(sites) for key, sites in found.items()}


def _any_operator(op_class: OpClass, arity: int) -> Operator:
    source = OpId("$input.x")
    return Operator(
        OpId("any"), next(iter(KINDS)), op_class, (source,) * arity, ((1, 1),) * arity, output_shape=(1, 1), weight_shape=(1, 1)
    )


def cast_shapes(dag: PrecisionDag, sites: Collection[CastSite], granularity: Granularity) -> list[tuple[int, ...]]:
    """Shapes to time: real ones of the model, spread evenly over the logarithm of the number of elements.

    Weights where only weights are cast that way (their channels matter to per-channel scales; stored ones are dequantized), else
    activations and weights.
    """
    shapes: set[tuple[int, ...]] = set()
    only_weights = granularity is Granularity.PER_CHANNEL or CastSite.WEIGHT_AGAIN in sites
    for operator in dag.operators:
        if operator.is_adjustable and CastSite.WEIGHT in sites:
            shapes.add(operator.weight_shape)
        if not only_weights:
            shapes.update(operator.input_shapes)
            shapes.add(operator.output_shape)
    by_numel = {math.prod(shape): shape for shape in sorted(shapes) if shape and math.prod(shape) > 1}
    return _spread(by_numel, SIZES)


def _spread(by_numel: dict[int, tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Choose at most ``count`` of the shapes, the smallest and the largest too; fewer than three are joined by larger ones."""
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

    def nearest(target: float) -> int:
        return min(numels, key=lambda numel: abs(math.log(numel) - target))

    chosen = {nearest(target) for target in wanted}
    return [by_numel[n] for n in sorted(chosen)]


def measure_cast(
    key: CastKey, shapes: Iterable[tuple[int, ...]], stopwatch: Stopwatch, effort: Effort, chooser: KernelChooser
) -> CastModel:
    """Time one kind of cast at the given shapes, 8-bit ones with the kernels that are chosen for each, and fit its cost model."""
    device = stopwatch.device
    rows: list[tuple[int, int, int]] = []
    for shape in shapes:
        sets = rotation_count(math.prod(shape) * key.source.nbytes, device, most=_MOST_SETS, cache_bytes=_CACHE_BYTES)
        calls = _calls(key, shape, sets, device, chooser)
        with torch.no_grad():
            dispatch_ns, compute_ns = repeat(partial(stopwatch.time_series, calls), effort).median_ns
        rows.append((math.prod(shape), dispatch_ns, compute_ns))
    if device.type == "cpu":
        # Issuing and computing cannot be told apart; what every call pays, whatever its size, counts as issuing.
        issue_ns = min([stopwatch.overhead_ns, *(compute for _, _, compute in rows)])
        rows = [(numel, issue_ns, compute - issue_ns) for numel, _, compute in rows]
    samples = tuple((numel, compute) for numel, _, compute in rows)
    line = fit_line(samples)
    dispatch_ns = sorted(dispatch for _, dispatch, _ in rows)[len(rows) // 2]
    return CastModel(key, dispatch_ns, line.intercept, line.slope, line.r2, samples)


def cast_once(key: CastKey, shape: tuple[int, ...], device: torch.device, chooser: KernelChooser) -> None:
    """Make one of the calls that :func:`measure_cast` times."""
    with torch.no_grad():
        _calls(key, shape, 1, device, chooser)[0]()


def _calls(key: CastKey, shape: tuple[int, ...], sets: int, device: torch.device, chooser: KernelChooser) -> list[Thunk]:
    stored = key.storage.is_quantized
    cast: Callable[[Any], object] = partial(_dequantize, key) if stored else make_cast(key, chooser.for_cast(key, shape))
    dtype = TORCH_DTYPE[key.source]
    tensors = (torch.randn(shape, dtype=torch.float32, device=device).to(dtype) for _ in range(sets))
    return [partial(cast, (shape, quantize_weight(tensor, key.storage)) if stored else tensor) for tensor in tensors]


def _dequantize(key: CastKey, operand: tuple[tuple[int, ...], StoredWeight]) -> torch.Tensor:
    """Dequantize a weight of that shape as a stored product does."""
    return dequantize(operand[1], key.storage, operand[0], TORCH_DTYPE[key.target])


def make_cast(key: CastKey, chosen: KernelChoice) -> Callable[[torch.Tensor], object]:
    """The function that ``apply_`` performs this cast with."""
    if key.target.needs_scale:
        quantization = quantization_of(key.target, key.granularity, key.rounding, chosen, key.symmetric)
        return partial(quantize, quantization=quantization, seed=1, offset=0)
    dtype = TORCH_DTYPE[key.target]
    return lambda x: x.to(dtype)
