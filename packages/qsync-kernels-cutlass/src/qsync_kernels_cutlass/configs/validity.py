"""Which configurations a chip can run: what CUTLASS would report as a page of template errors, as a reason."""

from __future__ import annotations

import math

import attrs

from qsync_core.geometry import NEUTRAL, Geometry
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.configs.config import (
    AddressIterator,
    Config,
    ConvConfig,
    Family,
    GemmConfig,
    Raster,
    Schedule,
    Scheduler,
    Shape3,
    shape_text,
)
from qsync_kernels_cutlass.configs.problem import BYTES, LONGEST_STRIDE, ConvProblem, Problem, folded_taps

MAX_SWIZZLE = 8
MAX_SPLITS = 32
WARP_GROUP = 128
"""Threads of a warp group, which executes wgmma."""
MAX_ACCUMULATORS = 128
"""Accumulator registers of a thread; with more, operands' addresses and the epilogue spill into memory (255 is the hard limit)."""
MAX_FLOAT8_ACCUMULATORS = 96
"""The same for float8 on the TMA path, which keeps two sets: tensor cores add float8 in fewer bits than float32, so sums are
promoted into a second set every few steps."""
SIMT_SIDE = 16
"""A block without tensor cores has 16 x 16 threads."""
MAX_SIMT_ACCUMULATORS = 64
MOST_PADDING = 127
FARTHEST_TAP = 254
"""Limits of TMA's im2col mode with two spatial dimensions, whose corners and offsets are bytes (CUDA driver API,
``cuTensorMapEncodeIm2col``)."""
MOST_MASKED_TAPS = 32
"""Rows or columns of a filter for which the 2.x path's optimized iterator keeps a mask in one register."""
STATIC_SHARED_BYTES = 48 << 10
"""What a kernel may have without opting in."""
ALIGNMENT_BYTES = 16
"""What TMA and cp.async move at a time; rows start at multiples of it (front-ends pad)."""

SWIZZLE_ALIGNMENT = 1024
"""Where a buffer that TMA writes or reads with 128-byte swizzling starts."""
STORED_LINE_BYTES = 128
"""What a TMA convolution stores of an output row at a time."""
_TMA_BARRIER_BYTES = 16
_OTHER_BARRIER_BYTES = 256
STORED_ROW_BYTES = 64
"""What a warp stores of an output row at least: its 32 threads store 16 bytes each to 8 rows."""

_INSTRUCTIONS: dict[str, dict[int, tuple[Shape3, ...]]] = {
    # Architecture: {bytes of an operand's element: shapes}.  PTX ISA, "matrix multiply-accumulate instructions".
    "sm_70": {2: ((8, 8, 4),)},
    "sm_75": {1: ((8, 8, 16),), 2: ((16, 8, 8),)},
    "sm_80": {1: ((16, 8, 32),), 2: ((16, 8, 16), (16, 8, 8))},
    "sm_86": {1: ((16, 8, 32),), 2: ((16, 8, 16), (16, 8, 8))},
    "sm_89": {1: ((16, 8, 32),), 2: ((16, 8, 16), (16, 8, 8))},
    "sm_90a": {1: ((16, 8, 32),), 2: ((16, 8, 16), (16, 8, 8))},
}


def reasons(config: Config, arch: Architecture, problem: Problem) -> list[str]:
    """Why a configuration cannot run a problem on a chip, each reason half a sentence; empty means it can."""
    by_path = {Family.TMA: _tma, Family.MMA: _mma, Family.SIMT: _simt}
    found = [
        *_run_time_knobs(config, problem),
        *(f"the tile {shape_text(config.tile)} has a side of 0" for side in config.tile if not side),
    ]
    return found if found else by_path[config.path](config, arch, problem)


def is_valid(config: Config, arch: Architecture, problem: Problem) -> bool:
    """Whether :func:`reasons` has none."""
    return not reasons(config, arch, problem)


def is_valid_at_run_time(config: Config, problem: Problem) -> bool:
    """Whether the run-time knobs fit, for a configuration whose compiled part is valid."""
    return not _run_time_knobs(config, problem)


def instructions(arch: Architecture, operand_format: str) -> tuple[Shape3, ...]:
    """Tensor core instructions of the 2.x path for operands of a format, the widest first; empty where there is none."""
    return _INSTRUCTIONS[arch.name].get(BYTES[operand_format], ())


