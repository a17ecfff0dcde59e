"""The configurations of a problem: all that are valid, and those worth measuring, best guess first.

The ranking is a model: a tile's time is that of its products at the share of the peak that its shape can reach (operands come from
shared memory, so square and large tiles reach more), plus what is not hidden (filling the pipeline, a cooperative tile's
epilogue); tiles run in waves over the multiprocessors; and nothing is faster than memory.  It only has to put good ones early:
tuning measures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import attrs

from qsync_kernels_cutlass import validity
from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.config import ConvConfig, GemmConfig, Path, Raster, Schedule, Scheduler, Shape3
from qsync_kernels_cutlass.problem import BYTES, ConvProblem, Problem
from qsync_kernels_cutlass.validity import Config

KERNELS_TO_MEASURE = 8
"""Libraries that tuning one problem may ask for; compiling one takes tens of seconds, though once for all shapes."""
CONFIGS_TO_MEASURE = 24
"""Configurations that tuning one problem measures."""

_COOPERATIVE = ((128, 256), (256, 128), (128, 192), (256, 96), (128, 160), (128, 128), (256, 64), (128, 96), (128, 64))
_PINGPONG = ((64, 256), (128, 128), (64, 192), (128, 96), (64, 128), (128, 64), (64, 96), (64, 64))
_CLUSTERS = ((2, 1), (1, 2), (1, 1))
_WARP_TILES: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = (
    ((128, 256), (64, 64)),
    ((256, 128), (64, 64)),
    ((128, 128), (64, 64)),
    ((128, 128), (32, 64)),
    ((256, 64), (64, 64)),
    ((64, 256), (64, 64)),
    ((128, 64), (64, 32)),
    ((64, 128), (32, 64)),
    ((64, 64), (32, 32)),
    ((128, 32), (32, 32)),
    ((32, 128), (32, 32)),
    ((64, 32), (32, 16)),
)
_SIMT_TILES = (((128, 128), (32, 64)), ((128, 64), (64, 32)), ((64, 64), (32, 32)), ((32, 64), (32, 32)))

_LAUNCH_NS = 3000.0
_FILL_NS = 900.0
"""Time from a block's start to its first product: descriptors, the first stage's trip from memory."""


def all_valid(problem: Problem, arch: Architecture) -> Iterator[Config]:
    """Every configuration of the search space that the chip can run, run-time knobs included; in no order of merit."""
    for config in _compiled_space(problem, arch):
        for knobs in _run_time_knobs(config, problem):
            yield attrs.evolve(config, **knobs)


@lru_cache(maxsize=4096)
def ranked(problem: Problem, arch: Architecture, sms: int = 0) -> tuple[Config, ...]:
    """Configurations worth measuring, best guess first; at most ``CONFIGS_TO_MEASURE`` of ``KERNELS_TO_MEASURE`` libraries.

    Args:
        problem: sizes and formats.
        arch: the chip.
        sms: its multiprocessors; 0 takes the usual chip's.
    """
    by_time = sorted(_compiled_space(problem, arch), key=lambda config: (predicted_ns(config, problem, arch, sms), config.text))
    # A kernel that differs from a better one in its cluster only is of less use than another tile.
    kept = _first_of_each(by_time, 2)[:KERNELS_TO_MEASURE]
    found = list(kept)
    for config in kept:
        found += [attrs.evolve(config, **knobs) for knobs in _run_time_knobs(config, problem)][1:]
    # The first library's knobs matter more than a sixth library's: take them in the order of the libraries.
    return tuple(dict.fromkeys(found))[:CONFIGS_TO_MEASURE]


def _first_of_each(configs: list[Config], count: int) -> list[Config]:
    """At most ``count`` of a tile and schedule."""
    seen: dict[tuple[Shape3, str], int] = {}
    kept = []
    for config in configs:
        key = (config.tile, str(config.schedule))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= count:
            kept.append(config)
    return kept


def _compiled_space(problem: Problem, arch: Architecture) -> Iterator[Config]:
    made = itertools.chain(_tma_space(problem), _mma_space(problem, arch), _simt_space(problem))
    families: dict[Path, list[Config]] = {path: [] for path in Path}
    for config in made:
        if validity.is_valid(config, arch, problem):
            families[config.path].append(config)
    # The 2.x path runs on sm_90a too, at half its speed, and SIMT kernels run anywhere: for chips that have nothing better.
    return iter(next((families[path] for path in (Path.TMA, Path.MMA, Path.SIMT) if families[path]), []))


def _tma_space(problem: Problem) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    size = BYTES[problem.a_format]
    depths = [128 // size] if problem.k * size > 64 else [64 // size]
    if isinstance(problem, ConvProblem) and problem.group_channels * size % 128:
        depths = [64 // size]
    for schedule, tiles in ((Schedule.COOPERATIVE, _COOPERATIVE), (Schedule.PINGPONG, _PINGPONG)):
        for (rows, columns), cluster, depth in itertools.product(tiles, _CLUSTERS, depths):
            config = cls(Path.TMA, (rows, columns, depth), cluster=cluster, schedule=schedule)
            yield config
            if isinstance(config, GemmConfig) and schedule is Schedule.COOPERATIVE and cluster == (2, 1):
                yield attrs.evolve(config, scheduler=Scheduler.STREAM_K)


def _mma_space(problem: Problem, arch: Architecture) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    size = BYTES[problem.a_format]
    instructions = validity.instructions(arch, problem.a_format)
    if not instructions:
        return
    stages = (3, 4, 5, 6) if arch.async_copies else (2,)
    for ((rows, columns), warp), depth, count in itertools.product(_WARP_TILES, (64 // size, 128 // size), stages):
        yield cls(Path.MMA, (rows, columns, depth), (*warp, depth), instructions[0], count)


def _simt_space(problem: Problem) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    depth, instruction = (32, (1, 1, 4)) if problem.a_format == "int8" else (8, (1, 1, 1))
    for (rows, columns), warp in _SIMT_TILES:
        yield cls(Path.SIMT, (rows, columns, depth), (*warp, depth), instruction, 2)


def _run_time_knobs(config: Config, problem: Problem) -> Iterator[dict[str, object]]:
    """Run-time knobs, the default ones first."""
    rasters = (Raster.HEURISTIC, Raster.ALONG_M, Raster.ALONG_N) if config.path is Path.TMA else (Raster.HEURISTIC,)
    splits = (1, 2, 4) if isinstance(config, GemmConfig) and config.scheduler is Scheduler.STREAM_K else (1,)
    for parts, swizzle, raster in itertools.product(splits, (1, 2, 4, 8), rasters):
        knobs: dict[str, object] = {"splits": parts, "swizzle": swizzle, "raster": raster}
        if validity.is_valid_at_run_time(attrs.evolve(config, **knobs), problem):
            yield knobs


def predicted_ns(config: Config, problem: Problem, arch: Architecture, sms: int = 0) -> float:
    """The model's time of a problem with a configuration, in nanoseconds."""
    sms = sms or arch.sms
    rows, columns, depth = config.tile
    size, out_size = BYTES[problem.a_format], BYTES[problem.out_format]
    tiles = _up(problem.m, rows, config.cluster[0]) * _up(problem.n, columns, config.cluster[1]) * config.splits
    if isinstance(problem, ConvProblem):
        tiles *= problem.geometry.groups
        steps = problem.filter_h * problem.filter_w * math.ceil(problem.group_channels / depth)
    else:
        steps = math.ceil(math.ceil(problem.k / depth) / config.splits)
    peak = arch.tensor_tops * 1e3 * (1.0 if size == 1 else 0.5) / arch.sms  # operations a nanosecond of one multiprocessor
    if config.path is Path.SIMT:
        peak /= 8
    products_ns = steps * 2.0 * rows * columns * depth / (peak * _share_of_peak(config))
    store_ns = rows * columns * out_size / (arch.bandwidth_gbs / sms)
    if config.path is Path.TMA:
        resident = 1
        tile_ns = max(products_ns, store_ns) if config.schedule is Schedule.PINGPONG else products_ns + 0.6 * store_ns
    else:
        resident = max(1, _resident_blocks(config, problem, arch))
        tile_ns = products_ns + store_ns / resident
    waves = tiles / sms if getattr(config, "scheduler", None) is Scheduler.STREAM_K else float(math.ceil(tiles / sms))
    compute_ns = max(1.0, waves) * tile_ns + _FILL_NS
    if getattr(config, "scheduler", None) is Scheduler.STREAM_K:
        compute_ns += (
            0.03 * compute_ns + 2 * _FILL_NS + 8.0 * rows * columns * sms / arch.bandwidth_gbs
        )  # partial sums travel through the L2 cache
    if config.splits > 1:
        compute_ns += 8.0 * problem.m * problem.n * config.splits / arch.bandwidth_gbs
    # Full occupancy hides one block's loads behind another's products.
    if config.path is not Path.TMA and resident == 1:
        compute_ns *= 1.15
    traffic = (problem.m + problem.n) * problem.k * size + problem.m * problem.n * out_size
    if isinstance(problem, ConvProblem):
        traffic = problem.images * problem.in_h * problem.in_w * problem.in_c * size + problem.m * problem.out_c * out_size
    return max(compute_ns, traffic / arch.bandwidth_gbs) + _LAUNCH_NS


def _up(length: int, side: int, cluster: int) -> int:
    """Tiles along one side, in whole clusters."""
    return math.ceil(math.ceil(length / side) / cluster) * cluster


def _share_of_peak(config: Config) -> float:
    """Products per operand read grow with a tile's harmonic mean; 128 x 256 counts as 1.  Clusters share their reads of L2."""
    rows, columns, _ = config.tile
    if config.path is not Path.TMA:
        rows, columns = config.warp[0] * 2, config.warp[1] * 2
    share = min(1.0, math.sqrt(rows * columns / (rows + columns) / (128 * 256 / 384)))
    if config.path is Path.TMA:
        share *= 1.0 if config.cluster != (1, 1) else 0.97
    return share


def _resident_blocks(config: Config, problem: Problem, arch: Architecture) -> int:
    threads = validity.threads(config)
    registers = min(255, config.warp[0] * config.warp[1] // 32 + 64)
    return min(
        arch.shared_bytes_per_sm // (validity.shared_bytes(config, arch, problem) + 1024),
        arch.threads_per_sm // threads,
        arch.registers_per_sm // (registers * threads),
        arch.blocks_per_sm,
    )
