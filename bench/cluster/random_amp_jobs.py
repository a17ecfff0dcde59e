"""Small random models that train under autocast, random plans for them, and what autograd keeps of a forward.

A model is a sequence of drawn blocks over tokens or images: linears, convolutions, norms, embeddings, attention (by hand or by
PyTorch), views, tensors that several operators read, modules that run twice, residuals, dropout, activations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir.cluster import Cluster, DeviceGroup
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_planner.matching import Inputs, under_base
from qsync_planner.replayer.replay import Replayer
from qsync_torch import apply_
from qsync_torch.job import Batch, Job
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

LADDER = tuple(Variant.of(p) for p in (Precision.INT8, Precision.FLOAT16, Precision.BFLOAT16, Precision.FLOAT32))
BASE = Precision.BFLOAT16
ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
WIDTH, TOKENS, WORDS, CLASSES = 32, 16, 50, 8
Build = Callable[[random.Random], nn.Module]

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, lambda: nn.ReLU(inplace=True), nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish, nn.ELU,
)  # fmt: skip


def _activation(draw: random.Random) -> nn.Module:
    return draw.choice(ACTIVATIONS)()


class Residual(nn.Module):
    """``x + f(x)``, or ``f(x) * x``."""

    def __init__(self, inner: nn.Module, gate: bool) -> None:
        super().__init__()
        self.inner, self.gate = inner, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return torch.sigmoid(y) * x if self.gate else x + y


class Branches(nn.Module):
    """Several linears that read one tensor; their results are added, multiplied or joined."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.how = draw.choice(("add", "multiply", "join"))
        count = draw.choice((2, 3))
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7) for _ in range(count))
        self.join = nn.Linear(count * WIDTH, WIDTH) if self.how == "join" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [part(x) for part in self.parts]
        if self.join is not None:
            joined: torch.Tensor = self.join(torch.cat(results, -1))
            return joined
        found = results[0]
        for result in results[1:]:
            found = found * result if self.how == "multiply" else found + result
        return found


