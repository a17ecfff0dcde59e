"""A script whose model gathers from all ranks: keys of a momentum encoder, and projections whose gradients are gathered too."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync

dist.init_process_group("gloo")
torch.set_num_threads(1)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        total = torch.stack(grads)
        dist.all_reduce(total)
        return total[dist.get_rank()]


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.calls = 0

    def forward(self, a, b):
        q = torch.cat(Gathered.apply(F.normalize(self.q(a), dim=1)))[: len(a)]
        with torch.no_grad():
            k = F.normalize(self.k(b), dim=1)
            keys = [torch.ones_like(k) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, k.contiguous())
            self.calls += 1
            if self.calls % 5 == 0:
                dist.broadcast(self.queue, 0)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        self.queue = torch.cat([torch.cat(keys).t(), self.queue], 1)[:, :16]
        return logits


torch.manual_seed(0)
model = Momentum()
optimizer = torch.optim.SGD(model.q.parameters(), 0.1)
data = [(torch.randn(4, 16), torch.randn(4, 16), torch.zeros(4, dtype=torch.long)) for _ in range(4)]
qsync.hybrid(model, optimizer, nn.CrossEntropyLoss(), data, run="run")
