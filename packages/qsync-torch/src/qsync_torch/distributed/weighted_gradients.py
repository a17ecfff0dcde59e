"""Gradients that are means over samples, not over ranks, where ranks have local batches of different sizes.

DistributedDataParallel averages the ranks' gradients, each a mean over its own samples.  Here a rank's gradient counts local
samples / global samples in a communication hook, so that the result is that of one process with the whole batch
(docs/uneven-batches.md#gradients).
"""

# Annotations stay objects: DistributedDataParallel compares those of a hook with classes.
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from qsync_core.errors import PlanError
from qsync_torch.distributed.uneven_batches import split_samples
from qsync_torch.torch_internals import pytree

Mean = torch.futures.Future[torch.Tensor]
CommunicationHook = Callable[[Any, dist.GradBucket], Mean]
"""A hook as DistributedDataParallel takes it; it gives the mean over ranks of a bucket."""


def weight_gradients(
    ddp: DistributedDataParallel,
    *,
    local_batch: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    count: Callable[..., float | torch.Tensor] | None = None,
    hook: CommunicationHook | None = None,
    state: Any = None,
) -> None:
    """Weight every rank's gradient by its samples; call it on all ranks, before the first backward pass.

    Each step counts the samples that it saw, so partial batches, steps that accumulate gradients under ``no_sync()`` and ranks
    without samples (an empty batch, or ``ddp.join()``) are right as well.  The loss is used as it is: a mean over local samples, in
    each of k accumulating passes divided by k.  One number more is all-reduced in a step.

    Args:
        ddp: the wrapper; it takes one hook.
        local_batch: samples that this rank is to have in a step; the first step compares it with those that it saw.
        reduction: of the loss over local samples.  With ``"sum"`` gradients are added up, as one process would.
        count: what this rank's mean is over, where that is not samples (tokens that are no padding): called with the model's
            arguments, gives a number.  One on a GPU is waited for.
        hook: how a bucket is averaged over ranks, such as PyTorch's ``bf16_compress_hook``: it is given the weighted gradients.  By
            default they are all-reduced as they are.
        state: the hook's own; the process group for those of PyTorch.

    Raises:
        PlanError: for another wrapper, one that has a hook already, a state without a hook, or a model whose forward mixes the
            ranks' samples (SyncBatchNorm) under a mean.  In the first step, on every rank: when ranks see other batches than
            ``local_batch``.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise PlanError(f"weight_gradients takes a model in DistributedDataParallel, got {type(ddp).__name__}")
    if reduction not in ("mean", "sum"):
        raise PlanError(f"the reduction of a loss is 'mean' or 'sum', got {reduction!r}")
    if hook is None and state is not None:
        raise PlanError("the state of weight_gradients is that of a hook, and there is none: give hook=... too, or leave it out")
    mixing = next((name for name, module in ddp.module.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
    if mixing is not None and reduction == "mean":
        raise PlanError(
            f"module {mixing!r} is a SyncBatchNorm, whose backward pass adds up gradients of ranks before they can be weighted: "
            "use BatchNorm, whose statistics are those of the local batch, or a loss that sums, with reduction='sum'"
        )
    weighting = _Weighting(ddp, local_batch, reduction == "mean", count, hook, state)
    try:
        ddp.register_comm_hook(weighting, _weighted_mean)
    except RuntimeError as error:
        raise PlanError(
            "this DistributedDataParallel has a communication hook already, and takes only one: leave its register_comm_hook out, "
            "and give the hook to weight_gradients(ddp, hook=..., state=...)"
        ) from error
    ddp.register_forward_hook(weighting.after_forward, with_kwargs=True)


def _weighted_mean(weighting: "_Weighting", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return weighting.reduce(bucket)


class _Weighting:
    """What a rank has counted since the last reduction, and the hook.

    A step is some backward passes, each with its samples and their weight; its gradients have the weight of the newest pass.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        local_batch: int | None,
        is_mean: bool,
        count: Callable[..., float | torch.Tensor] | None,
        hook: CommunicationHook | None,
        state: Any,
    ) -> None:
        self._parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        self._group: dist.ProcessGroup = ddp.process_group
        self._ranks = dist.get_world_size(self._group)
        self._local_batch, self._is_mean, self._count = local_batch, is_mean, count
        self._hook, self._state = hook, self._group if state is None else state
        self._divides_by = 1 if hook is None else self._ranks
        self._samples, self._passes, self._weight, self._newest = 0, 0, 0.0, 0.0
        self._unit = 0.0
        self._own = 0.0
        self._factor: Mean | None = None
        self._weighted_sums: _WeightedSums | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, ddp: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Count a forward's samples as soon as a backward pass comes to its output."""
        if not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not tensors and self._count is None:
            raise PlanError(
                "no argument of the model is a tensor whose first dimension could be its samples: give weight_gradients a count"
            )
        samples = tensors[0].shape[0] if tensors else 0
        weight = float(samples if self._count is None else self._count(*args, **kwargs))
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self._add(samples, weight), mode="any")
        else:  # in an object of a class that PyTorch does not look into
            self._add(samples, weight)

    def _add(self, samples: int, weight: float) -> None:
        """Begin one more backward pass of this step; gradients of earlier ones are brought to its weight."""
        self._samples += samples
        self._weight += weight
        if self._passes and weight and self._newest not in (0.0, weight):
            with torch.no_grad():
                for gradient in (parameter.grad for parameter in self._parameters if parameter.grad is not None):
                    gradient.mul_(self._newest / weight)
        self._passes += 1
        self._newest = weight or self._newest

    def reduce(self, bucket: dist.GradBucket) -> Mean:
        """Average a bucket over the samples of all ranks."""
        gradients = bucket.buffer()
        if bucket.index() == 0:
            self._start(gradients)
        if not self._is_mean:
            return self._reduced(bucket, lambda mean: mean.mul_(self._ranks) if self._hook else mean)
        if not self._own:  # also where they are not finite: a mean over no samples
            gradients.zero_()
        if self._weighted_sums is not None and gradients.dtype in _WIDE:
            return self._weighted_sums.reduce(gradients)
        if self._own:
            gradients.mul_(self._own)
        factor = self._factor
        assert factor is not None
        return self._reduced(bucket, lambda found: found.mul_(factor.wait()))

    def _reduced(self, bucket: dist.GradBucket, last: Callable[[torch.Tensor], torch.Tensor]) -> Mean:
        """What the hook makes of a bucket, else its sum over ranks, with ``last`` in one callback: each takes the CPU 50 µs."""
        if self._hook is not None:
            return self._hook(self._state, bucket).then(lambda mean: last(mean.value()))
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        found: Mean = work.get_future().then(lambda done: last(done.value()[0]))
        return found

    def _start(self, gradients: torch.Tensor) -> None:
        """What this rank and all ranks have counted in the step whose first bucket is there.

        Raises:
            PlanError: when gradients came past the wrapper's outputs; in the first step when ranks see other batches than planned.
        """
        if not self._passes and bool(gradients.any()):
            raise PlanError(
                "gradients came to DistributedDataParallel before a backward pass came to its output, so that their samples are "
                "not known: call the wrapper in every step, and let the loss depend on its output"
            )
        if not self._unit:
            self._meet(gradients.device)
        # The unit is a power of two near what is summed up, so that nothing overflows and not a bit depends on which it is.
        self._own = self._newest * self._passes / self._unit
        if self._is_mean:
            # Not torch.tensor, which copies from the CPU, and waits for the device to come to that.
            total = torch.full((), self._weight, dtype=torch.float64, device=gradients.device)
            work, unit = dist.all_reduce(total, group=self._group, async_op=True), self._unit * self._divides_by
            self._factor = work.get_future().then(lambda done: unit / done.value()[0])
            if gradients.is_cuda and self._hook is None and dist.get_backend(self._group) == "nccl":
                self._weighted_sums = self._weighted_sums or _WeightedSums(self._group, gradients.device)
                self._weighted_sums.start(self._factor, self._own)
        self._samples, self._passes, self._weight, self._newest = 0, 0, 0.0, 0.0

    def _meet(self, device: torch.device) -> None:
        mine = torch.tensor([self._weight, self._samples, self._local_batch or 0], dtype=torch.float64, device=device)
        heard = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(heard, mine, group=self._group)
        weights, samples, planned = zip(*(row.tolist() for row in heard), strict=True)
        check_batches([int(size) for size in samples], [int(size) for size in planned])
        summed = sum(weights) / self._divides_by
        self._unit = 2.0 ** round(math.log2(summed)) if summed else 1.0


