"""RMS norms and gated units, as Llama-like models write them: found in graphs, run as producers, or the reason why not."""

import logging

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync
from nightly import nightly
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_torch import apply_
from qsync_torch.apply.applied_plan import applied_to
from qsync_torch.compiling import compile as compiling
from qsync_torch.compiling import finding
from qsync_torch.operators import products

from .chained_models import INT8, Llama, distance, lowered, step, tokens

NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, grad_input=Precision.FLOAT32, grad_weight=Precision.FLOAT32)
STOCHASTIC = attrs.evolve(NEAREST, rounding=Rounding.STOCHASTIC)
ROWS = attrs.evolve(NEAREST, x_granularity=Granularity.PER_ROW)
INT8_ALL = attrs.evolve(ROWS, grad_input=Precision.INT8, grad_weight=Precision.INT8)
QUANTIZE = torch.ops.qsync.quantize.at


def compiled(model, **options):
    """Without inductor, which takes long."""
    return qsync.compile(model, **({"backend": "aot_eager", "fullgraph": True} | options))


class Net(nn.Module):
    """What ``between`` makes of the input with a weight, and a linear operator that reads it."""

    def __init__(self, between, width=16):
        super().__init__()
        self.between, self.weight, self.fc = between, nn.Parameter(torch.randn(width)), nn.Linear(width, 4)
        self.register_buffer("short", torch.randn(2, 5, width).bfloat16())

    def forward(self, x):
        result, *others = y if isinstance(y := self.between(self, x), tuple) else (y,)
        return sum((other.sum() for other in others), self.fc(result).sum())


