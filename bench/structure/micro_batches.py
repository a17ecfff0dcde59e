"""Row S11: the error of a step's gradient under accumulation, when random numbers follow from data, against independent rounding.
Row S11b: whether rounding is unbiased over steps on the same data.

    python bench/structure/micro_batches.py [--trials 600] [--within .008] [--steps 4000] [--json]

The gradient of a step of eight micro-batches is computed in int8 over and over.  Operators either take the step alone as their
offset, as in training, or an offset of its own for every micro-batch: independent rounding.  The ratio of their root mean square
errors is 1 where errors average out alike.  Data are different, nearly equal, nearly equal with a largest magnitude that all share
(inputs clipped at 1, ReLU6), and images under convolutions, of which the same is true.

For S11b one operator runs on the same data step after step.  The mean of its errors is told along what is exact, result and
gradients together, in standard errors: 1 in the mean, where rounding is unbiased.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.nn.functional as F

from qsync_core.ir.precision import Granularity, Precision
from qsync_core.ir.variant import Variant
from qsync_torch.operators import conv2d, linear

INT8 = Variant.parse("int8>float32")
MICRO_BATCHES = 8
Parameters = Sequence[torch.Tensor]


@attrs.frozen
class Ratio:
    """Error of derived over independent rounding, and the standard error of that ratio."""

    value: float
    standard_error: float


def _smooth(x: torch.Tensor, p: Parameters, offset: int | None) -> torch.Tensor:
    return _linear(torch.tanh(_linear(x, *p[:2], offset)) * 1.1, *p[2:], offset)


def _saturated(x: torch.Tensor, p: Parameters, offset: int | None) -> torch.Tensor:
    return _linear(F.relu6(4 * _linear(x, *p[:2], offset)), *p[2:], offset)


def _convolutions(x: torch.Tensor, p: Parameters, offset: int | None) -> torch.Tensor:
    return _conv2d(F.relu6(4 * _conv2d(x, *p[:2], offset, padding=1)), *p[2:], offset, groups=4)


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, offset: int | None) -> torch.Tensor:
    return F.linear(x, w, b) if offset is None else linear(x, w, b, INT8, offset=offset)


def _conv2d(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, offset: int | None, *, padding: int = 0, groups: int = 1
) -> torch.Tensor:
    if offset is None:
        return F.conv2d(x, w, b, padding=padding, groups=groups)
    return conv2d(x, w, b, INT8, padding=padding, groups=groups, offset=offset)


Case = tuple[Callable[[torch.Tensor, Parameters, int | None], torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""A model, its parameters, and its micro-batches."""


def cases() -> dict[str, Case]:
    """The four kinds of data."""
    g = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    def nearly(x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * random(*x.shape)

    dense = [random(64, 64) / 8, random(64) / 8, random(16, 64) / 8, random(16) / 8]
    filters = [random(8, 3, 3, 3) / 5, random(8) / 5, random(8, 2, 3, 3) / 4, random(8) / 4]
    same, image = random(16, 64), torch.rand(4, 3, 8, 8, generator=g)
    image[0, 0, 0, 0] = 1.0
    images = [torch.cat([image[:1], nearly(image[1:]).clamp(0, 1)]) for _ in range(MICRO_BATCHES)]
    return {
        "different data": (_smooth, dense, [random(16, 64) for _ in range(MICRO_BATCHES)]),
        "nearly equal": (_smooth, dense, [nearly(same) for _ in range(MICRO_BATCHES)]),
        "nearly equal, ReLU6, inputs clipped at 1": (_saturated, dense, [nearly(same).clamp(-1, 1) for _ in range(MICRO_BATCHES)]),
        "convolutions on images": (_convolutions, filters, images),
    }


def errors(case: Case, trials: int, offset_of: Callable[[int, int], int]) -> torch.Tensor:
    """Squared errors of the gradient of a step, one of each trial; ``offset_of`` is told trial and micro-batch."""
    model, values, batches = case
    parameters = [value.clone().requires_grad_() for value in values]

    def gradient(offsets: Sequence[int | None]) -> torch.Tensor:
        loss = sum(
            (model(x, parameters, offset).square().sum() for x, offset in zip(batches, offsets, strict=True)), torch.zeros(())
        )
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).double()

    exact = gradient([None] * len(batches))
    found = (gradient([offset_of(trial, i) for i in range(len(batches))]) - exact for trial in range(trials))
    return torch.stack([error.square().sum() for error in found])


