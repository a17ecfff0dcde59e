"""A zoo of tiny training jobs as people write them: each either runs right under a plan or is refused in one sentence.

``ZOO`` maps names to functions that make the job.  All of them are small (a step takes milliseconds), run on a CPU, and have fixed
seeds: making a job twice gives equal weights and equal batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_torch.job import Batch, Job

ZOO: dict[str, Callable[[], Job]] = {}
"""Jobs by name, in the order of this file."""

CLASSES, WIDTH, TOKENS, VOCABULARY, SIZE = 10, 16, 8, 50, 4
"""Classes of a target, features of a vector, tokens of a sequence, ids of a vocabulary, samples of a batch."""

Make = Callable[[], nn.Module]
Draw = Callable[[torch.Generator, int], Batch]
Loss = Callable[[Any, Batch], torch.Tensor]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def classified(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross-entropy of logits (N, classes, ...)."""
    return F.cross_entropy(output, batch.target)


def regressed(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean square of any output."""
    return output.square().mean()


def own_loss(output: Any, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself from the labels."""
    loss: torch.Tensor = output.loss
    return loss


def vectors(generator: torch.Generator, size: int) -> Batch:
    """Inputs (N, width) and classes (N,)."""
    return Batch((torch.randn(size, WIDTH, generator=generator),), {}, _classes(generator, size))


def images(generator: torch.Generator, size: int, *, pixels: int = 16, channels: int = 3) -> Batch:
    """Inputs (N, channels, pixels, pixels) and classes (N,)."""
    return Batch((torch.randn(size, channels, pixels, pixels, generator=generator),), {}, _classes(generator, size))


def sequences(generator: torch.Generator, size: int) -> Batch:
    """Inputs (N, tokens, width) and classes (N,)."""
    return Batch((torch.randn(size, TOKENS, WIDTH, generator=generator),), {}, _classes(generator, size))


def texts(generator: torch.Generator, size: int) -> Batch:
    """Token ids (N, tokens) and classes (N,)."""
    return Batch((torch.randint(VOCABULARY, (size, TOKENS), generator=generator),), {}, _classes(generator, size))


def labelled_texts(generator: torch.Generator, size: int) -> Batch:
    """Token ids and labels (N, tokens) by name, as transformers' language models take them."""
    tokens = torch.randint(2, VOCABULARY, (size, TOKENS), generator=generator)
    return Batch((), {"input_ids": tokens, "labels": tokens})


def labelled_images(generator: torch.Generator, size: int) -> Batch:
    """Pixels (N, 3, 32, 32) and classes by name."""
    return Batch((), {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator), "labels": _classes(generator, size)})


def _classes(generator: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(CLASSES, (size,), generator=generator)


def job(name: str, make: Make, draw: Draw = vectors, loss: Loss = classified) -> Job:
    """A job with weights of seed 0; batch ``step`` is drawn with seed ``step``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    return Job(name, model, lambda step, size: draw(torch.Generator().manual_seed(step), size), loss, _sgd, SIZE)


def entry(draw: Draw = vectors, loss: Loss = classified) -> Callable[[Make], Make]:
    """Puts a function that makes a model, or a model's class, into the zoo under its name."""

    def enter(make: Make) -> Make:
        name = make.__name__.strip("_")
        ZOO[name] = functools.partial(job, name, make, draw, loss)
        return make

    return enter


# Plain layers


@entry()
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


@entry(images)
def convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES))


@entry(images)
def grouped_and_dilated() -> nn.Module:
    body = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 16, 3, groups=2, dilation=2)]
    return nn.Sequential(*body, nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


@entry(images)
def channels_last() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, CLASSES)).to(
        memory_format=torch.channels_last
    )


@entry(images)
class UNet(nn.Module):
    """Down, up by a transposed convolution, a skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.middle(self.down(x).relu()).relu())
        return self.out(torch.cat([x, y], 1)).mean((2, 3))


@entry(sequences)
class Convolved1d(nn.Module):
    """Convolution along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(WIDTH, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x.transpose(1, 2)).relu().amax(-1))


