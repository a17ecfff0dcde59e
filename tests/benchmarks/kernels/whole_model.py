"""A named job's model on the device, with a plan applied, and the time of its training steps."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from qsync_core.op_id import OpId
from qsync_core.plan import Assignment
from qsync_core.variant import Variant
from qsync_torch.apply import apply_
from qsync_torch.job import Batch, Job, load_job
from qsync_torch.plan_fit import is_own_forward

_LEARNING_RATE = 1e-5
"""So small that random data do not drive the weights to infinity, whose kernels might take another time."""


@attrs.frozen
class Setting:
    """How a model runs.

    Attributes:
        name: for people.
        variant: of every adjustable operator, 8-bit gradients where they are offered (see :func:`variant_for`); None leaves the
            model as it is.
        backend, config: whose kernels (see :mod:`qsync_core.kernel_choice`); None for qsync-torch's own default.
        autocast: the format of ``torch.autocast`` around forward and loss.
    """

    name: str
    variant: Variant | None = None
    backend: str | None = None
    config: str = ""
    autocast: torch.dtype | None = None


class WholeModel:
    """A model ready to train; ``step()`` is one forward, backward and optimizer step."""

    def __init__(self, job_text: str, batch_size: int, setting: Setting, device: torch.device, *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.job: Job = load_job(job_text, batch_size)
        model = self.job.model.to(device).train()
        self.setting = setting
        if setting.variant is not None:
            apply_everywhere(model, setting)
        self.optimizer = self.job.optimizer([p for p in model.parameters() if p.requires_grad])
        for group in self.optimizer.param_groups:
            group["lr"] = _LEARNING_RATE
        self._batches: list[Batch] = [self.job.batch(step, batch_size).to(device) for step in range(2)]
        self._model: Any = torch.compile(model) if compiled else model
        self._device, self._step = device, 0

    def step(self) -> None:
        """Forward, backward, optimizer."""
        batch = self._batches[self._step % len(self._batches)]
        self._step += 1
        dtype = self.setting.autocast
        context = torch.autocast(self._device.type, dtype) if dtype is not None else contextlib.nullcontext()
        with context:
            loss = self.job.compute_loss(batch, self._model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def apply_everywhere(model: torch.nn.Module, setting: Setting) -> None:
    """Every linear operator and convolution of the model in the setting's variant."""
    variant = setting.variant
    assert variant is not None
    found = {OpId(name): variant_for(module, variant) for name, module in model.named_modules() if is_own_forward(module)}
    if not variant.compute.needs_scale:
        apply_(model, found)
    elif setting.config:
        apply_(model, {op_id: Assignment(each, setting.backend or "auto", setting.config, "") for op_id, each in found.items()})
    else:
        apply_(model, found, backend=setting.backend)


def variant_for(module: torch.nn.Module, variant: Variant) -> Variant:
    """The variant as the module can have it (see :func:`offered`)."""
    if not isinstance(module, torch.nn.Conv2d):
        return variant
    return offered(variant, strided=tuple(module.stride) != (1, 1) or module.groups != 1)


def offered(variant: Variant, *, strided: bool) -> Variant:
    """A convolution's variant with 16-bit gradients where no backend offers 8-bit ones: of weights, and of a strided or grouped
    one's input."""
    sixteen = variant.output
    if variant.grad_weight.needs_scale:
        variant = attrs.evolve(variant, grad_weight=sixteen)
    if variant.grad_input.needs_scale and strided:
        variant = attrs.evolve(variant, grad_input=sixteen)
    return variant


@attrs.frozen
class StepTimes:
    """Times of one step in blocks measured in turns with the others', in milliseconds."""

    blocks_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median block."""
        return statistics.median(self.blocks_ms)


def time_in_turns(
    models: Mapping[str, Callable[[], None]], device: torch.device, *, blocks: int = 7, steps: int = 6, warm_up: int = 4
) -> dict[str, StepTimes]:
    """Whole steps back to back, a block of each model in turn; a step's time includes whatever the CPU takes too long for."""
    for step in models.values():
        for _ in range(warm_up):
            step()
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(blocks):
        for name, step in models.items():
            found[name].append(_block_ms(step, steps, device))
    return {name: StepTimes(tuple(times)) for name, times in found.items()}


def _block_ms(step: Callable[[], None], steps: int, device: torch.device) -> float:
    if device.type != "cuda":
        import time

        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) * 1e3 / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    step()  # fills the queue, so that the block starts as every later step does
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / steps


def release() -> None:
    """Give the memory of finished models back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
