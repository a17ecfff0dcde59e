"""Chains of today's models: those of a trace are those of compiled graphs, and a plan that names them trains the same steps."""

import contextlib

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync
from nightly import nightly
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import ChainVariant
from qsync_core.ir.precision import Precision, Rounding
from qsync_torch.compiling import finding
from qsync_torch.compiling.no_ops import drop_no_ops
from qsync_torch.compiling.planned import chain_names
from qsync_torch.job import Batch, Job
from qsync_torch.tracing.trace import trace

from .chained_models import INT8, compiled, distance, lowered, plan_of

BFLOAT16, FLOAT32 = Precision.BFLOAT16, Precision.FLOAT32
FUSED, SAVED = ChainVariant(), ChainVariant(saved=Precision.INT8)
NEAREST = attrs.evolve(INT8, rounding=Rounding.NEAREST, output=BFLOAT16, grad_input=BFLOAT16, grad_weight=FLOAT32)
OF = {
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Qwen3": {"head_dim": 16},
    "Phi3": {"pad_token_id": 0, "eos_token_id": 1},
}


def family(name, layers=1):
    """A model of transformers, as small as can be."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        tie_word_embeddings=False, use_cache=False, **OF.get(name, {}),
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def ids(size=2):
    return torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(1))


def traced(model, base):
    amp = None if base is FLOAT32 else str(base)
    batch = lambda step, size: Batch((), {"input_ids": ids(size), "labels": ids(size)})  # noqa: E731
    return trace(Job("m", model, batch, lambda output, _: output.loss, torch.optim.SGD, batch_size=2, amp=amp))


def under(base):
    return contextlib.nullcontext() if base is FLOAT32 else torch.autocast("cpu", torch.bfloat16)


def in_graphs(model, base, *args, **kwargs):
    """What :func:`finding.find_chains` finds in compiled graphs, by the names of a trace."""
    found = {}

    def backend(module, inputs):
        drop_no_ops(module)
        names = chain_names(module, model)
        for chain in finding.find_chains(module.graph):
            found[names[chain.head]] = (chain.producer, chain.activation, chain.residual is not None, len(chain.consumers))
        return module.forward

    applied = qsync.apply_(model, lowered(model), base=base)
    with under(base):
        torch.compile(model, backend=backend)(*args, **kwargs)
    applied.remove()
    return found


def of(chain):
    return chain.producer, chain.activation, chain.residual is not None, len(chain.product_readers)


@pytest.mark.parametrize(
    "name, base, alone",
    [
        ("Llama", BFLOAT16, 0),
        ("Gemma", FLOAT32, 0),
        *nightly(
            ("Llama", FLOAT32, 0),
            ("Gemma", BFLOAT16, 0),
            ("Mistral", BFLOAT16, 0),
            ("Qwen2", BFLOAT16, 0),
            ("Qwen3", FLOAT32, 2),  # norms of queries and keys, which rotations read
            ("Gemma2", BFLOAT16, 2),  # norms that additions read
            ("Phi3", BFLOAT16, 0),  # gate and up are halves of one result
        ),
    ],
)
def test_chains_of_a_trace_are_those_of_compiled_graphs(name, base, alone):
    """Two norms and a gated unit a layer, and the last norm."""
    model = family(name)
    chains = chains_of(traced(model, base))
    read = {chain.name: of(chain) for chain in chains if chain.product_readers}
    assert [str(of(chain)[0]) for chain in chains if chain.product_readers] == ["rms_norm", "rms_norm", "glu", "rms_norm"]
    assert len(chains) - len(read) == alone
    assert in_graphs(model, base, input_ids=ids(), labels=ids()) == read


class Net(nn.Module):
    """What ``between`` makes of two linears' results, read by a third."""

    def __init__(self, between):
        super().__init__()
        self.between, self.weight = between, nn.Parameter(torch.randn(16))
        self.gate, self.up, self.fc = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        result, *others = y if isinstance(y := self.between(self, self.gate(x), self.up(x)), tuple) else (y,)
        return self.fc(result).square().sum() + sum(other.square().sum() for other in others)


def norm(net, x):
    return net.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


WRITTEN = {
    "a sum that nothing else reads": lambda net, x, y: norm(net, x + y),
    "a sum that goes on": lambda net, x, y: (norm(net, s := x + y), s),
    "a sum in place": lambda net, x, y: norm(net, (x * 1.0).add_(y)),
    "a result that is read beside": lambda net, x, y: (z := norm(net, x), z + y),
    "a gated unit with a bias": lambda net, x, y: F.silu(x) * (y + net.weight),
    "halves": lambda net, x, y: F.silu(x.repeat(1, 1, 2)[..., :16]) * y,
    "a function that is read beside": lambda net, x, y: ((s := F.silu(x)) * y, s),
    "two functions": lambda net, x, y: F.silu(x) * F.gelu(y),
    "a norm of a function": lambda net, x, y: F.rms_norm(F.gelu(x), (16,), net.weight, 1e-5),
    "a unit of a norm": lambda net, x, y: F.relu(norm(net, x)) * y,
    "a product that broadcasts": lambda net, x, y: F.silu(x) * y[:, :1],
    "no weight": lambda net, x, y: x * torch.rsqrt((x * x).mean(2, True).add(1e-6)),
}


@pytest.mark.parametrize("between", [pytest.param(f, id=name) for name, f in WRITTEN.items()])
def test_small_graphs_have_the_same_chains(between):
    model, x = Net(between), torch.randn(2, 5, 16)
    dag = trace(Job("m", model, lambda *_: Batch((x,)), lambda y, _: y, torch.optim.SGD, batch_size=2))
    read = {chain.name: of(chain) for chain in chains_of(dag) if chain.product_readers}
    assert in_graphs(model, FLOAT32, x) == read


def step(run, model, base):
    """Loss and gradients."""
    model.zero_grad()
    with under(base):
        loss = run(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return {"loss": loss.detach()[None], **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("how, rounding", [(FUSED, Rounding.NEAREST), *nightly((SAVED, Rounding.STOCHASTIC))], ids=str)
def test_planned_steps_are_those_of_chains_that_the_compiler_found(how, rounding, fused):
    """To the bit, and as far from float64's as 8 bits put them."""
    variant, model = attrs.evolve(NEAREST, rounding=rounding), family("Llama", 2)
    names = [str(chain.name) for chain in chains_of(traced(model, BFLOAT16)) if chain.product_readers]
    exact = {name: value.float() for name, value in step(model.double(), model, FLOAT32).items()}
    model.float()
    plain = qsync.apply_(model, lowered(model, variant), base=BFLOAT16)
    unfused = step(model, model, BFLOAT16)
    plain.remove()
    found = step(compiled(model, plan_of(model, variant, {}, base=BFLOAT16), saved=how.saved, fullgraph=False), model, BFLOAT16)
    qsync.applied_to(model).remove()
    before = fused()
    assert len(before) == len(names) == 7
    torch._dynamo.reset()
    plan = plan_of(model, variant, dict.fromkeys(names, how), base=BFLOAT16)
    planned = step(compiled(model, plan, fullgraph=False), model, BFLOAT16)
    assert fused()[len(before) :] == before
    assert all(torch.equal(planned[name], value) for name, value in found.items())
    assert distance(planned, exact) < 1.5 * distance(unfused, exact) + 1e-2