@entry(sequences)
class Lstm(nn.Module):
    """Two LSTM layers, the last state classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(WIDTH, 12, 2, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@entry(sequences)
class Gru(nn.Module):
    """A bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(WIDTH, 12, bidirectional=True, batch_first=True), nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0].mean(1))


@entry(sequences)
class LstmCells(nn.Module):
    """A cell that Python unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(WIDTH, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        for part in x.unbind(1):
            state = self.cell(part, state)
        return self.out(state[0])


@entry(sequences)
class Encoder(nn.Module):
    """PyTorch's own transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x).mean(1))


@entry(texts)
def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES))


# Modules that share, repeat or compute their weights


@entry(texts, lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.args[0].flatten()))
class Tied(nn.Module):
    """The decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.decoder = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.body(self.embedding(tokens)).tanh())


@entry()
class Repeated(nn.Module):
    """One layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.layer(x).tanh()
        return self.out(x)


@entry()
def weight_norm() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 32))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
def spectral_norm() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 32))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 32)), nn.ReLU(), nn.Linear(32, CLASSES))


@entry()
class LowRank(nn.Module):
    """A frozen layer with a trained product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


@entry()
class Standardised(nn.Module):
    """A weight that the forward standardises before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.std(1, keepdim=True)
        return self.out(F.linear(x, weight).relu())


@entry()
class ForwardByName(nn.Module):
    """Calls a submodule's ``forward`` instead of the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.first.forward(x).relu())


# Functional calls and other products


@entry()
class Functional(nn.Module):
    """``F.linear`` on parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(24, WIDTH) / 4), nn.Parameter(torch.randn(CLASSES, 24) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.w1).relu(), self.w2)


@entry()
class MatrixProducts(nn.Module):
    """``@``, ``addmm`` and ``bmm`` with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(2, WIDTH, 8) / 4)
        self.bias, self.out = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x @ self.a, self.a)
        return self.out(torch.bmm(y.expand(2, *y.shape), self.b).transpose(0, 1).flatten(1))


@entry(sequences)
class Einsum(nn.Module):
    """Attention and a projection written as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Parameter(torch.randn(WIDTH, 2, 8) / 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.einsum("ntw,whd->nhtd", x, self.project)
        scores = torch.einsum("nhtd,nhsd->nhts", heads, heads).softmax(-1)
        return self.out(torch.einsum("nhts,nhsd->nthd", scores, heads).flatten(2).mean(1))


@entry(sequences)
class Bilinear(nn.Module):
    """``nn.Bilinear`` of two parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x[:, 0], x[:, 1])


@entry(sequences)
class MixtureOfExperts(nn.Module):
    """Every expert sees every token; the router's probabilities weigh them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1).unbind(-1)
        mixed = sum(p[..., None] * expert(x).relu() for p, expert in zip(share, self.experts, strict=True))
        return self.out(mixed.mean(1))


# Recomputation, own gradients, hooks


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant, self.stem, self.body, self.out = (
            use_reentrant,
            nn.Linear(WIDTH, WIDTH),
            _block(),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.body, self.stem(x), use_reentrant=self.use_reentrant))


@entry()
def checkpointed() -> nn.Module:
    return _Checkpointed(use_reentrant=False)


@entry()
def checkpointed_reentrant() -> nn.Module:
    return _Checkpointed(use_reentrant=True)


@entry()
class CheckpointedMethod(nn.Module):
    """Checkpoints a method with a functional call inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, CLASSES)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.part, x, use_reentrant=False))


class _CheckpointedClosure(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.out, self.use_reentrant = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), use_reentrant
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(lambda t: F.linear(t, self.weight).relu(), self.stem(x), use_reentrant=self.use_reentrant))


@entry()
def checkpointed_closure() -> nn.Module:
    return _CheckpointedClosure(use_reentrant=False)


@entry()
def checkpointed_closure_reentrant() -> nn.Module:
    return _CheckpointedClosure(use_reentrant=True)


class _Rerun(torch.autograd.Function):
    """Checkpointing of one's own make, as in guided-diffusion."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, length: int, *args: Any) -> Any:
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run_function(*[x.view_as(x) for x in inputs])
        return (None, None, *torch.autograd.grad(output, inputs + ctx.parameters, output_grads, allow_unused=True))


