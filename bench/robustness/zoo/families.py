"""The families of transformers, tiny and with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from qsync_torch.job import Batch
from robustness.zoo.entries import CLASSES, TOKENS, VOCABULARY, ZOO, Draw, Loss, job, labelled_images, labelled_texts, own_loss


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
