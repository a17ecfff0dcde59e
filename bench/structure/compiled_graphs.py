"""Row S12: how many graphs the compiler makes of equal blocks under a plan, and how often an activation is quantized.

    PYTHONPATH=... python bench/structure/compiled_graphs.py TREE

Prints JSON: ``graphs`` of 12 equal blocks that are compiled one by one, ``recompilations`` over 10 training steps of them, and how
often the input that Q, K and V read is quantized in a forward, ``eager`` and ``compiled``; beside each how many quantizations there
are in all.  Compiled graphs are those that inductor would get, after PyTorch's own elimination of what is equal.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_torch import apply_

BLOCKS, STEPS, WIDTH = 12, 10, 16


class Attention(nn.Module):
    """Q, K and V of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


def planned(blocks: int) -> nn.Sequential:
    """Blocks whose operators all run in int8."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(blocks)))
    apply_(model, {f"{block}.{name}#0": "int8>float32" for block in range(blocks) for name in "qkv"})
    return model


def batch() -> torch.Tensor:
    """An input that gets a gradient."""
    return torch.randn(2, 5, WIDTH, requires_grad=True)


def compiled_steps() -> dict[str, int]:
    """Graphs after the first training step, and how many more after the others."""
    model = planned(BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch()).square().sum().backward()
        optimizer.step()
        seen.append(counters["stats"]["unique_graphs"])
    return {"graphs": seen[0], "recompilations": seen[-1] - seen[0]}


class Quantizations(TorchDispatchMode):
    """Notes what is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_quantization(function):
            self.seen.append(args[0])
        return function(*args, **(kwargs or {}))


def _is_quantization(function: object) -> bool:
    return isinstance(function, torch._ops.OpOverload) and function.namespace == "qsync" and "quantize" in function.__name__


def in_eager_mode() -> dict[str, int]:
    """Quantizations of the input among those of a forward."""
    x, model = batch(), planned(1)
    with Quantizations() as found:
        model(x)
    return {"eager": sum(seen.data_ptr() == x.data_ptr() for seen in found.seen), "eager, all": len(found.seen)}


def in_a_compiled_graph() -> dict[str, int]:
    """The same of the compiled forward: nodes that read its input."""
    graphs: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x = batch()
    torch.compile(planned(1), backend=backend, fullgraph=True)(x).sum().backward()
    nodes = [node for node in graphs[0].nodes if _is_quantization(node.target)]
    of_x = [node for node in nodes if node.args[0].meta["val"].shape == x.shape]
    return {"compiled": len(of_x), "compiled, all": len(nodes)}


if __name__ == "__main__":
    print(json.dumps(compiled_steps() | in_eager_mode() | in_a_compiled_graph()))
