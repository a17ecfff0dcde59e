"""The loops that a user would write without a trainer; what each trainer is compared with.

``python plain_ddp.py FOLDER NAME...`` trains each of :data:`JOBS` that is named, and rank 0 saves its parameters as NAME.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from digits_net import load_data, make_model, make_optimizer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from qsync_torch import InStepGradScaler, apply_

STEPS, RANKS = 20, 2


def bert() -> nn.Module:
    """The model of the page's script for Hugging Face's Trainer."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=17, num_labels=10, **sizes, **no_dropout))


class Module(nn.Module):
    """The network inside a module, as LightningModules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


@attrs.frozen(eq=False)
class PlainJob:
    """A loop.

    Attributes:
        make: the model, with the initial weights of the script.
        rows: samples of a micro-batch, by its number and the rank.
        micro_batches: per step.
        factor: of the mean loss of a micro-batch.
        plan: name of its plan.
        bert: whether it is trained with AdamW on tokens, and not with the optimizer of the example on images.
        scaled: whether losses are scaled.
    """

    make: Callable[[], nn.Module]
    rows: Callable[[int, int], Tensor]
    micro_batches: int = 1
    factor: float = 1.0
    plan: str = "digits"
    bert: bool = False
    scaled: bool = False


def in_turn(size: int) -> Callable[[int, int], Tensor]:
    """Accelerate's: ranks take whole batches in turn."""
    return lambda number, rank: torch.arange(size) + (number * RANKS + rank) * size


def shuffled(size: int, batches: int) -> Callable[[int, int], Tensor]:
    """Lightning's, whatever the loader does: DistributedSampler shuffles, anew in each epoch of so many batches."""
    sampler = [DistributedSampler(load_data()[0], RANKS, rank, shuffle=True, seed=0) for rank in range(RANKS)]

    def rows(number: int, rank: int) -> Tensor:
        epoch, position = divmod(number, batches)
        sampler[rank].set_epoch(epoch)
        return torch.tensor(list(sampler[rank]))[position * size : (position + 1) * size]

    return rows


JOBS = {
    # transformers 5.17 multiplies by the ranks and does not divide by the micro-batches: it takes it that the model has divided by
    # all labels of the step, which this one does not.
    "transformers": PlainJob(bert, in_turn(8), micro_batches=2, factor=RANKS, plan="bert", bert=True),
    "accelerate": PlainJob(make_model, in_turn(16)),
    "lightning": PlainJob(Module, shuffled(16, 10), plan="module"),
    "accelerate-scaled": PlainJob(make_model, in_turn(16), plan="digits-scaled", scaled=True),
    "lightning-scaled": PlainJob(Module, shuffled(16, 10), plan="module-scaled", scaled=True),
}


def train(job: PlainJob, plan: Path, *, forgets_step_at: int | None = None) -> nn.Module:
    """Train under a plan; the rounding step is put to 0 where it says so, as if a resumed run had not restored it."""
    rank = dist.get_rank()
    model = job.make()
    applied = apply_(model, plan)
    wrapped = DistributedDataParallel(model, **applied.ddp_options())
    if job.bert:
        pixels, labels = load_digits(return_X_y=True)
        inputs, targets = torch.tensor(pixels).long(), torch.tensor(labels)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    else:
        inputs, targets = load_data()[0].tensors
        optimizer = make_optimizer(model.parameters())
    scaler = InStepGradScaler("cpu", enabled=job.scaled)
    for step in range(STEPS):
        if step == forgets_step_at:
            applied.step = 0
        for part in range(job.micro_batches):
            rows = job.rows(step * job.micro_batches + part, rank)
            with nullcontext() if part == job.micro_batches - 1 else wrapped.no_sync():
                output = wrapped(inputs[rows])
                loss = cross_entropy(output.logits if job.bert else output, targets[rows])
                scaler.scale(loss * job.factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    for name in names:
        job = JOBS[name]
        plan = folder / f"{job.plan}.qsync"
        states = [train(job, plan).state_dict(), train(job, plan, forgets_step_at=STEPS // 2).state_dict()]
        if dist.get_rank() == 0:
            # What a rank adds to the sum of gradients depends on the numbers that it rounds with.
            assert any(not torch.equal(one, other) for one, other in zip(*(state.values() for state in states), strict=True))
            torch.save(states[0], folder / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
