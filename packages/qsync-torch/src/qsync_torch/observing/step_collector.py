"""Collectors that run the observed step themselves: those that need a second derivative, or many runs of one batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import attrs
import torch

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job

StepTerm = tuple[OpId | None, Variant | None, str]
"""A number's name within a step: the operator, the variant it is for (None where it depends on none) and the term."""


@attrs.frozen(eq=False)
class ObservedStep:
    """The state between two updates: a model in training mode, and the batch that its next update will see.

    Attributes:
        job: what is trained; its own model and batch size are not those observed.
        model: float32 parameters at this update, on the observed device, without gradients.
        dag: its graph.
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
        """Around one pass over the batch: draws what every other pass draws, and leaves the model as it was found.

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
        """Whether loss, gradients, parameters and buffers are; what is computed of others is not the fault of who computes it."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with self.undisturbed():
            loss = self.loss()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
        tensors = (loss, *gradients, *self.model.parameters(), *self.model.buffers())
        return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


@runtime_checkable
class StepCollector(Protocol):
    """Writes terms for every observed step.  Offered by the hook ``qsync_register_collectors``, like per-call collectors.

    ``name`` names it in Observations.  ``collect_step`` is called once per observed update, before that update changes the
    parameters, and returns finite numbers: always the same terms for one model.  Every pass it makes over the batch runs inside
    ``step.undisturbed()``, so that training goes on as if nobody had looked.

    It may have ``passes(dag, variants)``, what an update costs in forward and backward passes, for the announcement, and
    ``measures_once = True`` where only the first observed update costs that.

    Raises:
        CollectorUnavailable: where the model lacks what the collector needs; observing goes on without it and says why.
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
            variants: those of the run.
            found: empty where it wrote nothing.
        """
        ...


class CollectorUnavailable(Exception):
    """A collector can not work on this model, for the stated reason."""


@torch.no_grad()
def _copy_each(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of the same names, with a launch for each format and device rather than for each of them."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in into.items():
        groups[tensor.device, tensor.dtype].append(name)
    for names in groups.values():
        torch._foreach_copy_([into[name] for name in names], [values[name] for name in names])
