"""Collector ``hutchinson``: rounding noise carried into all weight gradients by Hessian-vector products.

See docs/design/indicator.md#hutchinson.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import attrs
import torch

from qsync_core.errors import ObservationError
from qsync_core.ir import observations as terms
from qsync_core.ir.chain import ChainVariant, Producer
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.noise import EXACT, GradientCopies, OperandCasts, StoredError, VariantNoise, kept_formats, kept_input
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision, Rounding, Storage
from qsync_core.ir.semantics import CastTarget, readable_copy
from qsync_core.ir.variant import Variant
from qsync_torch.apply.plan_fit import weight_name
from qsync_torch.aten.stored_weights import StoredWeight, quantize_weight
from qsync_torch.job import Batch
from qsync_torch.observing.call_hooks import hooked_calls
from qsync_torch.observing.collector import CollectorUnavailable, ObservedStep, StepTerm, low_precision, parameter_of
from qsync_torch.observing.joint_errors import MIXED, MOST, ON_THE_WAY, Direction, Split, displaced, mixtures
from qsync_torch.observing.kept_inputs import CopyScales, KeptInputs
from qsync_torch.observing.mask_flips import FLIP_FACTOR, Mask, Masks
from qsync_torch.observing.noise_response import NoiseResponse, Phase, Place, Site, lowered_copies
from qsync_torch.observing.normalization import LeanNorms
from qsync_torch.observing.replaced_functions import LeanAttention, PairedDropout
from qsync_torch.observing.rounding_noise import (
    DeferredSum,
    Fetched,
    Scales,
    add_response,
    add_response_by_magnitude,
    mean_error,
    stored_error,
)
from qsync_torch.observing.second_derivatives import Uncheckpointed, products_as_coarse_as, second_derivatives
from qsync_torch.torch_internals import pytree

_DIRECTION_SEED, _FLIP_SEED, _NEXT_DIRECTION = 0x5EED, 0xF11B, 0x9E3779B1
"""Keep the signs apart from what the model itself draws."""
_PASSES, _PASSES_WITH_MASKS = 7.0, 21.0
"""BERT-base with 12 and ResNet50 with 128 samples."""
_PASS_AGAIN = 2.0
"""A further direction: a backward pass through that of the gradient, by its arithmetic."""


@attrs.frozen(cache_hash=True)
class ChainCopy:
    """The casts of operands of which the activation's is what a fused chain with a residual writes."""

    operands: OperandCasts

    @classmethod
    def read_in(cls, variant: Variant, noise: VariantNoise) -> ChainCopy | None:
        """What an operator in a variant reads if a chain writes it; None where that has no scale of its own."""
        copy = readable_copy(Producer.BATCH_NORM, variant)
        wanted = copy is not None and copy.precision is Precision.INT8 and copy.rounding is Rounding.STOCHASTIC
        return cls(noise.operands) if wanted and noise.operands else None


Source = OperandCasts | ChainCopy | GradientCopies | CastTarget | StoredError
"""What makes noise: the casts of the operands, those of the incoming gradient's copies, or that of a result; or a stored weight's
fixed error."""
Key = tuple[OpId, Place, Source]
"""An operator, where the noise is (``X`` stands for both operands) and what makes it."""


