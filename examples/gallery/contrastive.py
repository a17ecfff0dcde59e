"""Contrastive learning (SimCLR): two views of each image, and negatives gathered from all ranks.

torchrun --nproc-per-node 2 -m qsync prepare contrastive.py -o run
torchrun --nproc-per-node 2 contrastive.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import qsync_torch as qsync

EPOCHS = int(os.environ.get("EPOCHS", "2"))
TEMPERATURE = 0.2


class Encoder(nn.Module):
    """Two views of each image, (N, 2, 1, 8, 8), to embeddings of length 1, (N, 2, 32)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()
        )
        self.projection = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, views):
        embeddings = self.projection(self.features(views.flatten(0, 1)))
        return functional.normalize(embeddings, dim=1).unflatten(0, (-1, 2))


def two_views(images):
    """Each image twice, each time with noise and with a piece that is hidden."""
    views = images.repeat_interleave(2, 0)
    views = views + 0.3 * torch.randn_like(views)
    corners = torch.randint(0, 6, (len(views), 2)).tolist()
    for view, (row, column) in zip(views, corners, strict=True):
        view[:, row : row + 3, column : column + 3] = 0
    return views.unflatten(0, (-1, 2))


def contrastive_loss(embeddings, _):
    """Cross entropy of finding the other view of an image among those of all ranks."""
    first, second = embeddings.unbind(1)
    gathered = [torch.empty_like(second) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, second.detach().contiguous())
    gathered[dist.get_rank()] = second  # the one that has a gradient here
    others = torch.cat(gathered)
    mine = torch.arange(len(first), device=first.device) + dist.get_rank() * len(first)
    return functional.cross_entropy(first @ others.T / TEMPERATURE, mine)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels))

    def collate(rows):
        return two_views(torch.stack([image for image, _ in rows])), torch.stack([label for _, label in rows])

    loader = DataLoader(data, 32, sampler=DistributedSampler(data, drop_last=True), drop_last=True, collate_fn=collate)
    torch.manual_seed(0)
    model = Encoder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    applied = qsync.hybrid(model, optimizer, contrastive_loss, loader)
    ddp = DistributedDataParallel(model, **applied.ddp_options())
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for views, labels in loader:
            loss = contrastive_loss(ddp(views.to(device)), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
