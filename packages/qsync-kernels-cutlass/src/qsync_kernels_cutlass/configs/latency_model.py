"""How long a configuration should take: tiles in waves over the multiprocessors, each as slow as its tensor cores or its loads.

A step of a tile's main loop takes the longer of its products and of its loads from the L2 cache, which blocks of a cluster share in
part.  A ping-pong tile hides its epilogue behind the next tile's main loop, a cooperative one does not.  Nothing is faster than
memory.  The constants were fitted to the order of 42 int8 kernels on 6 products and 23 convolutions on an H200: the first guess
was within 3% of the best measured one in the mean, and the best five held it within 5%; times are off by 15%.  For other chips the
constants are scaled by the chips' peaks.
"""

from __future__ import annotations

import math

from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.configs import validity
from qsync_kernels_cutlass.configs.config import Config, Family, Schedule, Scheduler
from qsync_kernels_cutlass.configs.problem import BYTES, ConvProblem, Problem, folded_channels, folded_taps

_LAUNCH_NS = 2300.0
_CLUSTER_NS = 1200.0
"""How long the blocks of a cluster take to meet, at its start and at its end."""
_PING_PONG_NS = 860.0
"""Once a tile: handing the tensor cores from one warp group to the other, and filling the pipeline."""
_REACHED = 0.81
"""Share of the peak that the largest tiles reach, at the clock that the chip holds under them."""
_L2_OVER_MEMORY = 2.4
_GATHERED_OVER_MEMORY = 3.0
"""Bandwidth at which all multiprocessors load operands, over that of memory: of a product, and of a convolution, whose taps
lie near each other."""
_SHARED_LOADS = 0.75
"""Time that a product's load takes when two blocks share it, over that of one that they do not share."""
_SMALL_TILE = 0.02
"""What small tiles lose (at 128 rows a warp group and 64 columns): shared memory is read more often per product."""
_COOPERATIVE_EPILOGUE = 1.9
_LAST_EPILOGUE = 1.3
"""Shares of an epilogue that nothing hides: of each cooperative tile, and of the last ping-pong tile."""
_WIDE = 1.01
"""A cooperative tile that is wider than high is a little slower than one that is higher than wide."""
_STREAM_K = 1.1
_ALONE = 1.15
"""2.x kernels hide one block's loads behind another's products; a block that is alone on its multiprocessor does not."""


def predicted_ns(config: Config, problem: Problem, arch: Architecture, sms: int = 0) -> float:
    """The time of a problem with a valid configuration, in nanoseconds.

    Args:
        config: what runs; of the run-time knobs only ``splits`` counts.
        problem: sizes and formats.
        arch: the chip.
        sms: its multiprocessors; 0 takes the usual chip's.
    """
    sms = sms or arch.sms
    of_path = _tma_ns if config.path is Family.TMA else _two_point_x_ns
    return max(of_path(config, problem, arch, sms), _bytes(problem) / arch.bandwidth_gbs) + _LAUNCH_NS


def _tma_ns(config: Config, problem: Problem, arch: Architecture, sms: int) -> float:
    (rows, columns, _), (cluster_m, cluster_n) = config.tile, config.cluster
    cooperative = config.schedule is Schedule.COOPERATIVE
    group_rows = rows // 2 if cooperative else rows
    small = 1 + _SMALL_TILE * (128 / min(group_rows, 128)) * (64 / columns)
    products_ns = _step_products_ns(config, problem, arch, _REACHED) * small
    shared = 1.0 if isinstance(problem, ConvProblem) else _SHARED_LOADS
    shares = (shared if cluster_n > 1 else 1.0, shared if cluster_m > 1 else 1.0)
    loads_ns = _step_loads_ns(config, problem, arch, sms, shares)
    main_ns = _steps(config, problem) * max(products_ns, loads_ns)
    epilogue_ns = rows * columns * BYTES[problem.out_format] * sms / arch.bandwidth_gbs
    if cooperative:
        tile_ns, rest_ns = main_ns + _COOPERATIVE_EPILOGUE * epilogue_ns, 0.0
        tile_ns *= _WIDE if columns > rows else 1.0
    else:
        tile_ns, rest_ns = max(main_ns, epilogue_ns) + _PING_PONG_NS, _LAST_EPILOGUE * epilogue_ns
    rest_ns += _CLUSTER_NS if config.cluster != (1, 1) else 0.0
    tiles = _tiles(config, problem)
    if getattr(config, "scheduler", None) is not Scheduler.STREAM_K:
        return math.ceil(tiles / sms) * tile_ns + rest_ns
    # Every multiprocessor works to the end, but partial sums travel through the L2 cache and are added there.
    sums_ns = 8.0 * rows * columns * sms / arch.bandwidth_gbs
    return _STREAM_K * max(1.0, tiles / sms) * tile_ns + rest_ns + sums_ns


