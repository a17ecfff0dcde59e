"""Rows P1 to P3: what attention reads in the compiled steps of their models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eight_bit.steps import SHAPES, batch_of, made

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("part", "masked", "causal"),
    [
        ("P1b", False, True),
        ("P3-bert", True, False),
        ("P3-vit", True, False),
        ("P3b-bert", False, False),
        ("P3b-vit", False, False),
    ],
)
def test_attention_of_a_compiled_step_reads_a_mask_where_the_row_says_so(part, masked, causal):
    calls = []

    def counting(graph, inputs):
        calls.extend(node for node in graph.graph.nodes if node.target is nn.functional.scaled_dot_product_attention)
        return graph

    torch.compiler.reset()
    device = torch.device("cpu")
    model = torch.compile(made(SHAPES[part], quick=True).train(), backend=counting)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch_of(SHAPES[part], device, quick=True))
    (call,) = calls  # of one layer
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), call.args, strict=False)) | call.kwargs
    assert (given.get("attn_mask") is not None) == masked
    assert given.get("is_causal", False) == causal
    if masked:  # expanded from a value of each query: the stride for which no fused kernel takes it
        assert given["attn_mask"].meta["example_value"].stride(-1) == 0
    assert given.get("dropout_p", 0.0) == (0.1 if "bert" in part else 0.0)