@entry()
class OwnCheckpoint(nn.Module):
    """Checkpoints a method with a functional call and a module inside by an autograd function of its own; only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(F.linear(x, self.weight).relu()).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if torch.compiler.is_exporting():
            return self.out(self.part(x))
        return self.out(_Rerun.apply(self.part, 1, x, self.weight, *self.inner.parameters()))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@entry()
class OwnFunction(nn.Module):
    """An autograd function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_Square.apply(self.first(x)))


@entry()
class OwnProduct(nn.Module):
    """An autograd function that multiplies with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_Straight.apply(x, self.weight).relu())


@entry()
def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


@entry()
def full_backward_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
    return model


@entry()
class GradientHook(nn.Module):
    """Scales a gradient by a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return self.out(y.relu())


# Operators beside the common ones


@entry(sequences)
class Fourier(nn.Module):
    """Mixes tokens by the real part of a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = _block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.out((x + torch.fft.fft2(x, norm="ortho").real).mean(1))


@entry(sequences)
class Spectral(nn.Module):
    """Multiplies in the frequency domain with a complex weight made of two real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.filter, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(TOKENS // 2 + 1, WIDTH, 2)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.first(x), dim=1) * torch.view_as_complex(self.filter)
        return self.out(torch.fft.irfft(frequencies, n=TOKENS, dim=1).mean(1))


@entry()
class ComplexWeight(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.phase, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.first(x) * self.phase).abs())


@entry(sequences)
class LinearAlgebra(nn.Module):
    """Decompositions that exist for float32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(TOKENS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        gram = y @ y.transpose(1, 2) + TOKENS * torch.eye(TOKENS)
        return self.out(torch.linalg.cholesky(gram).diagonal(dim1=1, dim2=2).log() + torch.linalg.solve(gram, y).sum(-1))


@entry(sequences)
class Sorting(nn.Module):
    """Sorts, picks the largest, gathers, sums along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        top, at = y.topk(3, dim=1)
        return self.out(y.cumsum(1)[:, -1] + top.mean(1) + y.gather(1, at).sum(1) + y.sort(1).values[:, 0])


@entry(images)
class Deformed(nn.Module):
    """Resamples an image: grid_sample, interpolate, unfold."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.out = nn.Linear(3 * 16 * 16, 6), nn.Linear(27, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).tanh().view(-1, 2, 3), list(x.shape), align_corners=False)
        seen = F.interpolate(F.grid_sample(x, grid, align_corners=False), size=(8, 8), mode="bilinear", align_corners=False)
        return self.out(F.unfold(seen, 3).mean(-1))


@entry()
class Branching(nn.Module):
    """Decides by a tensor's value: cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.out(y if y.mean() > 0 else -y)


@entry()
def auxiliary_head_unused() -> nn.Module:
    model = mlp()
    model.auxiliary = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return model


@entry()
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, CLASSES))


# Outputs and losses


@attrs.frozen
class Prediction:
    """An own class of outputs."""

    logits: torch.Tensor
    features: torch.Tensor


@entry(loss=lambda output, batch: classified(output.logits, batch) + 0.01 * regressed(output.features, batch))
class OwnOutput(nn.Module):
    """Returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Prediction:
        y = self.first(x).relu()
        return Prediction(self.out(y), y)


@dataclasses.dataclass
class Scored:
    """A dataclass of outputs."""

    logits: torch.Tensor
    parts: dict[str, torch.Tensor]


@entry(loss=lambda output, batch: classified(output.logits, batch) + 0.01 * regressed(output.parts["features"], batch))
class DataclassOutput(nn.Module):
    """Returns a dataclass with a dictionary in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Scored:
        y = self.first(x).relu()
        return Scored(self.out(y), {"features": y})


