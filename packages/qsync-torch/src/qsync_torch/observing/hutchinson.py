"""Collector ``hutchinson``: rounding noise carried into all weight gradients by Hessian-vector products (DESIGN 6.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_core import terms
from qsync_core.dag import PrecisionDag
from qsync_core.op_id import OpId
from qsync_core.precision import Precision
from qsync_core.variant import Variant
from qsync_torch.job import Batch
from qsync_torch.observing.flips import FLIP_FACTOR, Windows
from qsync_torch.observing.micro_batches import split
from qsync_torch.observing.noise_response import NoiseResponse, Place, Site
from qsync_torch.observing.rounding_noise import Cast, GradientCasts, OperandCasts, output_noise
from qsync_torch.observing.step_collector import CollectorUnavailable, ObservedStep, StepTerm
from qsync_torch.observing.watch import watched

_DIRECTION_SEED = 0x5EED
"""Keeps the signs apart from what the model itself draws."""
Source = OperandCasts | GradientCasts | Cast
"""What makes noise: the forward casts, the backward casts, or the cast of the output."""
Key = tuple[OpId, Source]


class HutchinsonCollector:
    """One random direction a step: Σ σ²·h² and (Σ μ·h)² of every operator in every variant; terms in :mod:`qsync_core.terms`.

    A batch that does not fit in the device's memory is taken in parts, whose responses add up (exactly, but for batch norm's
    statistics and scales per tensor, which are then those of a part).

    Attributes:
        name: in Observations.
        parts: into how many parts a batch is taken; grows when memory runs out.
    """

    name = terms.HUTCHINSON

    def __init__(self, parts: int = 1) -> None:
        self.parts = parts

    def passes(self, dag: PrecisionDag, variants: Sequence[Variant]) -> float:
        """Passes a step: forward and backward, and a second backward pass of about twice that, once more for masks that flip."""
        masks = any(operator.kind in ("relu", "max_pool2d") for operator in dag.operators)
        return 5.0 if masks else 3.0

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """All terms of one step.

        Raises:
            CollectorUnavailable: where some function of the model has no second derivative, or one sample is too much for the
                device's memory.
        """
        while True:
            try:
                return _Pass(step, variants).run(self.parts)
            except torch.OutOfMemoryError as error:
                out_of_memory = str(error)
            except (RuntimeError, NotImplementedError) as error:
                if reason := _no_second_derivative(error):
                    raise CollectorUnavailable(reason) from None
                raise
            # Outside the handler: the traceback holds the tensors that filled the memory.
            if self.parts >= step.batch.size:
                raise CollectorUnavailable(f"one sample at a time does not fit in memory: {out_of_memory.splitlines()[0]}")
            self.parts = min(2 * self.parts, step.batch.size)
            torch.cuda.empty_cache()


@attrs.define
class _Sums:
    """Of one operator and one source of noise, over the batch; 0-d float64 tensors or 0."""

    squares: torch.Tensor | float = 0.0
    bias: torch.Tensor | float = 0.0
    noise: torch.Tensor | float = 0.0

    def total(self) -> torch.Tensor | float:
        """Σ σ²·h² + (Σ μ·h)²."""
        return self.squares + self.bias * self.bias


class _Pass:
    """One observed step."""

    def __init__(self, step: ObservedStep, variants: Sequence[Variant]) -> None:
        self._step = step
        self._variants = [v for v in variants if v != Variant.plain(Precision.FLOAT32)]
        self._operands = {c for v in self._variants if (c := OperandCasts.of(v)) is not None}
        self._gradients = {c for v in self._variants if (c := GradientCasts.of(v)) is not None}
        self._outputs = {Cast(v.output) for v in self._variants if v.output is not Precision.FLOAT32}
        self._windows = Windows()
        self._sums: dict[bool, defaultdict[Key, _Sums]] = {False: defaultdict(_Sums), True: defaultdict(_Sums)}
        self._weight_responses: dict[tuple[bool, OpId], tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole = True
        self._direction: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, parts: int) -> dict[StepTerm, float]:
        """All terms."""
        step = self._step
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        self._direction = dict(zip(parameters, random_signs(parameters, step.seed + _DIRECTION_SEED), strict=True))
        self._whole = parts == 1
        for part, share in split(step.batch, parts, mean=step.dag.loss_reduction == "mean"):
            self._one(part, share, parameters)
        with torch.no_grad():
            for (opened, op_id), (weight, h) in self._weight_responses.items():
                self._add_operand(opened, op_id, weight, h, Place.WEIGHT)
        return self._terms(parts)

    def _one(self, part: Batch, share: float, parameters: list[torch.Tensor]) -> None:
        step = self._step
        response = NoiseResponse(self._respond)
        try:
            with step.undisturbed(), twice_differentiable():
                with self._windows, watched(step.model, step.dag.adjustable, response):
                    loss = share * step.job.compute_loss(part, step.model)
                response.differentiate(loss, parameters)
                del loss
                self._windows.open = False
                response.respond(self._direction, again=self._windows.used)
                with torch.no_grad():
                    for site in response.sites:
                        self._add_noise(site)
                if self._windows.used:
                    self._windows.open = True
                    response.respond(self._direction, again=False)
        finally:
            response.release()

    def _respond(self, site: Site, place: Place, h: torch.Tensor) -> None:
        opened = self._windows.open
        with torch.no_grad():
            if place is Place.WEIGHT and not self._whole:
                self._keep_weight_response(opened, site, h)
            elif place in (Place.X, Place.WEIGHT):
                tensor = site.x if place is Place.X else site.weight
                self._add_operand(opened, site.operator.op_id, tensor, h, place)
            elif place is Place.OUTPUT:
                squares = h.square()
                for cast in self._outputs:
                    self._sums[opened][site.operator.op_id, cast].squares += _dot(cast.variance(site.output), squares)
            elif not opened:  # noise of gradients flips no mask
                self._add_gradient(site, place, h)

    def _keep_weight_response(self, opened: bool, site: Site, h: torch.Tensor) -> None:
        """Parts of a batch read one rounded weight, so that their responses add up before they are squared."""
        key = opened, site.operator.op_id
        earlier = self._weight_responses.get(key)
        self._weight_responses[key] = (site.weight, h.clone() if earlier is None else earlier[1] + h)

    def _add_operand(self, opened: bool, op_id: OpId, tensor: torch.Tensor, h: torch.Tensor, place: Place) -> None:
        squares = h.square()
        for casts in self._operands:
            cast = casts.x if place is Place.X else casts.weight
            sums = self._sums[opened][op_id, casts]
            sums.squares += _dot(cast.variance(tensor), squares)
            if (mean := cast.mean(tensor)) is not None:
                sums.bias += _dot(mean, h)

    def _add_gradient(self, site: Site, place: Place, h: torch.Tensor) -> None:
        op_id = site.operator.op_id
        tensor = site.grad_output if place is Place.GRAD_OUTPUT else site.grad_input
        assert tensor is not None
        for casts in self._gradients:
            sums = self._sums[False][op_id, casts]
            if place is Place.GRAD_INPUT:
                if casts.result is not None:
                    sums.squares += _dot(casts.result.variance(tensor), h.square())
                continue
            for cast, response in self._by_copy(site, casts, h):
                sums.squares += _dot(cast.variance(tensor), response.square())
                if (mean := cast.mean(tensor)) is not None:
                    sums.bias += _dot(mean, response)

    def _by_copy(self, site: Site, casts: GradientCasts, h: torch.Tensor) -> Iterator[tuple[Cast, torch.Tensor]]:
        """The copies of the incoming gradient that are read in a lower format, each with the response to its noise."""
        u = self._direction.get(site.parameter)
        if casts.shared or u is None:
            if (cast := casts.to_weight or casts.to_input) is not None:
                yield cast, h
            return
        # ⟨g, u⟩ depends on the copy for the weight's gradient by ⟨grad_outputᵀ·x, u⟩ alone; the rest goes through the input's.
        by_weight = site.geometry.product(site.x, u, None)
        for cast, response in ((casts.to_weight, by_weight), (casts.to_input, h - by_weight)):
            if cast is not None:
                yield cast, response

    def _add_noise(self, site: Site) -> None:
        """The noise of the output relative to its variance, which tells how often masks behind it flip."""
        if not self._windows.used:
            return
        op_id = site.operator.op_id
        variance = site.output_variance.double().clamp(min=torch.finfo(torch.float32).tiny)
        grad = site.grad_output
        if grad is None:
            return
        for casts in self._operands:
            noise = output_noise(site.x, site.weight, site.geometry, casts, grad.numel())
            self._sums[False][op_id, casts].noise += noise / variance
        for cast in self._outputs:
            self._sums[False][op_id, cast].noise += cast.variance(site.output).mean(dtype=torch.float64) / variance

    def _terms(self, parts: int) -> dict[StepTerm, float]:
        found: dict[StepTerm, torch.Tensor | float] = {}
        plain, windowed = self._sums[False], self._sums[True]
        for operator in self._step.dag.adjustable:
            op_id = operator.op_id
            for v in self._variants:
                sources: tuple[tuple[Source | None, str, str, str], ...] = (
                    (OperandCasts.of(v), terms.OPERANDS, terms.OPERANDS_FLIPS, terms.OPERANDS_NOISE),
                    (
                        None if v.output is Precision.FLOAT32 else Cast(v.output),
                        terms.OUTPUT,
                        terms.OUTPUT_FLIPS,
                        terms.OUTPUT_NOISE,
                    ),
                )
                for source, smooth, flips, noise in sources:
                    if source is None:
                        continue
                    sums = plain[op_id, source]
                    found[op_id, v, smooth] = sums.total()
                    if self._windows.used:
                        found[op_id, v, flips] = FLIP_FACTOR * (windowed[op_id, source].total() - sums.total())
                        found[op_id, v, noise] = sums.noise / parts
                if (casts := GradientCasts.of(v)) is not None:
                    found[op_id, v, terms.GRADIENT] = plain[op_id, casts].total()
        return _on_host(found)


def random_signs(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """For each tensor one of the same shape with independent elements of -1 and 1, the same for one seed on one kind of device."""
    generators: dict[torch.device, torch.Generator] = {}
    signs = []
    for tensor in tensors:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        bits = torch.randint(0, 2, tensor.shape, generator=generators[tensor.device], device=tensor.device, dtype=torch.int8)
        signs.append((2 * bits - 1).to(tensor.dtype))
    return signs


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain products inside: fused kernels give the same values and have no second derivative."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sum(a * b, dtype=torch.float64)


def _on_host(values: Mapping[StepTerm, torch.Tensor | float]) -> dict[StepTerm, float]:
    """All numbers in one transfer."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return {key: next(numbers) if isinstance(value, torch.Tensor) else float(value) for key, value in values.items()}


def _no_second_derivative(error: BaseException) -> str:
    """What lacks a second derivative, where that is what an error says; "" for any other error."""
    text = str(error).splitlines()[0] if str(error) else ""
    signs = ("is not implemented", "once_differentiable", "double backward", "does not support double", "derivative for")
    return text if any(sign in text for sign in signs) else ""
