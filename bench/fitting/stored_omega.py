"""Ω of stored weights against the truth: small Llamas with adapters, and their gradients in float64 at the same updates."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import statistics
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_planner.allocator.verdict import plan_error
from qsync_planner.indicate import indicate
from qsync_planner.indicators.series import UpdateMean
from qsync_torch.aten.stored_weights import dequantize_weight, quantize_weight
from qsync_torch.job import Batch, Job
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.observe import STEPS, ObserveRequest, observe
from qsync_torch.tracing.trace import trace

MODELS = ((2, 128, 0), (4, 128, 1), (2, 256, 2))
"""Layers, width and seed."""
STORED = tuple(Variant.named(name) for name in ("bfloat16@nf4", "bfloat16@int8-row", "bfloat16@int8-block"))
_TOKENS, _SAMPLES, _TRAINED, _RANK = 64, 8, 300, 8
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@functools.cache
def text() -> torch.Tensor:
    """The bytes of the modules of Python's library, in the order of their names: a text that no commit changes."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8).long()


def tokens(seed: int, size: int, length: int = _TOKENS) -> torch.Tensor:
    """Pieces of the text: (size, length)."""
    first = torch.randint(0, len(text()) - length, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text()[start : start + length] for start in first.tolist()])


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    """The next byte's cross-entropy."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), batch.target[:, 1:].flatten())


def batch_of(step: int, size: int, length: int = _TOKENS) -> Batch:
    """A batch of the text."""
    x = tokens(10_000 + step, size, length)
    return Batch((), {"input_ids": x, "use_cache": False}, x)


def adapted_llama(
    layers: int,
    width: int,
    seed: int,
    *,
    inner: int | None = None,
    heads: int = 4,
    vocabulary: int = 256,
    length: int = _TOKENS,
    rank: int = _RANK,
    trained: int = _TRAINED,
    samples: int = 16,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A Llama that was trained on the text a little, in bfloat16, with adapters in float32."""
    import peft
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner or 11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )
    with torch.device(device):  # a GPU draws billions of numbers in an instant
        model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 * min(1.0, 256 / width))
    for step in range(trained):
        x = tokens(step, samples, length).to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = loss_of(model(input_ids=x, use_cache=False), Batch((), {}, x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    model = model.to("cpu", torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(_LINEARS)))


class Truth:
    """A collector of the squared change of all gradients, in float64, with weights as they are read of each storage."""

    name = "float64"

    def __init__(self, plans: Mapping[str, Mapping[OpId, Variant]]) -> None:
        self.plans = plans
        self.changes: dict[str, list[float]] = {}

    def collect_step(self, step: ObservedStep, variants: Sequence[Variant]) -> Mapping[Any, float]:
        """Measure every plan on the step's batch; nothing is written."""
        model = _in_float64(step.model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def gradient() -> torch.Tensor:
            output = model(**step.batch.kwargs)
            loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), step.batch.target[:, 1:].flatten())
            return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained)])

        before = gradient()
        for name, plan in self.plans.items():
            kept = {op_id: model.get_submodule(op_id.fqn).weight.data for op_id in plan}
            for op_id, variant in plan.items():
                model.get_submodule(op_id.fqn).weight.data = read_of(kept[op_id], variant)
            self.changes.setdefault(name, []).append(float((gradient() - before).square().sum()))
            for op_id, weight in kept.items():
                model.get_submodule(op_id.fqn).weight.data = weight
        return {}


def _in_float64(model: nn.Module) -> nn.Module:
    """A copy whose norms compute in float64 too: Llama's own go by way of float32."""
    copied = copy.deepcopy(model).double()
    for name, norm in list(copied.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":
            exact = nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon)
            exact.weight = norm.weight
            copied.set_submodule(name, exact)
    return copied


def read_of(weight: torch.Tensor, variant: Variant) -> torch.Tensor:
    """What a product in bfloat16 reads of a stored weight."""
    stored = quantize_weight(weight.float(), variant.storage)
    return dequantize_weight(stored, variant.storage, weight.shape, torch.bfloat16).to(weight.dtype)


@attrs.frozen
class Found:
    """How Ω of one model compares.

    Attributes:
        taus: Kendall's τ over layers, by storage.
        quotients: predicted over true, of all layers in all storages.
        wholes: predicted over true of whole plans; sums: Σ Ω over true of the same.
    """

    taus: Mapping[str, float]
    quotients: Sequence[float]
    wholes: Mapping[str, float]
    sums: Mapping[str, float]


def measure(layers: int, width: int, seed: int, *, steps: int = STEPS, progress: Callable[[str], None]) -> Found:
    """Observe one model and hold Ω against the truth."""
    job = Job("llama", adapted_llama(layers, width, seed), batch_of, loss_of, lambda ps: torch.optim.AdamW(ps, lr=1e-3), _SAMPLES)
    dag = trace(job)
    names = [operator.op_id for operator in dag.adjustable]
    wholes = _plans(dag, seed)
    singles = {f"{op_id} {variant.label}": {op_id: variant} for op_id, variant in itertools.product(names, STORED)}
    truth = Truth({**singles, **wholes})
    asked = ObserveRequest(STORED, steps=steps, collectors=[HutchinsonCollector(), truth], settled=None)
    observations = observe(job, dag, asked)
    sensitivity, mean = indicate(observations, dag, STORED), UpdateMean.of(observations).mean
    true = {name: mean(changes) for name, changes in truth.changes.items()}
    omega = {f"{op_id} {variant.label}": sensitivity.omega[op_id][variant] for op_id, variant in itertools.product(names, STORED)}
    taus = {
        variant.label: kendall(
            [omega[f"{one} {variant.label}"] for one in names], [true[f"{one} {variant.label}"] for one in names]
        )
        for variant in STORED
    }
    found = Found(
        taus,
        [omega[name] / true[name] for name in singles],
        {name: plan_error(sensitivity, plan) / true[name] for name, plan in wholes.items()},
        {name: sum(sensitivity.omega[o][v] for o, v in plan.items()) / true[name] for name, plan in wholes.items()},
    )
    middle = statistics.median(found.quotients)
    progress(f"{layers} layers of {width}: τ {taus}, wholes {found.wholes}, sums {found.sums}, median of layers {middle:.3f}")
    return found


def _plans(dag: PrecisionDag, seed: int) -> dict[str, dict[OpId, Variant]]:
    """All layers in one storage, and two random mixtures."""
    names, draw = [operator.op_id for operator in dag.adjustable], random.Random(seed)
    uniform = {variant.label: dict.fromkeys(names, variant) for variant in STORED}
    mixed = {f"mixture {number}": {name: draw.choice(STORED) for name in names} for number in range(2)}
    return uniform | mixed


def kendall(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Kendall's τ of two lists without ties."""
    pairs = list(itertools.combinations(zip(predicted, true, strict=True), 2))
    agreeing = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    return 2 * agreeing / len(pairs) - 1
