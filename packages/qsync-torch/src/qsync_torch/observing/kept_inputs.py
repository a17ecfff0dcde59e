"""What fused chains keep of their inputs in 8 bit: how all weight gradients respond to its noise, and training with it for real.
And the scales of the copies that they write behind a shortcut.

A kept input is read by the backward of the chain alone, so that its noise leaves the forward as it is
(docs/design/indicator.md#kept-inputs).  Rounding is that of a matrix with a scale for each entry of dimension 0: the channels of a
batch norm, the rows of a layer norm or an activation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from qsync_core.ir.chain import ALONE, Activation, Chain, ChainForm, Producer
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.variant import Variant
from qsync_torch.aten.activation import (
    build_activation_grad_input,
    build_activation_output,
    build_glu_grad_input,
    build_glu_output,
)
from qsync_torch.aten.batch_norm import build_batch_norm_grad_input, build_batch_norm_output
from qsync_torch.aten.random_bits import stream_key
from qsync_torch.aten.row_norms import (
    build_layer_norm_output,
    build_rms_norm_output,
    layer_norm_grad_input,
    rms_norm_grad_input,
)
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.observing.noise_response import NoiseResponse, Phase
from qsync_torch.observing.producer_calls import ProducerCall, ProducerCalls
from qsync_torch.observing.rounding_noise import int8_scale
from qsync_torch.operators.casts import KEPT_FACTOR


@attrs.define(eq=False)
class _Site:
    call: ProducerCall
    waits_for: int = 0
    """Operands whose gradients respond."""
    grad: torch.Tensor | None = None
    """The gradient of the call's result, from the pass of the gradient to that of the response."""
    responses: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """The response to the gradient of each operand, by its position."""


_ADDITIONS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__"})
Respond = Callable[[OpId, torch.Tensor, torch.Tensor], None]


