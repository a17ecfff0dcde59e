"""16-bit products and their gradients on a CPU that has no instructions for the format.

PyTorch computes them there element by element, 10 to 400 times slower than in float32 (AVX2: both formats; convolutions in float16
on nearly every CPU), and some sum in 16 bit.  Here they are computed in float32, which holds the product of two 16-bit numbers
exactly, and rounded once, as hardware for the format does.  What backward needs is kept in 16 bit, as elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from qsync_core.geometry import Geometry
from qsync_torch.kinds import products
from qsync_torch.torch_internals import transforms_are_active


def _without_hardware() -> frozenset[torch.dtype]:
    cpu = torch.cpu.get_capabilities()
    # As oneDNN asks: AVX-512 or the newest AVX2, and ARM's own.
    ways = (("avx512_bw", "avx512_dq", "avx512_vl"), ("avx_ne_convert",), ("bf16",))
    has = {
        torch.bfloat16: any(all(cpu.get(name) for name in way) for way in ways),
        torch.float16: bool(cpu.get("amx_fp16")),
    }
    return frozenset(dtype for dtype, supported in has.items() if not supported)


FORMATS_WITHOUT_HARDWARE = _without_hardware()
"""16-bit formats that this machine's CPU has no fast products for."""


def needs_widening(x: torch.Tensor) -> bool:
    """Whether products of this tensor are computed in float32."""
    return x.dtype in FORMATS_WITHOUT_HARDWARE and x.is_cpu


def _runs_widened(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether a differentiable product is computed so: where PyTorch transforms it, or wants tangents, it is PyTorch's own."""
    return (
        needs_widening(x)
        and not transforms_are_active()
        and all(forward_ad.unpack_dual(operand).tangent is None for operand in (x, *others) if operand is not None)
    )


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry | None) -> torch.Tensor:
    """The product of an operator of any kind, of operands in one float format and in that format; differentiable.

    Args:
        x, weight, bias: (..., K), (N, K) and (N,) where there is no geometry, else (B, C, H, W), (O, C / groups, KH, KW) and (O,).
        geometry: of a convolution.
    """
    if not _runs_widened(x, weight, bias):
        return products.product(x, weight, bias, geometry)
    g = geometry
    settings = None if g is None else (g.stride, g.padding, g.dilation, g.groups, g.transposed, g.output_padding)
    y: torch.Tensor = _Widened.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return y


def mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """The product of matrices in one float format: (M, N) in that format, or the float32 sums where they are computed so."""
    return torch.mm(a_MK.float(), b_KN.float()) if needs_widening(a_MK) else torch.mm(a_MK, b_KN)


def gradients(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, geometry: Geometry, by_x: bool, by_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of activation and weight of a convolution that are asked for.

    They are in the format of ``grad``, or the float32 sums where they are computed so.
    """
    if needs_widening(grad):
        grad, x, w = grad.float(), x.float(), w.float()
    return products.product_gradients(grad, x, w, geometry, by_x, by_weight)


_geometry = functools.cache(Geometry)


@torch.compiler.allow_in_graph  # traced, it would save its operands past the hooks of a checkpoint that runs it again
class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: tuple[Any, ...] | None
    ) -> torch.Tensor:
        """The geometry comes as constants, which a compiler can write into a graph."""
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry = None if settings is None else _geometry(*settings)
        return products.product(x.float(), weight.float(), None if bias is None else bias.float(), geometry).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Differentiable: it consists of torch's operators on what was saved."""
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        wide = grad.float()
        # Where ``backward()`` is called under autocast, that would bring the operands back to 16 bit.
        with torch.autocast("cpu", enabled=False):
            found = products.product_gradients(wide, x.float(), weight.float(), ctx.geometry, need_x, need_w)
        grad_x, grad_w = (None if g is None else g.to(like.dtype) for g, like in zip(found, (x, weight), strict=True))
        return grad_x, grad_w, products.bias_gradient(wide, ctx.geometry).to(grad.dtype) if need_b else None, None
