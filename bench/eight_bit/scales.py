"""Rows P4 and P4b: the gradient of a whole model in int8 where one channel of each down projection is a hundred times larger.

A GLU model learns Python's source text in float32.  Outliers are planted so that the model stays the same function: a row of an up
projection times 100, the column of the down projection behind it over 100.  Errors are those of all linears' gradients together
(but the head's) on text that was not trained on, relative to float64.  Kernels are the backend ``aten``'s, whose numbers are the
same on all devices; channel factors come from a step on another batch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor, nn

import qsync_torch as qsync
from indicator.data import BYTES, held_out_text, text_batch
from kernels.bench import Bench, Row
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch

HIDDEN, INNER, LAYERS, LENGTH, BATCH = 256, 1024, 3, 128, 8
UPDATES, QUICK_UPDATES, RATE, WARMUP = 300, 3, 2e-3, 40
WINDOWS = 8
"""Sequences of which the gradient is taken: 1,024 tokens."""
DRAWS = 3
"""Which channels are planted."""
LARGER = 100.0
ONE_SCALE = attrs.evolve(
    Variant.of(Precision.INT8, output=Precision.FLOAT32), grad_input=Precision.INT8, grad_weight=Precision.INT8
)
ROWS = attrs.evolve(ONE_SCALE, x_granularity=Granularity.PER_ROW)
BEST = "rows and factors"
WAYS = {"one scale": ONE_SCALE, "rows": ROWS, BEST: attrs.evolve(ROWS, channel_factors=True)}
TO_REACH = {"P4": "≤ 0.10", "P4b": "≤ 2.5"}


def rows(bench: Bench) -> Iterator[Row]:
    """P4, over one scale a tensor, and P4b, over the same without outliers: by row with channel factors, rounded to nearest.

    One draw that is rounded stochastically, as it trains, is beside them.
    """
    model = trained(bench, QUICK_UPDATES if bench.quick else UPDATES)
    errors: dict[tuple[str, Rounding, int | None], float] = {}
    for draw in (None, *range(DRAWS)):
        exact = gradient(planted(model, draw).double(), held_out_text(LENGTH, WINDOWS))
        for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC) if not draw else (Rounding.NEAREST,):
            for way, variant in WAYS.items():
                found = error(planted(model, draw), attrs.evolve(variant, rounding=rounding), exact)
                errors[way, rounding, draw] = found
                bench.say(f"{'as trained' if draw is None else f'planted {draw}'}, {rounding}, {way}: {found:.4f}")
    title = (
        f"gradient of a GLU model ({LAYERS} layers, {HIDDEN}, {INNER}, {UPDATES} updates on Python's library), one channel "
        f"in {INNER} of each down projection x {LARGER:.0f}, all three products in int8 by row with channel factors, emulated by "
        "aten: error"
    )
    spread = "; ".join(
        f"{way}: "
        + ", ".join(
            f"{rounding} {errors[way, rounding, None]:.3f} → "
            + ", ".join(f"{errors[way, rounding, draw]:.3f}" for draw in range(DRAWS) if (way, rounding, draw) in errors)
            for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC)
        )
        for way in WAYS
    )
    for id_, over, whose, planted_too in (
        ("P4", "one scale a tensor's", "one scale", True),
        ("P4b", "its own without outliers", BEST, False),
    ):
        ratios = [
            errors[BEST, Rounding.NEAREST, draw] / errors[whose, Rounding.NEAREST, draw if planted_too else None]
            for draw in range(DRAWS)
        ]
        what = f"{title} over {over}, the worst of {DRAWS} draws"
        yield bench.row(id_, what, max(ratios), "ratio", TO_REACH[id_], spread)


def trained(bench: Bench, updates: int) -> nn.Module:
    """Train the model, on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=BYTES,
        tie_word_embeddings=False,
        max_position_embeddings=2 * LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * (1 - step / UPDATES))
    )
    begin = time.monotonic()
    for step in range(updates):
        optimizer.zero_grad()
        loss = loss_of(model, text_batch(step, BATCH, length=LENGTH, seed=0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == updates - 1:
            bench.say(f"update {step}: {loss.item():.3f} nats a byte, {time.monotonic() - begin:.0f} s")
    return model


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Of the next byte."""
    logits = model(input_ids=batch.args[0]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.target.flatten())


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All but the head, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in found.items() if name != "lm_head"}


def planted(model: nn.Module, draw: int | None) -> nn.Module:
    """A copy with the outliers of a draw, in float32."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(11 + (draw or 0))
    for layer in copied.model.layers if draw is not None else ():  # type: ignore[union-attr]
        channel = int(torch.randint(INNER, (1,), generator=generator))
        with torch.no_grad():
            layer.mlp.up_proj.weight[channel] *= LARGER
            layer.mlp.down_proj.weight[:, channel] /= LARGER
    return copied


def gradient(model: nn.Module, batch: Batch) -> Tensor:
    """All linears' weight gradients in one float64 vector."""
    model.zero_grad()
    loss_of(model, batch).backward()
    return torch.cat(
        [module.weight.grad.double().flatten() for module in linears(model).values() if module.weight.grad is not None]
    )


def error(model: nn.Module, variant: Variant, exact: Tensor) -> float:
    """Relative error of the gradient in a variant; factors are those that a step on another batch leaves."""
    applied = qsync.apply_(model, dict.fromkeys(linears(model), variant), backend="aten")
    if variant.channel_factors:
        gradient(model, text_batch(UPDATES, BATCH, length=LENGTH, seed=1))
        applied.advance()
    found = gradient(model, held_out_text(LENGTH, WINDOWS))
    return float((found - exact).norm() / exact.norm())