def ratio(case: Case, trials: int, within: float = math.inf) -> Ratio:
    """Root mean square errors of both, over so many steps each, and over more until the standard error is ``within`` a bound."""
    derived, independent = torch.zeros(0), torch.zeros(0)
    while True:
        first = len(derived)
        derived = torch.cat([derived, errors(case, trials, lambda trial, _, first=first: first + trial)])
        apart = errors(case, trials, lambda trial, batch, first=first: (1 << 20) + (first + trial) * MICRO_BATCHES + batch)
        independent = torch.cat([independent, apart])
        value = math.sqrt(derived.mean() / independent.mean())
        relative = sum(float(squares.var() / len(squares) / squares.mean() ** 2) for squares in (derived, independent))
        found = Ratio(value, value * math.sqrt(relative) / 2)
        if found.standard_error <= within or len(derived) >= _MOST * trials:
            return found


_MOST = 20
"""Times the number of trials, where the errors of single steps scatter."""


@attrs.frozen
class Bias:
    """The mean error of an operator on the same data, in standard errors.

    Attributes:
        z: along the exact result and gradients.
        beyond: share of the single numbers that are more than 3 from 0; .0027 of normal ones.
    """

    name: str
    z: float
    beyond: float


def biases(steps: int) -> list[Bias]:
    """Of a linear operator in several variants and on several data, and of a convolution."""
    g = torch.Generator().manual_seed(7)
    wide = attrs.evolve(INT8, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)  # 16-bit casts round to nearest
    eight = attrs.evolve(INT8, grad_input=Precision.INT8, grad_weight=Precision.INT8)
    x, w, up = torch.randn(8, 64, generator=g), torch.randn(32, 64, generator=g), torch.randn(8, 32, generator=g)
    rows = x.clone()
    rows[0] = 0
    image, filters = torch.rand(2, 4, 8, 8, generator=g), torch.randn(6, 4, 3, 3, generator=g)
    asked = (
        ("int8", linear, F.linear, x, w, up, wide),
        ("int8 with a zero point", linear, F.linear, x.relu(), w, up, attrs.evolve(wide, symmetric=False)),
        ("a scale per row", linear, F.linear, x, w, up, attrs.evolve(wide, x_granularity=Granularity.PER_ROW)),
        ("int8 gradients", linear, F.linear, x, w, up, eight),
        ("a constant", linear, F.linear, torch.full_like(x, 0.3), w, up, wide),
        ("a row of zeros", linear, F.linear, rows, w, up, wide),
        ("a convolution", conv2d, F.conv2d, image, filters, torch.randn(2, 6, 6, 6, generator=g), wide),
    )
    return [_bias(*parts, steps=steps) for parts in asked]


def _bias(
    name: str,
    planned: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    variant: Variant,
    steps: int,
) -> Bias:
    operands = [operand.clone().requires_grad_() for operand in (x, weight)]

    def gives(y: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.detach().double().flatten() for part in (y, *torch.autograd.grad(y, operands, up))])

    exact = gives(plain(*operands))
    total, squares, along = torch.zeros_like(exact), torch.zeros_like(exact), []
    for step in range(steps):
        error = gives(planned(*operands, None, variant, offset=step << 32)) - exact
        total, squares = total + error, squares + error.square()
        along.append(float(error @ exact))
    mean = total / steps
    standard_error = ((squares / steps - mean.square()).clamp(min=0) / steps).sqrt()
    is_rounded = standard_error > 1e-8
    single = (mean / standard_error)[is_rounded]
    projected = torch.tensor(along, dtype=torch.float64)
    z = float(projected.mean() / (projected.std() / math.sqrt(steps)))
    return Bias(name, z, float((single.abs() > 3).double().mean()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", help="whose packages are measured, for the message alone")
    parser.add_argument("--trials", type=int, default=600, help="at least, of each kind of data")
    parser.add_argument("--within", type=float, default=0.008, help="standard error of a ratio at most")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--json", action="store_true", help="print one value that a program can read")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ratios = {name: ratio(case, asked.trials, asked.within) for name, case in cases().items()}
    found = biases(asked.steps)
    if asked.json:
        listed = [(name, one.value, one.standard_error) for name, one in ratios.items()]
        print(json.dumps({"ratios": listed, "steps": asked.steps, "biases": [attrs.asdict(one) for one in found]}))
    else:
        for name, one in ratios.items():
            print(f"S11  {name}: {one.value:.3f} ± {one.standard_error:.3f}")
        for bias in found:
            print(f"S11b  {bias.name}: {bias.z:+.2f} standard errors; of single numbers {bias.beyond:.2%} beyond 3")
