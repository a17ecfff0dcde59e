"""The backend ``triton``: what it offers, what it refuses and why.  Neither torch nor triton is imported before ``build``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_core.kernels.support import BATCH_NORMS, FLOATS, GLUS, LINEAR, product_format
from qsync_kernels_triton.config import (
    DEQUANTIZE,
    ONE_READ,
    ProducerConfig,
    ProductConfig,
    QuantizeConfig,
    StoredConfig,
    UnknownConfigError,
    ranked,
    ranked_pointwise,
)
from qsync_kernels_triton.support import EIGHT_BIT, OPS, min_compute_capability, unsupported_reasons

QUANTIZE_CANDIDATES = (
    QuantizeConfig(),
    QuantizeConfig(sweep=0),
    QuantizeConfig(block=8192, warps=8, sweep=0),
    QuantizeConfig(block=8192, warps=8, programs=1056, sweep=0),
    QuantizeConfig(keep=32 << 20, hold=0),
    QuantizeConfig(keep=32 << 20, sweep=0, hold=0),
    QuantizeConfig(block=8192, warps=8, sweep=2112),
    QuantizeConfig(sweep=2112),
    QuantizeConfig(block=8192, warps=16, sweep=0),
    QuantizeConfig(keep=32 << 20),
    QuantizeConfig(block=2048, warps=4, programs=1056, sweep=2112),
    QuantizeConfig(block=8192, warps=8, keep=64 << 20, sweep=0, hold=0),
)
_ROWS_OUTPUT = (
    ProducerConfig(lane=32, apply=16),
    ProducerConfig(block=1024, lane=32),
    ProducerConfig(block=1024, lane=16, apply=16),
    ProducerConfig(apply=16),
    ProducerConfig(block=4096, lane=32, apply=16),
    ProducerConfig(block=1024, lane=16, apply=0),
    ProducerConfig(block=1024),
)
_ROWS_ONE_SCALE = (
    ProducerConfig(lane=16, apply=4),
    ProducerConfig(block=4096, lane=32, apply=4),
    ProducerConfig(block=4096, lane=16, apply=4),
    ProducerConfig(block=1024, lane=16, apply=4),
    ProducerConfig(lane=16),
    ProducerConfig(block=4096, lane=16, apply=0),
)
"""One scale for the whole tensor: few programs leave partial maxima, and each of a second launch reads all of these."""
_ELEMENTWISE_GRADIENT = (
    ProducerConfig(block=1024),
    ProducerConfig(block=1024, apply=16),
    ProducerConfig(block=1024, lane=16, apply=0),
    ProducerConfig(lane=16, apply=0),
    ProducerConfig(),
)
_NORM_GRADIENT = (
    ProducerConfig(lane=16, reduce=2),
    ProducerConfig(block=1024),
    ProducerConfig(block=1024, reduce=2),
    ProducerConfig(block=1024, reduce=1, apply=16),
    ProducerConfig(block=1024, lane=16, reduce=1, apply=0),
    ProducerConfig(block=4096, lane=32, reduce=2, apply=0),
    ProducerConfig(),
)
PRODUCER_CANDIDATES = {
    Op.BATCH_NORM_OUTPUT: (
        ProducerConfig(lane=32),
        ProducerConfig(lane=16),
        ProducerConfig(lane=16, apply=16),
        ProducerConfig(),
        ProducerConfig(block=4096, lane=16),
        ProducerConfig(strip=64),
        ProducerConfig(strip=64, lane=32),
        ProducerConfig(reduce=8, lane=16),
    ),
    Op.BATCH_NORM_GRAD_INPUT: (
        ProducerConfig(),
        ProducerConfig(lane=16),
        ProducerConfig(lane=32),
        ProducerConfig(apply=0),
        ProducerConfig(block=4096, lane=16),
        ProducerConfig(strip=64),
        ProducerConfig(strip=64, apply=0),
        ProducerConfig(reduce=2, apply=4),
        ProducerConfig(reduce=8),
    ),
    Op.LAYER_NORM_OUTPUT: _ROWS_OUTPUT,
    Op.LAYER_NORM_GRAD_INPUT: _NORM_GRADIENT,
    Op.RMS_NORM_GRAD_INPUT: _NORM_GRADIENT,
    Op.RMS_NORM_OUTPUT: _ROWS_OUTPUT,
    Op.ACTIVATION_OUTPUT: _ROWS_OUTPUT,
    Op.ACTIVATION_GRAD_INPUT: _ELEMENTWISE_GRADIENT,
    Op.GLU_OUTPUT: _ROWS_OUTPUT,
    Op.GLU_GRAD_INPUT: _ELEMENTWISE_GRADIENT,
}
STORED_CANDIDATES = (
    StoredConfig(),
    StoredConfig(block=2048, warps=4),
    StoredConfig(block=1024, warps=4),
    StoredConfig(block=8192, warps=8),
    StoredConfig(block=4096, warps=4),
)
_NORMS = (Op.LAYER_NORM_OUTPUT, Op.RMS_NORM_OUTPUT)
_LONG_NORM = 2048
"""From rows of this length on, more of one in a thread is faster than more rows at once (one scale, an H200)."""
_OF_ROWS = tuple(op for op in PRODUCER_CANDIDATES if op.endswith(".output") and op not in BATCH_NORMS)


class TritonBackend:
    """Quantization, 8-bit products with dequantization fused, float gradients from kept copies, producers, and stored weights."""

    name = "triton"
    api_version = BACKEND_API_VERSION
    offset_tensors = True
    hands_on_maxima = True
    reports_launches = True

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What the backend offers, as data only."""
        return tuple(
            KernelSpec(
                op,
                FLOATS if op == Op.DEQUANTIZE else (*EIGHT_BIT, *FLOATS) if op in Op.PRODUCERS else EIGHT_BIT,
                ("cuda",),
                min_compute_capability=".".join(map(str, min_compute_capability(op))),
                layouts=_layouts(op),
            )
            for op in OPS
        )

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason a sentence; empty means it can."""
        return list(unsupported_reasons(request))

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first."""
        if request.op == Op.QUANTIZE:
            return tuple(KernelConfig(str(config)) for config in _quantize_candidates(request))
        if request.op == Op.DEQUANTIZE:
            return tuple(KernelConfig(str(config)) for config in STORED_CANDIDATES)
        if request.op in Op.PRODUCERS:
            return tuple(KernelConfig(str(config)) for config in _producer_candidates(request))
        if request.op == Op.CONV2D_GRAD_WEIGHT:
            if not _may_be_pointwise(request):
                return (KernelConfig(),)
            (_, outputs, *_), (_, channels, *_) = request.shapes[:2]
            touched = 1 / math.prod(request.geometry.stride)
            return tuple(KernelConfig(text) for text in ranked_pointwise(outputs, channels, touched))
        m, n, k = _product_shape(request)
        is_float = not product_format(request).needs_scale
        a_bytes = 2 if is_float else 1
        b_bytes = 1 if request.op in LINEAR else a_bytes
        tma = request.op in LINEAR and a_bytes == 1 and request.compute_capability.startswith("9.")
        float8 = not request.variant.compute.is_fixed_point
        cuts = tuple(KernelConfig(str(config)) for config in ranked(m, n, k, a_bytes, b_bytes, tma, float8))
        return (KernelConfig(DEQUANTIZE), *cuts) if is_float else cuts

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel; ``docs/writing-a-backend.md`` has its arguments.

        The scales of a quantization are those of the activation: ``request.variant.x_granularity``.

        Raises:
            BackendError: when the request is not supported or the configuration cannot be read.
        """
        if reasons := self.unsupported_reasons(request):
            raise BackendError(f"backend triton cannot run {request.op} on {list(request.shapes)}: " + "; ".join(reasons))
        variant = request.variant
        if request.op == Op.QUANTIZE:
            from qsync_kernels_triton.quantize.single import build_quantize

            return build_quantize(variant.x_granularity, variant.rounding, QuantizeConfig.parse(config.text))
        if request.op == Op.DEQUANTIZE:
            from qsync_kernels_triton.stored import build_dequantize

            return build_dequantize(variant.storage, StoredConfig.parse(config.text))
        if request.op in Op.PRODUCERS:
            return _producer(request, ProducerConfig.parse(config.text or self.candidate_configs(request)[0].text))
        if request.op == Op.CONV2D_GRAD_WEIGHT:
            from qsync_kernels_triton.products.conv2d import build_conv2d_grad_weight

            text = config.text or self.candidate_configs(request)[0].text
            if text in ("", DEQUANTIZE):
                return build_conv2d_grad_weight(request.geometry)
            cut = ProductConfig.parse(text)
            if not _may_be_pointwise(request):
                raise UnknownConfigError(
                    f"backend triton has no configuration {text!r} of {request.op}, which only 1x1 convolutions with 16-bit "
                    "gradients have; leave it empty"
                )
            return build_conv2d_grad_weight(request.geometry, cut)
        text = config.text or self.candidate_configs(request)[0].text
        eight_bit = product_format(request).needs_scale
        if text == DEQUANTIZE and not eight_bit:
            return _from_dequantized(request)
        cut = ProductConfig.parse(text)
        if request.op in LINEAR:
            from qsync_kernels_triton.products import linear

            if request.op == Op.LINEAR_OUTPUT:
                return linear.build_linear_output(cut)
            if request.op == Op.LINEAR_GRAD_INPUT:
                return linear.build_linear_grad_input(cut, eight_bit)
            return linear.build_linear_grad_weight(cut, eight_bit)
        from qsync_kernels_triton.products import conv2d

        if request.op == Op.CONV2D_GRAD_INPUT:
            return conv2d.build_conv2d_grad_input(cut, request.geometry, eight_bit)
        return conv2d.build_conv2d_output(cut, request.geometry)

    def rehearsal(self) -> AbstractContextManager[None]:
        """Inside, kernels that this thread calls are not launched where they are still to be compiled: all are, side by side."""
        from qsync_kernels_triton.launching import rehearsal

        return rehearsal()


def _from_dequantized(request: KernelRequest) -> Kernel:
    """A gradient in a float format, by cuBLAS or cuDNN."""
    from qsync_kernels_triton.products import by_library

    if request.op == Op.CONV2D_GRAD_INPUT:
        return by_library.build_conv2d_grad_input(request.geometry)
    return by_library.build_linear_grad_input() if request.op == Op.LINEAR_GRAD_INPUT else by_library.build_linear_grad_weight()


def _layouts(op: str) -> tuple[str, ...]:
    if op in BATCH_NORMS:
        return ("channels_last",)
    matrices = op in LINEAR or op in Op.PRODUCERS or op == Op.DEQUANTIZE
    return ("contiguous",) if matrices else ("contiguous", "channels_last")


def _quantize_candidates(request: KernelRequest) -> Iterable[QuantizeConfig]:
    if not request.transposed or request.variant.x_granularity is Granularity.PER_CHANNEL:
        return QUANTIZE_CANDIDATES
    # The plans that write both copies have tiles of their own, and read no other knobs.
    return dict.fromkeys(QuantizeConfig(programs=one.programs, sweep=one.sweep) for one in QUANTIZE_CANDIDATES)


def _producer_candidates(request: KernelRequest) -> Sequence[ProducerConfig]:
    configs, variant = PRODUCER_CANDIDATES[request.op], request.variant
    if request.op == Op.BATCH_NORM_OUTPUT and request.chain.residual:
        return _first(1, configs)  # beside a tile of the shortcut a thread holds less
    if request.op not in _OF_ROWS:
        return configs
    length = request.shapes[0][-1] if request.shapes else 0
    if variant.compute.needs_scale and variant.x_granularity is Granularity.PER_TENSOR:
        return _first(1, _ROWS_ONE_SCALE) if request.op in _NORMS and length >= _LONG_NORM else _ROWS_ONE_SCALE
    # Longer rows are walked: fewer elements in a thread let more programs wait for memory.
    return _first(3, configs) if length > ONE_READ else configs


def _first(place: int, configs: Sequence[ProducerConfig]) -> tuple[ProducerConfig, ...]:
    return (configs[place], *configs[:place], *configs[place + 1 :])


def _producer(request: KernelRequest, config: ProducerConfig) -> Kernel:
    variant, activation = request.variant, request.chain.activation
    if request.op in BATCH_NORMS:
        from qsync_kernels_triton.producers import batch_norm_plans

        if request.op == Op.BATCH_NORM_OUTPUT:
            return batch_norm_plans.build_batch_norm_output(activation, variant.rounding, config)
        return batch_norm_plans.build_batch_norm_grad_input(activation, variant.rounding, config, request.chain.grad_sum)
    from qsync_kernels_triton.producers import row_plans

    if request.op == Op.LAYER_NORM_OUTPUT:
        return row_plans.build_layer_norm_output(variant.x_granularity, variant.rounding, config)
    if request.op == Op.RMS_NORM_OUTPUT:
        return row_plans.build_rms_norm_output(variant.x_granularity, variant.rounding, config)
    if request.op == Op.RMS_NORM_GRAD_INPUT:
        return row_plans.build_rms_norm_grad_input(config)
    if request.op == Op.LAYER_NORM_GRAD_INPUT:
        return row_plans.build_layer_norm_grad_input(config)
    if request.op in GLUS:
        from qsync_kernels_triton.producers import glu_plans

        if request.op == Op.GLU_OUTPUT:
            return glu_plans.build_glu_output(activation, variant.x_granularity, variant.rounding, config)
        return glu_plans.build_glu_grad_input(activation, variant.x_granularity, variant.rounding, config)
    if request.op == Op.ACTIVATION_OUTPUT:
        return row_plans.build_activation_output(activation, variant.x_granularity, variant.rounding, config)
    return row_plans.build_activation_grad_input(activation, config)


def _may_be_pointwise(request: KernelRequest) -> bool:
    """Whether gradient and activation can be those of a 1x1 convolution in one group, with gradients in 16 bit."""
    geometry = request.geometry
    if len(request.shapes) < 2 or geometry.padding != (0, 0) or geometry.groups != 1:
        return False
    grad, x = request.shapes[:2]
    in_16_bit = request.variant.grad_weight.nbytes == 2
    return in_16_bit and len(grad) == len(x) == 4 and tuple(grad[2:]) == geometry.output_size(x[2:], (1, 1))


def _product_shape(request: KernelRequest) -> tuple[int, int, int]:
    """Rows, columns and contracted length of the matrix product behind a request; of a plausible one where shapes are missing."""
    if len(request.shapes) < 2:
        return 4096, 4096, 4096
    first, second = request.shapes[:2]
    if request.op == Op.LINEAR_OUTPUT:
        return math.prod(first[:-1]), second[0], first[-1]
    if request.op == Op.LINEAR_GRAD_INPUT:
        return math.prod(first[:-1]), second[1], second[0]
    if request.op == Op.LINEAR_GRAD_WEIGHT:
        return first[-1], second[-1], math.prod(first[:-1])
    outputs, inputs, height, width = second
    stride = request.geometry.stride
    positions = max(1, first[0] * first[2] * first[3] // (stride[0] * stride[1]))
    if request.op == Op.CONV2D_GRAD_INPUT:
        return positions, inputs, outputs * height * width
    return positions, outputs, inputs * height * width
