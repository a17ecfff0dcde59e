"""The demo's language job: a small BERT that fills masked bytes in the source text of Python's standard library.

The text comes with Python, so nothing is downloaded; tokens are its bytes, so no tokenizer has to be trained.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from qsync_torch.demo.workload import Evaluation, Workload
from qsync_torch.job import Batch, Job

BYTES = 256
MASK = BYTES
VOCABULARY = BYTES + 8
"""Bytes, the mask, and padding to a multiple of 8 (tensor cores and int8 kernels want aligned sizes)."""
MASKED_SHARE = 0.15
IGNORED = -100
TEXT_BYTES = 4_000_000
HELD_OUT_EVERY = 10
"""Every tenth file is held out."""
HELD_OUT_WINDOWS = 256


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Bytes of the training and of the held-out files of the standard library, as two 1-d uint8 tensors."""
    training, held_out, size = bytearray(), bytearray(), 0
    for position, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        content = path.read_bytes()
        (held_out if position % HELD_OUT_EVERY == 0 else training).extend(content)
        size += len(content)
        if size > TEXT_BYTES:
            break
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def _masked(tokens: Tensor, seed: int) -> Batch:
    """BERT's corruption of tokens (N, S): of 15%, 80% become the mask, 10% a random byte, 10% stay; targets are the originals."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(tokens.shape, generator=generator)
    corrupted = tokens.clone()
    corrupted[draw < 0.8 * MASKED_SHARE] = MASK
    swapped = (draw >= 0.8 * MASKED_SHARE) & (draw < 0.9 * MASKED_SHARE)
    corrupted[swapped] = torch.randint(BYTES, (int(swapped.sum()),), generator=generator)
    return Batch(kwargs={"input_ids": corrupted}, target=torch.where(draw < MASKED_SHARE, tokens, IGNORED))


def _windows(text: Tensor, indices: Tensor, length: int) -> Tensor:
    return torch.stack([text[i * length : (i + 1) * length] for i in indices.tolist()]).long()


def _loss(output: object, batch: Batch) -> Tensor:
    logits: Tensor = output.logits  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=IGNORED)


def _evaluate(model: nn.Module, length: int) -> Evaluation:
    _, held_out = _text()
    stride = len(held_out) // length // HELD_OUT_WINDOWS
    batch = _masked(_windows(held_out, torch.arange(HELD_OUT_WINDOWS) * stride, length), seed=0)
    output = model(**batch.kwargs)
    masked = batch.target != IGNORED
    right = (output.logits.argmax(-1) == batch.target)[masked]
    return Evaluation(float(_loss(output, batch)), float(right.float().mean()))


def masked_sources_bert(tiny: bool = False) -> Workload:
    """The job at the size of the demo, or ``tiny`` for tests: the same code in milliseconds a step."""
    from transformers import BertConfig, BertForMaskedLM

    length = 16 if tiny else 32
    hidden = 32 if tiny else 256
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=1 if tiny else 3,
        num_attention_heads=2 if tiny else 4,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",  # fused attention's bfloat16 backward is several times slower than float32's on CPUs
    )
    model = BertForMaskedLM(config).train()
    return Workload(
        name="bert",
        model=model,
        data="the source text of Python's standard library",
        samples=len(_text()[0]) // length,
        take=lambda indices, step: _masked(_windows(_text()[0], indices, length), step),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True),
        batch_size=4 if tiny else 32,
        evaluate_once=lambda held_out_model: _evaluate(held_out_model, length),
    )


def job(tiny: bool = False) -> Job:
    """For the command line: ``qsync trace --job qsync_torch.demo.masked_sources:job``."""
    return masked_sources_bert(tiny).job()
