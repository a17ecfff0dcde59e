"""Calls of the operators that chains with a kept input are built around, seen while a model runs (docs/design/fused-chains.md).

A norm or a function is one call.  Of an RMS norm that is written out, and of a gated unit, the call that delivers the result stands
for all: it is followed back to what its members read, by the tensors that they give each other.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from qsync_core.chains.calls import eps_of
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import Chain, Producer
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.op_id import OpId

_ROOT = "rsqrt"
_KINDS: Mapping[Any, str] = {
    F.batch_norm: "batch_norm",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    torch.rsqrt: _ROOT,
    torch.Tensor.rsqrt: _ROOT,
}
_NORMS = {kind: inspect.signature(function) for function, kind in _KINDS.items() if kind.endswith("norm")}
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__"})
_SQUARES = frozenset({"pow", "__pow__", "square"})
_CARRIED = frozenset({"mean", "add", "__add__", "__radd__"})


@attrs.frozen(eq=False)
class ProducerCall:
    """One call of the operator that a chain is built around.

    Attributes:
        operands: what it reads; of a gated unit the factor too.
        run: computes the result of operands.
        weight, bias, eps: of a norm.
    """

    chain: Chain
    operands: tuple[torch.Tensor, ...]
    run: Callable[..., torch.Tensor]
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0
    is_of_images: bool = False

    @property
    def x(self) -> torch.Tensor:
        """The first operand."""
        return self.operands[0]

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of ``x`` in float32, with what shares a scale along dimension 1."""
        if self.chain.producer is Producer.BATCH_NORM:
            return tensor.transpose(0, 1).reshape(tensor.shape[1], -1).float()
        by_position = tensor.permute(0, 2, 3, 1) if self.is_of_images else tensor
        return by_position.reshape(-1, by_position.shape[-1]).float()


@attrs.frozen(eq=False)
class _Part:
    """What a part of a chain was computed from; ``chain``: of which it is, where that is known."""

    result: weakref.ref[torch.Tensor]
    x: torch.Tensor
    chain: Chain | None = None
    run: Callable[[torch.Tensor], torch.Tensor] | None = None


