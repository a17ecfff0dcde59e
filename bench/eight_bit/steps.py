"""Rows P1 to P3: whole compiled training steps in 8 bit over compiled bfloat16 autocast, and their peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

import qsync_torch as qsync
from eight_bit.in_turns import Turns, take_turns
from kernels.bench import Bench, Row
from kernels.whole_model import Setting
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace
from steps.roofline import copy_bytes_per_s, floor_bytes, lines

BLOCKS, STEPS = 5, 4
"""How often contenders take turns, and steps of a turn."""
INT8 = "int8;out=bfloat16;save=int8;{gradients};x={x};w=channel;round=stochastic;sym=true"


@attrs.frozen
class Way:
    """One way to train in 8 bit, or PyTorch's own 16.

    Attributes:
        name: for people and for ``--contenders``.
        spec: the variant of every linear inside the layers; empty for none of QSync's.
        saved: what ``qsync.compile`` keeps the inputs of fused chains in.
        graphs: whether steps are replayed as CUDA graphs (``mode="reduce-overhead"``), which no host can delay.
    """

    name: str
    spec: str = ""
    saved: str = ""
    graphs: bool = False


BASE, TORCHAO = Way("bf16"), Way("torchao float8")
BASES = (BASE, Way("bf16, graphs", graphs=True))
ALL = INT8.format(gradients="gi=int8;gw=int8", x="tensor")
ROWS = INT8.format(gradients="gi=int8;gw=int8", x="row")
WAYS = (
    *BASES,
    TORCHAO,
    Way("torchao float8, graphs", graphs=True),
    Way("int8 forward", "int8>bfloat16"),
    Way("int8", ALL),
    Way("int8, graphs", ALL, graphs=True),
    Way("int8, saved", ALL, "int8"),
    Way("int8, saved, graphs", ALL, "int8", graphs=True),
    Way("int8, a scale a row, 16-bit gw", INT8.format(gradients="gi=int8;gw=bfloat16", x="row")),
    Way("int8, a scale a row", ROWS),
    Way("int8, a scale a row, graphs", ROWS, graphs=True),
    Way("int8, a scale a row, saved", ROWS, "int8"),
    Way("int8, a scale a row, saved, graphs", ROWS, "int8", graphs=True),
    Way("int8, channel factors", f"{ROWS};factors=channel"),
    Way("int8, channel factors, graphs", f"{ROWS};factors=channel", graphs=True),
)


class Attention(Enum):
    """What attention of a compiled step reads beside queries, keys and values, as titles have it."""

    MASKED = "a dense mask"
    """transformers makes one whenever it is traced; no flash kernel takes it."""
    CAUSAL = "causal attention"
    """No mask in memory; what comes behind a query is skipped."""
    UNMASKED = "attention without a mask"
    """Every query reads every key, as encoders do whose batches are not padded."""


@attrs.frozen
class Shape:
    """A transformer and its batch: the class, arguments of its configuration, samples and tokens (or the image's size)."""

    title: str
    model: str
    arguments: Mapping[str, Any]
    batch: int
    length: int
    classes: int = 0
    attention: Attention = Attention.MASKED


def llama(title: str, hidden: int, inner: int, layers: int, batch: int, length: int, attention: Attention) -> Shape:
    """A Llama whose heads have 64 columns (128 from 4,096 on), four queries to a key."""
    heads = hidden // (64 if hidden < 4096 else 128)
    arguments = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    arguments |= {"num_key_value_heads": max(1, heads // 4), "vocab_size": 32000, "tie_word_embeddings": False, "use_cache": False}
    return Shape(f"{title}, {batch} × {length} tokens, {attention.value}", "Llama", arguments, batch, length, attention=attention)


def unmasked(shape: Shape) -> Shape:
    """The same with attention without a mask, which flash kernels take."""
    return attrs.evolve(shape, title=f"{shape.title}, {Attention.UNMASKED.value}", attention=Attention.UNMASKED)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT = Shape("BERT-large 16 × 512", "Bert", LARGE, 16, 512)
VIT = Shape("ViT-L b64", "ViT", {**LARGE, "num_labels": 1000}, 64, 224, classes=1000)
SHAPES = {
    "P1": llama("Llama-like 1B", 2048, 8192, 16, 4, 2048, Attention.MASKED),
    "P1b": llama("Llama-like 1B", 2048, 8192, 16, 4, 2048, Attention.CAUSAL),
    "P2": llama("4 layers of 8B's size", 4096, 14336, 4, 2, 4096, Attention.CAUSAL),
    "P2b": llama("4 layers of 8B's size", 4096, 14336, 4, 4, 4096, Attention.CAUSAL),
    "P3-bert": BERT,
    "P3-vit": VIT,
    "P3b-bert": unmasked(BERT),
    "P3b-vit": unmasked(VIT),
}
BOUNDS = {"P1": 0.83, "P1b": 0.79, "P2": 0.74, "P2b": 0.80, "P3-bert": 0.92, "P3-vit": 0.92, "P3b-bert": 0.92, "P3b-vit": 0.92}
TINY: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}


def made(shape: Shape, quick: bool, seed: int = 0) -> nn.Module:
    """The model with random weights."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    arguments = dict(shape.arguments) | (TINY if quick else {})
    if quick and "num_key_value_heads" in arguments:
        arguments |= {"num_key_value_heads": 1, "vocab_size": 256}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{shape.model}Config")(**arguments)
    if shape.attention is not Attention.MASKED:  # a name without a function that makes masks: none is made
        name = shape.attention.name.lower()
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, is_causal=shape.attention is Attention.CAUSAL))
        config._attn_implementation = name
    heads = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM", "ViT": "ViTForImageClassification"}
    model: nn.Module = getattr(transformers, heads[shape.model])(config)
    return model


def _attend(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    is_causal: bool,
    scaling: Any = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Any, None]:
    """Attend as trainers do whose batches are not padded: no mask in memory, flash attention."""
    repeated = query.shape[1] != key.shape[1]
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=is_causal, scale=scaling, enable_gqa=repeated
    )
    return attended.transpose(1, 2).contiguous(), None


def batch_of(shape: Shape, device: torch.device, quick: bool) -> dict[str, torch.Tensor]:
    """Random samples."""
    batch, length = (2, 32) if quick else (shape.batch, shape.length)
    if shape.classes:
        pixels = torch.randn(batch, 3, 224, 224, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(shape.classes, (batch,), device=device)}
    ids = torch.randint(256 if quick else 30000, (batch, length), device=device)
    return {"input_ids": ids, "labels": ids}


def run_of(way: Way, shape: Shape, device: torch.device, quick: bool, seed: int = 0) -> tuple[nn.Module, Callable[..., Any]]:
    """The model, and what calls it compiled as a trainer would."""
    how: dict[str, Any] = {"mode": "reduce-overhead" if way.graphs else None} if device.type == "cuda" else {"backend": "aot_eager"}
    model = made(shape, quick, seed).to(device).train()
    linears = linears_of(model)
    if way.spec:
        applied = qsync.apply_(model, {f"{name}#0": way.spec for name in linears}, base=Precision.BFLOAT16, seed=seed)
        return model, qsync.compile(applied, saved=way.saved or None, **how)
    if way.name.startswith(TORCHAO.name):
        from torchao.float8 import convert_to_float8_training

        inside = frozenset(linears)
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in inside)
    return model, torch.compile(model, **how)


def stepped(way: Way, shape: Shape, device: torch.device, quick: bool) -> Callable[[], None]:
    """What trains one step, compiled as a trainer would."""
    model, run = run_of(way, shape, device, quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    batch = batch_of(shape, device, quick)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def linears_of(model: nn.Module) -> list[str]:
    """The linears of the repeated layers, by name; not the head."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, _ in named if any(part.isdigit() for part in name.split("."))]


def measured(shape: Shape, ways: Sequence[Way], bench: Bench, bound: float) -> Mapping[str, Turns]:
    """Steps of the contenders in turns, by name; one that fails is told, and the others still count.

    Where the fastest over the base misses the bound, both with the kernels of their steps.
    """
    made = {way.name: (stepped, (way, shape, bench.device, bench.quick)) for way in ways}

    def missed(found: Mapping[str, Turns]) -> Sequence[str]:
        pair = fastest(found)
        return pair if len(pair) == 2 and ratio(found[pair[0]], found[pair[1]])[0] > bound else ()

    def say(text: str) -> None:
        bench.say(f"{shape.title}, {text}")

    return take_turns(made, blocks=BLOCKS, steps=STEPS, say=say, explain=missed)


def sides(found: Collection[str]) -> tuple[list[str], list[str]]:
    """Those that were measured of QSync's ways, and of PyTorch's own 16 bit."""
    return [way.name for way in WAYS if way.spec and way.name in found], [way.name for way in BASES if way.name in found]


def fastest(found: Mapping[str, Turns]) -> Sequence[str]:
    """The fastest of each side that there is."""
    return [min(names, key=lambda name: found[name].ms) for names in sides(found) if names]


def job_of(title: str, model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]]) -> Job:
    """A model of transformers' under bfloat16 autocast, which computes its loss itself."""

    def batch(step: int, samples: int) -> Batch:
        return Batch(kwargs={key: value[:samples] for key, value in batches[step % len(batches)].items()})

    size = next(iter(batches[0].values())).shape[0]
    return Job(title, model, batch, lambda output, _: output.loss, torch.optim.AdamW, size, amp="bfloat16")


