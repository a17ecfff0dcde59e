# Denoising autoencoder on noisy sine waves.  torchrun --nproc_per_node=2 autoencoder.py
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    length: int = 128
    hidden: int = 256
    code: int = 16
    batch_size: int = 64
    steps: int = int(os.environ.get("STEPS", 60))
    lr: float = 1e-3
    clip: float = 1.0


cfg = Config()


class Waves(Dataset):
    def __init__(self, n=4096):
        rng = np.random.default_rng(int(os.environ.get("RANK", 0)))
        self.freq = rng.uniform(1, 6, n).astype("float32")
        self.phase = rng.uniform(0, 2 * np.pi, n).astype("float32")

    def __len__(self):
        return len(self.freq)

    def __getitem__(self, i):
        t = np.linspace(0, 1, cfg.length, dtype="float32")
        clean = np.sin(2 * np.pi * self.freq[i] * t + self.phase[i])
        noisy = clean + 0.3 * np.random.randn(cfg.length).astype("float32")
        return torch.from_numpy(noisy), torch.from_numpy(clean)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(cfg.length, cfg.hidden), nn.GELU(), nn.LayerNorm(cfg.hidden), nn.Linear(cfg.hidden, cfg.code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(cfg.code, cfg.hidden), nn.GELU(), nn.LayerNorm(cfg.hidden), nn.Linear(cfg.hidden, cfg.length)
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def loss_fn(recon, x):
    # smoothness keeps the decoder from drawing the noise
    return F.mse_loss(recon, x) + 0.01 * (recon[:, 1:] - recon[:, :-1]).pow(2).mean()


ddp = int(os.environ.get("WORLD_SIZE", "1")) > 1
if ddp:
    dist.init_process_group("gloo")
rank = dist.get_rank() if ddp else 0
torch.manual_seed(1337)
np.random.seed(1337 + rank)

model = AutoEncoder()
if ddp:
    model = nn.parallel.DistributedDataParallel(model)
raw_model = model.module if ddp else model
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.05)
loader = DataLoader(Waves(), cfg.batch_size, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)

step = 0
while step < cfg.steps:
    for noisy, clean in loader:
        recon = model(noisy)
        loss = loss_fn(recon, clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        step += 1
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        if step >= cfg.steps:
            break

if rank == 0:
    torch.save(raw_model.state_dict(), "autoencoder.pt")
if ddp:
    dist.destroy_process_group()