def shared_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of a thread block, in bytes: never less than what the compiled template lays out, and on the TMA path at most
    two alignments more.  Where the number of stages is left open, that of two."""
    stages = config.stages or 2
    mainloop = stages * _stage_bytes(config, problem)
    if config.path is not Family.TMA:
        return max(mainloop, _staged_epilogue(config))
    # Barriers first (two words of 8 bytes a stage, and a few of the epilogue's and the tile scheduler's), then the two parts.
    parts = (_TMA_BARRIER_BYTES * stages + _OTHER_BARRIER_BYTES, tma_epilogue_bytes(config, problem), mainloop)
    return sum(-(-part // SWIZZLE_ALIGNMENT) * SWIZZLE_ALIGNMENT for part in parts)


def tma_epilogue_bytes(config: Config, problem: Problem) -> int:
    """What a TMA kernel's epilogue keeps: up to two parts of the output's tile on their way out, and a tile's column scales and
    bias in float32."""
    tile_m, tile_n, _ = config.tile
    size = BYTES[problem.out_format]
    rows = min(tile_m, 128 if config.schedule is Schedule.COOPERATIVE else 64)
    columns = math.gcd(32, tile_n)
    if isinstance(config, ConvConfig) and tile_n % (STORED_LINE_BYTES // size) == 0:
        columns = STORED_LINE_BYTES // size  # see conv_sm90.cuh
    parts = min(2, -(-tile_m // rows) * (tile_n // columns))
    return parts * rows * columns * size + 2 * tile_n * 4


def max_stages(config: Config, arch: Architecture, problem: Problem) -> int:
    """Stages that fit into the chip's shared memory (0: not even one)."""
    stages = arch.shared_bytes_per_block // _stage_bytes(config, problem)
    while stages and shared_bytes(attrs.evolve(config, stages=stages), problem) > arch.shared_bytes_per_block:
        stages -= 1
    return stages


def _stage_bytes(config: Config, problem: Problem) -> int:
    size = max(BYTES[problem.a_format], BYTES[problem.b_format])
    return (config.tile[0] + config.tile[1]) * config.tile[2] * size


def threads(config: Config) -> int:
    """Threads of a block, the TMA path's producer warp group included."""
    if config.path is Family.TMA:
        return 3 * WARP_GROUP
    if config.path is Family.SIMT:
        return SIMT_SIDE**2
    return 32 * (config.tile[0] // config.warp[0]) * (config.tile[1] // config.warp[1])


def _run_time_knobs(config: Config, problem: Problem) -> list[str]:
    found = []
    if config.swizzle not in (1, 2, 4, 8):
        found.append(f"the swizzle is 1, 2, 4 or {MAX_SWIZZLE} tiles wide, not {config.swizzle}")
    if not 1 <= config.splits <= MAX_SPLITS:
        found.append(f"k is split into 1 to {MAX_SPLITS} parts, not {config.splits}")
    elif config.splits > 1:
        if isinstance(config, ConvConfig):
            found.append("a convolution is not split along k")
        elif config.scheduler is not Scheduler.STREAM_K:
            found.append("only the stream-K scheduler splits k")
        elif config.tile[2] and config.splits > -(-problem.k // config.tile[2]):
            found.append(f"{config.splits} parts are more than k has tiles")
    if config.path is not Family.TMA and config.raster is not Raster.HEURISTIC:
        found.append("the raster is a knob of the TMA path")
    if config.path is Family.SIMT and config.swizzle != 1:
        found.append("kernels without tensor cores have no swizzle")
    return found


def _tma(config: Config, arch: Architecture, problem: Problem) -> list[str]:
    tile_m, tile_n, tile_k = config.tile
    bytes_a, bytes_b = BYTES[problem.a_format], BYTES[problem.b_format]
    found = []
    if not arch.tma:
        return [f"{arch.name} has no TMA and no warp-group tensor core instructions; they came with sm_90a"]
    if bytes_a != bytes_b or bytes_a > 2:
        found.append(
            f"tensor cores multiply 8-bit with 8-bit or 16-bit with 16-bit, not {problem.a_format} with {problem.b_format}"
        )
    if config.warp != (0, 0, 0) or config.instruction != (0, 0, 0):
        found.append("warp and instruction tiles belong to the 2.x paths")
    cooperative = config.schedule is Schedule.COOPERATIVE
    least = 2 * 64 if cooperative else 64
    if tile_m % least or tile_m > 256:
        found.append(f"the {config.schedule} schedule takes tiles of {least} to 256 rows in steps of {least}, not {tile_m}")
    if tile_n % 16 or not 16 <= tile_n <= 256:
        found.append(f"a warp-group instruction takes 16 to 256 columns in steps of 16, not {tile_n}")
    if tile_k * bytes_a not in (64, 128, 256):
        found.append(f"a tile is 64, 128 or 256 bytes deep, not {tile_k * bytes_a}")
    accumulators = tile_m * tile_n // (WARP_GROUP * (2 if cooperative else 1))
    most = MAX_FLOAT8_ACCUMULATORS if problem.a_format.startswith("float8") else MAX_ACCUMULATORS
    if accumulators > most:
        found.append(f"{accumulators} accumulators a thread spill; at most {most} fit beside the epilogue")
    if config.cluster not in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)):
        found.append(f"clusters are 1x1, 2x1, 1x2, 2x2, 4x1 or 1x4, not {shape_text(config.cluster)}")
    if isinstance(problem, ConvProblem):
        found += _im2col_reasons(problem)
    if isinstance(config, GemmConfig) and config.scheduler is Scheduler.STREAM_K and not cooperative:
        found.append("the stream-K scheduler needs the cooperative schedule")
    fitting = max_stages(config, arch, problem)
    if fitting < max(2, config.stages):
        found.append(_too_little_memory(config, arch, fitting))
    if config.stages == 1:
        found.append("one stage cannot overlap loading with products; take at least 2")
    return found