_WIDE = (torch.float32, torch.float64)
"""Formats of gradients in which a weight is precise enough: NCCL takes it in the gradients' own."""


class _WeightedSums:
    """Sums by NCCL of gradients that each rank weights as it sends them, without a pass over memory of its own.

    The weight is known on the device once all ranks have told their samples.  A stream of its own waits for that, so that
    computation need not.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._stream = group, device, torch.cuda.Stream(device)
        self._weight = torch.empty((), dtype=torch.float64, device=device)

    def start(self, factor: Mean, own: float) -> None:
        """Take the weight of the step whose first bucket is there: a factor on the device times this rank's own part."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # and with it for the sums of the step before
        with torch.cuda.stream(self._stream):
            self._weight.copy_(factor.wait() * own)

    def reduce(self, gradients: torch.Tensor) -> Mean:
        """Add up a bucket's weighted gradients in place."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            weighted = dist._make_nccl_premul_sum(self._weight.to(gradients.dtype))
            work = dist.all_reduce(gradients, op=weighted, group=self._group, async_op=True)
        found: Mean = work.get_future().then(lambda done: done.value()[0])
        return found


def check_batches(samples: Sequence[int], planned: Sequence[int]) -> None:
    """Compare what every rank saw in a step with its local batch; whole multiples and partial batches are right as well.

    Args:
        samples: by rank.
        planned: by rank; 0 where nothing was planned.

    Raises:
        PlanError: naming the first rank that is wrong.
    """
    if not all(planned):
        return
    expected = split_samples(sum(samples), planned)
    for rank, (seen, wanted) in enumerate(zip(samples, expected, strict=True)):
        if seen != wanted:
            raise PlanError(
                f"rank {rank} trained on {seen} of the {sum(samples)} samples of the first step, and the plan's local batches "
                f"({' + '.join(map(str, planned))}) give it {wanted}: take batches of applied.local_batch samples, or "
                "DataLoader(dataset, batch_sampler=applied.batch_sampler(dataset))"
            )
