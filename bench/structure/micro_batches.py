"""Row S11: the error of a step's gradient under accumulation, when random numbers follow from data, against independent rounding.

    python bench/structure/micro_batches.py [--trials 600]

The gradient of a step of eight micro-batches is computed in int8 over and over.  Operators either take the step alone as their
offset, as in training, or an offset of its own for every micro-batch: independent rounding.  The ratio of their root mean square
errors is 1 where errors average out alike.  Data are different, nearly equal, nearly equal with a largest magnitude that all share
(inputs clipped at 1, ReLU6), and images under convolutions, of which the same is true.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.nn.functional as F

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


def ratio(case: Case, trials: int) -> Ratio:
    """Root mean square errors of both, over so many steps each."""
    derived = errors(case, trials, lambda trial, _: trial)
    independent = errors(case, trials, lambda trial, batch: (1 << 20) + trial * MICRO_BATCHES + batch)
    value = math.sqrt(derived.mean() / independent.mean())
    relative = sum(float(squares.var() / trials / squares.mean() ** 2) for squares in (derived, independent))
    return Ratio(value, value * math.sqrt(relative) / 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=600)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, case in cases().items():
        found = ratio(case, asked.trials)
        print(f"S11  {name}: {found.value:.3f} ± {found.standard_error:.3f}", flush=True)
