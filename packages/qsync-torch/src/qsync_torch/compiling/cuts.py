"""Chains that run in parts: a graph break, or a bucket of DistributedDataParallel, stands between what one kernel would run."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from qsync_core.ir.chain import Activation, Producer
from qsync_core.ir.op_id import OpId
from qsync_torch.apply.applied_plan import AppliedPlan
from qsync_torch.compiling import graph_nodes as nodes
from qsync_torch.compiling.finding import last_parts, readers_of
from qsync_torch.compiling.planned import chain_names, place_of, scopes_of

_EAGER = {
    "NativeBatchNormBackward0": Producer.BATCH_NORM,
    "CudnnBatchNormBackward0": Producer.BATCH_NORM,
    "NativeLayerNormBackward0": Producer.LAYER_NORM,
    "FusedRmsNormBackward0": Producer.RMS_NORM,
    "ReluBackward0": Producer.ACTIVATION,
    "GeluBackward0": Producer.ACTIVATION,
    "SiluBackward0": Producer.ACTIVATION,
}
"""What PyTorch calls the operators of a chain that ran outside of all graphs."""


@attrs.frozen
class _End:
    """A result that leaves a graph and may be a chain's.

    Attributes:
        value: what stands for it in graphs.
        name: of the chain; None where no graph has it.
        producer: what the chain is built around.
        may_add, may_apply: whether an addition, or a ReLU, could be the chain's next member.
    """

    value: Callable[[], torch.Tensor | None]
    name: OpId | None
    producer: Producer
    may_add: bool
    may_apply: bool


class Cuts:
    """The chains of a model that its graphs have in parts.

    Args:
        applied: the plan in force on it.
    """

    def __init__(self, applied: AppliedPlan) -> None:
        self._applied, self._model, self._planned = applied, applied.model, applied.in_model.planned.chains
        self._ends: list[_End] = []
        self._results: list[list[tuple[weakref.ref[torch.Tensor], _End]]] = []
        self._cut: dict[str, bool] = {}  # whether a bucket cuts it
        self._said: set[str] = set()

    def read(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Look at a graph before chains are fused in it.

        Args:
            inputs: that it is compiled for.

        Returns:
            What to do with the function that is made of the graph, so that graphs behind it are known to read its results.
        """
        if not torch.is_grad_enabled():  # nothing is kept for backward there
            return lambda run: run
        graph, names = module.graph, chain_names(module, self._model)
        given_to = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=False))
        modules = {id(parameter): fqn.rpartition(".")[0] for fqn, parameter in self._model.named_parameters()}
        owners = {node: modules[id(given)] for node, given in given_to.items() if id(given) in modules}
        for node, given in given_to.items():
            end = self._end_of(node, given)
            if end is not None and (self._planned is None or end.name is None or end.name in self._planned):
                self._cut |= dict.fromkeys(self._lost(node, end, owners), _is_bucket(node, given))
        ends = [_end(node, graph, names) for node in _results(graph)]
        self._ends += [end for end in ends if end is not None]
        return functools.partial(self._watched, ends) if any(ends) else lambda run: run

    def check(self, *_: Any) -> None:
        """Warn, after a forward, of what was found to be cut since the last time, once of each."""
        new = [cut for cut in self._cut if cut not in self._said]
        if not new or not self._model.training:
            return
        self._said.update(new)
        shown = ", ".join(new[:4]) + (f" and {len(new) - 4} more" if len(new) > 4 else "")
        by = "buckets of DistributedDataParallel" if all(self._cut[cut] for cut in new) else "graph breaks"
        warnings.warn(
            f"the compiled model runs in parts what one kernel would run ({shown}), because its graph is cut between them by {by}: "
            "results are right, but it takes more time and memory than fused; let one graph have both parts "
            "(TORCH_LOGS=graph_breaks says what breaks graphs, and DistributedDataParallel may go around the compiled model)",
            stacklevel=2,
        )

    def _watched(self, ends: Sequence[_End | None], run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which notes the tensors that are its graph's results."""
        place = len(self._results)
        self._results.append([])

        @functools.wraps(run)
        def watched(*arguments: Any) -> Any:
            results = run(*arguments)
            pairs = zip(results, ends, strict=False)
            self._results[place] = [(weakref.ref(result), end) for result, end in pairs if end is not None]
            return results

        return watched

    def _end_of(self, node: Node, given: Any) -> _End | None:
        """What delivered a graph's input, if that can be part of a chain."""
        if not isinstance(given, torch.Tensor) or given.is_leaf or nodes.float_of(node) is None:
            return None
        if _is_bucket(node, given):
            return next((end for end in self._ends if end.value() is nodes.value_of(node)), None)
        for results in self._results:
            for result, end in results:
                if result() is given:
                    return end
        producer = None if given.grad_fn is None else _EAGER.get(given.grad_fn.name())
        return None if producer is None else _End(lambda: None, None, producer, False, False)

    def _lost(self, given: Node, end: _End, owners: Mapping[Any, str]) -> Iterator[str]:
        """What goes on in a graph with a chain whose part has run before; ``owners``: names of modules, by their parameters."""
        for last in _continued(given, end):
            readers = readers_of(last, end.producer)
            if not readers and (last is given or self._planned is None):
                continue
            scopes = scopes_of(self._model)
            names = [owners.get(reader.args[1]) or place_of(reader, scopes, "operator") for reader in readers]
            names = names or [place_of(last, scopes, nodes.function_of(last) or "add")]
            chain = f"eager {end.producer}" if end.name is None else end.name.fqn
            yield f"{chain} before {' and '.join(dict.fromkeys(names))}"
            return


def _is_bucket(node: Node, given: Any) -> bool:
    """Whether a graph is a bucket of DistributedDataParallel, compiled before anything runs: for what its nodes hold."""
    return type(given) is type(nodes.value_of(node))


def _results(graph: Graph) -> list[object]:
    (values,) = next(iter(graph.find_nodes(op="output"))).args
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _end(node: object, graph: Graph, names: Mapping[Node, OpId]) -> _End | None:
    """What a graph's result is the last part of, in this graph."""
    found = last_parts(node, graph) if isinstance(node, Node) else None
    value = nodes.value_of(node)
    if found is None or value is None or not isinstance(node, Node):
        return None
    alone = len(node.users) == 1 and found.producer is Producer.BATCH_NORM and found.activation is Activation.NONE
    name = names.get(found.head)
    return _End(weakref.ref(value), name, found.producer, alone and found.residual is None, alone)


def _continued(given: Node, end: _End) -> Iterator[Node]:
    """The results that a chain may end with that begins with a graph's input, the longest first."""
    behind = [given]
    only = _only_reader(given)
    summands = nodes.summands_of(only) if end.may_add else None
    if only is not None and summands is not None and not any(map(nodes.batch_norm_of, summands)):  # else it is that one's residual
        behind.append(only)
        only = _only_reader(only)
    function = nodes.activation_of(only) if end.may_apply else None
    if only is not None and function is not None and function[0] is Activation.RELU:
        behind.append(only)
    yield from reversed(behind)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
