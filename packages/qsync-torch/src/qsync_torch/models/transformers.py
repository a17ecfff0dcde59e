"""Language jobs: BERT and RoBERTa from transformers' configurations, with random weights and synthetic token sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from qsync_core.errors import JobError
from qsync_core.plugins.installing import pip_install
from qsync_torch.job import Batch, Job

_SIZES = {
    "bert-base": {"layers": 12, "hidden": 768, "heads": 12},
    "bert-large": {"layers": 24, "hidden": 1024, "heads": 16},
    "roberta-base": {"layers": 12, "hidden": 768, "heads": 12},
}
_FIRST_ORDINARY_TOKEN = 5
"""Synthetic sequences avoid the ids below it, which RoBERTa and BERT give a meaning (padding is 0 or 1)."""


def bert(
    name: str,
    /,
    *,
    head: str = "qa",
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    intermediate: int = 0,
    vocab: int = 30522,
    seq: int = 384,
    dropout: float = 0.1,
    attention: str = "sdpa",
    batch: int = 12,
    seed: int = 0,
) -> Job:
    """BERT with AdamW.

    Args:
        name: ``bert-base`` or ``bert-large``: the sizes that options left at 0 take.
        head: ``qa`` (span extraction, as the paper fine-tunes on SQuAD) or ``mlm`` (masked language model, decoder tied to the
            embedding).
        layers, hidden, heads, intermediate, vocab: as in transformers' configuration; intermediate is 4·hidden unless given.
        seq: tokens of a sequence; every fourth sequence is padded to it from three quarters.
        dropout: of hidden states and attention weights.
        attention: transformers' ``attn_implementation``: ``sdpa`` or ``eager``.
        batch: sequences per step.
    """
    sizes = _sizes(name, layers, hidden, heads, intermediate)
    sizes |= {"vocab_size": vocab, "max_position_embeddings": max(512, seq)}
    return _language_job(name, "Bert", ("qa", "mlm"), head, sizes, dropout, attention, seq, batch, seed, padding=0)


def roberta(
    name: str,
    /,
    *,
    head: str = "multiple-choice",
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    intermediate: int = 0,
    vocab: int = 50265,
    seq: int = 128,
    choices: int = 4,
    dropout: float = 0.1,
    attention: str = "sdpa",
    batch: int = 16,
    seed: int = 0,
) -> Job:
    """RoBERTa with AdamW.

    Args:
        name: ``roberta-base``.
        head: ``multiple-choice`` (as the paper fine-tunes on SWAG) or ``mlm``.
        choices: endings per question of the multiple-choice head; a batch holds batch·choices sequences.
        layers, hidden, heads, intermediate, vocab, seq, dropout, attention, batch, seed: as for :func:`bert`.
    """
    sizes = _sizes(name, layers, hidden, heads, intermediate)
    sizes |= {"vocab_size": vocab, "max_position_embeddings": max(514, seq + 2), "type_vocab_size": 1}
    known = ("multiple-choice", "mlm")
    return _language_job(name, "Roberta", known, head, sizes, dropout, attention, seq, batch, seed, padding=1, choices=choices)


def question_answering_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Mean of the cross-entropies of the start and end positions; the target is the pair (start N, end N)."""
    start, end = batch.target
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(output.start_logits, start) + cross_entropy(output.end_logits, end)) / 2


def masked_lm_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the masked tokens; the target N×seq is −100 elsewhere."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.target.flatten())


def multiple_choice_loss(output: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of logits N×choices against the right choice N."""
    return nn.functional.cross_entropy(output.logits, batch.target)


_HEADS = {
    "qa": ("ForQuestionAnswering", question_answering_loss),
    "mlm": ("ForMaskedLM", masked_lm_loss),
    "multiple-choice": ("ForMultipleChoice", multiple_choice_loss),
}
"""Ending of the class's name in transformers, and the loss."""


def _language_job(
    name: str,
    family: str,
    heads: tuple[str, ...],
    head: str,
    sizes: dict[str, int],
    dropout: float,
    attention: str,
    seq: int,
    batch_size: int,
    seed: int,
    *,
    padding: int,
    choices: int = 1,
) -> Job:
    if head not in heads:
        raise JobError(f"{name} has no head {head!r}; known heads: {', '.join(heads)}")
    try:
        import transformers
    except ImportError as error:
        raise JobError(
            f"the named language models need transformers ({error}); install it with: {pip_install('qsync-torch', 'models')}"
        ) from None
    ending, loss = _HEADS[head]
    config = getattr(transformers, f"{family}Config")(
        **sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, attn_implementation=attention
    )

    def batch(step: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)

        def integers(high: int, *shape: int, low: int = 0) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        shape = (size, choices, seq) if head == "multiple-choice" else (size, seq)
        tokens = integers(config.vocab_size, *shape, low=_FIRST_ORDINARY_TOKEN)
        mask = torch.ones(shape, dtype=torch.long)
        mask[::4, ..., 3 * seq // 4 :] = 0
        tokens = torch.where(mask.bool(), tokens, padding)
        target: Any
        if head == "qa":
            target = (integers(seq, size), integers(seq, size))
        elif head == "mlm":
            chosen = (torch.rand(shape, generator=generator) < 0.15) & mask.bool()
            chosen[..., 0] = True  # never an empty mean
            target = torch.where(chosen, tokens, -100)
            tokens = torch.where(chosen, _FIRST_ORDINARY_TOKEN - 1, tokens)
        else:
            target = integers(choices, size)
        return Batch(kwargs={"input_ids": tokens, "attention_mask": mask}, target=target)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.01)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, family + ending)(config)
    model.train()
    return Job(name, model, batch, loss, optimizer, batch_size)


def _sizes(name: str, layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, int]:
    asked = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    for option, value in asked.items():
        if value < 0:
            raise JobError(f"option {option} of {name} is a count, or 0 for the model's own, got {value}")
    usual = _SIZES[name]
    hidden = hidden or usual["hidden"]
    return {
        "num_hidden_layers": layers or usual["layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads or min(usual["heads"], max(1, hidden // 64)),
        "intermediate_size": intermediate or 4 * hidden,
    }
