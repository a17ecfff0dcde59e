"""A recipe of torchtune's structure, with one added line: adapters beside the weight of the layer that they adapt, activation
checkpointing, accumulated gradients, packed documents, and logits in chunks.

Layers are written as torchtune 0.6 has them: ``LoRALinear`` holds its weight itself and calls ``F.linear`` with it.
``python lora_recipe.py [CHECKPOINT]``; with a checkpoint, the base is loaded straight into its planned formats.
"""

from __future__ import annotations

import contextlib
import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import qsync_torch as qsync

WIDTH, HEADS, KV_HEADS, LAYERS, LENGTH, BATCH, IGNORED = 256, 4, 2, 3, 32, 2, -100


class LoRALinear(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.scaling = alpha / rank
        self.weight = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight)
        self.lora_a, self.lora_b = nn.Linear(in_dim, rank, bias=False), nn.Linear(rank, out_dim, bias=False)
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def to_empty(self, *, device, recurse: bool = True):
        self.lora_a.to_empty(device=device), self.lora_b.to_empty(device=device)

    def adapter_params(self) -> list[str]:
        return ["lora_a.weight", "lora_b.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.scaling * self.lora_b(self.lora_a(x))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.scale.float(), 1e-5).to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.rope_init()

    def rope_init(self) -> None:
        theta = 10_000.0 ** -(torch.arange(0, self.dim, 2, device="cpu").float() / self.dim)
        angles = torch.arange(LENGTH, device="cpu").float()[:, None] * theta
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        cache = self.cache[input_pos][:, :, None]
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * cache[..., 0] - b * cache[..., 1], b * cache[..., 0] + a * cache[..., 1]], dim=-1)
        return turned.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.q_proj, self.k_proj = LoRALinear(WIDTH, WIDTH), nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v_proj, self.output_proj = LoRALinear(WIDTH, KV_HEADS * head), LoRALinear(WIDTH, WIDTH)
        self.pos_embeddings = Rotary(head)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, WIDTH // HEADS))

        q, k = self.pos_embeddings(split(self.q_proj(x)), input_pos), self.pos_embeddings(split(self.k_proj(x)), input_pos)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=2) for y in (k, split(self.v_proj(x))))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.output_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = LoRALinear(WIDTH, 2 * WIDTH), LoRALinear(WIDTH, 2 * WIDTH), LoRALinear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.attn, self.mlp_norm, self.mlp = RMSNorm(WIDTH), Attention(), RMSNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        h = x + self.attn(self.sa_norm(x), mask, input_pos)
        return h + self.mlp(self.mlp_norm(h))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(256, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.output, self.num_output_chunks = RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False), 0

    def set_num_output_chunks(self, count: int) -> None:
        self.num_output_chunks = count

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, input_pos: torch.Tensor) -> list[torch.Tensor]:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask, input_pos)
        return [self.output(chunk) for chunk in self.norm(h).chunk(self.num_output_chunks, dim=1)]


class ChunkedCrossEntropy(nn.Module):
    num_output_chunks = 4

    def forward(self, logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        total = sum(
            F.cross_entropy(part.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED, reduction="sum")
            for part, target in zip(logits, labels.chunk(self.num_output_chunks, dim=1), strict=True)
        )
        return total / (labels != IGNORED).sum()


def get_adapter_params(model: nn.Module) -> dict[str, nn.Parameter]:
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "adapter_params")]
    return {f"{name}.{own}": module.get_parameter(own) for name, module in layers for own in module.adapter_params()}


def packed() -> list[dict[str, torch.Tensor]]:
    """Documents of the standard library, several in a row, which do not see each other."""
    text = b"".join(path.read_bytes()[:2000] for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20])
    packs = []
    for start in range(0, len(text) - LENGTH, LENGTH):
        cut = 8 + start // LENGTH % 17
        tokens = torch.tensor(list(text[start : start + LENGTH]))
        document = (torch.arange(LENGTH) >= cut).long()
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (document[:, None] == document)
        labels = F.pad(tokens[1:], (0, 1), value=IGNORED)
        labels[cut - 1] = IGNORED
        packs.append({"tokens": tokens, "labels": labels, "input_pos": torch.arange(LENGTH) - cut * document, "mask": mask})
    return packs


class Recipe:
    def __init__(self, checkpoint: str = "") -> None:
        self.rank, self.accumulate, self.steps, self.applied = dist.get_rank(), 2, 30, None
        self.checkpoint = checkpoint

    def setup(self) -> None:
        self.model = self.setup_model()
        self.optimizer = torch.optim.AdamW(get_adapter_params(self.model).values(), lr=3e-3)
        self.loss_fn = ChunkedCrossEntropy()
        self.model.set_num_output_chunks(self.loss_fn.num_output_chunks)
        data = packed()
        self.loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), drop_last=True)
        if self.applied is None:
            self.applied = qsync.hybrid(self.model, self.optimizer, self.loss_fn, self.loader, accumulate=self.accumulate)
        self.ddp = DistributedDataParallel(self.model, **self.applied.ddp_options())

    def setup_model(self) -> nn.Module:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta") if self.checkpoint else contextlib.nullcontext():
            model = Decoder()
        adapters = get_adapter_params(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in adapters)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
        if self.checkpoint:
            torch.manual_seed(1)
            for module in model.modules():
                if isinstance(module, LoRALinear):
                    module.to_empty(device="cpu")
                    module.initialize_parameters()
                if isinstance(module, Rotary):
                    module.rope_init()
            self.applied = qsync.load_planned(model, "run", self.checkpoint)
        torch.set_default_dtype(torch.float32)
        return model

    def train(self) -> None:
        losses, running, tokens, step = [], 0.0, torch.tensor(0), 0
        for index, batch in enumerate(self.loader):
            labels, is_last = batch.pop("labels"), index % self.accumulate == self.accumulate - 1
            count = (labels != IGNORED).sum()
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                loss = self.loss_fn(self.ddp(**batch), labels) * count
                loss.backward()
            running, tokens = running + loss.detach(), tokens + count
            if is_last:
                dist.all_reduce(tokens), dist.all_reduce(running)
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(dist.get_world_size() / tokens)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                losses.append(float(running / tokens))
                running, tokens, step = 0.0, torch.tensor(0), step + 1
            if step == self.steps:
                break
        state = self.model.state_dict()
        kept = {name: value for name, value in state.items() if "lora_" in name}
        torch.save({"adapters": kept, "base": {name: state[name] for name in state if name not in kept}}, f"rank{self.rank}.pt")
        print(f"losses from {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    recipe = Recipe(*sys.argv[1:])
    recipe.setup()
    recipe.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
