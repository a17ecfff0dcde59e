"""Twelve jobs of people's kinds, for W2's peaks: ``bench/fitting/jobs.py:NAME`` names one for commands."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from qsync_torch.job import Batch, Job
from qsync_torch.models import NAMED


def llama_1b(batch: int = 1, seq: int = 2048, checkpoint: bool = True, amp: str = "bfloat16", layers: int = 16) -> Job:
    """A causal language model of the shapes of Llama 3.2 1B, with AdamW, under autocast, activations computed again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            vocab_size=128_256,
            max_position_embeddings=seq,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return Job("llama-1b", model, partial(_tokens, seq), _causal_loss, partial(_adamw, lr=1e-4), batch, amp=amp or None)


def llama_lora(batch: int = 2, seq: int = 1024) -> Job:
    """The same model, frozen, of which low-rank additions to all its linear layers are trained."""
    job = llama_1b(batch, seq, checkpoint=False)
    for parameter in job.model.parameters():
        parameter.requires_grad_(False)
    for module in list(job.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, _LowRank(child))
    return job


class _LowRank(nn.Module):
    """A frozen linear layer with an addition of rank 16."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x))
        return self.base(x) + added


def _named(text: str, amp: str | None = None) -> Job:
    import attrs

    name, _, options = text.partition(":")
    values: dict[str, Any] = dict(part.split("=") for part in options.split(",") if part)
    job = NAMED[name](**{key: int(value) if value.isdigit() else value == "true" for key, value in values.items()})
    return attrs.evolve(job, amp=amp)


JOBS = {
    "resnet50 b64 float32": partial(_named, "resnet50:batch=64"),
    "resnet50 b128 autocast": partial(_named, "resnet50:batch=128", "bfloat16"),
    "resnet50 b128 autocast channels last": partial(_named, "resnet50:batch=128,channels_last=true", "bfloat16"),
    "vgg16_bn b32 float32": partial(_named, "vgg16_bn:batch=32"),
    "vgg16_bn b64 autocast": partial(_named, "vgg16_bn:batch=64", "bfloat16"),
    "bert-base 12x384 float32": partial(_named, "bert-base:batch=12,seq=384"),
    "bert-base 32x128 autocast": partial(_named, "bert-base:batch=32,seq=128", "bfloat16"),
    "roberta-base 16x384 autocast": partial(_named, "roberta-base:batch=16,seq=384", "bfloat16"),
    "bert-large 4x384 float32": partial(_named, "bert-large:batch=4,seq=384"),
    "llama 1B 1x2048 autocast checkpointed": llama_1b,
    "llama 1B 1x1024 autocast": partial(llama_1b, seq=1024, checkpoint=False),
    "llama 1B 2x1024 autocast LoRA": llama_lora,
}


def _tokens(seq: int, step: int, batch_size: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 128_256, (batch_size, seq), generator=generator)
    return Batch((tokens,), {}, tokens)


def _causal_loss(output: Any, batch: Batch) -> torch.Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.target[:, 1:].flatten())


def _adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)
