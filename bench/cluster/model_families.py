"""Model families of transformers from tiny configurations, and what is to be said of each that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from qsync_torch import capture
from qsync_torch.job import Job
from robustness.zoo import ZOO

_SAMPLES, _LENGTH, _WORDS = 2, 16, 99
_VALUES = "depend on tensor values"
"""What a sentence says of a forward that reads values."""


@attrs.frozen
class Family:
    """How to make a model's job, and the truth about it.

    Attributes:
        make: makes its job; one of these may be refused there.
        refused: what a sentence that refuses it has to name, the code that decides; empty for one that is to be traced.
        advice: what else it has to say.
    """

    make: Callable[[], Job]
    refused: str = ""
    advice: str = ""


def job_of(model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> Job:
    """A job of one batch; without a loss its forward computes that."""
    job: Job = capture(model.train(), torch.optim.SGD(model.parameters(), 0.1), loss, [batch])
    return job


def _ids(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(5, 90, (_SAMPLES, length))


def _images(size: int) -> torch.Tensor:
    return torch.randn(_SAMPLES, 3, size, size)


def _classes(count: int = 3) -> torch.Tensor:
    return torch.randint(count, (_SAMPLES,))


_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_BERT = {**_LAYERS, "max_position_embeddings": 64}
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_LED = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
_MARKS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_BART = {**_LED, **_MARKS, "max_position_embeddings": 64}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "pad_token_id": 0}
_SPEECH = {
    **_LAYERS, "vocab_size": 20, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3, "classifier_proj_size": 16,
    "pad_token_id": 0,
}  # fmt: skip


def _given(
    model: str, config: str, batch: Callable[[], dict[str, Any]], refused: str = "", advice: str = "", **settings: Any
) -> Family:
    """A model with a batch of its own."""
    return Family(lambda: job_of(getattr(hf, model)(getattr(hf, config)(**settings)), batch()), refused, advice)


def _words(model: str, config: str, refused: str = "", advice: str = "", **settings: Any) -> Family:
    """A language model."""

    def batch() -> dict[str, Any]:
        return {"input_ids": (ids := _ids()), "labels": ids.clone()}

    return _given(model, config, batch, refused, advice, vocab_size=_WORDS, **settings)


def _sequences(model: str, config: str, refused: str = "", advice: str = "", masks: bool = False, **settings: Any) -> Family:
    """An encoder and a decoder."""

    def batch() -> dict[str, Any]:
        names = ("attention_mask", "decoder_attention_mask") if masks else ()
        return {
            **{name: _ids() for name in ("input_ids", "decoder_input_ids", "labels")},
            **{name: torch.ones(_SAMPLES, _LENGTH) for name in names},
        }

    return _given(model, config, batch, refused, advice, vocab_size=_WORDS, **settings)


def _pictures(model: str, config: str, size: int = 32, **settings: Any) -> Family:
    """A classifier of images."""
    return _given(model, config, lambda: {"pixel_values": _images(size), "labels": _classes()}, num_labels=3, **settings)


def _sound() -> torch.Tensor:
    return torch.randn(_SAMPLES, 800)


def _wav2vec2_by_ctc() -> Job:
    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        log_probs = output.logits.log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(labels),), len(log_probs))
        return F.ctc_loss(log_probs, labels, lengths, torch.full((len(labels),), labels.shape[1]))

    batch = {"input_values": _sound(), "labels": torch.randint(1, 20, (_SAMPLES, 5))}
    return job_of(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_SPEECH)), batch, loss)


def _boxes() -> list[dict[str, torch.Tensor]]:
    return [{"class_labels": torch.randint(3, (2,)), "boxes": torch.rand(2, 4)} for _ in range(_SAMPLES)]


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"], layer_type="basic")
    model: nn.Module = hf.DetrForObjectDetection(
        hf.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, num_queries=5, num_labels=4, **_LED
        )
    )
    return model


def _detr_matched() -> Job:
    def loss(output: Any, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        from scipy.optimize import linear_sum_assignment

        total = torch.zeros(())
        for logits, found, wanted, target in zip(output.logits, output.pred_boxes, classes, boxes, strict=True):
            cost = torch.cdist(found.detach(), target, p=1) - logits.detach().softmax(-1)[:, wanted]
            i, j = map(torch.as_tensor, linear_sum_assignment(cost.numpy()))
            of_queries = torch.full((len(logits),), 4).scatter(0, i, wanted[j])
            total = total + F.cross_entropy(logits, of_queries) + F.l1_loss(found[i], target[j])
        return total / len(classes)

    batch = {"pixel_values": _images(64), "classes": torch.randint(4, (_SAMPLES, 2)), "boxes": torch.rand(_SAMPLES, 2, 4)}
    return job_of(_detr(), batch, loss)


def _mask2former() -> nn.Module:
    backbone = hf.SwinConfig(
        image_size=64,
        embed_dim=16,
        depths=[1] * 4,
        num_heads=[1] * 4,
        window_size=2,
        out_features=[f"stage{n}" for n in range(1, 5)],
    )
    config = hf.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=5, num_labels=4,
        train_num_points=32,
    )  # fmt: skip
    model: nn.Module = hf.Mask2FormerForUniversalSegmentation(config)
    return model


def _mask2former_own() -> Job:
    masks = [(torch.rand(2, 64, 64) > 0.5).float() for _ in range(_SAMPLES)]
    classes = [torch.randint(4, (2,)) for _ in range(_SAMPLES)]
    return job_of(_mask2former(), {"pixel_values": _images(64), "mask_labels": masks, "class_labels": classes})


def _mask2former_outside() -> Job:
    def loss(output: Any, classes: torch.Tensor) -> torch.Tensor:
        masks: torch.Tensor = output.masks_queries_logits
        return F.cross_entropy(output.class_queries_logits[:, 0], classes) + masks.sigmoid().mean()

    return job_of(_mask2former(), {"pixel_values": _images(64), "classes": _classes(4)}, loss)


def _decisions() -> Job:
    model = hf.DecisionTransformerModel(
        hf.DecisionTransformerConfig(state_dim=4, act_dim=2, hidden_size=32, max_ep_len=64, n_layer=1, n_head=2)
    )
    sizes = {"states": 4, "actions": 2, "rewards": 1, "returns_to_go": 1, "target": 2}
    batch = {name: torch.randn(_SAMPLES, 8, size) for name, size in sizes.items()}
    batch |= {"timesteps": torch.arange(8).expand(_SAMPLES, 8).contiguous(), "attention_mask": torch.ones(_SAMPLES, 8)}
    return job_of(model, batch, lambda output, target: (output.action_preds - target).square().mean())


_SWITCH = {
    **_T5, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "expert_capacity": 16,
}  # fmt: skip
_SWITCH_NAMES = ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig")
_VIT = {**_LAYERS, "image_size": 32, "patch_size": 8}
_AS_LOSS = "passed as loss_fn"

_OF_THE_ZOO = {
    "BERT": "BertForMaskedLM", "DeBERTa-v2": "DebertaV2ForMaskedLM", "GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM",
    "Mixtral": "MixtralForCausalLM", "Qwen2": "Qwen2ForCausalLM", "Qwen2-MoE": "Qwen2MoeForCausalLM", "Mamba": "MambaForCausalLM",
    "T5": "T5ForConditionalGeneration", "ViT": "ViTForImageClassification", "Swin": "SwinForImageClassification",
    "ConvNeXt": "ConvNextForImageClassification", "SegFormer": "SegformerForSemanticSegmentation", "CLIP": "CLIPModel",
    "Whisper": "WhisperForConditionalGeneration",
}  # fmt: skip

FAMILIES = {
    # Those of which the sentence was wrong, or that were refused without need.
    "Wav2Vec2-CTC": _given(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        lambda: {"input_values": _sound(), "labels": torch.randint(1, 20, (_SAMPLES, 5))},
        "if labels is not None and labels.max() >= self.config.vocab_size:",
        _AS_LOSS,
        **_SPEECH,
    ),
    "Wav2Vec2-CTC with a loss outside": Family(_wav2vec2_by_ctc),
    "DETR": Family(
        lambda: job_of(_detr(), {"pixel_values": _images(64), "labels": _boxes()}),
        "a dictionary for each sample (labels)",
        "pad the",
    ),
    "DETR with a loss outside": Family(_detr_matched),
    "Mask2Former": Family(_mask2former_own, "linear_sum_assignment(cost_matrix.cpu())", _AS_LOSS),
    "Mask2Former with a loss outside": Family(_mask2former_outside),
    "Longformer": _words(
        "LongformerForMaskedLM", "LongformerConfig", "if is_global_attn:", _VALUES, attention_window=4, pad_token_id=1, **_BERT
    ),
    "Funnel": _words(
        "FunnelForMaskedLM",
        "FunnelConfig",
        "self.relative_positional_attention(",
        "a shape is made from a number that is read from a tensor",
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "SwitchTransformers": _sequences(
        *_SWITCH_NAMES, "causal_mask = attention_mask[:, None, None, :]", "torch.compiler.is_compiling() is true", **_SWITCH
    ),
    "SwitchTransformers with masks": _sequences(*_SWITCH_NAMES, "for expert_idx in expert_hit:", _VALUES, masks=True, **_SWITCH),
    "Reformer": _words(
        "ReformerForMaskedLM",
        "ReformerConfig",
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=64,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        is_decoder=False,
        hash_seed=0,
        max_position_embeddings=16,
    ),
    # Others.
    "BERT for questions": _given(
        "BertForQuestionAnswering",
        "BertConfig",
        lambda: {"input_ids": _ids(), "start_positions": _classes(_LENGTH), "end_positions": _classes(_LENGTH)},
        vocab_size=_WORDS,
        **_BERT,
    ),
    "RoBERTa": _words("RobertaForMaskedLM", "RobertaConfig", **_BERT),
    "ALBERT": _words("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **_BERT),
    "ELECTRA": _words("ElectraForMaskedLM", "ElectraConfig", embedding_size=16, **_BERT),
    "DistilBERT": _words("DistilBertForMaskedLM", "DistilBertConfig", dim=32, n_layers=1, n_heads=2, hidden_dim=64),
    "MPNet": _words("MPNetForMaskedLM", "MPNetConfig", **_BERT),
    "BigBird": _words(
        "BigBirdForMaskedLM", "BigBirdConfig", attention_type="block_sparse", block_size=2, num_random_blocks=1, **_BERT
    ),
    "XLNet": _words("XLNetLMHeadModel", "XLNetConfig", d_model=32, n_layer=1, n_head=2, d_inner=64),
    "FNet": _words("FNetForMaskedLM", "FNetConfig", hidden_size=32, num_hidden_layers=1, intermediate_size=64),
    "ModernBERT": _words("ModernBertForMaskedLM", "ModernBertConfig", pad_token_id=0, **_BERT),
    "GPT-Neo": _words(
        "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    ),
    "GPT-NeoX": _words("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT),
    "OPT": _words(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
    ),
    "BLOOM": _words("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=1, n_head=2),
    "Falcon": _words("FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
    "Mistral": _words("MistralForCausalLM", "MistralConfig", **_LLAMA),
    "Gemma 2": _words("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, pad_token_id=0, **_LLAMA),
    "Phi-3": _words("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, **_LLAMA),
    "RWKV": _words("RwkvForCausalLM", "RwkvConfig", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    "BART": _sequences("BartForConditionalGeneration", "BartConfig", **_BART),
    "Pegasus": _sequences("PegasusForConditionalGeneration", "PegasusConfig", **_BART),
    "M2M100": _sequences("M2M100ForConditionalGeneration", "M2M100Config", **_BART),
    "LED": _sequences(
        "LEDForConditionalGeneration",
        "LEDConfig",
        "if is_global_attn:",
        _VALUES,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        **_LED,
        **_MARKS,
    ),
    "ProphetNet": _sequences(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        hidden_size=32,
        encoder_ffn_dim=32,
        num_encoder_layers=1,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_decoder_layers=1,
        num_decoder_attention_heads=2,
        max_position_embeddings=64,
    ),
    "DeiT": _pictures("DeiTForImageClassification", "DeiTConfig", **_VIT),
    "BEiT": _pictures("BeitForImageClassification", "BeitConfig", **_VIT),
    "ResNet": _pictures("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "MobileViT": _pictures(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        hidden_sizes=[16] * 3,
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 16],
        num_attention_heads=2,
        image_size=32,
    ),
    "EfficientNet": _pictures(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
    ),
    "PoolFormer": _pictures("PoolFormerForImageClassification", "PoolFormerConfig", 64, hidden_sizes=[8] * 4, depths=[1] * 4),
    "ViT-MAE": _given(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        lambda: {"pixel_values": _images(16)},
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        image_size=16,
        patch_size=4,
        **_LAYERS,
    ),
    "YOLOS": _given(
        "YolosForObjectDetection",
        "YolosConfig",
        lambda: {"pixel_values": _images(32), "labels": _boxes()},
        "a dictionary for each sample (labels)",
        "pad the",
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=5,
        num_labels=3,
        **_LAYERS,
    ),
    "SigLIP": _given(
        "SiglipModel",
        "SiglipConfig",
        lambda: {"input_ids": _ids(), "pixel_values": _images(16), "return_loss": True},
        text_config={**_LAYERS, "vocab_size": _WORDS, "max_position_embeddings": _LENGTH},
        vision_config={**_LAYERS, "image_size": 16, "patch_size": 8},
    ),
    "ViLT": _given(
        "ViltForQuestionAnswering",
        "ViltConfig",
        lambda: {
            "input_ids": _ids(),
            "pixel_values": _images(32),
            "pixel_mask": torch.ones(_SAMPLES, 32, 32).long(),
            "labels": torch.rand(_SAMPLES, 3),
        },
        "nn.functional.interpolate(",
        _VALUES,
        vocab_size=_WORDS,
        max_position_embeddings=_LENGTH,
        num_labels=3,
        **_VIT,
    ),
    "HuBERT": _given(
        "HubertForSequenceClassification", "HubertConfig", lambda: {"input_values": _sound(), "labels": _classes()}, **_SPEECH
    ),
    "WavLM": _given(
        "WavLMForSequenceClassification", "WavLMConfig", lambda: {"input_values": _sound(), "labels": _classes()}, **_SPEECH
    ),
    "SEW": _given(
        "SEWForSequenceClassification",
        "SEWConfig",
        lambda: {"input_values": _sound(), "labels": _classes()},
        squeeze_factor=1,
        **_SPEECH,
    ),
    "LayoutLM": _given(
        "LayoutLMForTokenClassification",
        "LayoutLMConfig",
        lambda: {
            "input_ids": _ids(),
            "bbox": torch.randint(1, 9, (_SAMPLES, _LENGTH, 1)).expand(_SAMPLES, _LENGTH, 4).contiguous(),
            "labels": torch.randint(3, (_SAMPLES, _LENGTH)),
        },
        vocab_size=_WORDS,
        max_2d_position_embeddings=64,
        num_labels=3,
        **_BERT,
    ),
    "TAPAS": _given(
        "TapasForMaskedLM",
        "TapasConfig",
        lambda: {"input_ids": _ids(), "token_type_ids": torch.zeros(_SAMPLES, _LENGTH, 7).long(), "labels": _ids()},
        "new_shape = [int(x) for x in new_tensor.tolist()]",
        _VALUES,
        vocab_size=_WORDS,
        type_vocab_sizes=[3, 8, 8, 2, 8, 8, 8],
        num_aggregation_labels=0,
        **_BERT,
    ),
    "PatchTST": _given(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        lambda: {"past_values": torch.randn(_SAMPLES, 16, 2), "future_values": torch.randn(_SAMPLES, 4, 2)},
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        d_model=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
    ),
    "Time series": _given(
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        lambda: {
            "past_values": torch.randn(_SAMPLES, 10),
            "past_time_features": torch.randn(_SAMPLES, 10, 1),
            "past_observed_mask": torch.ones(_SAMPLES, 10),
            "future_values": torch.randn(_SAMPLES, 4),
            "future_time_features": torch.randn(_SAMPLES, 4, 1),
        },
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=1,
        **_LED,
    ),
    "Decision Transformer": Family(_decisions),
    **{name: Family(ZOO[of_the_zoo]) for name, of_the_zoo in _OF_THE_ZOO.items()},
}
"""By name; what a refusal must name is a line of the model's own code."""
