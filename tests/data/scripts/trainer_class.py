"""Next-character model, with a Trainer class of its own: torchrun --nproc-per-node 2 trainer_class.py --max-steps 40"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog and then sleeps under the old oak tree by the river. " * 60


class Characters(Dataset):
    def __init__(self, text, length):
        vocabulary = sorted(set(text))
        self.size = len(vocabulary)
        self.codes = torch.tensor([vocabulary.index(character) for character in text])
        self.length = length

    def __len__(self):
        return len(self.codes) - self.length - 1

    def __getitem__(self, i):
        chunk = self.codes[i : i + self.length + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width=64, layers=2, length=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))))


def sequence_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Trainer:
    def __init__(self, model, loader, optimizer, max_steps):
        self.model = DistributedDataParallel(model)
        self.loader, self.optimizer, self.max_steps, self.step = loader, optimizer, max_steps, 0

    def _run_batch(self, source, target):
        self.optimizer.zero_grad()
        loss = sequence_loss(self.model(source), target)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def train(self):
        while self.step < self.max_steps:
            for source, target in self.loader:
                loss = self._run_batch(source, target)
                self.step += 1
                if dist.get_rank() == 0 and self.step % 20 == 0:
                    print(f"step {self.step} | perplexity {math.exp(loss):.2f}")
                if self.step == self.max_steps:
                    break


def main(args):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(args.seed)
    dataset = Characters(TEXT, 32)
    model = LanguageModel(dataset.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset, args.batch_size, sampler=DistributedSampler(dataset), drop_last=True)
    trainer = Trainer(model, loader, optimizer, args.max_steps)
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
