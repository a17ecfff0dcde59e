"""CUDA source of the convolution kernels, from a configuration; the templates are in ``templates/conv_*.cuh``."""

from __future__ import annotations

from qsync_core.errors import BackendError
from qsync_kernels_cutlass.config import ConvConfig, Family, Iterator, Schedule
from qsync_kernels_cutlass.kernel_source import KernelSource

_ELEMENTS = {"float32": "float", "float16": "cutlass::half_t", "bfloat16": "cutlass::bfloat16_t"}
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

OUT_ALIGNMENT = {"float32": 4, "float16": 8, "bfloat16": 8}
"""Output channels come in multiples of 16 bytes."""

_EXPORTS = """\
QSYNC_EXPORT int32_t qsync_{name}(const QsyncArguments* arguments) {{ return {run}(*arguments); }}
QSYNC_EXPORT int64_t qsync_{name}_workspace(const QsyncArguments* arguments) {{ {workspace} }}
"""


def conv_source(config: ConvConfig, arch: str, out_format: str) -> KernelSource:
    """The source of an int8 convolution with dequantization into ``out_format``.

    Args:
        config: which template and its tiles; run-time knobs do not matter.
        arch: architecture to compile for.
        out_format: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        BackendError: when there is no template for the configuration's path or the output's format.
    """
    if out_format not in _ELEMENTS:
        raise BackendError(f"int8 convolutions write {', '.join(_ELEMENTS)}, not {out_format}")
    if config.path is Family.TMA:
        return _tma(config, arch, out_format)
    if config.path is Family.MMA:
        return _mma(config, arch, out_format)
    raise BackendError("there is no convolution without tensor cores among the CUTLASS templates; choose the backend aten")


def fold_source(arch: str) -> KernelSource:
    """The source of the kernel that folds pixels of few channels into pixels of 16."""
    return _operands("conv2d_fold_pixels", "run_fold_pixels", arch)


def turn_source(arch: str) -> KernelSource:
    """The source of the kernel that turns filters for the gradient of the input."""
    return _operands("conv2d_turn_filters", "run_turn_filters", arch)


def _operands(name: str, run: str, arch: str) -> KernelSource:
    exports = _EXPORTS.format(name=name, run=f"qsync::{run}", workspace="(void)arguments; return 0;")
    return KernelSource(name, f'#include "conv_operands.cuh"\n{exports}', arch)


def _tma(config: ConvConfig, arch: str, out_format: str) -> KernelSource:
    tile, cluster = _text(config.tile), _text(config.cluster)
    cooperative = config.schedule is Schedule.COOPERATIVE
    schedule = "coop" if cooperative else "ping"
    name = f"conv2d_tma_{tile}_{cluster}_{config.stages}_{schedule}_{_SHORT[out_format]}"
    knobs = [*config.tile, *config.cluster, config.stages, "true" if cooperative else "false", _ELEMENTS[out_format]]
    return _kernel(name, "conv_sm90.cuh", f"qsync::ConvSm90<{', '.join(map(str, knobs))}>", arch)


def _mma(config: ConvConfig, arch: str, out_format: str) -> KernelSource:
    iterator = config.iterator
    name = f"conv2d_mma_{_text(config.tile)}_{_text(config.warp)}_{config.stages}_{iterator}_{_SHORT[out_format]}"
    shapes = [f"cutlass::gemm::GemmShape<{', '.join(map(str, shape))}>" for shape in (config.tile, config.warp, config.instruction)]
    # Chips after Ampere run its instructions; only Turing has others.
    tag = "cutlass::arch::Sm75" if arch == "sm_75" else "cutlass::arch::Sm80"
    algorithm = "kOptimized" if iterator is Iterator.OPTIMIZED else "kAnalytic"
    knobs = [tag, *shapes, config.stages, f"cutlass::conv::IteratorAlgorithm::{algorithm}", _ELEMENTS[out_format]]
    return _kernel(name, "conv_2x.cuh", f"qsync::Conv2x<{', '.join(map(str, knobs))}>", arch)


def _kernel(name: str, template: str, type_name: str, arch: str) -> KernelSource:
    exports = _EXPORTS.format(name=name, run="Kernel::run", workspace="return Kernel::workspace(*arguments);")
    return KernelSource(name, f'#include "{template}"\nusing Kernel = {type_name};\n{exports}', arch)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
