"""What ``qsync demo`` trains: two models on real data that needs no download, and how well they do on held-out data.

``resnet``: a BatchNorm ResNet on scikit-learn's handwritten digits.  ``bert``: a small BERT that fills masked bytes in the source
text of Python's standard library.
"""

from __future__ import annotations

import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qsync_torch.models.resnet import BasicBlock

WORKLOADS = ("resnet", "bert")
IGNORED = -100
"""The target of a byte that was not masked; PyTorch's cross entropy leaves it out."""


@attrs.frozen
class Evaluation:
    """Mean loss and accuracy (0..1) on held-out data."""

    loss: float
    accuracy: float


@attrs.frozen(eq=False)
class Workload:
    """A model and its data.

    Attributes:
        data: what it learns from, in words.
        model: with its initial weights; the same in every call.
        training, held_out: inputs and targets.
        optimizer: makes one from parameters.
        batch_size: samples a step and rank.
    """

    data: str
    model: nn.Module
    training: TensorDataset
    held_out: TensorDataset
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int = 32

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: float = 1.0) -> Evaluation:
        """Loss and accuracy of a model in evaluation mode on that share (0..1] of held-out data; its mode is restored."""
        was_training = model.training
        inputs, targets = self.held_out[: round(share * len(self.held_out))]
        logits = model.eval()(inputs)
        model.train(was_training)
        counted = targets != IGNORED
        return Evaluation(float(loss(logits, targets)), float((logits.argmax(-1) == targets)[counted].float().mean()))


def load_workload(name: str, *, tiny: bool = False) -> Workload:
    """The workload ``resnet`` or ``bert`` at the size of the demo, or ``tiny`` for tests: the same code in milliseconds a step."""
    torch.manual_seed(0)
    return digits_resnet(tiny) if name == "resnet" else masked_sources_bert(tiny)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (..., C) and targets (...)."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


ENLARGED = 2
"""Images are enlarged by this: on 16×16 pixels bfloat16 convolutions are fast on a CPU in backward too, on 8×8 they are not."""
HELD_OUT_IMAGES = 5
"""Every fifth image is held out."""


def digits_model(wide: int, narrow: int, blocks: int) -> nn.Module:
    """A ResNet for small grey images, (N, 1, H, W) to logits (N, 10): some wide blocks, and two narrow ones."""
    narrowing = nn.Sequential(nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow))
    body = [BasicBlock(wide, wide, 1, None) for _ in range(blocks)]
    body += [BasicBlock(wide, narrow, 1, narrowing), BasicBlock(narrow, narrow, 1, None)]
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, wide, 3, 1, 1, bias=False),
        "bn1": nn.BatchNorm2d(wide),
        "relu": nn.ReLU(),
        "blocks": nn.Sequential(*body),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(narrow, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def digits_resnet(tiny: bool = False) -> Workload:
    """A BatchNorm ResNet on scikit-learn's handwritten digits: 1,797 real images, 8×8 enlarged to 16×16."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = nn.functional.interpolate(x, scale_factor=ENLARGED, mode="bilinear")
    x, y = (x - x.mean()) / x.std(), torch.tensor(labels, dtype=torch.int64)
    held_out = torch.arange(len(x)) % HELD_OUT_IMAGES == 0
    # Convolutions so wide take nearly all of the step on a CPU core, as they do on a GPU for real images.
    model = digits_model(*((8, 4, 1) if tiny else (128, 64, 3)))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
    return Workload(
        data="scikit-learn's handwritten digits",
        model=model,
        training=TensorDataset(x[~held_out], y[~held_out]),
        held_out=TensorDataset(x[held_out], y[held_out]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4, fused=True),
    )


BYTES = 256
MASK = BYTES
VOCABULARY = BYTES + 8
"""Bytes, the mask, and padding to a multiple of 8 (tensor cores and int8 kernels want aligned sizes)."""
MASKED_SHARE = 0.15
TEXT_BYTES = 1_000_000
HELD_OUT_WINDOWS = 256


class MaskedBytes(nn.Module):
    """BERT that gives logits alone: (N, S) token numbers to (N, S, VOCABULARY)."""

    def __init__(self, length: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.bert = BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * hidden,
                max_position_embeddings=length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",  # fused attention's bfloat16 backward is several times slower than float32's on CPUs
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        # Said, because transformers adds a mask of its own where it is traced, and none where it runs.
        mask = torch.zeros(len(tokens), 1, tokens.shape[1], tokens.shape[1])
        logits: Tensor = self.bert(input_ids=tokens, attention_mask=mask).logits
        return logits


def masked(tokens: Tensor, seed: int) -> TensorDataset:
    """BERT's corruption of tokens (N, S): of 15%, 80% become the mask, 10% a random byte, 10% stay; targets are the originals."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(tokens.shape, generator=generator)
    # The mean over no tokens is NaN: a short sample by itself, as in a small batch, has one masked token at least.
    without = (draw >= MASKED_SHARE).all(1)
    draw[without, draw[without].argmin(1)] = 0.0
    corrupted = tokens.clone()
    corrupted[draw < 0.8 * MASKED_SHARE] = MASK
    swapped = (draw >= 0.8 * MASKED_SHARE) & (draw < 0.9 * MASKED_SHARE)
    corrupted[swapped] = torch.randint(BYTES, (int(swapped.sum()),), generator=generator)
    return TensorDataset(corrupted, torch.where(draw < MASKED_SHARE, tokens, IGNORED))


def masked_sources_bert(tiny: bool = False) -> Workload:
    """A small BERT on the standard library's source text; tokens are bytes, so no tokenizer has to be trained."""
    length = 16 if tiny else 32
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in files))[:TEXT_BYTES]
    windows = torch.frombuffer(text, dtype=torch.uint8)[: TEXT_BYTES // length * length].view(-1, length).long()
    held_out = torch.zeros(len(windows), dtype=torch.bool)
    held_out[:: len(windows) // HELD_OUT_WINDOWS] = True
    return Workload(
        data="the source text of Python's standard library",
        model=MaskedBytes(length, *((32, 1, 2) if tiny else (256, 3, 4))),
        training=masked(windows[~held_out], seed=1),
        held_out=masked(windows[held_out], seed=0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True),
        batch_size=4 if tiny else 32,
    )
