"""Launches kernels through Triton's real argument analysis on a driver that only writes down what it is given.

Run without the interpreter; prints, as JSON, what the first launch of each case passed on and what the second one did.
"""

from __future__ import annotations

import json
import warnings

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from qsync_core.geometry import Geometry
from qsync_core.ir.chain import Activation
from qsync_core.ir.precision import Granularity, Rounding
from qsync_kernels_triton.config import ProducerConfig, ProductConfig, QuantizeConfig
from qsync_kernels_triton.producers.batch_norm_plans import build_batch_norm_grad_input, build_batch_norm_output
from qsync_kernels_triton.producers.glu_plans import build_glu_grad_input, build_glu_output
from qsync_kernels_triton.producers.row_plans import (
    build_activation_grad_input,
    build_activation_output,
    build_layer_norm_grad_input,
    build_layer_norm_output,
    build_rms_norm_grad_input,
    build_rms_norm_output,
)
from qsync_kernels_triton.products.conv2d import build_conv2d_output
from qsync_kernels_triton.products.linear import build_linear_grad_weight, build_linear_output
from qsync_kernels_triton.quantize.single import build_quantize

CALLS: list[list] = []


def plain(value, kind):
    """As JSON; an address as a list of one, which no number is."""
    if hasattr(value, "data_ptr"):
        value = value.data_ptr()
    if str(kind).startswith("*"):
        return [value]
    return value if isinstance(value, (int, str)) else str(type(value).__name__)


class Launcher:
    """Stands for the compiled function that starts a kernel."""

    def __init__(self, source, metadata):
        self._name, self._signature = source.fn.__name__, list(source.signature.values())

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        assert len(arguments) == len(self._signature), self._name
        given = [plain(a, kind) for a, kind in zip(arguments, self._signature, strict=True) if kind != "constexpr"]
        CALLS.append([self._name, [x, y, z], stream, function, given])


class Device:
    """What the driver's device functions answer."""

    def load_binary(self, *_):
        return "module", "function", 32, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def unload_module(self, _):
        pass


class Driver:
    """A driver for compute capability 9.0 without a device."""

    utils, launcher_cls = Device(), Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 77


def no_further_than_read(*called):
    """Leave out what makes code of a kernel that Triton has read: launches follow from its signature."""
    if not called:
        return "no further than read", "no further than read"  # what Triton's caches call this
    _, stages, *_ = called
    read = stages["ttir"]
    stages.clear()
    stages["ttir"] = read
    stages["cubin"] = lambda module, metadata: metadata.update(name="kernel", shared=0, tmem_size=0) or b""


def cases():
    x, q = torch.randn(96, 40_960), torch.empty(96, 40_960, dtype=torch.int8)
    for granularity, scale in ((Granularity.PER_TENSOR, torch.empty(1)), (Granularity.PER_ROW, torch.empty(96))):
        yield build_quantize(granularity, Rounding.STOCHASTIC, QuantizeConfig()), (x, q, scale, None, 1 << 40, 2)
        short = (x[:, :512].contiguous(), q[:, :512].contiguous(), scale, None, 1, 1)
        yield build_quantize(granularity, Rounding.NEAREST, QuantizeConfig()), short
        offset, stream = torch.tensor([1 << 33]), torch.empty(1, dtype=torch.int64)
        yield build_quantize(granularity, Rounding.STOCHASTIC, QuantizeConfig()), (x, q, scale, stream, 1 << 40, offset)
    extras = (torch.ones(40_960), torch.empty(40_960, 96, dtype=torch.int8))
    yield build_quantize(Granularity.PER_TENSOR, Rounding.FLOOR, QuantizeConfig()), (x, q, torch.empty(1), None, 1, 2, *extras)
    both = torch.empty(96 + 40_960)
    for operands in (extras, (None, extras[1], torch.ones(96))):
        yield build_quantize(Granularity.PER_ROW, Rounding.STOCHASTIC, QuantizeConfig()), (x, q, both, None, 1, 2, *operands)
    a, b, one = torch.zeros(256, 512, dtype=torch.int8), torch.zeros(128, 512, dtype=torch.int8), torch.ones(1)
    for tma in (0, 1):
        yield build_linear_output(ProductConfig(tma=tma)), (a, one, b, torch.ones(128), None, torch.empty(256, 128))
    grad = torch.zeros(256, 128, dtype=torch.bfloat16)
    yield build_linear_grad_weight(ProductConfig(), False), (grad, a, one, torch.empty(128, 512))
    image, filters, out = (
        torch.zeros(s).to(memory_format=torch.channels_last) for s in ((2, 64, 8, 8), (32, 64, 3, 3), (2, 32, 6, 6))
    )
    convolution = build_conv2d_output(ProductConfig(), Geometry())
    yield convolution, (image.to(torch.int8), one, filters.to(torch.int8), torch.ones(32), None, out)

    yield from producers()


def producers():
    half, config = torch.zeros(2, 64, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last), ProducerConfig()
    of, per, one = torch.ones(64), torch.empty(64), torch.ones(1)
    eight = half.to(torch.int8)
    normalize = build_batch_norm_output(Activation.RELU, Rounding.STOCHASTIC, config)
    words, streams = (1 << 40, 2, 3), torch.empty(1, dtype=torch.int64)
    yield normalize, (half, of, of, 1e-5, half, one, per, per, half, one, eight, one, streams, eight, per, None, *words)
    yield (
        build_batch_norm_grad_input(Activation.RELU, Rounding.STOCHASTIC, config),
        (half, half, None, per, per, of, of, 1e-5, None, half, None, per, per),
    )
    rows, eight_rows = torch.zeros(64, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.int8)
    for granularity, scale in ((Granularity.PER_ROW, per), (Granularity.PER_TENSOR, one)):
        norm = build_layer_norm_output(granularity, Rounding.STOCHASTIC, config)
        yield norm, (rows, of, None, 1e-5, rows, rows, per, per, None, eight_rows, scale, streams, None, None, *words)
        activate = build_activation_output(Activation.GELU, granularity, Rounding.NEAREST, config)
        yield activate, (rows, rows, eight_rows, scale, streams, eight_rows, per, *words)
        norm = build_rms_norm_output(granularity, Rounding.STOCHASTIC, config)
        yield norm, (rows, of, 1e-5, rows, rows, per, None, eight_rows, scale, streams, None, None, *words)
        gate, copies = build_glu_output(Activation.SILU, granularity, Rounding.STOCHASTIC, config), (eight_rows, per)
        yield gate, (rows, rows, None, eight_rows, scale, streams, *copies, *copies, *words[:2], 9, words[2])
        back = build_glu_grad_input(Activation.SILU, granularity, Rounding.STOCHASTIC, config)
        yield back, (rows, eight_rows, per, eight_rows, per, rows, rows, scale, eight_rows, words[0], streams)
    yield build_rms_norm_grad_input(config), (rows, eight_rows, per, per, of, rows, per)
    yield build_layer_norm_grad_input(config), (rows, eight_rows, per, per, per, of, rows, per, per)
    yield build_activation_grad_input(Activation.SILU, config), (rows, rows, None, rows)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    driver.set_active(Driver())
    knobs.runtime.add_stages_inspection_hook = no_further_than_read
    found = []
    for kernel, operands in cases():
        rounds = []
        for _ in range(2):
            CALLS.clear()
            kernel(*operands)
            rounds.append(json.loads(json.dumps(CALLS)))
        found.append(rounds)
    print(json.dumps(found))