class ProducerCalls(TorchFunctionMode):
    """While active in a forward pass, hands on the calls of those operators that chains with a kept input are built around.

    A graph stands in the order of execution: the n-th call of a function is its n-th operator of that kind.
    """

    def __init__(self, dag: PrecisionDag) -> None:
        super().__init__()
        self._dag = dag
        self._operators = {kind: [o for o in dag.operators if o.kind == kind] for kind in _KINDS.values()}
        self._kinds = {operator.op_id: operator.kind for operator in dag.operators}
        self._chains = {chain.name: chain for chain in chains_of(dag) if chain.may_round_input}
        self._convolutions = {operator.op_id for operator in dag.adjustable if operator.is_convolution}
        self._counts: Counter[str] = Counter()
        self._unlike: set[OpId] = set()
        self._parts: dict[int, _Part] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the calls of a producer's function, and hand on those of chains."""
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None:
            return self._follow(func, args, kwargs)
        number = self._counts[kind]
        self._counts[kind] += 1
        operators = self._operators[kind]
        operator = operators[number] if number < len(operators) else None
        chain = None if operator is None else self._chains.get(operator.op_id)
        x = args[0] if args else kwargs["input"]
        if operator is None or chain is None or kwargs.get("inplace") or _is_other(x, operator):
            if operator is not None:
                self._unlike.add(operator.op_id)
            return func(*args, **kwargs)
        # Without the input itself, whose graph would hold the call and be held by it.
        others, named = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
        run = functools.partial(_run, func, others, named)
        if kind == _ROOT or chain.producer is Producer.GLU:  # it is like the graph once its last call has come
            self._unlike.add(operator.op_id)
            before = self._part_of(x) if kind == _ROOT else None
            source = x if kind != _ROOT else None if before is None else before.x
            return func(*args, **kwargs) if source is None else self._note(func(*args, **kwargs), source, chain, run)
        affine: dict[str, Any] = {}
        if kind in _NORMS:
            bound = _NORMS[kind].bind(*args, **kwargs)
            bound.apply_defaults()
            affine = {name: bound.arguments[name] for name in ("weight", "bias", "eps") if name in bound.arguments}
            if affine["eps"] is None:
                affine["eps"] = eps_of(self._dag, chain.name)
        images = x.dim() == 4 and not self._convolutions.isdisjoint(chain.product_readers[:1])
        return self.call(ProducerCall(chain, (x,), run, **affine, is_of_images=images))

    def __exit__(self, *raised: Any) -> None:
        """Forget what was followed."""
        self._parts.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def call(self, call: ProducerCall) -> torch.Tensor:
        """One call, as it is."""
        return call.run(*call.operands)

    def has(self, name: OpId) -> bool:
        """Whether the forward that has passed called a chain's operator as the graph says; also false where it did so in place."""
        kind = self._kinds[name]
        return self._counts[kind] == len(self._operators[kind]) and name not in self._unlike

    def found(self) -> list[Chain]:
        """The chains of the forward that has passed whose input can be kept in 8 bit."""
        return [chain for chain in self._chains.values() if self.has(chain.name)]

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of another function, and follow what chains of several calls compute."""
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS and len(args) == 2 and not kwargs:
            first, second = args
            if first is second and isinstance(first, torch.Tensor):
                return self._note(func(*args), first)
            return self._product(func, first, second)
        result = func(*args, **kwargs)
        if name in _SQUARES and (name == "square" or args[1:] == (2,)):
            return self._note(result, args[0])
        if name in _CARRIED and (part := self._part_of(args[0] if args else None)) is not None and part.chain is None:
            return self._note(result, part.x)
        return result

    def _product(self, func: Callable[..., Any], first: Any, second: Any) -> Any:
        """A product: of a chain's last call, or of a norm before its weight."""
        for one, other in ((first, second), (second, first)):
            part = self._part_of(one)
            if part is None or (chain := part.chain) is None or not isinstance(other, torch.Tensor):
                continue
            if chain.producer is Producer.GLU and other.shape == part.x.shape:
                run = part.run
                assert run is not None
                return self._whole(ProducerCall(chain, (part.x, other), lambda x, factor, run=run: run(x) * factor))
            eps = eps_of(self._dag, chain.name)
            weighted = chain.name not in self._dag[chain.last].inputs
            if part.run is not None and other is part.x:  # a root times what it normalizes
                if not weighted:
                    return self._whole(ProducerCall(chain, (part.x,), functools.partial(_normalize, eps, None), eps=eps))
                return self._note(func(first, second), part.x, chain)
            if part.run is None and weighted and other.shape == part.x.shape[-1:] and chain.weight is None:
                run = functools.partial(_normalize, eps, other)
                return self._whole(ProducerCall(chain, (part.x,), run, other, eps=eps))
        return func(first, second)

    def _whole(self, call: ProducerCall) -> torch.Tensor:
        self._unlike.discard(call.chain.name)
        return self.call(call)

    def _part_of(self, tensor: object) -> _Part | None:
        part = self._parts.get(id(tensor))
        return part if part is not None and part.result() is tensor else None

    def _note(self, result: Any, x: torch.Tensor, chain: Chain | None = None, run: Any = None) -> Any:
        """Note what a part was computed from, as long as it is there."""
        key = id(result)
        self._parts[key] = _Part(weakref.ref(result, lambda _: self._parts.pop(key, None)), x, chain, run)
        return result


def _run(func: Callable[..., Any], others: Iterable[Any], named: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = func(x, *others, **named)
    return result


def _normalize(eps: float, weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normalized if weight is None else normalized * weight


def _is_other(x: torch.Tensor, operator: Operator) -> bool:
    """Batches may be of another size than the graph's."""
    return len(x.shape) != len(operator.input_shapes[0]) or x.shape[1:] != operator.input_shapes[0][1:]
