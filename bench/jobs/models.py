"""The models of jobs, in three sizes each: as they are, with half of their layers, and stand-ins for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

SIZES = ("full", "halved", "small")


@attrs.frozen
class Size:
    """A model's configuration, and its batch.

    Attributes:
        arguments: of the configuration.
        batch: samples of one rank.
        length: tokens, or the image's size.
        vocabulary: of tokens; 0 for images.
    """

    arguments: Mapping[str, Any]
    batch: int
    length: int
    vocabulary: int = 0

    def but(self, batch: int, length: int, **arguments: Any) -> Size:
        """The same with another batch, and other arguments."""
        return attrs.evolve(self, batch=batch, length=length, arguments={**self.arguments, **arguments})


@attrs.frozen
class Kind:
    """A model by the names of its configuration and its class in transformers.

    Attributes:
        full: as it is; small: a stand-in for CPUs.
        halved: half of the layers: equal layers are measured once, and the whole steps that a profile takes are half as long.  The
            batch fills a GPU: a small one's eager step waits for the CPU, whose own speed varies by more than 5%.
    """

    config: str
    model: str
    full: Size
    halved: Size
    small: Size


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 384}
_GPT2 = Size({"n_embd": 1024, "n_layer": 24, "n_head": 16, "use_cache": False}, 8, 512, 50257)
_LLAMA = Size(
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
     "vocab_size": 32000, "tie_word_embeddings": True, "use_cache": False}, 4, 2048, 32000,
)  # fmt: skip
_BERT = Size(_LARGE, 16, 512, 30522)
_VIT = Size({**_LARGE, "num_labels": 1000}, 64, 224)
_PICTURES = Size({"num_labels": 1000}, 64, 224)
KINDS = {
    "resnet50": Kind(
        "ResNetConfig", "ResNetForImageClassification", _PICTURES, _PICTURES.but(256, 224),
        Size({"num_labels": 10, "embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]}, 8, 64),
    ),
    "gpt2-medium": Kind(
        "GPT2Config", "GPT2LMHeadModel", _GPT2, _GPT2.but(24, 512, n_layer=12),
        Size({"n_embd": 96, "n_layer": 2, "n_head": 2, "vocab_size": 256, "use_cache": False}, 8, 64, 256),
    ),
    "bert-large": Kind(
        "BertConfig", "BertForMaskedLM", _BERT, _BERT.but(48, 384, num_hidden_layers=12),
        Size({**_SMALL, "vocab_size": 256}, 8, 64, 256),
    ),
    "llama-1b": Kind(
        "LlamaConfig", "LlamaForCausalLM", _LLAMA, _LLAMA.but(4, 2048, num_hidden_layers=8),
        Size({**_SMALL, "intermediate_size": 256, "num_key_value_heads": 2, "vocab_size": 256, "use_cache": False}, 8, 64, 256),
    ),
    "vit-large": Kind(
        "ViTConfig", "ViTForImageClassification", _VIT, _VIT.but(96, 224, num_hidden_layers=12),
        Size({**_SMALL, "num_labels": 10, "image_size": 64, "patch_size": 8}, 8, 64),
    ),
    "convnext": Kind(
        "ConvNextConfig", "ConvNextForImageClassification", _PICTURES, _PICTURES.but(192, 224),
        Size({"num_labels": 10, "hidden_sizes": [24, 48, 64, 96], "depths": [1, 1, 1, 1]}, 8, 64),
    ),
}  # fmt: skip


class Pictures(nn.Module):
    """A classifier of transformers that gives its scores alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x).logits
        return scores


@attrs.frozen(eq=False)
class Task:
    """What is trained.

    Attributes:
        model: in its first state, on a CPU.
        loss_fn: None where the model computes its loss.
        data: samples.
        call: the loss of a model and a batch.
        batch: samples of a rank.
    """

    model: nn.Module
    loss_fn: Any
    data: list[Any]
    call: Callable[[nn.Module, Any], torch.Tensor]
    batch: int

    @classmethod
    def make(cls, name: str, size: str) -> Task:
        """A model with random weights, and random data.

        Args:
            name: of :data:`KINDS`; size: of :data:`SIZES`.
        """
        import transformers

        torch.manual_seed(0)
        kind = KINDS[name]
        wanted: Size = getattr(kind, size)
        config = getattr(transformers, kind.config)(**wanted.arguments)
        model: nn.Module = getattr(transformers, kind.model)(config)
        batch, length = wanted.batch, wanted.length
        if wanted.vocabulary:
            tokens = torch.randint(wanted.vocabulary, (4 * batch, length))
            return cls(model, None, [{"input_ids": row, "labels": row} for row in tokens], lambda m, b: m(**b).loss, batch)
        data = [(torch.randn(3, length, length), torch.tensor(i % config.num_labels)) for i in range(4 * batch)]
        return cls(Pictures(model), nn.CrossEntropyLoss(), data, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch)
