"""A script's default format (``torch.set_default_dtype``) is its own matter: what a plan stores and rounds is as without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from qsync_core.ir.precision import Precision, Storage
from qsync_torch import apply_
from qsync_torch.apply.stored_modules import stored_tensors
from qsync_torch.aten import stored_weights
from qsync_torch.aten.stored_weights import dequantize_weight, empty_stored, quantize_weight

STORAGES = [storage for storage in Storage if storage is not Storage.AS_IS]


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    """In which no table that was made before is left, nor one after."""
    tables = [made for made in vars(stored_weights).values() if isinstance(made, functools._lru_cache_wrapper)]
    for table in tables:
        table.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for table in tables:
            table.cache_clear()


def weights() -> dict[Storage, torch.Tensor]:
    weight = torch.randn(40, 200, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).bfloat16()
    return {
        storage: dequantize_weight(quantize_weight(weight, storage), storage, weight.shape, torch.float32) for storage in STORAGES
    }


WANTED = weights()


def test_stored_weights_are_the_same(bfloat16_by_default: None) -> None:
    for storage, found in weights().items():
        assert torch.equal(found, WANTED[storage]), storage
        stored = empty_stored((40, 200), storage, "cpu")
        assert stored.scale.dtype is torch.float32


def output(precision: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, dtype=torch.float32, generator=generator).bfloat16() for shape in ((8, 64), (32, 64)))
    model = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    model[0].weight.data.copy_(weight)
    x.requires_grad_()
    apply_(model, {"0": precision}, base=Precision.BFLOAT16)
    assert precision != "int8" or not list(stored_tensors(model))
    found: torch.Tensor = model(x)
    found.sum().backward()
    assert x.grad is not None
    return torch.cat([found.detach().flatten(), x.grad.flatten()])


OUTPUTS = {precision: output(precision) for precision in ("int8", "bfloat16@nf4", "int8@int8-row")}


@pytest.mark.parametrize("precision", OUTPUTS)
def test_outputs_and_gradients_are_the_same(precision: str, bfloat16_by_default: None) -> None:
    assert torch.equal(output(precision), OUTPUTS[precision])
