"""``dequantize``: what products read of a weight in each storage, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math

import attrs
import torch

from qsync_core.ir.precision import INT8_BLOCK_COLUMNS, NF4_BLOCK, NF4_CONSTANTS, Precision, Storage
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Op
from qsync_core.kernels.nf4 import NF4_CODES, dynamic_codes
from qsync_core.kernels.support import FLOATS
from qsync_torch.aten.stored_weights import quantize_weight
from qsync_torch.conformance.calls import Asked, Call, Case, Entry, Impossible, Written
from qsync_torch.conformance.operands import Outputs, floats
from qsync_torch.dtypes import TORCH_DTYPE

STORAGES = tuple(storage for storage in Storage if storage.is_quantized)
SHAPES: tuple[tuple[int, ...], ...] = (
    (64, 64),
    (3, 5),
    (7, 129),
    (5, 127),
    (33, 1000),
    (129, 256),
    (200, 700),
    (8, 16, 3, 3),
    (6, 1, 5),
    (0, 8),
    (4, 0),
)
"""Whole blocks, blocks that end within a row, a word or a byte, more constants than share a scale, filters, and nothing."""

__tracebackhide__ = True  # a failure shows the test and the kernel


@attrs.frozen(eq=False, kw_only=True)
class Dequantization(Call):
    """One call of ``dequantize``."""

    shape: tuple[int, ...]
    values: torch.Tensor
    scale: torch.Tensor
    constants: torch.Tensor | None
    mean: torch.Tensor | None

    @property
    def asked(self) -> Asked:
        """Each configuration writes the same bits."""
        return Asked(Op.DEQUANTIZE, "values scale constants mean out>", (self.shape,))

    def allocate(self, outputs: Outputs) -> Written:
        """The weight, row-major."""
        return Written(out=outputs.empty(self.shape, TORCH_DTYPE[self.variant.compute]))

    def compare(self, written: Written) -> None:
        """Every sum and product rounded to float32, and the last one to the result's format, as bitsandbytes does."""
        expected, out = self._expected().to(written.out.dtype).view(self.shape), written.out
        wrong = out != expected
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} elements differ: {expected[wrong][0].item()!r} became {out[wrong][0].item()!r}"
        )

    def _expected(self) -> torch.Tensor:
        """Compute in float64, where one product of float32 numbers is exact, and one sum nearly so, before it is rounded."""
        numel, values, scale = math.prod(self.shape), self.values.cpu(), self.scale.cpu().double()
        if not numel:
            return torch.empty(0, device=self.values.device)
        if self.constants is None or self.mean is None:
            columns = math.prod(self.shape[1:])
            block = max(1, columns) if self.variant.storage is Storage.INT8_ROW else INT8_BLOCK_COLUMNS
            by_column = scale.view(self.shape[0], -1).repeat_interleave(block, 1)[:, :columns]
            return (values.view(self.shape[0], columns).double() * by_column).float().to(self.values.device)
        codes = torch.tensor(dynamic_codes(), dtype=torch.float32)[self.constants.cpu().long()].double()
        products = (codes * scale.repeat_interleave(NF4_CONSTANTS)[: codes.numel()]).float().double()
        largest = (products + self.mean.cpu().double()).float().double().repeat_interleave(NF4_BLOCK)[:numel]
        elements = torch.stack([values >> 4, values & 15], 1).view(-1)[:numel].long()
        return (torch.tensor(NF4_CODES, dtype=torch.float32)[elements].double() * largest).float().to(self.values.device)


def dequantization(
    shape: tuple[int, ...], storage: Storage, precision: Precision, device: torch.device, spread: float = 0.02
) -> Dequantization:
    """A normal weight, stored, whose rows differ in size and whose every seventh element is 0."""
    weight = floats(shape, torch.float32, torch.device("cpu"), len(shape)) * spread
    weight.mul_(torch.logspace(-2, 1, shape[0]).view(-1, *(1,) * (len(shape) - 1)))
    weight.view(-1)[::7] = 0.0
    stored = (None if tensor is None else tensor.to(device) for tensor in quantize_weight(weight, storage))
    values, scale, constants, mean = stored
    assert values is not None
    assert scale is not None
    variant = attrs.evolve(Variant.plain(precision), storage=storage)
    return Dequantization(variant=variant, shape=shape, values=values, scale=scale, constants=constants, mean=mean)


def case(shape: tuple[int, ...], storage: Storage, precision: Precision, spread: float = 0.02) -> Case:
    """A dequantization by name."""
    size = "" if spread == 0.02 else f", values around {spread:g}"
    return Case(
        f"dequantize, {storage} {shape} to {precision}{size}",
        lambda device: dequantization(shape, storage, precision, device, spread),
    )


def entry() -> Entry:
    """The table's entry."""
    values = [case(*asked) for asked in itertools.product(SHAPES, STORAGES, FLOATS)]
    values += [case((40, 70), *asked) for asked in itertools.product(STORAGES, FLOATS, (1e-38, 1e30))]
    typical = [case((24, 200), storage, precision) for storage, precision in itertools.product(STORAGES, FLOATS)]
    ones = [case(shape, storage, FLOATS[0]) for shape, storage in itertools.product(((1, 1), (1, 40), (40, 1)), STORAGES)]
    named = functools.partial(attrs.evolve, Variant.plain(Precision.BFLOAT16))
    impossible: dict[str, Impossible] = {
        "a weight that is stored as it is": (named(), ((64, 64),)),
        "a second shape": (named(storage=Storage.NF4), ((64, 64), (64, 64))),
    }
    return Entry(values=values, typical=typical, ones=ones, impossible=impossible)


ENTRIES = {Op.DEQUANTIZE: entry()}
"""The operator's part of the table."""
