# Regression of a noisy surface, in functions: a closure, a schedule of its own.  torchrun --nproc-per-node=2 functions.py
import functools
import itertools
import math
import os

import torch
import torch.distributed as dist
from torch import nn


def batches(seed, size, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.rand(size, 8, generator=generator) * 2 - 1
        y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + 0.05 * torch.randn(size, 1, generator=generator)
        yield x, y


def mlp(sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def schedule(step, warmup, total):
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def train(model, optimizer, scheduler, loss_fn, data):
    for step, (x, y) in enumerate(data):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"{step}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    steps = int(os.environ.get("STEPS", 60))
    torch.manual_seed(1)
    model = mlp([8, 256, 256, 256, 1])
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(schedule, warmup=5, total=steps))
    loss_fn = nn.HuberLoss()
    data = functools.partial(batches, dist.get_rank(), 128, steps)
    train(ddp, optimizer, scheduler, loss_fn, data())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
