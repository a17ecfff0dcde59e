"""Image classification: a small ResNet on scikit-learn's handwritten digits, with a learning-rate schedule and label smoothing.

torchrun --nproc-per-node 2 -m qsync prepare image.py -o run
torchrun --nproc-per-node 2 image.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import qsync_torch as qsync

EPOCHS = int(os.environ.get("EPOCHS", "3"))


class Block(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return torch.relu(self.second(self.first(x)) + self.around(x))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    data, held_out = TensorDataset(x[300:], y[300:]), (x[:300].to(device), y[:300].to(device))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data, drop_last=True), drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(Block(1, 16, 1), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=len(loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    applied = qsync.hybrid(model, optimizer, criterion, loader)
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(ddp(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean()
    if dist.get_rank() == 0:
        print(f"held-out accuracy {right:.1%}")
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
