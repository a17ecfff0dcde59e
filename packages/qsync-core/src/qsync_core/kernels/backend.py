"""What a kernel backend is: the interface behind the plugins, and the requests that are put to it (docs/design/backends.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_core.ir.chain import ALONE, ChainForm
from qsync_core.ir.semantics import steps_of
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS
from qsync_core.progress import ProgressCallback

BACKEND_API_VERSION = 1
"""Backends of another API version are reported by name and not offered."""

Kernel = Callable[..., Any]
"""A built kernel.  It writes into outputs that its caller allocates, on the current stream; the operators' signatures are in
``docs/writing-a-backend.md`` and are checked by the conformance suite."""


PARTIAL_MAXIMA = 2048
"""How many partial maxima, and as many checksums behind them, stand for a tensor that its producer has read already: as many as a
large GPU has programs at work."""


class Op:
    """Names of the operators that a backend may provide."""

    QUANTIZE = "quantize"
    LINEAR_OUTPUT = "linear.output"
    LINEAR_GRAD_INPUT = "linear.grad_input"
    LINEAR_GRAD_WEIGHT = "linear.grad_weight"
    CONV2D_OUTPUT = "conv2d.output"
    CONV2D_GRAD_INPUT = "conv2d.grad_input"
    CONV2D_GRAD_WEIGHT = "conv2d.grad_weight"
    BATCH_NORM_OUTPUT = "batch_norm.output"
    BATCH_NORM_GRAD_INPUT = "batch_norm.grad_input"
    LAYER_NORM_OUTPUT = "layer_norm.output"
    LAYER_NORM_GRAD_INPUT = "layer_norm.grad_input"
    ACTIVATION_OUTPUT = "activation.output"
    ACTIVATION_GRAD_INPUT = "activation.grad_input"
    RMS_NORM_OUTPUT = "rms_norm.output"
    RMS_NORM_GRAD_INPUT = "rms_norm.grad_input"
    GLU_OUTPUT = "glu.output"
    GLU_GRAD_INPUT = "glu.grad_input"
    DEQUANTIZE = "dequantize"
    """What products in float formats read of a stored weight (:class:`~qsync_core.ir.precision.Storage`)."""

    UNFUSED = (QUANTIZE, *(op for kind in KINDS.values() if kind.as_run is kind for op in kind.products))
    """Quantization, and the products of adjustable operators."""
    PRODUCERS = (
        BATCH_NORM_OUTPUT,
        BATCH_NORM_GRAD_INPUT,
        LAYER_NORM_OUTPUT,
        LAYER_NORM_GRAD_INPUT,
        ACTIVATION_OUTPUT,
        ACTIVATION_GRAD_INPUT,
        RMS_NORM_OUTPUT,
        RMS_NORM_GRAD_INPUT,
        GLU_OUTPUT,
        GLU_GRAD_INPUT,
    )
    """What produces the activation of a product, fused with its quantization (docs/design/fused-chains.md)."""
    CHOSEN = (*UNFUSED, *PRODUCERS)
    """What a plan chooses kernels for; a dequantization gives the same bits whoever runs it, and each device takes its fastest."""
    ALL = (*CHOSEN, DEQUANTIZE)
    CONVOLUTIONS = tuple(op for kind in KINDS.values() if not kind.of_rows for op in kind.products)
    """The products of convolutions of all kinds; ``conv2d`` runs others too (:attr:`qsync_core.kinds.Kind.runs_as`)."""
    IN_FLOATS = tuple(op for kind in KINDS.values() if not kind.in_8_bit for op in kind.products)
    """The products of kinds that have no kernels for 8-bit operands."""


@attrs.frozen(cache_hash=True)
class KernelRequest:
    """One kernel that is to run, as a backend is asked about it.

    Attributes:
        op: one of :class:`Op`.
        variant: precisions, granularity and rounding.
        shapes: operand shapes in the order in which the kernel takes them: activation or gradient first, then weight or activation
            (``linear.output``: ``(M, K)``, ``(N, K)``; ``conv2d.output``: NCHW and OIHW; ``dequantize``: that of the weight).
        geometry: of a convolution; neutral for other operators.
        device_kind: ``cpu`` or ``cuda``; compute_capability: ``9.0`` and so on, empty on a CPU.
        contiguous: operands are dense and aligned (channels-last for conv2d on cuda).
        multiplied: of ``quantize``: the tensor is first multiplied by one factor per channel.
        transposed: of ``quantize``: a transposed copy is written too.
        knows_maxima: of ``quantize`` under one scale: the tensor's maxima are given, which the kernel that made it has found.
        chain: of a producer: what is fused with it.
    """

    op: str
    variant: Variant
    shapes: tuple[tuple[int, ...], ...]
    geometry: Geometry = NEUTRAL
    device_kind: str = "cpu"
    compute_capability: str = ""
    contiguous: bool = True
    multiplied: bool = False
    transposed: bool = False
    knows_maxima: bool = False
    chain: ChainForm = ALONE

    @property
    def column_scaled(self) -> bool:
        """Whether the kernel takes ``column_scale``: of a gradient, one number for each of its columns."""
        return steps_of(self.variant).factored and self.op in (Op.LINEAR_GRAD_INPUT, Op.LINEAR_GRAD_WEIGHT)

    @property
    def attributes(self) -> dict[str, str]:
        """Geometry and flags as the texts that tuning records store; empty where they are neutral."""
        if self.op in Op.PRODUCERS:
            return self.chain.attributes
        flags = {"multiplier": "channel"} if self.multiplied else {}
        if self.transposed:
            flags["transposed"] = "true"
        return self.geometry.attributes if self.op in Op.CONVOLUTIONS else flags


@attrs.frozen
class KernelSpec:
    """What a backend offers, as data: which operator, compute formats, devices, layouts and alignment (in elements)."""

    op: str
    compute: tuple[str, ...]
    device_kinds: tuple[str, ...]
    min_compute_capability: str = ""
    layouts: tuple[str, ...] = ("contiguous",)
    alignment: int = 1


@attrs.frozen
class KernelConfig:
    """One way to run a kernel: a name and its knobs; ``text`` is what plans and tuning records store."""

    text: str = ""


@runtime_checkable
class KernelBackend(Protocol):
    """A provider of kernels.  Constructing one must not import torch or touch a device; ``build`` may."""

    name: str
    api_version: int

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What the backend offers, as data only."""
        ...

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        ...

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first; at least one for a supported request."""
        ...

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel.  Heavy imports and compilation happen here.

        Raises:
            BackendError: naming operator, shapes, formats and configuration.
        """
        ...


