"""What prepare says of masks that attention reads from memory."""

import attrs
import pytest
import torch
import torch.nn.functional as F

from qsync_core.ir.profile import OpCost
from qsync_torch.job import Batch, Job
from qsync_torch.prepare import attention_masks
from qsync_torch.prepare.attention_masks import masks_told
from qsync_torch.tracing.aten_call import AtenCall
from qsync_torch.tracing.trace import trace

transformers = pytest.importorskip("transformers")
FREE = OpCost(
    forward_dispatch_ns=0, forward_compute_ns=0, backward_dispatch_ns=0, backward_compute_ns=0, saves_inputs=(), saves_output=False,
    saved_own_bytes=0, workspace_bytes=0, backend="aten", config="", spread=0.0,
)  # fmt: skip


def _causal(module, query, key, value, mask, scaling=None, **_):
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _dag(attention, encodes=False):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50}
    if encodes:
        kind, config = transformers.BertForMaskedLM, transformers.BertConfig(**sizes)
    else:
        kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes, num_key_value_heads=1, use_cache=False)
    if attention:
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("causal", _causal)
        config._attn_implementation = "causal"

    def batch(step, size):
        tokens = torch.randint(0, 50, (size, 24))
        return Batch((), {"input_ids": tokens, "labels": tokens} | ({"attention_mask": tokens > 5} if encodes == "padded" else {}))

    model = kind(config)
    return trace(Job("model", model, batch, lambda out, _: out.loss, lambda ps: torch.optim.SGD(ps, 0.1), 2, compiles=True))


def test_masks_in_memory_are_told_with_their_shapes_and_what_they_cost(monkeypatch):
    dag, timed = _dag(attention=False), []

    def measure(operator, variant, layouts, choice, stopwatch, effort, base):
        call = AtenCall.of(operator)
        query, key, value = inputs = call.make_inputs([torch.float32] * 3, "cpu")
        is_causal = call.kwargs.get("is_causal", False)
        mask = call.args[3] and torch.ones(call.args[3]["tensor"], dtype=torch.bool)
        expected = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=call.kwargs["scale"])
        assert torch.equal(call.bind(inputs)(), expected)
        timed.append(is_causal)
        return attrs.evolve(FREE, forward_compute_ns=1000 if mask is not None else 300 if is_causal else 500, backward_compute_ns=7)

    monkeypatch.setattr(attention_masks, "measure_operator", measure)
    told = masks_told(dag, torch.device("cpu"), step_ns=30_000)
    assert timed == [False, False, True]  # equal operators are measured once
    assert "(3 of 2 × 1 × 24 × 24)" in told
    assert "3.0 µs of a step of 30.0 µs" in told
    assert "without a mask takes 1.5 µs, and causal attention 0.9 µs" in told
    assert masks_told(dag, torch.device("cpu"), step_ns=200_000) == ""  # less than 2% of it


def test_causal_attention_has_none():
    assert masks_told(_dag(attention=True), torch.device("cpu"), step_ns=1) == ""


@pytest.mark.parametrize("encodes", [True, "padded"])
def test_the_mask_of_an_encoder_that_was_given_none_is_expanded_and_told_with_its_reason(monkeypatch, encodes):
    timed = []

    def measure(operator, variant, layouts, choice, stopwatch, effort, base):
        call = AtenCall.of(operator)
        _, _, _, mask, dropout = call.bind(call.make_inputs([torch.float32] * 3)).args
        timed.append(mask if mask is None else mask.stride(-1))
        assert dropout == 0.1
        return attrs.evolve(FREE, forward_compute_ns=1000 if mask is not None else 500)

    monkeypatch.setattr(attention_masks, "measure_operator", measure)
    monkeypatch.setattr(attention_masks, "make_stopwatch", str)
    told = masks_told(_dag(attention=False, encodes=encodes), torch.device("cuda"), step_ns=30_000)
    if encodes == "padded":
        assert timed == [1, None, None]
        assert told.startswith("attention reads masks from memory (3 of 2 × 1 × 24 × 24)")
        return
    assert timed == [0, None]
    assert told.startswith(
        "under torch.compile attention gets masks that are expanded from one value a query (3 of 2 × 1 × 24 × 24)"
    )
    assert "formula in float32: 3.0 µs of a step of 30.0 µs, where attention without a mask takes 1.5 µs; train with" in told
    assert "causal" not in told
