"""What a collector is, and what it sees: one call of an operator, or a whole step that it runs itself.

A :class:`Collector` turns each observed call of an adjustable operator into numbers.  A :class:`StepCollector` runs the observed
step as often as it needs: for second derivatives, or for many draws on one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol, runtime_checkable

import attrs
import torch

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import CastTarget
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.kinds.products import product, product_gradients
from qsync_torch.observing.rounding_noise import element_variance

Term = tuple[Variant | None, str]
"""A number's name within an operator: the variant it is for (None where it depends on none) and the term."""
StepTerm = tuple[OpId | None, Variant | None, str]
"""A number's name within a step: the operator (None for the model), the variant and the term."""


class CollectorUnavailable(Exception):
    """A collector cannot work on this model, for the stated reason."""


@runtime_checkable
class Collector(Protocol):
    """Writes terms for every observed call.  Offered by the hook ``qsync_register_collectors``.

    ``name`` names it in Observations.  ``collect`` is called once per operator and iteration, without autograd, and returns a 0-d
    tensor (or a float) per term: always the same terms for one operator.  It must not change the tensors it is given.
    """

    name: str

    def collect(self, call: OperatorCall, variants: Sequence[Variant]) -> Mapping[Term, torch.Tensor | float]:
        """The terms of one call."""
        ...


@runtime_checkable
class StepCollector(Protocol):
    """Writes terms for every observed step.  Offered by the hook ``qsync_register_collectors``, like per-call collectors.

    ``name`` names it in Observations.  ``collect_step`` is called once per observed update, before that update changes the
    parameters, and returns finite numbers: always the same terms for one model.  Every pass it makes over the batch runs inside
    ``step.undisturbed()``, so that training is not affected.

    It may have ``passes(dag, variants)``, what an update costs in forward and backward passes, for the announcement, and
    ``measures_once = True`` where only the first observed update costs that.

    Raises:
        CollectorUnavailable: where the model lacks what the collector needs; observing goes on without it and reports why.
    """

    name: str

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[StepTerm, float]:
        """The terms of one step."""
        ...


@runtime_checkable
class RestoredCollector(Protocol):
    """What a step collector may offer beside :class:`StepCollector` when what it writes depends on what it wrote before."""

    name: str

    def restore(self, model: torch.nn.Module, update: int, variants: Sequence[Variant], found: Mapping[StepTerm, float]) -> None:
        """Go on as if this object had returned ``found`` at ``update``: called once, before an interrupted run is continued.

        Args:
            model: the one that later steps will have.
            update: the last that was observed.
            found: empty where it wrote nothing.
        """
        ...


def low_precision(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The variants that lose anything against float32, each once."""
    return tuple(variant for variant in dict.fromkeys(variants) if variant != Variant.plain(Precision.FLOAT32))


def parameter_of(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What the model stores of a weight that an operator was handed, and whether its first two dimensions are exchanged in that.

    The weight (N, K) of a parameter (K, N), or the filters of a transposed convolution, are a new tensor in every call; everything
    else is what it is.
    """
    stored = weight._base
    if isinstance(stored, torch.nn.Parameter) and stored.dim() > 1:
        turned = stored.transpose(0, 1)
        if (weight.shape, weight.stride()) == (turned.shape, turned.stride()):
            return stored, True
    return weight, False


@attrs.frozen(eq=False, slots=False)
class OperatorCall:
    """One forward call of an adjustable operator, with the gradient that came back to it.

    Attributes:
        operator: its entry in the PrecisionDag.
        x: the activation input (N×…×K, or N×C×H×W), float32.
        weight: the weight, output channels first, float32.
        grad_output: gradient of the loss with respect to the output, float32.
        geometry: strides, padding, dilation and groups of a convolution; neutral for linear.
    """

    operator: Operator
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor
    geometry: Geometry = NEUTRAL

    @cached_property
    def output(self) -> torch.Tensor:
        """The output, computed anew: the one of the forward pass may have been overwritten in place since."""
        return product(self.x, self.weight, self.bias, self.geometry)

    @cached_property
    def _gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        return product_gradients(self.grad_output, self.x, self.weight, self.geometry)

    @property
    def grad_x(self) -> torch.Tensor:
        """Gradient with respect to this operator's own copy of its activation (other readers do not contribute)."""
        return self._gradients[0]

    @property
    def grad_weight(self) -> torch.Tensor:
        """This call's contribution to the gradient of the weight."""
        return self._gradients[1]

    def is_finite(self) -> bool:
        """Whether its tensors are; what a collector computes of others is not the collector's fault."""
        tensors = (self.x, self.weight, self.bias, self.grad_output)
        return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)

    @cached_property
    def _variances(self) -> dict[tuple[str, CastTarget], torch.Tensor]:
        return {}

    def variance(self, operand: str, cast: CastTarget) -> torch.Tensor:
        """Element variances of ``x``, ``weight`` or ``output`` (the operand's name) under a cast; computed once per call."""
        key = (operand, cast)
        if key not in self._variances:
            self._variances[key] = element_variance(
                getattr(self, operand), cast.precision, cast.granularity, cast.rounding, cast.symmetric
            )
        return self._variances[key]


@attrs.frozen(eq=False)
class ObservedStep:
    """The state between two updates: a model in training mode, and the batch that its next update will see.

    Attributes:
        job: what is trained; its own model and batch size are not those observed.
        model: float32 parameters at this update, on the observed device, without gradients.
        batch: on the model's device.
        update: how many updates came before.
        seed: of whatever this step draws; the same for every pass over the batch, so that dropout masks are paired.
    """

    job: Job
    model: torch.nn.Module
    dag: PrecisionDag
    batch: Batch
    update: int
    seed: int

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Surround one pass over the batch: it draws what every other pass draws, and leaves the model as it was found.

        Buffers (batch norm's statistics), gradients and the state of the random generators are put back at the end.
        """
        buffers = dict(self.model.named_buffers())
        kept = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        _copy_each(kept, buffers)
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        device = next(self.model.parameters()).device
        cuda = [device.index or 0] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(self.seed)
            try:
                yield
            finally:
                _copy_each(dict(self.model.named_buffers()), kept)
                for name, parameter in self.model.named_parameters():
                    parameter.grad = gradients[name]

    def loss(self) -> torch.Tensor:
        """Forward pass and loss, a 0-d tensor with its graph."""
        return self.job.compute_loss(self.batch, self.model)

    def is_finite(self) -> bool:
        """Whether loss, gradients, parameters and buffers are; what a collector computes of others is not the collector's fault."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with self.undisturbed():
            loss = self.loss()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
        tensors = (loss, *gradients, *self.model.parameters(), *self.model.buffers())
        return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


@torch.no_grad()
def _copy_each(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of the same names."""
    for name, tensor in into.items():
        tensor.copy_(values[name])