def transformers_norm(net, x, eps=1e-6):
    """``LlamaRMSNorm.forward``."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return net.weight * x.to(dtype)


def torchtitan_norm(net, x):
    """With ``_norm(x.float()).type_as(x)``."""
    y = x.float()
    return (y * torch.rsqrt(torch.mean(y * y, dim=-1, keepdim=True) + 1e-6)).type_as(x) * net.weight


def two_readers_of_the_mean(net, x):
    mean = x.pow(2).mean(-1, keepdim=True) + 1e-6
    return net.weight * (x * torch.rsqrt(mean)), mean


def product_whose_function_is_read_beside(net, x):
    y = F.silu(x)
    return y * (x + 1), y


RMS, GLU = ["rms_norm, 1 readers"], ["glu + silu, 1 readers"]
WRITTEN = [
    (lambda net, x: F.rms_norm(x, (16,), net.weight), RMS),
    (transformers_norm, RMS),
    (lambda net, x: transformers_norm(net, net.short + 0), RMS),
    (torchtitan_norm, RMS),
    (lambda net, x: transformers_norm(net, x + net.short), ["rms_norm + residual, 1 readers"]),
    (lambda net, x: (transformers_norm(net, y := x + net.short), y), RMS),
    (lambda net, x: F.silu(x) * (x + 1), GLU),
    *nightly(
        (lambda net, x: torch.rms_norm(x, [16], eps=1e-3), RMS),
        (lambda net, x: x * x.square().mean(2, True).add(1e-6).rsqrt(), RMS),
        (lambda net, x: (1.0 + net.weight) * (torch.rsqrt(1e-6 + torch.mean(torch.pow(x, 2), (-1,), keepdim=True)) * x), RMS),
        (lambda net, x: (x + 1).mul(F.gelu(x, approximate="tanh")), ["glu + gelu_tanh, 1 readers"]),
    ),
    # Not the same numbers, or read beside.
    (two_readers_of_the_mean, []),
    (lambda net, x: net.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)), []),
    (lambda net, x: net.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)), []),
    (lambda net, x: net.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)), []),
    (lambda net, x: net.weight[:1] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), []),
    (lambda net, x: F.rms_norm(net.short, (16,)), []),
    (lambda net, x: F.silu(x) * x[:, :1], []),
    (product_whose_function_is_read_beside, []),
]


@pytest.mark.parametrize("between, expected", WRITTEN)
def test_which_chains_are_found(between, expected):
    model, found = Net(between), []
    applied = apply_(model, lowered(model))

    def backend(module, inputs):
        found.extend(str(c).replace(f"({c.last.name})", "").replace(" ,", ",") for c in finding.find_chains(module.graph))
        return module.forward

    torch.compile(model, backend=backend)(tokens())
    applied.remove()
    assert found == expected


@pytest.mark.parametrize("variant", [NEAREST, ROWS, INT8_ALL], ids=["one scale", "rows", "all products"])
def test_a_fused_step_rounded_to_nearest_is_the_unfused_one(variant, fused):
    torch.manual_seed(0)
    model, x = Llama(), tokens()
    applied = apply_(model, lowered(model, variant))
    unfused = step(model, model, x)
    applied.step = 0
    found = step(compiled(model), model, x)
    assert [message.partition(" (")[0] for message in fused()] == ["fused: rms_norm", "fused: glu + silu"]
    assert distance(found, unfused) < 1e-3


@pytest.mark.parametrize("saved", [None, "int8"])
@pytest.mark.parametrize("rows", [Granularity.PER_TENSOR, Granularity.PER_ROW])
def test_products_for_the_weights_gradient_in_8_bit_read_the_copy_transposed(fused, monkeypatch, saved, rows):
    """As on a GPU, where integer tensor cores want it so; readers of one copy transpose it once, and a copy made again is too."""
    monkeypatch.setattr(products, "wants_transposed", lambda q, binding: binding.wants_transposed)
    counts, rewrite = [], compiling._rewrite
    monkeypatch.setattr(compiling, "_rewrite", lambda graph: (counts.append(transposed_copies(graph)), rewrite(graph))[1])
    torch.manual_seed(2)
    model, x = Llama(), tokens()
    applied = apply_(model, lowered(model, attrs.evolve(INT8_ALL, x_granularity=rows)))
    unfused = step(model, model, x)
    applied.step = 0
    found = step(compiled(model, saved=saved), model, x)
    assert [message.partition(" (")[0] for message in fused()] == ["fused: rms_norm", "fused: glu + silu"]
    assert sum(counts) == 2, "gate and up share one, the down projection has one"
    assert distance(found, unfused) < (1e-3 if saved is None else 5e-2)


def transposed_copies(graph):
    """Count int8 tensors that are laid out anew."""
    clones = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    return sum(node.meta["val"].dtype is torch.int8 for node in clones)


def test_gradients_are_unbiased_where_all_is_kept_in_8_bit():
    torch.manual_seed(1)
    model, x, runs = Llama(), tokens(), 300
    names = [name for name, _ in model.named_parameters() if name != "down.weight"]
    projection = torch.randn(2, 5, 16)
    model.double()
    (model(x.double()) * projection).sum().backward()
    exact = {name: model.get_parameter(name).grad.float() for name in names}
    model.float().zero_grad(set_to_none=True)
    apply_(model, lowered(model, STOCHASTIC))
    run, draws = compiled(model, saved="int8"), {name: [] for name in names}
    for _ in range(runs):
        model.zero_grad(set_to_none=True)
        (run(x) * projection).sum().backward()
        applied_to(model).advance()
        for name in names:
            draws[name].append(model.get_parameter(name).grad)
    for name, expected in exact.items():
        grads = torch.stack(draws[name])
        spread = grads.std(0).norm()
        assert (grads.mean(0) - expected).norm() < 0.02 * expected.norm() + 3 * spread / runs**0.5, name


def hugging_face(layers=2):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def hugging_face_step(run, model, ids):
    """Loss and gradients under autocast."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()[None], **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("saved", [None, "int8"])
def test_transformers_llama(fused, caplog, monkeypatch, saved):
    """Under autocast: two norms and a gated unit a layer; attention's results alone are quantized by themselves."""
    caplog.set_level(logging.INFO, "qsync_torch.compiling.unfused")
    counts, rewrite = [], compiling._rewrite
    monkeypatch.setattr(compiling, "_rewrite", lambda graph: (counts.append(quantized(graph)), rewrite(graph))[1])
    model, ids = hugging_face(), torch.randint(0, 50, (2, 8))
    exact = hugging_face_step(model, model, ids)
    variant = attrs.evolve(STOCHASTIC, output=Precision.BFLOAT16, grad_input=Precision.BFLOAT16)
    applied = apply_(model, lowered(model, variant, ("lm_head",)), base=Precision.BFLOAT16)
    unfused = hugging_face_step(model, model, ids)
    applied.step = 0
    found = hugging_face_step(compiled(model, fullgraph=False, saved=saved), model, ids)
    assert [m.partition(" (")[0] for m in fused()] == 2 * ["fused: rms_norm", "fused: rms_norm", "fused: glu + silu"]
    assert counts[0] == 2, "an activation is quantized by itself that a chain could have written"
    said = [record for record in caplog.records if record.name == "qsync_torch.compiling.unfused"]
    assert [(record.levelname, record.getMessage()) for record in said] == [
        (
            "INFO",
            "fused with the 8-bit copy that is read: 4 × rms_norm, 2 × glu + silu; quantized by itself: "
            "2 × scaled_dot_product_attention before o_proj: no producer computes it",
        )
    ]
    assert distance(found, exact) < 1.5 * distance(unfused, exact) + 1e-2