def takes_offset_tensors(backend: KernelBackend) -> bool:
    """Whether its kernels take the offset of random numbers as a tensor too: one int64 on the operands' device, read when they run.

    A backend says so by an attribute ``offset_tensors`` that is True.  Others are given numbers, and a CUDA graph with their
    stochastic rounding is refused: each replay would round alike.
    """
    return bool(getattr(backend, "offset_tensors", False))


def hands_on_maxima(backend: KernelBackend) -> bool:
    """Whether its gated units write the maxima of their gradients (``chain.grad_maxima``), and its quantization takes such
    (``knows_maxima``).

    A backend says so by an attribute ``hands_on_maxima`` that is True.  Others are asked for neither.
    """
    return bool(getattr(backend, "hands_on_maxima", False))


@runtime_checkable
class CompilingBackend(Protocol):
    """What a backend also has if its kernels can be compiled ahead of time, several at once, on a machine without a GPU.

    Knobs that are passed to a compiled kernel when it is launched are called ``raster``, ``splits`` and ``swizzle`` in the texts of
    its configurations (``tile=128x64x64;swizzle=4``): configurations that differ in these alone are one kernel.
    """

    def compile_ahead(self, requests: Sequence[KernelRequest], arch: str, progress: ProgressCallback) -> object:
        """Compile the candidates of requests that the backend supports, into its cache.

        Args:
            arch: the chip, as compilers name it: ``sm_75``, ``sm_90a``.
            progress: receives how many kernels are done.

        Returns:
            Whatever the backend reports; its attribute ``kernels``, if present, is how many kernels the cache holds for them now.

        Raises:
            BackendError: when a compiler is missing, or a kernel does not compile.
        """
        ...


@runtime_checkable
class InterruptibleBackend(Protocol):
    """What a compiling backend also has if its compilers can be ended: tuning within a time does not wait for them then."""

    def interrupt_compiling(self) -> None:
        """End all compilers that run for this process; builds that wait for one raise a BackendError, later ones compile."""
        ...


@runtime_checkable
class BackgroundCompilingBackend(Protocol):
    """What a compiling backend also has if training need not wait for its compilers: another backend's kernels run meanwhile."""

    def is_compiled(self, request: KernelRequest, config: KernelConfig) -> bool:
        """Whether :meth:`KernelBackend.build` compiles nothing: all is in the cache, or it refuses.

        What :meth:`compile_later` was asked for is not compiled as long as the process lives, so that a run keeps its kernels.
        """
        ...

    def compile_later(self, request: KernelRequest, config: KernelConfig) -> None:
        """Compile what ``build`` would, in the background, and say on standard error how that ended.

        Asked again, it does nothing.  The compilers end with the process.
        """
        ...