class Pieces(nn.Module):
    """Linears that read different views of one tensor: halves of it, or one half twice."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH // 2, WIDTH), nn.Linear(WIDTH // 2, WIDTH)
        self.same, self.dim = draw.random() < 0.4, draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim:  # a new view for each
            x = x.reshape(*x.shape[:-1], 2, WIDTH // 2)
            a, b = x.select(-2, 0), x.select(-2, 0 if self.same else 1)
        else:
            a, b = x.chunk(2, -1)
            b = a if self.same else b
        return self.first(a) + self.second(b)


class Attention(nn.Module):
    """Two heads; Q, K and V of one tensor by three linears, or by one of which each reads a third."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.joint, self.by_hand, self.dropout = draw.random() < 0.5, draw.random() < 0.5, draw.choice((0.0, 0.1))
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH)] if self.joint else [nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv[0](x).chunk(3, -1) if self.joint else [part(x) for part in self.qkv]
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        if self.by_hand:
            weights = torch.softmax(q @ k.transpose(-2, -1) * (WIDTH // 2) ** -0.5, -1)
            y = F.dropout(weights, self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        found: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


class Mixed(nn.Module):
    """A linear along the sequence, of a transposed tensor, beside one along the features."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.along, self.across = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.along(x.transpose(1, 2)).transpose(1, 2) + self.across(x)


class AlongTime(nn.Module):
    """A convolution along the sequence, whose ends meet: no plan lowers it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="circular")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return found


class Selected(nn.Module):
    """Tokens weighted by a distribution over them, which is read twice; their mean is handed to each."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.score(x).softmax(1)
        pooled = (weights * self.value(x)).sum(1, keepdim=True)
        return x + pooled.expand_as(x) * weights


class Twice(nn.Module):
    """A linear that runs twice."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner, self.between = nn.Linear(WIDTH, WIDTH), _activation(draw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.between(self.inner(x)))
        return found


class Scaled(nn.Module):
    """A product with a parameter, as layer scale has it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Excited(nn.Module):
    """Channels weighted by what a small network says of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x.mean((2, 3)))[:, :, None, None]


def _perceptron(draw: random.Random) -> nn.Module:
    wide = draw.choice((WIDTH, 2 * WIDTH))
    parts = [nn.Linear(WIDTH, wide, bias=draw.random() < 0.8), _activation(draw), nn.Linear(wide, WIDTH)]
    if draw.random() < 0.5:
        parts.insert(2, nn.Dropout(0.1))
    if draw.random() < 0.5:
        parts.insert(0, nn.LayerNorm(WIDTH))
    return nn.Sequential(*parts)


TOKEN_BLOCKS: tuple[Build, ...] = (
    _perceptron,
    lambda draw: Residual(_perceptron(draw), draw.random() < 0.3),
    lambda draw: Residual(nn.Sequential(nn.LayerNorm(WIDTH), Attention(draw)), False),
    Attention,
    Branches,
    Pieces,
    Twice,
    Mixed,
    AlongTime,
    Selected,
    lambda draw: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    lambda draw: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled((WIDTH,)), _activation(draw)),
    lambda draw: Residual(nn.Sequential(nn.RMSNorm(WIDTH), Branches(draw)), False),
)


def _convolution(draw: random.Random, out: int = WIDTH) -> nn.Module:
    groups, kernel = draw.choice((1, 1, 4, WIDTH)), draw.choice((1, 3))
    return nn.Conv2d(WIDTH, out, kernel, padding=kernel // 2, groups=groups, bias=draw.random() < 0.5)


def _normed(draw: random.Random) -> nn.Module:
    norm = draw.choice((lambda: nn.BatchNorm2d(WIDTH), lambda: nn.GroupNorm(4, WIDTH), nn.Identity))
    return nn.Sequential(_convolution(draw), norm(), _activation(draw))


IMAGE_BLOCKS: tuple[Build, ...] = (
    _normed,
    _normed,
    lambda draw: Residual(nn.Sequential(_normed(draw), _convolution(draw)), draw.random() < 0.3),
    lambda draw: nn.Sequential(_convolution(draw), nn.MaxPool2d(2)),
    lambda draw: nn.Sequential(_convolution(draw), nn.AvgPool2d(2)),
    lambda draw: Excited(WIDTH),
    lambda draw: nn.Sequential(_convolution(draw), Scaled((WIDTH, 1, 1)), nn.Dropout(0.1)),
)


class Tokens(nn.Module):
    """Blocks over a sequence, of words or of vectors."""

    def __init__(self, draw: random.Random, words: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if words else None
        self.positions = nn.Embedding(TOKENS, WIDTH) if draw.random() < 0.5 else None
        self.first = nn.LayerNorm(WIDTH) if draw.random() < 0.5 else nn.Identity()
        self.blocks = nn.Sequential(*(draw.choice(TOKEN_BLOCKS)(draw) for _ in range(draw.randrange(1, 5))))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.pooled = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x if self.positions is None else x + self.positions.weight
        x = self.blocks(self.first(x))
        found: torch.Tensor = self.head(x.mean(1) if self.pooled else x[:, 0])
        return found


class Images(nn.Module):
    """Blocks over an image."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*(draw.choice(IMAGE_BLOCKS)(draw) for _ in range(draw.randrange(1, 4))))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return found


LOSSES: Mapping[str, Callable[[torch.Tensor, Batch], torch.Tensor]] = {
    "cross entropy": lambda output, batch: F.cross_entropy(output, batch.target),
    "soft cross entropy": lambda output, batch: F.cross_entropy(output, batch.target.softmax(1)),
    "binary": lambda output, batch: F.binary_cross_entropy_with_logits(output, batch.target.sigmoid()),
    "two terms": lambda output, batch: F.mse_loss(output, batch.target) + 0.1 * F.l1_loss(output, batch.target),
    "squared error": lambda output, batch: F.mse_loss(output, batch.target),
    "squared error in float32": lambda output, batch: F.mse_loss(output.float(), batch.target),
    "smooth": lambda output, batch: F.smooth_l1_loss(output, batch.target),
}


def random_job(seed: int) -> Job:
    """A job whose model, loss and batch are drawn."""
    draw = random.Random(seed)
    kind = draw.choice(("words", "vectors", "images"))
    torch.manual_seed(seed)
    model = Images(draw) if kind == "images" else Tokens(draw, kind == "words")
    loss = draw.choice(list(LOSSES))

    def batch(step: int, size: int) -> Batch:
        numbers = torch.Generator().manual_seed(step)
        x = {
            "words": lambda: torch.randint(WORDS, (size, TOKENS), generator=numbers),
            "vectors": lambda: torch.randn(size, TOKENS, WIDTH, generator=numbers),
            "images": lambda: torch.randn(size, 3, 8, 8, generator=numbers),
        }[kind]()
        target = torch.randn(size, CLASSES, generator=numbers)
        return Batch((x,), target=target.argmax(1) if loss == "cross entropy" else target)

    size = draw.choice((32, 48, 64))
    return Job(f"{seed}: {kind}, {loss}", model, batch, LOSSES[loss], lambda p: torch.optim.SGD(p, 0.05), size, BASE.value)


@attrs.frozen
class Kept:
    """Bytes that one step keeps for backward under a plan: as the planner has it, and as autograd does."""

    plan: str
    predicted: int
    kept: int
    scales: int
    """Bytes of the scales of 8-bit copies that several operators read, which the planner counts with each."""

    @property
    def ratio(self) -> float:
        """Predicted over kept."""
        return self.predicted / self.kept


def kept_by_autograd(job: Job, variants: Mapping[OpId, Variant]) -> int:
    """Storages that autograd keeps at the end of a forward under autocast, without parameters, buffers and the batch."""
    model, batch = job.copy_model().train(), job.batch(0, job.batch_size)
    apply_(model, variants, base=BASE)
    lasting = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch.tensors)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor = tensor.detach()  # held, so that no address comes again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.compute_loss(batch, model)
    loss.backward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in lasting)


def plans(dag: PrecisionDag, ladder: tuple[Variant, ...], draw: random.Random) -> dict[str, dict[OpId, Variant]]:
    """Without a plan, uniform at every rung, and a mixture; calls of one module run alike."""
    units = list(dict.fromkeys(operator.variant_group for operator in dag.adjustable))
    chosen = {rung.label: dict.fromkeys(units, rung) for rung in ladder}
    chosen["a mixture"] = {unit: draw.choice(ladder) for unit in units}
    chosen["one lowered"] = dict.fromkeys(units, ladder[-1]) | {draw.choice(units): ladder[0]}
    return {name: {o.op_id: by_unit[o.variant_group] for o in dag.adjustable} for name, by_unit in chosen.items()}


def memory_of(seed: int) -> list[Kept]:
    """A random job under several plans."""
    job = random_job(seed)
    dag = trace(job)
    found = profile(job, dag, ProfileRequest(ladder=LADDER, with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE)))
    group = DeviceGroup("g", found.device.name, 1, Role.INFER, Precision.FLOAT32, LADDER)
    cluster, _ = under_base(Cluster("c", (group,)), dag)
    replayer = Replayer(Inputs(dag, cluster, {"g": attrs.evolve(found, steps=())}))
    return [
        Kept(name, replayer.memory("g", variants).saved_bytes, kept_by_autograd(job, variants), 4 * len(dag.adjustable))
        for name, variants in plans(dag, cluster.groups[0].ladder, random.Random(seed)).items()
    ]
