"""A named job's model on the device, with a plan applied, and the time of its training steps."""

from __future__ import annotations

import contextlib
import enum
import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

import qsync_torch
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant
from qsync_torch.apply.apply import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.load_job import load_job

_LEARNING_RATE = 1e-5
"""So small that random data do not drive the weights to infinity, whose kernels might take another time."""


class Mode(enum.StrEnum):
    """How the CPU issues a step."""

    EAGER = "eager"
    COMPILED = "torch.compile"
    GRAPH = "CUDA graph"
    COMPILED_GRAPH = "torch.compile, CUDA graph"
    COMPILED_PARTS = "torch.compile, graphs of its parts"

    @property
    def compiles(self) -> bool:
        """Whether ``torch.compile`` runs the model."""
        return self in (Mode.COMPILED, Mode.COMPILED_GRAPH, Mode.COMPILED_PARTS)

    @property
    def captures(self) -> bool:
        """Whether a whole step is replayed."""
        return self in (Mode.GRAPH, Mode.COMPILED_GRAPH)


@attrs.frozen
class Setting:
    """How a model runs.

    Attributes:
        name: for people.
        variant: of every adjustable operator, 8-bit gradients where they are offered; None leaves the model as it is.
        backend, config: whose kernels (see :mod:`qsync_core.kernels.choice`); None for the fastest by the tuning store.
        autocast: the format of ``torch.autocast`` around forward and loss.
        fused: where it is compiled, by ``qsync_torch.compile``, which fuses chains.
        saved: what that keeps the inputs of normalizations in; empty: as they are.
    """

    name: str
    variant: Variant | None = None
    backend: str | None = None
    config: str = ""
    autocast: torch.dtype | None = None
    fused: bool = False
    saved: str = ""


def compiled(model: torch.nn.Module, setting: Setting, device: torch.device, mode: Mode = Mode.COMPILED) -> Any:
    """The model as ``torch.compile`` runs it, or ``qsync_torch.compile`` (on a CPU without inductor, to try a script).

    In graphs of its parts forward and backward are each replayed, and what is between them, such as DDP's hooks, runs as ever.

    Raises:
        RuntimeError: where this version has no ``qsync_torch.compile``.
    """
    graphs = {"mode": "reduce-overhead"} if mode is Mode.COMPILED_PARTS else {}
    options: dict[str, Any] = graphs if device.type == "cuda" else {"backend": "aot_eager"}
    if not setting.fused:
        return torch.compile(model, **options)
    fuse = getattr(qsync_torch, "compile", None)
    if fuse is None:
        raise RuntimeError("this version of qsync-torch has no qsync_torch.compile, which the fused settings need")
    return fuse(model, saved=setting.saved or None, **options)


class WholeModel:
    """A model ready to train; ``step()`` is one forward, backward and optimizer step.

    As a CUDA graph the step is captured once and replayed, with one batch; stochastic rounding and dropout draw new numbers.

    Args:
        wrap: what is done to the model before it is compiled; around: after.
    """

    def __init__(
        self,
        job_text: str,
        batch_size: int,
        setting: Setting,
        device: torch.device,
        *,
        mode: Mode = Mode.EAGER,
        assignments: Mapping[OpId, Assignment] | None = None,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
        around: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(0)
        self.job: Job = load_job(job_text, batch_size)
        model = self.job.model.to(device).train()
        self.setting = setting
        if assignments is not None:
            apply_(model, assignments)
        self.optimizer = self.job.optimizer([p for p in model.parameters() if p.requires_grad])
        for group in self.optimizer.param_groups:
            group["lr"] = _LEARNING_RATE
            if mode.captures and device.type == "cuda" and "capturable" in group:
                group["capturable"] = True
        self._batches: list[Batch] = [self.job.batch(step, batch_size).to(device) for step in range(2)]
        model = wrap(model)
        self._model: Any = around(compiled(model, setting, device, mode) if mode.compiles else model)
        self._device, self._step = device, 0
        self._graph = self._capture() if mode.captures and device.type == "cuda" else None

    def step(self) -> None:
        """Forward, backward, optimizer."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._compute()
        self.optimizer.zero_grad(set_to_none=True)

    def _compute(self) -> None:
        batch = self._batches[self._step % len(self._batches)]
        self._step += 1
        dtype = self.setting.autocast
        # Casts of weights that autocast keeps would be kept from outside a graph.
        context = (
            torch.autocast(self._device.type, dtype, cache_enabled=self._device.type != "cuda" or self._capturing is False)
            if dtype is not None
            else contextlib.nullcontext()
        )
        with context:
            loss = self.job.compute_loss(batch, self._model)
        loss.backward()
        self.optimizer.step()

    def gradients(self) -> None:
        """Forward and backward alone, without what is around the model."""
        loss = self.job.compute_loss(self._batches[0], getattr(self._model, "module", self._model))
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    _capturing = False

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._capturing = True
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
                self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph


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
