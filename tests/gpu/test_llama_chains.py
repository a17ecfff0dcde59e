"""A Llama by transformers on a GPU, compiled by inductor: chains on Triton's kernels, gradients, and the memory that is kept."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

from torch import nn  # noqa: E402

import qsync_torch as qsync  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402

pytestmark = pytest.mark.gpu
FORWARD = "int8>bfloat16"
ALL_PRODUCTS = "int8;out=bfloat16;save=int8;gi=int8;gw=int8;x=tensor;w=channel;round=stochastic;sym=true"
IN_ROWS = "int8;out=bfloat16;save=int8;gi=bfloat16;gw=bfloat16;x=row;w=channel;round=stochastic;sym=true"


def model_of(layers=2):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=256, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).cuda().train()


def step(run, model, ids, autocast=True):
    """Gradients of all parameters, and the bytes that forward left for backward."""
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = run(input_ids=ids, labels=ids).loss
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, kept


def distance(found, exact):
    """Of all gradients together, in relation to their norm."""
    apart = sum(float((found[name] - value).norm() ** 2) for name, value in exact.items())
    return (apart / sum(float(value.norm() ** 2) for value in exact.values())) ** 0.5


@pytest.mark.parametrize("spec", [FORWARD, IN_ROWS, ALL_PRODUCTS], ids=["forward", "rows", "all products"])
def test_gradients_and_memory(spec):
    ids = torch.randint(0, 256, (4, 512), device="cuda")
    model = model_of()
    exact, _ = step(model, model, ids, autocast=False)
    names = {f"{n}#0": spec for n, part in model.named_modules() if isinstance(part, nn.Linear) and "lm_head" not in n}
    applied = qsync.apply_(model, names, base=Precision.BFLOAT16, backend="triton+aten")
    unfused, _ = step(model, model, ids)
    kept = {}
    for saved in (None, "int8"):
        torch._dynamo.reset()
        run = qsync.compile(applied, saved=saved)
        for _ in range(2):
            found, kept[saved] = step(run, model, ids)
        assert distance(found, exact) < 1.3 * distance(unfused, exact) + 0.01
    tokens, width, layers = ids.numel(), 512, 2
    saved_bytes = kept[None] - kept["int8"]
    # 6 bytes of the norms' inputs, 8 of gate and up, 4 of their product's copy; scales and rounding of blocks beside them.
    assert saved_bytes > 0.9 * 18 * tokens * width * layers
