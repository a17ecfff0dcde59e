"""The script that ``autocast_jobs.py`` prepares and trains, in the environment of torchrun: a plain loop under autocast.

``MODEL``: which; ``SMALL``: a stand-in for CPUs; ``MODES``: ways to train, one after the other, each from the same weights:
``plan`` (the one line of QSync's README), ``full`` (without it), ``alone`` (the same, rank 0 by itself), or the path of a plan;
``RUN``: the run folder; ``STEPS``.  Rank 0 ends each with a line ``STEP {…}``: the mode, the median step and its quartiles.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import qsync_torch as qsync

AMP = "bfloat16"
WARMUP = 8
"""Steps before those that are timed; DistributedDataParallel makes its buckets anew in the second."""


@attrs.frozen
class Kind:
    """A model's configuration, and its batch.

    Attributes:
        config, model: names in transformers.
        full, small: arguments of the configuration; of a stand-in for CPUs.  Layers of the large ones are halved: equal layers are
            measured once, and the whole steps that a profile takes are half as long.
        batch: samples of one rank, full and small.
        length: tokens, or the image's size.
        vocabulary: of tokens, full and small; 0 for images.
        labels: whether the model computes its loss by itself, of labels that are its tokens.
    """

    config: str
    model: str
    full: Mapping[str, Any]
    small: Mapping[str, Any]
    batch: tuple[int, int]
    length: tuple[int, int]
    vocabulary: tuple[int, int] = (0, 0)


KINDS = {
    "gpt2-medium": Kind(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 1024, "n_layer": 12, "n_head": 16, "use_cache": False},
        {"n_embd": 96, "n_layer": 2, "n_head": 2, "vocab_size": 256, "use_cache": False},
        (8, 8), (512, 64), (50257, 256),
    ),
    "llama-1b": Kind(
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": True, "use_cache": False},
        {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "vocab_size": 256, "use_cache": False},
        (4, 8), (512, 64), (32000, 256),
    ),
    "bert-large": Kind(
        "BertConfig",
        "BertForMaskedLM",
        {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096},
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 384, "vocab_size": 256},
        (16, 8), (384, 64), (30522, 256),
    ),
    "vit-large": Kind(
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096, "num_labels": 1000},
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 384, "num_labels": 10,
         "image_size": 64, "patch_size": 8},
        (32, 8), (224, 64),
    ),
    "resnet50": Kind(
        "ResNetConfig",
        "ResNetForImageClassification",
        {"num_labels": 1000},
        {"num_labels": 10, "embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]},
        (64, 8), (224, 64),
    ),
    "convnext": Kind(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"num_labels": 1000},
        {"num_labels": 10, "hidden_sizes": [24, 48, 64, 96], "depths": [1, 1, 1, 1]},
        (64, 8), (224, 64),
    ),
}  # fmt: skip


class Pictures(nn.Module):
    """A classifier of transformers that gives its scores alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x).logits
        return scores


@attrs.frozen(eq=False)
class Task:
    """What is trained.

    Attributes:
        model: in its first state, on a CPU.
        loss_fn: None where the model computes its loss.
        data: samples.
        call: the loss of a model and a batch.
        batch: samples of a rank.
    """

    model: nn.Module
    loss_fn: Any
    data: list[Any]
    call: Callable[[nn.Module, Any], torch.Tensor]
    batch: int

    @classmethod
    def make(cls, kind: Kind, small: bool) -> Task:
        """A model with random weights, and random data."""
        import transformers

        torch.manual_seed(0)
        batch, length, words = kind.batch[small], kind.length[small], kind.vocabulary[small]
        config = getattr(transformers, kind.config)(**(kind.small if small else kind.full))
        model: nn.Module = getattr(transformers, kind.model)(config)
        if words:
            tokens = torch.randint(words, (4 * batch, length))
            return cls(model, None, [{"input_ids": row, "labels": row} for row in tokens], lambda m, b: m(**b).loss, batch)
        data = [(torch.randn(3, length, length), torch.tensor(i % config.num_labels)) for i in range(4 * batch)]
        return cls(Pictures(model), nn.CrossEntropyLoss(), data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch)


def main() -> None:
    """Train for some steps in each way."""
    kind, small = KINDS[os.environ["MODEL"]], os.environ.get("SMALL") == "1"
    cuda = torch.cuda.is_available() and not small
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    task = Task.make(kind, small)
    first = dist.new_group([0])
    for mode in os.environ.get("MODES", "plan").split():
        if mode != "alone":
            train(task, mode, device, None)
        elif dist.get_rank() == 0:
            train(task, "full", device, first, name=mode)
        dist.barrier()
    dist.destroy_process_group()


def train(task: Task, mode: str, device: torch.device, group: dist.ProcessGroup | None, name: str = "") -> None:
    """Some steps in one way, by the ranks of a group."""
    steps, batch, cuda = int(os.environ.get("STEPS", "28")), task.batch, device.type == "cuda"
    gc.collect()  # the model of the way before, with what its hooks hold
    if cuda:
        torch.cuda.empty_cache()
    model = copy.deepcopy(task.model).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(task.data, batch, shuffle=True, drop_last=True)
    applied: Any = None
    if mode == "plan":
        applied = qsync.hybrid(model, optimizer, task.loss_fn, loader, run=os.environ["RUN"], amp=AMP)
    elif mode != "full":
        applied = qsync.apply_(model, mode)
    if applied is not None and applied.local_batch != batch:
        batch = applied.local_batch
        loader = DataLoader(task.data * (1 + batch // len(task.data)), batch, shuffle=True, drop_last=True)
    ddp = DistributedDataParallel(model, process_group=group, **(applied.ddp_options() if applied is not None else {}))
    if applied is not None and len(set(applied.batch_sizes)) > 1:
        applied.weight_gradients(ddp)
    batches = [_moved(b, device) for _, b in zip(range(4), loader, strict=False)]
    took = []
    for step in range(steps):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = task.call(ddp, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    late = sorted(took[WARMUP:])
    sizes = torch.tensor([batch], device=device)
    dist.all_reduce(sizes, group=group)
    if dist.get_rank() == 0:
        quartiles = [late[len(late) // 4], late[3 * len(late) // 4]]
        found = {"ms": statistics.median(late), "quartiles": quartiles, "samples": int(sizes), "loss": loss.item()}
        print("STEP " + json.dumps({"mode": name or mode, **found}), flush=True)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return [tensor.to(device) for tensor in batch]


if __name__ == "__main__":
    main()
