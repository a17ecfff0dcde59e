"""A loop that treats its converters, its model and its checkpoints as torchtitan 0.2 does; torchtitan itself is not imported.

``python torchtitan_loop.py PLAN``: 20 steps with a checkpoint after 10, from which it goes on where it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digits_net import DigitsNet, load_data, make_model, make_optimizer
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy

from qsync_torch.integrations.torchtitan import HybridConverter

REGISTRY = {}
"""torchtitan's registry of converter classes, which it calls with the job's configuration."""
dist.init_process_group("gloo")
rank = dist.get_rank()
converter = HybridConverter(sys.argv[1])
REGISTRY["qsync"] = converter
job_config = SimpleNamespace(training=SimpleNamespace(dtype="float32", mixed_precision_param="float32"))
parallel_dims = SimpleNamespace(dp_replicate=2, dp_shard=1, cp=1, tp=1, pp=1, ep=1)

with torch.device("meta"):
    model = DigitsNet()
converters = [make(job_config, parallel_dims) for make in REGISTRY.values()]
for found in converters:
    found.convert(model)
replicate(model, bucket_cap_mb=100)
model.to_empty(device="cpu")
model.load_state_dict(make_model().state_dict())  # torchtitan's init_weights
model.train()
optimizer = make_optimizer(model.parameters())
optimizer.register_step_post_hook(lambda *_: [found.post_optimizer_hook([model]) for found in converters])


class Optimizer:
    """torchtitan's container of optimizers, of one."""

    def state_dict(self):
        return get_optimizer_state_dict(model, optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(model, optimizer, state)


class Progress:
    """torchtitan's trainer, as its own checkpoint has it."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


progress = Progress()
states = {"model": model, "optimizer": Optimizer(), "train_state": progress, "qsync": converter}
if Path("step-10").is_dir():
    dcp.load(states, checkpoint_id="step-10")
images, labels = load_data()[0].tensors
while progress.step < 20:
    rows = torch.arange(16) + (progress.step * 2 + rank) * 16
    optimizer.zero_grad()
    cross_entropy(model(images[rows]), labels[rows]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    progress.step += 1
    if progress.step == 10:
        dcp.save(states, checkpoint_id="step-10")
if rank == 0:
    torch.save(model.state_dict(), "trained.pt")
dist.destroy_process_group()
