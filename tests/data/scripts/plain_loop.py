# Handwritten digits, gradients accumulated over 4 batches.  torchrun --nproc-per-node 2 plain_loop.py
import contextlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 4
EPOCHS = int(os.environ.get("EPOCHS", 2))

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10),
)  # fmt: skip
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
model = DDP(net)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = 0.0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = criterion(model(x), y) / ACCUMULATE
            loss.backward()
        total += loss.item() * ACCUMULATE
        if last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")
dist.destroy_process_group()