@entry(loss=lambda output, batch: sum(output.values()))
class LossesInDict(nn.Module):
    """Returns a dictionary of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.first(x).relu())
        return {"size": y.square().mean(), "margin": F.relu(1 - y).mean(), "entropy": -y.log_softmax(-1).mean()}


@entry(lambda generator, size: Batch((torch.randn(size, 2, WIDTH, generator=generator),)), lambda output, batch: contrasted(output))
def contrastive() -> nn.Module:
    return _block()


def contrasted(output: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of similarities of pairs (N, 2, width): each should be nearest to its partner."""
    left, right = F.normalize(output, dim=-1).unbind(1)
    return F.cross_entropy(left @ right.t() / 0.1, torch.arange(len(left)))


@entry(loss=lambda output, batch: F.nll_loss(output.log_softmax(-1), batch.target, reduction="sum") / len(output))
def summed_loss() -> nn.Module:
    return mlp()


# transformers' families


def _transformers(name: str, config: str, draw: Draw = labelled_texts, loss: Loss = own_loss, **sizes: Any) -> None:
    """A tiny model of transformers with random weights: class ``name`` with ``config`` of ``sizes``."""

    def make() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        return model.train()

    ZOO[name] = functools.partial(job, name, make, draw, loss)


_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_labels": CLASSES,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}


def _heard(generator: torch.Generator, size: int) -> Batch:
    labels = torch.randint(3, VOCABULARY, (size, TOKENS), generator=generator)
    return Batch((), {"input_features": torch.randn(size, 8, 32, generator=generator), "labels": labels})


def _pairs(generator: torch.Generator, size: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (size, TOKENS), generator=generator)
    pixels = torch.randn(size, 3, 32, 32, generator=generator)
    return Batch((), {"input_ids": tokens, "pixel_values": pixels, "attention_mask": torch.ones_like(tokens), "return_loss": True})


def _segments(generator: torch.Generator, size: int) -> Batch:
    labels = torch.randint(CLASSES, (size, 32, 32), generator=generator)
    return Batch((), {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator), "labels": labels})


_transformers("BertForMaskedLM", "BertConfig", **_ENCODER)
_transformers("DebertaV2ForMaskedLM", "DebertaV2Config", **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"])
_transformers(
    "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
_transformers("LlamaForCausalLM", "LlamaConfig", **_DECODER)
_transformers("Qwen2ForCausalLM", "Qwen2Config", **_DECODER)
_transformers("MixtralForCausalLM", "MixtralConfig", **_DECODER, **_EXPERTS)
_transformers(
    "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_DECODER, **_EXPERTS, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
_transformers(
    "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
    use_cache=False, decoder_start_token_id=0,
)  # fmt: skip
_transformers(
    "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False,
    bos_token_id=0, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
_transformers("ViTForImageClassification", "ViTConfig", labelled_images, **_VISION)
_transformers(
    "SwinForImageClassification",
    "SwinConfig",
    labelled_images,
    image_size=32,
    patch_size=4,
    embed_dim=8,
    depths=[1, 1],
    num_heads=[2, 2],
    window_size=4,
    num_labels=CLASSES,
)
_transformers(
    "ConvNextForImageClassification", "ConvNextConfig", labelled_images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
    num_labels=CLASSES,
)  # fmt: skip
_transformers(
    "SegformerForSemanticSegmentation", "SegformerConfig", _segments, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
    hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    decoder_hidden_size=8, num_labels=CLASSES,
)  # fmt: skip
_transformers(
    "WhisperForConditionalGeneration", "WhisperConfig", _heard, vocab_size=VOCABULARY, num_mel_bins=8, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16,
    max_source_positions=16, max_target_positions=16, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
_transformers(
    "CLIPModel", "CLIPConfig", _pairs, text_config={**_ENCODER, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
    vision_config={**_VISION, "projection_dim": 8}, projection_dim=8,
)  # fmt: skip
