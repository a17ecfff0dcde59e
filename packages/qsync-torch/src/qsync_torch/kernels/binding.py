"""A binding: which variant an operator runs as, on whose kernels, with which configuration and geometry; and the built kernels.

A custom operator takes plain values only, so a binding travels through it as text and is read back with a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from qsync_core.geometry import Geometry
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.semantics import gradient_precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import Kernel, KernelRequest, Op
from qsync_core.kernels.choice import QUANTIZE_WEIGHT, KernelChoice, split_chain
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.selection import DEFAULT_BACKEND, build_kernel, parse_choice

Attributes = tuple[tuple[str, str], ...]


class Binding:
    """How one operator is run.

    Everything that a call needs is worked out here once and kept as plain strings, numbers and dtypes: ``torch.compile`` follows
    calls through them.

    Attributes:
        variant: precisions, granularity, rounding.
        backend: name of a kernel backend; ``a+b`` means a, and b for what a does not offer (a visible choice, never made silently).
        config: which operators are pinned to which backend and configuration (:mod:`qsync_core.kernels.choice`); mostly empty.
        attributes: stride, padding, dilation and groups of a convolution as canonical text, sorted by name.
        text: canonical text; :func:`parse_binding` reads it.
        x_text, w_text: canonical texts of the quantizations of activation and weight (8-bit formats).
        is_quantized: the operands are quantized to an 8-bit format.
        compute, output, gradient, grad_input: torch dtypes of the operands, the result, the output gradient after its cast, and
            the input's gradient.
        geometry: of a convolution.
    """

    def __init__(self, variant: Variant, backend: str = DEFAULT_BACKEND, config: str = "", attributes: Attributes = ()) -> None:
        self.variant, self.backend, self.config, self.attributes = variant, backend, config, attributes
        self.text = _text(variant, backend, config, attributes)
        self.is_quantized = variant.compute.needs_scale
        self.x_text = quantization_text(variant.compute, variant.x_granularity, variant.rounding, *_x_quantization(backend, config))
        self.w_text = quantization_text(variant.compute, variant.w_granularity, variant.rounding, *_w_quantization(backend, config))
        self.compute, self.output = TORCH_DTYPE[variant.compute], TORCH_DTYPE[variant.output]
        self.gradient, self.grad_input = TORCH_DTYPE[gradient_precision(variant)], TORCH_DTYPE[variant.grad_input]
        self.geometry = Geometry.of(dict(attributes))


def _text(variant: Variant, backend: str, config: str, attributes: Attributes) -> str:
    return "|".join((backend, config, str(variant), "&".join(f"{name}={value}" for name, value in attributes)))


@functools.lru_cache(maxsize=4096)
def _x_quantization(backend: str, config: str) -> tuple[str, str]:
    """Backends and configuration of the activation's quantization in an operator of this chain and choice."""
    pinned = parse_choice(config).of(Op.QUANTIZE)
    return (backend, "") if pinned is None else (pinned.backend, str(KernelChoice({Op.QUANTIZE: pinned})))


@functools.lru_cache(maxsize=4096)
def _w_quantization(backend: str, config: str) -> tuple[str, str]:
    """The same of the weight's.  Never a configuration: weights with equal texts are quantized together, whatever their shapes."""
    choice = parse_choice(config)
    pinned = choice.of(QUANTIZE_WEIGHT) or choice.of(Op.QUANTIZE)
    if pinned is None:
        return backend, ""
    spare = DEFAULT_BACKEND if DEFAULT_BACKEND in split_chain(backend) and pinned.backend != DEFAULT_BACKEND else ""
    return "+".join(filter(None, (pinned.backend, spare))), ""


@functools.lru_cache(maxsize=4096)
def quantization_text(
    precision: Precision, granularity: Granularity, rounding: Rounding, backend: str = DEFAULT_BACKEND, config: str = ""
) -> str:
    """Text of a quantization (:func:`qsync_torch.quantize.quantize`).

    It is that of a binding whose variant has the granularity of whatever is quantized in the activation's place.
    """
    wide = Precision.FLOAT32
    return _text(Variant(precision, wide, precision, wide, wide, granularity, rounding=rounding), backend, config, ())


@functools.lru_cache(maxsize=4096)
def parse_binding(text: str) -> Binding:
    """Read a binding's canonical text."""
    backend, config, variant, attributes = text.split("|")
    pairs = (tuple(part.split("=", 1)) for part in attributes.split("&") if part)
    return Binding(Variant.parse(variant), backend, config, tuple((name, value) for name, value in pairs))


@functools.lru_cache(maxsize=16)
def device_facts(device: torch.device) -> tuple[str, str]:
    """Kind and compute capability (empty on a CPU) of a device."""
    if device.type != "cuda":
        return device.type, ""
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", f"{major}.{minor}"


def request_for(op: str, binding: Binding, shapes: Sequence[tuple[int, ...]], device: torch.device) -> KernelRequest:
    """The request that a call with these operand shapes puts to a backend."""
    kind, capability = device_facts(device)
    flags = dict(binding.attributes)
    return KernelRequest(
        op,
        binding.variant,
        tuple(shapes),
        binding.geometry,
        kind,
        capability,
        multiplied="multiplier" in flags,
        transposed="transposed" in flags,
    )


_KERNELS: dict[tuple[object, ...], Kernel] = {}


def kernel_for(op: str, text: str, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Kernel:
    """The built kernel for a call, made once per operator, binding, operand shapes and device."""
    key = (op, text, shapes, device)
    kernel = _KERNELS.get(key)
    if kernel is None:
        binding = parse_binding(text)
        kernel = build_kernel(request_for(op, binding, shapes, device), binding.backend, binding.config)
        _KERNELS[key] = kernel
    return kernel