class HutchinsonCollector:
    """One random direction a step: Σ σ²·h² and (Σ μ·h)² of every operator in every variant; terms in
    :mod:`qsync_core.ir.observations`.

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
        """The time of a step in that of forward and backward passes over its batch, as measured on an H200: arithmetic is less than
        half of it, small kernels the rest (rows I6 of docs/results/indicator.json)."""
        masks = any(operator.kind in ("relu", "max_pool1d", "max_pool2d") for operator in dag.operators)
        stored = any(v.storage.is_quantized and operator.runs_in(v) for v in variants for operator in dag.adjustable)
        again = _PASS_AGAIN * (len(terms.SHIFTS) - 1) + MOST + 1
        bent = stored and any(v.storage is Storage.NF4 for v in variants)
        followed = 1 + _PASS_AGAIN * len(terms.SHIFTS)
        return (_PASSES_WITH_MASKS if masks else _PASSES) + (again if stored else 0.0) + (followed if bent else 0.0)

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """All terms of one step.

        Raises:
            CollectorUnavailable: where some function of the model has no second derivative, or none that is finite, or one sample
                is too much for the device's memory.
        """
        while True:
            try:
                with second_derivatives(step.job.name), Uncheckpointed(step.model) as model:
                    found = _Pass(step, variants, model).run(self.parts)
                if not found and step.dag.adjustable:
                    raise CollectorUnavailable(
                        f"no gradient of {step.job.name} that has derivatives reaches an operator, as where reentrant activation "
                        "checkpointing is around all of them; pass use_reentrant=False"
                    )
                # The gradient is finite, or the pass had refused it.
                if stray := next((op_id for (op_id, *_), value in found.items() if not math.isfinite(value)), None):
                    raise CollectorUnavailable(
                        f"at operator {stray}, second derivatives of {step.job.name} are not finite at update {step.update}, as "
                        "where it has the distance of two equal vectors"
                    )
                return found
            except torch.OutOfMemoryError as error:
                out_of_memory = str(error)
            # Outside the handler: the traceback holds the tensors that filled the memory.
            if self.parts >= step.batch.size:
                raise CollectorUnavailable(f"one sample at a time does not fit in memory: {out_of_memory.splitlines()[0]}")
            self.parts = min(2 * self.parts, step.batch.size)
            torch.cuda.empty_cache()


@attrs.define
class _Sums:
    """Sums over the batch, of one operator, one source of noise and one pass: Σ σ²·h² and Σ μ·h."""

    squares: DeferredSum = attrs.field(factory=DeferredSum)
    bias: DeferredSum = attrs.field(factory=DeferredSum)


@attrs.define
class _ParameterResponse:
    """The response at a weight or bias that several calls read."""

    parameter: torch.Tensor
    h: torch.Tensor
    factor: torch.Tensor | None
    calls: dict[OpId, None] = attrs.field(factory=dict)


class _Pass:
    """One observed step."""

    def __init__(self, step: ObservedStep, variants: Sequence[Variant], model: Uncheckpointed) -> None:
        self._step, self._model = step, model
        self._noise = {variant: VariantNoise.of(variant, step.dag.base) for variant in low_precision(variants)}
        # Variants share casts: the response to each is computed once.
        self._operands = {noise.operands for noise in self._noise.values() if noise.operands}
        self._chain_copies = {copy for v, noise in self._noise.items() if (copy := ChainCopy.read_in(v, noise))}
        self._copy_scales: dict[OpId, torch.Tensor] = {}
        self._outputs = {noise.output for noise in self._noise.values() if noise.output}
        gradients = [noise.gradients for noise in self._noise.values() if noise.gradients]
        self._copies = {casts.copies for casts in gradients if casts.copies}
        self._grad_inputs = {casts.grad_input for casts in gradients if casts.grad_input}
        self._grad_weights = {casts.grad_weight for casts in gradients if casts.grad_weight}
        self._sums: dict[Phase, defaultdict[Key, _Sums]] = {phase: defaultdict(_Sums) for phase in Phase}
        self._stored = list(dict.fromkeys(noise.stored for noise in self._noise.values() if noise.stored))
        self._shifts: defaultdict[tuple[OpId, StoredError, int], DeferredSum] = defaultdict(DeferredSum)
        self._quantized: dict[tuple[str, Storage], StoredWeight] = {}
        self._frozen_weights: dict[str, torch.Tensor] = {}
        self._turn, self._split = 0, Split((), len(terms.SHIFTS))
        self._followed: tuple[StoredError, float] | None = None
        """On whose way the present pass takes derivatives, and how much they count."""
        self._kept = kept_formats(self._noise)
        self._kept_sums: defaultdict[tuple[OpId, Precision], DeferredSum] = defaultdict(DeferredSum)
        by_group: defaultdict[str, list[OpId]] = defaultdict(list)
        self._calls: dict[OpId, list[OpId]] = {}
        """All calls that share an operator's module, or its weight."""
        for operator in step.dag.adjustable:
            calls = by_group[operator.variant_group or str(operator.op_id)]
            calls.append(operator.op_id)
            self._calls[operator.op_id] = calls
        self._parameter_responses: dict[tuple[Phase, OpId, Place, tuple[int, bool] | OpId], _ParameterResponse] = {}
        self._parameter_gradients: dict[tuple[OpId, Place], torch.Tensor] = {}
        self._mask_weights: defaultdict[OpId, float] = defaultdict(float)
        """Flips in the masks behind an operator that noise of their inputs' standard deviation would bring about."""
        self._reached: set[OpId] = set()
        self._has_masks = False
        self._whole = True
        self._direction: dict[torch.Tensor, torch.Tensor] = {}
        self._scale = 0.0

    def run(self, parts: int) -> dict[StepTerm, float]:
        """All terms."""
        step = self._step
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        self._direction = dict(zip(parameters, random_signs(parameters, step.seed + _DIRECTION_SEED), strict=True))
        self._whole = parts == 1
        if self._stores:
            self._split = Split(self._joint_changes(parts, parameters), len(terms.SHIFTS))
        self._all(parts, parameters)
        for number, stored in enumerate(self._joint):
            for earlier, points in ON_THE_WAY:
                if self._split.is_missed(number, self._along(stored)):
                    self._follow(stored, earlier, points, parts, parameters)
        with torch.no_grad():
            for (phase, _, place, _), found in self._parameter_responses.items():
                share = 1 / math.sqrt(len(found.calls))
                for op_id in found.calls:
                    self._add_operand(phase, op_id, found.parameter, found.h * share, place, {}, share, found.factor)
            for (op_id, _), gradient in self._parameter_gradients.items():
                # What the product writes is rounded as well; no response stands between that and the gradient.
                for cast in self._grad_weights:
                    into = self._sums[Phase.GRADIENT][op_id, Place.WEIGHT, cast].squares
                    add_response(cast, gradient, torch.ones_like(gradient), into)
        return self._terms()

    def _all(self, parts: int, parameters: Sequence[torch.Tensor]) -> None:
        for number, (part, share) in enumerate(_split(self._step.batch, parts, mean=self._step.dag.loss_reduction == "mean")):
            self._one(number, part, share, parameters)

    def _one(self, number: int, part: Batch, share: float, parameters: Sequence[torch.Tensor]) -> None:
        step, counts = self._step, self._followed is None
        # Elements flip one by one, so what each does is to be squared by itself.
        masks = Masks(step.seed + _FLIP_SEED + number)
        response = NoiseResponse(self._respond, masks)
        kept = KeptInputs(step.dag, response, self._direction, self._add_kept)
        copies = CopyScales(step.dag)
        watching = (copies if self._chain_copies and counts else nullcontext(), kept if self._kept and counts else nullcontext())
        lean = (PairedDropout(), LeanAttention(), LeanNorms(), masks, *watching, self._model.forward())
        try:
            with step.undisturbed():
                _forget_gradients(parameters)
                with ExitStack() as active:
                    for mode in lean:
                        active.enter_context(mode)
                    active.enter_context(hooked_calls(step.model, step.dag.adjustable, response))
                    loss = share * step.job.compute_loss(part, step.model)
                self._copy_scales |= copies.by_reader()
                self._has_masks = bool(masks.seen)
                with products_as_coarse_as(step.dag.base, loss.device), self._model.backward():
                    norm = float(response.differentiate(loss, parameters))
                    # The gradient does not pass by an operator before which nothing is trained; a response does, if there is one.
                    self._reached |= {site.operator.op_id for site in response.sites if site.grad_output is not None}
                    del loss
                    if not self._scale:
                        self._set_scale(norm)
                    response.respond(self._turned, len(terms.SHIFTS) if self._stores else 1, again=bool(masks.seen) and counts)
                    kept.finish()
                    _forget_gradients(parameters)
                    if counts:
                        self._carry_flips_back(response, masks.seen)
        finally:
            masks.seen.clear()
            kept.release()
            response.release()

    def _carry_flips_back(self, response: NoiseResponse, masks: Sequence[Mask]) -> None:
        """The last pass, and the weights of the masks behind each operator."""
        flipped = [mask for mask in masks if mask.flips is not None]
        if not flipped:
            return
        flips = [mask.flips.float() for mask in flipped if mask.flips is not None]
        weights = dict(zip((mask.index for mask in flipped), _weights(flipped, flips), strict=True))
        for site in response.sites:
            behind = math.fsum(weights.get(index, 0.0) for index in range(site.masks_before, len(masks)))
            self._mask_weights[site.operator.op_id] += behind
        response.carry_back([mask.edge for mask in flipped], flips)

    def _set_scale(self, norm: float) -> None:
        """Make directions so long that responses are numbers whose squares float32 holds, whatever the gradient's size."""
        if not math.isfinite(norm):
            raise ObservationError(
                f"the gradient of {self._step.dag.model} is not finite at update {self._step.update}; train with a smaller "
                "learning rate"
            )
        self._scale = 2.0 ** -round(math.log2(norm)) if norm > 0 else 1.0
        for direction in self._direction.values():
            direction.mul_(self._scale)

    @property
    def _stores(self) -> bool:
        """Whether some weight may be stored otherwise: a fixed error has one derivative, which few directions do not tell."""
        return any(not op.not_stored_as(stored.storage) for op in self._step.dag.adjustable for stored in self._stored)

    @property
    def _joint(self) -> Sequence[StoredError]:
        """The storages of which the change of the gradients is measured where all weights that can be are stored so."""
        return self._stored[: MOST - MIXED] if self._stores else ()

    def _joint_changes(self, parts: int, parameters: Sequence[torch.Tensor]) -> list[Direction]:
        """Find how all weights that can be stored change the gradients together: in each storage, and in mixtures of them."""
        before, alike = self._gradient(parts, parameters), [self._alike(stored) for stored in self._joint]
        choices = [*alike, *mixtures(alike, MOST - len(alike), self._step.seed)]
        found: list[Direction] = []
        for stored_as in choices:
            with self._on_the_way(stored_as, 1.0):
                after = self._gradient(parts, parameters)
            found.append({parameter: after[parameter] - value for parameter, value in before.items()})
        return found

    def _alike(self, stored: StoredError) -> dict[str, StoredError]:
        """All weights that can be stored so, by their modules' names."""
        return {op.op_id.fqn: stored for op in self._step.dag.adjustable if not op.not_stored_as(stored.storage)}

    def _on_the_way(self, stored_as: Mapping[str, StoredError], share: float) -> AbstractContextManager[None]:
        """A block in which modules' weights are stored so, or a part of the way there."""
        weights = {fqn: self._step.model.get_parameter(weight_name(self._step.model, fqn)) for fqn in stored_as}

        def read(fqn: str) -> torch.Tensor:
            weight = self._frozen(fqn).to(weights[fqn].dtype)
            return weight + share * self._error_of(fqn, weight, stored_as[fqn])

        return displaced(weights, read, {fqn: self._frozen(fqn) for fqn in stored_as})

    def _frozen(self, fqn: str) -> torch.Tensor:
        """A module's weight as the job has it, which is frozen, in the job's format beside the step's copy: all directions on a way
        read it, and a job in the machine's memory is far from the device.
        """
        if fqn not in self._frozen_weights:
            name = weight_name(self._step.model, fqn)
            weight, copy = (model.get_parameter(name).detach() for model in (self._step.job.model, self._step.model))
            self._frozen_weights[fqn] = weight.to(copy.device)
        return self._frozen_weights[fqn]

    def _along(self, stored: StoredError) -> list[float]:
        """What derivatives say of all weights stored so, along each direction."""
        own = {key: shift for key, shift in self._shifts.items() if key[1] == stored}
        fetched, said = Fetched(own.values()), [0.0] * len(terms.SHIFTS)
        for (_, _, number), shift in own.items():
            said[number] += fetched.value(shift) / self._length(number)
        return said

    def _follow(
        self,
        stored: StoredError,
        earlier: float,
        points: Iterable[tuple[float, float]],
        parts: int,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Take derivatives of one storage at points on the way to it that count so much each, beside a share of those before."""
        for key, shift in self._shifts.items():
            if key[1] == stored:
                shift.scale(earlier)
        for share, weight in points:
            self._followed = stored, weight
            with self._on_the_way(self._alike(stored), share):
                self._all(parts, parameters)
        self._followed = None

    def _gradient(self, parts: int, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        found = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        for part, share in _split(self._step.batch, parts, mean=self._step.dag.loss_reduction == "mean"):
            with self._step.undisturbed():
                with self._model.forward():
                    loss = share * self._step.job.compute_loss(part, self._step.model)
                gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found[parameter] += gradient
        return found

    def _turned(self, number: int) -> dict[torch.Tensor, torch.Tensor]:
        """The direction of a pass: the same in all parts of a batch."""
        self._turn = number
        if not self._split.is_random(number):
            return {p: value * (self._scale * self._known_length) for p, value in self._split.known[number - 1].items()}
        direction = self._direction if not number else self._random_direction(number)
        self._split.meet(number, direction, self._scale)
        return direction

    @property
    def _known_length(self) -> float:
        """The length of random directions, which the known ones get for the sake of float32."""
        return math.sqrt(sum(parameter.numel() for parameter in self._direction))

    def _length(self, number: int) -> float:
        """How long a direction is, by the length with which it counts."""
        return self._scale if self._split.is_random(number) else self._scale * self._known_length

    def _random_direction(self, number: int) -> dict[torch.Tensor, torch.Tensor]:
        parameters = list(self._direction)
        signs = random_signs(parameters, self._step.seed + _DIRECTION_SEED + _NEXT_DIRECTION * number)
        return {parameter: u.mul_(self._scale) for parameter, u in zip(parameters, signs, strict=True)}

    def _add_stored(self, phase: Phase, site: Site, h: torch.Tensor) -> None:
        """Add what the fixed errors of a call's weight do: calls of a module, and parts of a batch, share them."""
        op_id, followed = site.operator.op_id, self._followed
        for stored, part in [(stored, 1.0) for stored in self._stored] if followed is None else [followed]:
            if site.operator.not_stored_as(stored.storage):
                continue
            weight = site.weight if followed is None else self._frozen(op_id.fqn).to(site.weight.dtype)
            error = self._error_of(op_id.fqn, weight, stored)
            if phase is Phase.FLIPS:
                norm = torch.linalg.vector_norm(error * h)
                self._sums[phase][op_id, Place.X, stored].squares.add(norm, norm)
            else:
                self._shifts[self._calls[op_id][0], stored, self._turn].add(_dot(error, h), constant=part)

    def _error_of(self, fqn: str, weight: torch.Tensor, stored: StoredError) -> torch.Tensor:
        if (fqn, stored.storage) not in self._quantized:
            self._quantized[fqn, stored.storage] = quantize_weight(weight, stored.storage)
        return stored_error(weight, stored, self._quantized[fqn, stored.storage])

    def _respond(self, phase: Phase, site: Site, place: Place, h: torch.Tensor) -> None:
        if phase is Phase.RESPONSE:
            self._reached.add(site.operator.op_id)
        with torch.no_grad():
            if place is Place.WEIGHT and phase is not Phase.GRADIENT:
                self._add_stored(phase, site, h)
            if phase is Phase.AGAIN or self._followed is not None:
                return
            if phase is Phase.GRADIENT:
                self._keep_parameter_gradient(site, place, h)
            elif place in (Place.WEIGHT, Place.BIAS) and (not self._whole or len(self._calls[site.operator.op_id]) > 1):
                self._keep_parameter_response(phase, site, place, h)
            elif place in (Place.X, Place.WEIGHT, Place.BIAS):
                factor = self._factor(site)
                self._add_operand(phase, site.operator.op_id, site.operand(place), h, place, site.scales[place], factor=factor)
            elif place is Place.OUTPUT:
                for cast in self._outputs:
                    add_response(cast, site.output, h, self._sums[phase][site.operator.op_id, place, cast].squares)
            else:
                self._add_gradient(site, place, h)

    def _keep_parameter_response(self, phase: Phase, site: Site, place: Place, h: torch.Tensor) -> None:
        """Calls of one module, and parts of a batch, read one rounded parameter: their responses add up before they are squared."""
        op_id = site.operator.op_id
        stored, is_transposed = parameter_of(site.handed_over(place))
        # A tensor that is computed anew for every part is known by its call; a parameter and its transpose are rounded apart.
        which = (id(stored), is_transposed) if isinstance(stored, torch.nn.Parameter) else op_id
        found = self._parameter_responses.setdefault(
            (phase, self._calls[op_id][0], place, which),
            _ParameterResponse(site.operand(place), torch.zeros_like(h), self._factor(site)),
        )
        found.h += h
        found.calls[op_id] = None

    def _keep_parameter_gradient(self, site: Site, place: Place, gradient: torch.Tensor) -> None:
        """Kept where some variant rounds it; parts of a batch add up."""
        if site.handed_over(place).requires_grad and self._grad_weights:
            key = (site.operator.op_id, place)
            earlier = self._parameter_gradients.get(key)
            self._parameter_gradients[key] = gradient if earlier is None else earlier + gradient

    def _add_operand(
        self,
        phase: Phase,
        op_id: OpId,
        tensor: torch.Tensor,
        h: torch.Tensor,
        place: Place,
        scales: Scales,
        share: float = 1.0,
        factor: torch.Tensor | None = None,
    ) -> None:
        written = self._copy_scales.get(op_id)
        for source in (*self._operands, *(() if written is None else self._chain_copies)):
            operands = source.operands if isinstance(source, ChainCopy) else source
            cast = {Place.X: operands.x, Place.WEIGHT: operands.weight, Place.BIAS: operands.bias}[place]
            if cast == EXACT:
                continue
            sums, known = self._sums[phase][op_id, Place.X, source], scales
            if written is not None and isinstance(source, ChainCopy) and place is Place.X:
                known = {(cast.granularity, cast.symmetric): written}
            rounded, response = tensor, h
            if cast.factored and factor is not None:
                times = factor if place is Place.WEIGHT else factor.reciprocal()
                rounded, response, known = tensor * times, h / times, {}
            add_response(cast, rounded, response, sums.squares, known)
            if (mean := mean_error(cast, rounded)) is not None:
                sums.bias.add(_dot(mean, response), constant=share)

    def _factor(self, site: Site) -> torch.Tensor | None:
        return site.factor if any(operands.x.factored for operands in self._operands) else None

    def _add_gradient(self, site: Site, place: Place, h: torch.Tensor) -> None:
        op_id, sums = site.operator.op_id, self._sums[Phase.RESPONSE]
        if place is Place.GRAD_INPUT:
            assert site.grad_input is not None
            tensor = site.grad_input.float()
            for cast in self._grad_inputs:
                add_response_by_magnitude(cast.precision, tensor, h, sums[op_id, place, cast].squares)
            return
        assert site.grad_output is not None
        for copies in self._copies:
            into = sums[op_id, place, copies]
            for cast, copied, response in lowered_copies(site, copies, site.grad_output, h, self._direction):
                add_response(cast, copied, response, into.squares)
                if (mean := mean_error(cast, copied)) is not None:
                    into.bias.add(_dot(mean, response))

    def _chain_copy(self, op_id: OpId, variant: Variant) -> ChainCopy | None:
        return ChainCopy.read_in(variant, self._noise[variant]) if op_id in self._copy_scales else None

    def _add_kept(self, chain: OpId, tensor: torch.Tensor, h: torch.Tensor) -> None:
        scales: Scales = {}
        for saved in self._kept:
            add_response(kept_input(saved), tensor, h, self._kept_sums[chain, saved], scales)

    def _terms(self) -> dict[StepTerm, float]:
        found: dict[StepTerm, float] = {}
        sums_of_operators = (sums for by_key in self._sums.values() for sums in by_key.values())
        of_operators = (one for sums in sums_of_operators for one in (sums.squares, sums.bias))
        fetched = Fetched([*of_operators, *self._shifts.values(), *self._kept_sums.values()])

        def total(phase: Phase, op_id: OpId, place: Place, source: Source | None) -> float:
            """Σ σ²·h² + (Σ μ·h)²; calls of one module are shifted alike, so that each counts a part of what all do together."""
            if source is None:
                return 0.0
            sums = self._sums[phase]
            scale = 1.0 if phase is Phase.GRADIENT else self._scale
            calls = [call for call in self._calls[op_id] if (call, place, source) in sums]
            shift = math.fsum(fetched.value(sums[call, place, source].bias) for call in calls)
            return (fetched.value(sums[op_id, place, source].squares) + shift**2 / max(1, len(calls))) / scale**2

        for operator in self._step.dag.adjustable:
            op_id = operator.op_id
            if op_id not in self._reached:
                continue  # nothing is known of it, and zeros would say that it is harmless
            weight = self._mask_weights[op_id] / self._scale**2
            for v, rounded in self._noise.items():
                if operator.not_stored_as(v.storage):
                    continue
                if (stored := rounded.stored) is not None:
                    along = []
                    for number in range(len(terms.SHIFTS)):
                        shift = self._shifts.get((op_id, stored, number))  # the first call's, which is that of all
                        along.append(0.0 if shift is None else fetched.value(shift) / self._length(number))
                    found |= {(op_id, v, term): value for term, value in zip(terms.SHIFTS, self._split.numbers(along), strict=True)}
                    if self._has_masks:
                        response = total(Phase.FLIPS, op_id, Place.X, stored)
                        found[op_id, v, terms.STORED_FLIPS] = FLIP_FACTOR * response
                        found[op_id, v, terms.STORED_NOISE] = response / weight if weight > 0 else 0.0
                sources: tuple[tuple[Place, Source | None, str, str, str], ...] = (
                    (Place.X, rounded.operands, terms.OPERANDS, terms.OPERANDS_FLIPS, terms.OPERANDS_NOISE),
                    (Place.OUTPUT, rounded.output, terms.OUTPUT, terms.OUTPUT_FLIPS, terms.OUTPUT_NOISE),
                    (Place.X, self._chain_copy(op_id, v), terms.COPY, terms.COPY_FLIPS, terms.COPY_NOISE),
                )
                for place, source, smooth, flips, noise in sources:
                    if source is None:
                        continue
                    found[op_id, v, smooth] = total(Phase.RESPONSE, op_id, place, source)
                    if self._has_masks:
                        response = total(Phase.FLIPS, op_id, place, source)
                        found[op_id, v, flips] = FLIP_FACTOR * response
                        found[op_id, v, noise] = response / weight if weight > 0 else 0.0
                if (casts := rounded.gradients) is not None:
                    found[op_id, v, terms.GRADIENT] = (
                        total(Phase.RESPONSE, op_id, Place.GRAD_OUTPUT, casts.copies)
                        + total(Phase.RESPONSE, op_id, Place.GRAD_INPUT, casts.grad_input)
                        + total(Phase.GRADIENT, op_id, Place.WEIGHT, casts.grad_weight)
                    )
        for (chain, saved), kept in self._kept_sums.items():
            found[chain, ChainVariant(saved=saved).rated_as, terms.KEPT_INPUT] = fetched.value(kept) / self._scale**2
        return found


def _weights(masks: Sequence[Mask], flips: list[torch.Tensor]) -> list[float]:
    """Σ flips² times the variance of what the mask reads, of each: the expected square of what noise of that size does."""
    norms, stds = torch.stack([flip.norm() for flip in flips]), torch.stack([mask.std for mask in masks])
    weights: list[float] = (norms * stds).square().tolist()
    return weights


def _split(batch: Batch, parts: int, *, mean: bool) -> Iterator[tuple[Batch, float]]:
    """Parts of a batch along dimension 0, each with the weight of its loss in the loss of the whole.

    Args:
        batch: its tensors of ``batch.size`` rows are split; others belong to every part.
        parts: at least 1; some fewer where the batch has fewer samples.
        mean: whether the loss is a mean over samples (a sum otherwise).
    """
    size = batch.size
    if parts <= 1 or size <= 1:
        yield batch, 1.0
        return
    for rows in torch.arange(size).tensor_split(min(parts, size)):
        first, last = int(rows[0]), int(rows[-1]) + 1

        def take(leaf: object, first: int = first, last: int = last) -> object:
            return leaf[first:last] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

        args, kwargs, target = pytree.tree_map(take, (batch.args, batch.kwargs, batch.target))
        yield Batch(args, kwargs, target), (last - first) / size if mean else 1.0


def _forget_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """What a backward pass left behind; only responses count."""
    for parameter in parameters:
        parameter.grad = None


def random_signs(tensors: Iterable[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Draw independent elements of -1 and 1 in the shape of each tensor; the same for one seed on one kind of device.

    Of complex elements both parts are drawn.
    """
    generators: dict[torch.device, torch.Generator] = {}
    signs = []
    for tensor in tensors:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        # Filled in the order of memory: a layout of its own would be converted wherever it meets the tensor's.
        drawn = torch.empty_like(tensor)
        numbers = torch.view_as_real(drawn) if drawn.is_complex() else drawn
        numbers.random_(0, 2, generator=generators[tensor.device]).mul_(2.0).sub_(1.0)
        signs.append(drawn)
    return signs


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sum(a * b, dtype=torch.float64)
