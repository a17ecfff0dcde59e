"""What the demo trains: a model, real data, and how well it does on data that it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from torch import Tensor, nn

from qsync_torch.job import Batch, Job

SHUFFLE_SEED = 20


@attrs.frozen
class Evaluation:
    """Mean loss and accuracy (0..1) on held-out data."""

    loss: float
    accuracy: float


@attrs.frozen(eq=False)
class Workload:
    """A job with a finite data set, so that several ranks can each take their part of one global batch.

    Attributes:
        name: as on the command line; data: what it learns from, in words.
        model: with its initial weights; the same on every rank and in every call.
        samples: training samples; ``take(indices, step)`` makes a batch of some of them (``step`` seeds what is random in it).
        loss, optimizer, batch_size: as in :class:`~qsync_torch.job.Job`; the batch size is that of one rank.
        evaluate_once: loss and accuracy of a model in evaluation mode, without gradients.
    """

    name: str
    data: str
    model: nn.Module
    samples: int
    take: Callable[[Tensor, int], Batch]
    loss: Callable[[Tensor, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    evaluate_once: Callable[[nn.Module], Evaluation]

    def job(self) -> Job:
        """The workload as trace, profile and observe know it: one rank's job."""
        return Job(
            f"demo-{self.name}",
            self.model,
            lambda step, size: self.part(step, size, 0, size),
            self.loss,
            self.optimizer,
            self.batch_size,
        )

    def part(self, step: int, global_batch: int, start: int, size: int) -> Batch:
        """One rank's part ``[start, start + size)`` of the global batch of a step.

        Samples are drawn without replacement within an epoch; the last, incomplete batch of an epoch is left out.
        """
        epoch, position = divmod(step, self.samples // global_batch)
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(SHUFFLE_SEED + epoch))
        first = position * global_batch + start
        return self.take(order[first : first + size], step * global_batch + start)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Loss and accuracy on held-out data; the model's mode is restored."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.evaluate_once(model)
        finally:
            model.train(was_training)
