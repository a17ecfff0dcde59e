"""Frozen weights in other formats: rows of ``docs/results/frozen.json`` (docs/frozen-weights.md).

    python bench/frozen.py [--only F8,F6,F4]

F8 compares what is stored with bitsandbytes' own and needs that library; F6 counts the bytes of all tensors that live while a model
is loaded, and in a training step of it; F4 holds Ω of stored weights against gradients in float64.  These run on a CPU; what
needs a GPU is in ``frozen_gpu.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qsync_core.ir.precision import Precision, Storage
from qsync_torch import load_planned
from qsync_torch.aten.stored_weights import dequantize_weight, quantize_weight
from results import write_rows

COMMAND = "python bench/frozen.py"
SHAPES = ((64, 64), (1024, 1024), (1000, 1100), (2816, 1024))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH, INNER, BLOCKS, TOKENS = 1024, 2816, 6, 2048


def weights() -> Iterator[torch.Tensor]:
    """Normal weights of several shapes and formats."""
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            yield (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def libraries() -> Iterator[dict[str, Any]]:
    """F8: against bitsandbytes."""
    import bitsandbytes.functional as library

    dequantized = packed = constants = exact = blocks = elements = 0
    int8 = 0.0
    for weight in weights():
        theirs, state = library.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        mine = quantize_weight(weight, Storage.NF4)
        of_theirs = dequantize_weight(mine._replace(constants=state.absmax), Storage.NF4, weight.shape, weight.dtype)
        dequantized += int((of_theirs == library.dequantize_4bit(theirs, state)).sum())
        packed += int((theirs.flatten() == mine.values).sum())
        constants += int((state.absmax == mine.constants).sum())
        _, largest = torch.ops.bitsandbytes.quantize_4bit.default(weight, 64, "nf4", torch.uint8)
        nearest, _ = torch.ops.bitsandbytes.quantize_blockwise.default((largest - state.offset).double(), state.state2.code, 256)
        exact += int((nearest == mine.constants).sum())
        blocks += mine.constants.numel()
        elements += weight.numel()
        half = weight.half()
        rows, scales, _ = library.int8_vectorwise_quant(half)
        own = dequantize_weight(quantize_weight(half, Storage.INT8_ROW), Storage.INT8_ROW, half.shape, torch.float32)
        apart = (own - rows.float() * scales[:, None] / 127).norm() / half.float().norm()
        int8 = max(int8, float(apart))
    what = f"{len(SHAPES)} shapes up to {SHAPES[-1][0]} x {SHAPES[-1][1]} in float32, bfloat16 and float16"
    yield row(
        "F8",
        f"NF4 with double quantization that bitsandbytes stored ({what}): elements dequantized bit for bit as it does",
        dequantized / elements,
        "= 1",
    )
    yield row("F8b", "the same: bytes of packed codes, stored anew, that are its own", packed / (elements / 2), "= 1")
    yield row("F8c", "the same: codes of blocks' constants that are its reference's (nearest code)", exact / blocks, "= 1")
    yield row(
        "F8d",
        "the same: that are those of its kernel for a CPU, which takes the second nearest now and then",
        constants / blocks,
        "reported",
    )
    yield row("F8e", "int8 by row against its LLM.int8 rows, dequantized: relative distance, the worst of them", int8, "reported")


def row(name: str, what: str, value: float, target: str) -> dict[str, Any]:
    return {"id": name, "what": what, "value": round(value, 6), "unit": "ratio", "target": target}


class Block(nn.Module):
    """A frozen pair of linears with an adapter of rank 16 beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(INNER, WIDTH, bias=False, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) + self.b(self.a(x.float())).to(x.dtype)


class Live(TorchDispatchMode):
    """The most bytes of CPU tensors that lived at once, of those that operators read or wrote under it."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._sizes = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, key, None)
                self._sizes[key] = storage.nbytes()
        self.most = max(self.most, sum(self._sizes.values()))
        return result


def loading() -> Iterator[dict[str, Any]]:
    """F6: bytes while loading over those of a step."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        file = Path(folder) / "model.safetensors"
        save_file(model.state_dict(), file)
        for name in ("nf4", "int8-row"):
            with torch.device("meta"):
                model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
            plan = {f"{i}.{part}": f"bfloat16@{name}" for i in range(BLOCKS) for part in ("up", "down")}
            loads, steps = Live(), Live()
            with loads:
                load_planned(model, plan, file, base=Precision.BFLOAT16)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            with steps:
                for _ in range(2):
                    model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            print(f"{name}: {loads.most / 2**20:.1f} MiB while loading, {steps.most / 2**20:.1f} MiB in a step", file=sys.stderr)
            what = (
                f"{BLOCKS} blocks of {WIDTH} and {INNER} with adapters of rank 16, {TOKENS} tokens, stored as {name}, on a CPU: "
                "most bytes of tensors while loading over those of a training step"
            )
            yield row("F6-cpu" if name == "nf4" else "F6b-cpu", what, loads.most / steps.most, "≤ 1.05")


def predicted() -> Iterator[dict[str, Any]]:
    """F4: Ω of single layers and of whole plans against the truth."""
    from fitting.stored_omega import MODELS, measure

    found = [measure(*sizes, progress=lambda text: print(text, file=sys.stderr)) for sizes in MODELS]
    taus = [tau for one in found for tau in one.taus.values()]
    quotients = [quotient for one in found for quotient in one.quotients]
    wholes = [quotient for one in found for quotient in one.wholes.values()]
    what = (
        f"{len(MODELS)} small Llamas trained on text, bfloat16 with LoRA r = 8 on all linears, three storages; Ω of 12 updates "
        "against gradients in float64 of the same updates"
    )
    yield row("F4-cpu", f"{what}: Kendall's τ over layers, median of models and storages", statistics.median(taus), "≥ .9")
    yield row("F4b-cpu", "the same, the worst of them", min(taus), "reported")
    yield row("F4c-cpu", "the same: single layers within 2", sum(0.5 <= q <= 2 for q in quotients) / len(quotients), "≥ .9")
    yield row("F4d-cpu", "the same: whole plans, predicted over true, the lowest", min(wholes), "≥ .85")
    yield row("F4e-cpu", "the same: whole plans, predicted over true, the highest", max(wholes), "≤ 1.15")
    yield row("F4f-cpu", "the same: whole plans, predicted over true, the median", statistics.median(wholes), "reported")
    plain = [quotient for one in found for quotient in one.sums.values()]
    yield row("F4g-cpu", "whole plans by Σ Ω, which the allocator minimises, over true: the lowest", min(plain), "reported")
    yield row("F4h-cpu", "whole plans by Σ Ω, which the allocator minimises, over true: the highest", max(plain), "reported")


PARTS = {"F8": libraries, "F6": loading, "F4": predicted}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, comma-separated")
    options = parser.parse_args()
    for name in [part for part in options.only.split(",") if part] or PARTS:
        write_rows("frozen", PARTS[name](), f"{COMMAND} --only {name}")


if __name__ == "__main__":
    main()