def quantized(graph):
    """Count the activations that a graph quantizes: what is quantized and no parameter."""
    return sum(node.target is QUANTIZE and node.args[0].op != "placeholder" for node in graph.nodes)


def test_many_readers_quantize_an_activation_once_where_nothing_is_fused(monkeypatch):
    """Q, K and V, gate and up: equal quantizations of an activation are one node of a compiled graph."""
    counts, rewrite = [], compiling._rewrite
    monkeypatch.setattr(compiling, "_rewrite", lambda graph: (counts.append(quantized(graph)), rewrite(graph))[1])
    monkeypatch.setattr(compiling, "fuse_chains", lambda graph, saved: [])
    model, ids = hugging_face(1), torch.randint(0, 50, (2, 8))
    variant = attrs.evolve(STOCHASTIC, output=Precision.BFLOAT16, grad_input=Precision.BFLOAT16)
    apply_(model, lowered(model, variant, ("lm_head",)), base=Precision.BFLOAT16)
    hugging_face_step(compiled(model, fullgraph=False), model, ids)
    assert counts[0] == 4


def unsaid(caplog, model, x=None, **applying):
    """What is said of a compiled model's unfused activations."""
    caplog.set_level(logging.INFO, "qsync_torch.compiling.unfused")
    applied = apply_(model, lowered(model, **applying))
    compiled(model)(tokens() if x is None else x)
    applied.remove()
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "qsync_torch.compiling.unfused"]


@pytest.mark.parametrize(
    "between, what, why",
    [
        (two_readers_of_the_mean, "mul", "no producer computes it"),
        (lambda net, x: torch.tanh(x), "tanh", "no producer computes it"),
        (lambda net, x: F.rms_norm(net.short, (16,)), "rms_norm", "what is added to 16-bit numbers is up to PyTorch's version"),
        (lambda net, x: F.gelu(x).flatten(0, 1), "gelu", "a view of it is read"),
    ],
)
def test_what_is_not_fused_says_why_in_a_line(caplog, between, what, why):
    ((level, said),) = unsaid(caplog, Net(between))
    assert level == "WARNING", "a model without any chain is told"
    assert said.startswith(f"fused with the 8-bit copy that is read: nothing; quantized by itself: 1 × {what} before fc: ")
    assert why in said


FACTORED = attrs.evolve(NEAREST, channel_factors=True), "the reader's channels have factors, so it makes a copy of its own"


def said_of(caplog, variants):
    model = Llama()
    caplog.set_level(logging.INFO, "qsync_torch.compiling.unfused")
    applied = apply_(model, variants)
    compiled(model)(tokens())
    applied.remove()
    (said,) = (record.getMessage() for record in caplog.records if record.name == "qsync_torch.compiling.unfused")
    return said.partition("; quantized by itself: ")[::2]


def test_readers_with_copies_of_their_own_say_so(caplog):
    variant, why = FACTORED
    _, alone = said_of(caplog, dict.fromkeys(("gate", "up", "down"), variant))
    assert alone.endswith(f"1 × rms_norm before gate, up: {why}; 1 × mul before down: {why}")


@pytest.mark.parametrize("variant, why", [FACTORED, (ROWS, "its producer writes the copy of another kind, which others read")])
def test_a_reader_beside_one_of_a_producers_copy_is_named_alone(caplog, variant, why):
    fused, alone = said_of(caplog, {"gate": NEAREST, "up": variant, "down": NEAREST})
    assert fused == "fused with the 8-bit copy that is read: 1 × rms_norm, 1 × glu + silu"
    assert alone == f"1 × rms_norm before up: {why}"


def test_an_input_of_the_model_is_no_warning(caplog):
    ((level, said),) = unsaid(caplog, Net(lambda net, x: x))
    assert level == "INFO"
    assert said.endswith("1 × an input before fc: its graph gets it from outside")