def _mma(config: Config, arch: Architecture, problem: Problem) -> list[str]:
    (tile_m, tile_n, tile_k), (warp_m, warp_n, warp_k) = config.tile, config.warp
    size = BYTES[problem.a_format]
    found = _two_point_x(config)
    if BYTES[problem.b_format] != size or size > 2:
        found.append(
            f"tensor cores multiply 8-bit with 8-bit or 16-bit with 16-bit, not {problem.a_format} with {problem.b_format}"
        )
        return found
    shapes = instructions(arch, problem.a_format)
    if not shapes:
        found.append(f"{arch.name} has no tensor cores for {problem.a_format}")
    elif config.instruction not in shapes:
        known = " or ".join(map(shape_text, shapes))
        found.append(f"{arch.name} multiplies {problem.a_format} by {known} instructions, not {shape_text(config.instruction)}")
    if problem.a_format.startswith("float8") and not arch.float8_mma:
        found.append(f"{arch.name} has no float8 tensor cores; they came with sm_89")
    if "bfloat16" in (problem.a_format, problem.b_format) and not arch.bfloat16_mma:
        found.append(f"{arch.name} has no bfloat16 tensor cores; they came with sm_80")
    if not all(config.warp) or tile_m % warp_m or tile_n % warp_n or tile_k != warp_k:
        found.append(
            f"warps of {shape_text(config.warp)} do not cover the tile {shape_text(config.tile)} (with the whole of its depth)"
        )
        return found
    if any(side % least for side, least in zip(config.warp, config.instruction, strict=True) if least):
        found.append(f"a warp's tile {shape_text(config.warp)} is not made of whole instructions {shape_text(config.instruction)}")
    if warp_n * BYTES[problem.out_format] < STORED_ROW_BYTES:
        found.append(f"a warp's tile of {warp_n} columns is too narrow for stores of {problem.out_format}")
    warps = (tile_m // warp_m) * (tile_n // warp_n)
    if not 2 <= warps <= 8:
        found.append(f"a block has 2 to 8 warps, not {warps}")
    if warp_m * warp_n // 32 > MAX_ACCUMULATORS:
        found.append(f"{warp_m * warp_n // 32} accumulators a thread spill; at most {MAX_ACCUMULATORS} fit beside the operands")
    if tile_k * size not in (32, 64, 128):
        found.append(f"a tile is 32, 64 or 128 bytes deep, not {tile_k * size}")
    elif any(side * tile_k * size % (32 * warps * ALIGNMENT_BYTES) for side in (tile_m, tile_n)):
        found.append(f"{warps} warps do not divide the loads of a {shape_text(config.tile)} tile, {ALIGNMENT_BYTES} bytes a thread")
    if isinstance(config, ConvConfig) and isinstance(problem, ConvProblem) and config.iterator is AddressIterator.OPTIMIZED:
        found += mask_reasons(problem)
    found += _stages(config, arch, problem)
    return found


def _simt(config: Config, arch: Architecture, problem: Problem) -> list[str]:
    if isinstance(config, ConvConfig):
        return ["there is no convolution without tensor cores"]
    found = _two_point_x(config)
    integers = problem.a_format == "int8"
    if config.instruction != (1, 1, 4 if integers else 1):
        found.append("instructions without tensor cores are 1x1x4 for int8 (dp4a) and 1x1x1 for floats")
    (tile_m, tile_n, tile_k), (warp_m, warp_n, warp_k) = config.tile, config.warp
    if not all(config.warp) or tile_m % warp_m or tile_n % warp_n or tile_k != warp_k:
        found.append(
            f"warps of {shape_text(config.warp)} do not cover the tile {shape_text(config.tile)} (with the whole of its depth)"
        )
    if tile_m % SIMT_SIDE or tile_n % SIMT_SIDE or tile_k % 4:
        found.append(f"a tile of {SIMT_SIDE} x {SIMT_SIDE} threads has sides in steps of {SIMT_SIDE} and a depth in steps of 4")
    elif tile_m * tile_n // SIMT_SIDE**2 > MAX_SIMT_ACCUMULATORS:
        found.append(f"{tile_m * tile_n // SIMT_SIDE**2} accumulators a thread spill; at most {MAX_SIMT_ACCUMULATORS} fit")
    words = tile_k // 4 if integers else tile_k
    if words * (tile_m + tile_n + 2) * 4 > STATIC_SHARED_BYTES:
        found.append(
            f"operands of {shape_text(config.tile)} do not fit into the {STATIC_SHARED_BYTES} bytes of static shared memory"
        )
    if config.stages != 2:
        found.append(f"kernels without tensor cores have 2 stages, not {config.stages}")
    return found


def _two_point_x(config: Config) -> list[str]:
    found = []
    if config.cluster != (1, 1):
        found.append("only the TMA path has clusters")
    if (
        config.schedule is not Schedule.COOPERATIVE
        or getattr(config, "scheduler", Scheduler.PERSISTENT) is not Scheduler.PERSISTENT
    ):
        found.append("schedules and tile schedulers belong to the TMA path")
    return found


def _stages(config: Config, arch: Architecture, problem: Problem) -> list[str]:
    if not arch.async_copies and config.stages != 2:
        return [f"{arch.name} has no asynchronous copies, so that a kernel has 2 stages, not {config.stages}"]
    if arch.async_copies and not 2 <= config.stages <= 8:
        return [f"a kernel with asynchronous copies has 2 to 8 stages, not {config.stages}"]
    if shared_bytes(config, problem) > arch.shared_bytes_per_block:
        return [_too_little_memory(config, arch, max_stages(config, arch, problem))]
    return []


def _staged_epilogue(config: Config) -> int:
    """The 2.x epilogue passes accumulators through shared memory, one row of instructions of every warp at a time."""
    warps_m = config.tile[0] // config.warp[0] if config.warp[0] else 1
    return 8 * warps_m * (config.tile[1] + 8) * 4


def _too_little_memory(config: Config, arch: Architecture, fitting: int) -> str:
    wanted = max(2, config.stages)
    return (
        f"{wanted} stages of {shape_text(config.tile)} do not fit into the {arch.shared_bytes_per_block} bytes of shared memory "
        f"that {arch.name} gives a block ({fitting} do)"
    )


def _im2col_reasons(problem: ConvProblem) -> list[str]:
    """Why TMA cannot gather a convolution's pixels, each reason half a sentence; empty means it can."""
    taps, geometry = _run_as(problem)
    found = []
    if max(geometry.stride) > LONGEST_STRIDE:
        found.append(f"TMA steps over at most {LONGEST_STRIDE} pixels, not {max(geometry.stride)}")
    for axis, count in enumerate(taps):
        farthest = geometry.dilation[axis] * (count - 1)
        padding = geometry.padding[axis]
        if farthest > FARTHEST_TAP or farthest - padding > MOST_PADDING + 1:
            found.append(
                f"a filter's last tap is too far away for TMA: {farthest} pixels from the first, {farthest - padding} outside"
            )
        if padding > MOST_PADDING:
            found.append(f"TMA pads by at most {MOST_PADDING} pixels, not {padding}")
    return found


def mask_reasons(problem: ConvProblem) -> list[str]:
    """Why the 2.x path's optimized iterator cannot walk over a filter, each reason half a sentence; empty means it can."""
    most = max(_run_as(problem)[0])
    if most > MOST_MASKED_TAPS:
        return [
            f"the optimized iterator takes filters of at most {MOST_MASKED_TAPS} taps a side, not {most}; the analytic one does"
        ]
    return []


def _run_as(problem: ConvProblem) -> tuple[tuple[int, int], Geometry]:
    """Filter size and geometry of the convolution that the kernel sees."""
    if problem.folds:
        return (folded_taps(problem.taps, problem.geometry)[0], 1), NEUTRAL
    return problem.taps, problem.geometry
