"""A script: a model, what one step of it computes, and a run of both beside float32.

Rank 1 of two is lowered, or both are; the reference is the same script without a plan, on the same ranks.  Formats bound how far
numbers may be off: bfloat16 has 8 bits, float16 11, an int8 operator rounds three operands to 8 bits.  A step that leaves a
gradient out, takes another rank's numbers or one more term is off by the order of the numbers themselves.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from qsync_core.errors import QSyncError
from qsync_core.ir.precision import Precision
from qsync_torch import apply_

WIDTH, BATCH = 32, 8
BOUNDS = {"float16": 0.02, "bfloat16": 0.06, "int8": 0.2, "int8>float32": 0.2}
"""Relative to a tensor's norm, or to a tenth of the largest of the step."""
Body = Callable[["Two", torch.Tensor], Any]
SCRIPTS: dict[str, Script] = {}


class Two(nn.Module):
    """Two layers and a buffer; ``body`` is the forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


@attrs.frozen
class Script:
    """One of them.

    Attributes:
        name: of the script, with its formats.
        make: the model.
        step: from a model and this rank's batch, what is compared.
        variants: of the lowered rank's operators.
        ranks: which are lowered.
        base: the format of its autocast.
    """

    name: str
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, torch.Tensor], Mapping[str, torch.Tensor | None]]
    variants: Mapping[str, str]
    ranks: tuple[int, ...] = (1,)
    base: Precision = Precision.FLOAT32

    @property
    def bound(self) -> float:
        """The widest of its formats."""
        return max(
            [BOUNDS.get(variant, 0.0) for variant in self.variants.values()] + [BOUNDS["bfloat16"]] * (self.base != "float32")
        )


@attrs.frozen
class Outcome:
    """What became of a script on a rank: ``right``, ``refused`` in a sentence, ``silent`` (other numbers) or ``failed``."""

    status: str
    detail: str = ""


def enter(
    formats: str = "bfloat16 int8",
    ranks: str = "1",
    *,
    make: Callable[[Body], nn.Module] = Two,
    layers: str = "a b",
    **options: Any,
) -> Callable[[Body], Body]:
    """Enters the forward of :class:`Two` as scripts: in each format, with each choice of lowered ranks (``1 01``)."""

    def register(body: Body) -> Body:
        for format_ in formats.split():
            for lowered in ranks.split():
                name = f"{body.__name__}[{format_}-ranks {lowered}]"
                variants = {f"{layer}#0": format_ for layer in layers.split()}
                SCRIPTS[name] = Script(
                    name=name,
                    make=lambda: make(body),
                    step=options.get("step", train),
                    variants=variants,
                    ranks=tuple(map(int, lowered)),
                    base=options.get("base", Precision.FLOAT32),
                )
        return body

    return register


def train(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Output, gradients and buffers of a step; a tuple's first value is the loss, the others are compared."""
    output = model(x)
    first, *others = output if isinstance(output, tuple) else (output,)
    loss = first if first.dim() == 0 else first.float().square().mean()
    loss.backward()
    found: dict[str, torch.Tensor | None] = {"loss": loss, "input": x.grad}
    found |= {f"output {index}": value for index, value in enumerate((first, *others))}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def run(script: Script, rank: int) -> Outcome:
    """A script on this rank; every rank of the job runs it."""
    torch.manual_seed(0)
    model = script.make()
    plain = copy.deepcopy(model)
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(7 + rank))
    autocast = torch.autocast("cpu", torch.bfloat16) if script.base is Precision.BFLOAT16 else contextlib.nullcontext()
    try:
        expected = script.step(plain, x.clone())
        with autocast:
            if rank in script.ranks:
                apply_(model, dict(script.variants), base=script.base, seed=3)
            found = script.step(model, x.clone())
        if wrong := difference(found, expected, script.bound):
            return Outcome("silent", wrong)
    except QSyncError as error:
        return Outcome("failed" if "\n" in str(error) else "refused", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}"[-2000:])
    return Outcome("right")


def difference(found: Mapping[str, Any], expected: Mapping[str, Any], bound: float) -> str:
    """The first value that is further from its reference than formats account for; empty where there is none."""
    largest = max((value.double().norm().item() for value in expected.values() if value is not None), default=0.0)
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name} is {other}, expected {value}"
        if value is None:
            continue
        if value.shape != other.shape:
            return f"{name} has the shape {tuple(other.shape)}, expected {tuple(value.shape)}"
        scale = max(value.double().norm().item(), 0.1 * largest * (name.startswith("gradient")), 1e-12)
        error = (value.double() - other.double()).norm().item() / scale
        if not error <= bound:
            return f"{name} is off by {error:.3f} of its norm, formats account for {bound}"
    return ""


def other_rank() -> int:
    """Of two."""
    return 1 - dist.get_rank()