def made_of(shape: Shape, way: Way, turns: Turns, bench: Bench, copy_rate: float) -> Iterator[str]:
    """What a step is made of: its kernels by parts, and their bytes at the copy rate."""
    with torch.device("meta"):
        model = made(shape, bench.quick)
    lowered = {OpId(name, 0) for name in linears_of(model)}
    dag = trace(job_of(shape.title, model, [batch_of(shape, torch.device("cpu"), bench.quick)]))
    variant = Variant.parse(way.spec) if way.spec else None
    is_fused = variant is not None and not variant.channel_factors
    setting = Setting(way.name, variant, autocast=torch.bfloat16, fused=is_fused, saved=way.saved)
    return lines(f"{shape.title}, {way.name}", turns.kernels, floor_bytes(dag, setting, bench.device, lowered), copy_rate)


def ratio(over: Turns, under: Turns) -> tuple[float, str]:
    """Median of the ratios of neighbouring turns, and their range."""
    found = [a.ms / b.ms for a, b in zip(over.blocks, under.blocks, strict=True)]
    return statistics.median(found), f"{min(found):.3f} to {max(found):.3f} of {len(found)} turns"


def rows(bench: Bench, part: str, words: str) -> Iterator[Row]:
    """The rows of one shape, the fastest and the smallest of each side: its step, its peak, and over torchao's float8."""
    shape, wanted = SHAPES[part], [word for word in words.split("|") if word]
    ways = [way for way in WAYS if way == BASE or not wanted or any(word == way.name for word in wanted)]
    found = measured(shape, ways, bench, BOUNDS[part])
    others = [way.name for way in WAYS if way.name.startswith(TORCHAO.name) and way.name in found]
    if not all(sides(found)):
        raise RuntimeError(f"only {', '.join(found) or 'nothing'} could be measured, and a ratio has two sides")
    best, base = fastest(found)
    replayed = {way.name for way in ways if way.graphs}  # the allocator sees nothing of what a graph's replay writes
    value, spread = ratio(found[best], found[base])
    told = "; ".join(f"{name} {turns.ms:.1f} ms, {turns.peak:.2f} GiB" for name, turns in found.items())
    step = f"{shape.title}, whole compiled step: {best} over {base} (autocast)"
    peaks = [sorted(set(names) - replayed, key=lambda name: found[name].peak) for names in sides(found)]
    if all(peaks):
        smallest, least = (names[0] for names in peaks)
        peak_id, target = {"P1": ("P1m", "≤ 0.76"), "P2b": ("P2b", "≤ 0.80")}.get(part, (f"{part}-peak", "reported"))
        peak = found[smallest].peak / (found[least].peak or 1.0)
        yield bench.row(peak_id, f"{shape.title}, peak: {smallest} over bfloat16", peak, "ratio", target, told)
    if part == "P2b":  # the row is of the peak alone
        yield bench.row("P2b-step", step, value, "ratio", "reported", f"{spread}; {told}")
        return
    yield bench.row(part, step, value, "ratio", f"≤ {BOUNDS[part]:.2f}", f"{spread}; {told}")
    if others:
        over, range_ = ratio(found[best], found[min(others, key=lambda name: found[name].ms)])
        id_, target = {"P1": ("P1c-dense", "≤ 0.95"), "P1b": ("P1c-causal", "≤ 0.95")}.get(part, (f"{part}-torchao", "reported"))
        yield bench.row(id_, f"{shape.title}, whole step: {best} over torchao's float8", over, "ratio", target, range_)
    if all(found[name].kernels for name in (best, base)):
        rate = copy_bytes_per_s(bench)
        for way in (way for way in ways if way.name in (best, base)):
            for line in made_of(shape, way, found[way.name], bench, rate):
                bench.say(f"{part} missed: {line}")