class KeptInputs(ProducerCalls):
    """The response of all weight gradients to noise on what chains keep, from the passes of a :class:`NoiseResponse`.

    With g the gradient of a norm's result, w = γ·g, n elements normalized together, u_γ the direction at γ and v the response
    to the gradient of the norm's input, ⟨∂L/∂θ, u⟩ depends on the kept x̂ by Σ u_γ·g·x̂ - σ⁻¹/n·(Σ v·x̂)·(Σ w·x̂), on an
    activation's kept x by Σ v·f′(x)·g, and on a gated unit's x and factor y by Σ v_x·f′(x)·y·g + v_y·f(x)·g.

    Args:
        response: whose passes follow the forward pass in which this is active.
        direction: u, a tensor per trainable parameter.
        respond: receives the name of each chain, the kept matrix and the response to noise on it.
    """

    def __init__(
        self, dag: PrecisionDag, response: NoiseResponse, direction: Mapping[torch.Tensor, torch.Tensor], respond: Respond
    ) -> None:
        super().__init__(dag)
        self._response, self._direction, self._hand_on = response, direction, respond
        self._sites: list[_Site] = []

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Run it on a copy of its input."""
        if not torch.is_grad_enabled():
            return call.run(*call.operands)
        site, operands = _Site(attrs.evolve(call, operands=tuple(x.detach() for x in call.operands))), list[torch.Tensor]()
        for position, x in enumerate(call.operands):
            if x.requires_grad:
                x = self._response.copy(x)
                x.register_hook(functools.partial(self._input_passed, site, position))
                site.waits_for += 1
            operands.append(x)
        out = call.run(*operands)
        if out.requires_grad:
            out.register_hook(functools.partial(self._output_passed, site))
            self._sites.append(site)
        return out

    def finish(self) -> None:
        """Hand on, after the pass of responses, those of norms before which nothing is trained."""
        for site in self._sites:
            self._hand_on_response(site)

    def release(self) -> None:
        """Release all tensors."""
        self._sites.clear()

    def _output_passed(self, site: _Site, grad: torch.Tensor) -> None:
        if self._response.phase is Phase.GRADIENT:
            site.grad = grad.detach()

    def _input_passed(self, site: _Site, position: int, grad: torch.Tensor) -> torch.Tensor | None:
        if self._response.phase is not Phase.GRADIENT:
            return None
        copy = self._response.copy(grad)
        copy.register_hook(functools.partial(self._responded, site, position))
        return copy

    def _responded(self, site: _Site, position: int, v: torch.Tensor) -> None:
        site.responses[position] = v.detach()
        if len(site.responses) == site.waits_for:
            self._hand_on_response(site)

    def _hand_on_response(self, site: _Site) -> None:
        call, grad, site.grad = site.call, site.grad, None
        if grad is not None and self.has(call.chain.name):
            v = {position: call.matrix(v) for position, v in site.responses.items()}
            with torch.no_grad():
                by_producer = self._by_normalized if call.chain.producer.normalizes else _by_operands
                for kept, h in by_producer(call, call.matrix(grad), v):
                    self._hand_on(call.chain.name, kept, h)
        site.responses.clear()

    def _by_normalized(self, call: ProducerCall, g: torch.Tensor, responses: _Responses) -> Iterator[_Kept]:
        """x̂, and the response to noise on it."""
        shape, v = (-1, 1) if call.chain.producer is Producer.BATCH_NORM else (1, -1), responses.get(0)
        x = call.matrix(call.x)
        if call.chain.producer is Producer.RMS_NORM:
            var, mean = x.square().mean(1, keepdim=True), torch.zeros_like(x[:, :1])
        else:
            var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        r = (var + call.eps).rsqrt_()
        xhat = (x - mean).mul_(r)
        w = g if call.weight is None else g * call.weight.view(shape)
        h = torch.zeros_like(xhat)
        if v is not None:
            share = r.div_(-x.shape[1])
            h.addcmul_(v, share * (w * xhat).sum(1, keepdim=True)).addcmul_(w, share * (v * xhat).sum(1, keepdim=True))
        u = None if call.weight is None else self._direction.get(call.weight)
        yield xhat, h if u is None else h.addcmul_(g, u.view(shape))


_Responses = Mapping[int, torch.Tensor]
_Kept = tuple[torch.Tensor, torch.Tensor]


def _by_operands(call: ProducerCall, g: torch.Tensor, responses: _Responses) -> Iterator[_Kept]:
    """The operands of a function, and the response to noise on each: of x alone f″(x)·g·v."""
    operands = [call.matrix(x) for x in call.operands]
    if not responses:
        yield from ((x, torch.zeros_like(x)) for x in operands)
        return
    with torch.enable_grad():
        read = [x.requires_grad_() for x in operands]
        first = torch.autograd.grad(call.run(*read), read, g, create_graph=True)
        total = torch.stack([(grad * responses[i]).sum() for i, grad in enumerate(first) if i in responses]).sum()
        second = torch.autograd.grad(total, read, materialize_grads=True)
    yield from ((x.detach(), h) for x, h in zip(read, second, strict=True))


class CopyScales(ProducerCalls):
    """While active in a forward pass, finds the scales of the int8 copies that fused batch norms with a residual write.

    Such a scale is a bound: the residual's largest magnitude beside that of the normalized
    (docs/design/fused-chains.md#the-scale-is-this-steps-and-exact).
    """

    def __init__(self, dag: PrecisionDag) -> None:
        super().__init__(dag)
        self._waiting: dict[Chain, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._found: dict[Chain, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at additions before they run, since they may be in place."""
        if self._waiting and getattr(func, "__name__", "") in _ADDITIONS and len(args) > 1:
            self._add(*args[:2])
        return super().__torch_function__(func, types, args, kwargs)

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Note the range of what a residual is going to be added to."""
        out = call.run(*call.operands)
        if call.chain.producer is Producer.BATCH_NORM and call.chain.residual is not None and call.chain.product_readers:
            z = out.detach()
            most = z.amax() if call.chain.activation is Activation.RELU else torch.linalg.vector_norm(z, torch.inf)
            self._waiting[call.chain] = weakref.ref(out), most
        return out

    def _add(self, first: object, second: object) -> None:
        for chain, (normalized, most) in list(self._waiting.items()):
            z = normalized()
            other = second if first is z else first if second is z else None
            if z is not None and isinstance(other, torch.Tensor):
                del self._waiting[chain]
                bound = most.float() + torch.linalg.vector_norm(other.detach(), torch.inf)
                self._found[chain] = int8_scale(bound.clamp(min=0.0))

    def by_reader(self) -> dict[OpId, torch.Tensor]:
        """0-d, by the operators of the forward that has passed that would read such a copy."""
        return {reader: scale for chain, scale in self._found.items() if self.has(chain.name) for reader in chain.product_readers}


class RoundedInput(ProducerCalls):
    """While active, one chain keeps its input in 8 bit for backward; its forward, and all else, is as it was.

    Args:
        name: of the chain; variant: :attr:`~qsync_core.ir.chain.ChainVariant.rated_as`.
    """

    def __init__(self, dag: PrecisionDag, name: OpId, variant: Variant, seed: int) -> None:
        super().__init__(dag)
        self._name, self._variant, self._seed = name, variant, seed

    def call(self, call: ProducerCall) -> torch.Tensor:
        """Run a call, the chosen chain's with its input kept in 8 bit."""
        if call.chain.name != self._name or not torch.is_grad_enabled():
            return call.run(*call.operands)
        keeping = _Keeping(call, self._variant, self._seed)
        return _Rounded.apply(keeping, call.weight, call.bias, *call.operands)  # type: ignore[no-any-return,no-untyped-call]


@attrs.frozen(eq=False)
class _Keeping:
    """How a call keeps its operands; the kernels are those of the backend ``aten``."""

    call: ProducerCall
    variant: Variant
    seed: int

    @property
    def producer(self) -> Producer:
        """The producer of the call's chain."""
        return self.call.chain.producer

    @property
    def form(self) -> ChainForm:
        """The form of the call by itself."""
        return ALONE if self.producer is Producer.BATCH_NORM else ChainForm(self.call.chain.activation)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay a tensor out as the kernels read it: images, else a matrix of rows."""
        if self.producer is Producer.BATCH_NORM:
            return tensor.float().contiguous(memory_format=torch.channels_last)
        return self.call.matrix(tensor).contiguous()

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor the shape and dtype of the input."""
        shape = self.call.x.shape
        if self.call.is_of_images and self.producer is not Producer.BATCH_NORM:
            tensor = tensor.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
        return tensor.reshape(shape).to(self.call.x.dtype)

    def kept(self, x: torch.Tensor, *factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The 8-bit tensor with its scales, then the statistics of a norm, or the copy of a gated unit's factor with its scales."""
        x_q = torch.empty_like(x, dtype=TORCH_DTYPE[self.variant.saved])
        scale, mean, spread = (x.new_empty(x.shape[self.producer is Producer.BATCH_NORM]) for _ in range(3))
        keep, no_copy, seeds = (x_q, scale), (None, None, None), (0, self.seed, 0)
        match self.producer:
            case Producer.BATCH_NORM:
                kernel = build_batch_norm_output(self.variant, ALONE)
                kernel(x, None, None, self.call.eps, None, None, mean, spread, None, None, *no_copy, *keep, None, *seeds)
                return x_q, scale, mean, spread
            case Producer.LAYER_NORM:
                kernel = build_layer_norm_output(self.variant, ALONE)
                kernel(x, None, None, self.call.eps, None, None, mean, spread, None, *no_copy, *keep, *seeds)
                return x_q, scale, mean, spread
            case Producer.RMS_NORM:
                build_rms_norm_output(self.variant, ALONE)(
                    x, None, self.call.eps, None, None, spread, None, *no_copy, *keep, *seeds
                )
                return x_q, scale, spread
            case Producer.ACTIVATION:
                build_activation_output(self.variant, self.form)(x, None, *no_copy, *keep, *seeds)
                return x_q, scale
            case Producer.GLU:
                other = torch.empty_like(x_q), torch.empty_like(scale)
                kernel, own = build_glu_output(self.variant, self.form), stream_key(self.seed, KEPT_FACTOR)
                kernel(x, *factors, None, *no_copy, *keep, *other, 0, self.seed, own, 0)
                return x_q, scale, *other

    def gradients(
        self, grad: torch.Tensor, weight: torch.Tensor | None, x_q: torch.Tensor, scale: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of the weight, the bias and the operands."""
        grad_x = torch.empty_like(grad)
        if self.producer is Producer.ACTIVATION:
            build_activation_grad_input(self.variant, self.form)(grad, x_q, scale, grad_x)
            return None, None, self.back(grad_x)
        if self.producer is Producer.GLU:
            grad_factor = torch.empty_like(grad)
            build_glu_grad_input(self.variant, self.form)(grad, x_q, scale, *others, grad_x, grad_factor)
            return None, None, self.back(grad_x), self.back(grad_factor)
        by_weight, by_bias = (None if t is None else torch.empty_like(t) for t in (self.call.weight, self.call.bias))
        if self.producer is Producer.BATCH_NORM:
            kernel, results = build_batch_norm_grad_input(self.variant, ALONE), (None, grad_x, None, by_weight, by_bias)
            kernel(grad, x_q, scale, *others, weight, None, self.call.eps, *results)
        elif self.producer is Producer.LAYER_NORM:
            mean, rstd = others
            layer_norm_grad_input(grad, x_q, scale, mean, rstd, weight, grad_x, by_weight, by_bias)
        else:
            (rstd,) = others
            rms_norm_grad_input(grad, x_q, scale, rstd, weight, grad_x, by_weight)
        return by_weight, by_bias, self.back(grad_x)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keeping: _Keeping, weight: torch.Tensor | None, bias: torch.Tensor | None, *operands: torch.Tensor
    ) -> torch.Tensor:
        ctx.keeping = keeping
        ctx.save_for_backward(weight, *keeping.kept(*map(keeping.laid_out, operands)))
        return keeping.call.run(*operands)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        keeping: _Keeping = ctx.keeping
        return None, *keeping.gradients(keeping.laid_out(grad), *ctx.saved_tensors)