def _two_point_x_ns(config: Config, problem: Problem, arch: Architecture, sms: int) -> float:
    rows, columns, _ = config.tile
    warp_rows, warp_columns, _ = config.warp
    # Operands come from shared memory, so products a read grow with the warp's tile; 64 x 64 reaches all that there is to reach.
    share = min(1.0, math.sqrt(warp_rows * warp_columns / (warp_rows + warp_columns) / 32))
    reached = _REACHED * share * (1.0 if config.path is Family.MMA else 1 / 8)
    step_ns = max(_step_products_ns(config, problem, arch, reached), _step_loads_ns(config, problem, arch, sms, (1.0, 1.0)))
    resident = max(1, resident_blocks(config, problem, arch))
    epilogue_ns = rows * columns * BYTES[problem.out_format] * sms / arch.bandwidth_gbs
    tile_ns = _steps(config, problem) * step_ns * (_ALONE if resident == 1 else 1.0) + epilogue_ns / resident
    return math.ceil(_tiles(config, problem) / sms) * tile_ns


def _step_products_ns(config: Config, problem: Problem, arch: Architecture, reached: float) -> float:
    """Products of one step of the main loop on one multiprocessor's tensor cores."""
    rows, columns, depth = config.tile
    operations_per_ns = arch.tensor_tops * 1e3 * (1.0 if BYTES[problem.a_format] == 1 else 0.5) / arch.sms
    return 2.0 * rows * columns * depth / (operations_per_ns * reached)


def _step_loads_ns(config: Config, problem: Problem, arch: Architecture, sms: int, shares: tuple[float, float]) -> float:
    """Loads of one step from the L2 cache, when all multiprocessors load."""
    rows, columns, depth = config.tile
    loaded = (rows * shares[0] + columns * shares[1]) * depth * BYTES[problem.a_format]
    over_memory = _GATHERED_OVER_MEMORY if isinstance(problem, ConvProblem) else _L2_OVER_MEMORY
    return loaded * sms / (over_memory * arch.bandwidth_gbs)


def _tiles(config: Config, problem: Problem) -> int:
    """Tiles in whole clusters, of all groups."""
    sides = zip((problem.m, problem.n), config.tile, config.cluster, strict=False)
    tiles_m, tiles_n = (math.ceil(math.ceil(length / side) / together) * together for length, side, together in sides)
    return tiles_m * tiles_n * (problem.geometry.groups if isinstance(problem, ConvProblem) else 1)


def _steps(config: Config, problem: Problem) -> int:
    """Steps of a tile's main loop; a convolution's step stays within one tap of the filter, or one row of taps of a folded one."""
    depth = config.tile[2]
    if not isinstance(problem, ConvProblem):
        return math.ceil(problem.k / depth)
    if problem.folds:
        down, across = folded_taps(problem.taps, problem.geometry)
        return down * math.ceil(across * folded_channels(problem.in_c, problem.geometry) / depth)
    return problem.filter_h * problem.filter_w * math.ceil(problem.group_channels / depth)


def _bytes(problem: Problem) -> int:
    """What has to be read from and written to memory at least."""
    size, out_size = BYTES[problem.a_format], BYTES[problem.out_format]
    if isinstance(problem, ConvProblem):
        return problem.images * problem.in_h * problem.in_w * problem.in_c * size + problem.m * problem.out_c * out_size
    return (problem.m + problem.n) * problem.k * size + problem.m * problem.n * out_size


def resident_blocks(config: Config, problem: Problem, arch: Architecture) -> int:
    """Blocks of a 2.x kernel that one multiprocessor holds at a time."""
    threads = validity.threads(config)
    registers = min(255, config.tile[0] * config.tile[1] // threads + 64)
    return min(
        arch.shared_bytes_per_sm // (validity.shared_bytes(config, problem) + 1024),
        arch.threads_per_sm // threads,
        arch.registers_per_sm // (registers * threads),
        arch.blocks_per_sm,
    )
