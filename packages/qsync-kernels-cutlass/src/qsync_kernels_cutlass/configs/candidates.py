"""The configurations of a problem: all that are valid, and those worth measuring, best guess first.

The ranking is that of :mod:`~qsync_kernels_cutlass.configs.latency_model`, which only has to put good ones early: tuning measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import attrs

from qsync_kernels_cutlass.architectures import Architecture
from qsync_kernels_cutlass.configs import validity
from qsync_kernels_cutlass.configs.config import (
    AddressIterator,
    Config,
    ConvConfig,
    Family,
    GemmConfig,
    Raster,
    Schedule,
    Scheduler,
)
from qsync_kernels_cutlass.configs.latency_model import predicted_ns
from qsync_kernels_cutlass.configs.problem import BYTES, ConvProblem, Problem

KERNELS_TO_MEASURE = 4
"""Libraries that tuning one problem may ask for; compiling one takes tens of seconds, though once for all shapes."""
CONFIGS_TO_MEASURE = 24
"""Configurations that tuning one problem measures."""

_WITH_KNOBS = 3
_KNOBS_WORTH_MEASURING: tuple[dict[str, Any], ...] = (
    {"raster": Raster.ALONG_N, "swizzle": 8},
    {"raster": Raster.ALONG_M, "swizzle": 4},
    {"raster": Raster.ALONG_N, "swizzle": 4},
    {"swizzle": 4},
)

_PORTFOLIO = {
    (Schedule.PINGPONG, (128, 128), (2, 1)),
    (Schedule.PINGPONG, (128, 128), (1, 1)),
    (Schedule.PINGPONG, (128, 128), (1, 2)),
    (Schedule.PINGPONG, (64, 256), (2, 1)),
    (Schedule.PINGPONG, (128, 64), (1, 1)),
    (Schedule.PINGPONG, (64, 128), (1, 1)),
    (Schedule.PINGPONG, (64, 64), (1, 1)),
    (Schedule.COOPERATIVE, (256, 128), (1, 2)),
    (Schedule.COOPERATIVE, (256, 128), (2, 1)),
    (Schedule.COOPERATIVE, (128, 256), (1, 1)),
    (Schedule.COOPERATIVE, (256, 64), (2, 1)),
    (Schedule.COOPERATIVE, (128, 192), (2, 1)),
    (Schedule.COOPERATIVE, (128, 128), (2, 1)),
}
"""TMA kernels that tuning chooses from (schedule, tile's sides, cluster).  On an H200 one of them was within 5% of the best of all
on each of 29 products and convolutions, and the operators of a job share the few libraries."""

_STREAM_K_TILE = (128, 128)
"""The output tile of the portfolio's stream-K kernel, for few tiles of a long k."""

_COOPERATIVE = ((256, 128), (128, 256), (128, 192), (256, 96), (128, 128), (256, 64), (128, 96), (128, 64))
_PINGPONG = ((64, 256), (128, 128), (64, 192), (128, 96), (64, 128), (128, 64), (64, 96), (64, 64))
_CLUSTERS = ((2, 1), (1, 2), (1, 1))
_SHALLOW = ((256, 128), (128, 256), (128, 128))
"""Tiles that are tried 64 bytes deep too: with twice the stages, large products ran up to 6% faster (8192 cubed on an H200)."""
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
)
_SIMT_TILES = (((128, 128), (32, 64)), ((128, 64), (64, 32)), ((64, 64), (32, 32)), ((32, 64), (32, 32)))


def all_valid(problem: Problem, arch: Architecture) -> Iterator[Config]:
    """Every configuration of the search space that the chip can run, run-time knobs included; in no order of merit."""
    for config in _compiled_space(problem, arch):
        for knobs in _run_time_knobs(config, problem):
            yield attrs.evolve(config, **knobs)


def compiled(problem: Problem, arch: Architecture) -> list[Config]:
    """Every compiled part of a configuration that the chip can run (run-time knobs at their defaults), best guess first."""
    return _best_first(_compiled_space(problem, arch), problem, arch)


@lru_cache(maxsize=4096)
def ranked(problem: Problem, arch: Architecture) -> tuple[Config, ...]:
    """Configurations worth measuring, best guess first; at most ``CONFIGS_TO_MEASURE`` of ``KERNELS_TO_MEASURE`` libraries."""
    space = _compiled_space(problem, arch)
    tried = [config for config in space if _in_portfolio(config, problem)] or space
    kept = _best_first(tried, problem, arch)[:KERNELS_TO_MEASURE]
    found = list(kept)
    # Large products gain up to 6% from the order of their tiles, which is measured for the best guesses first.
    for config, knobs in itertools.product(kept[:_WITH_KNOBS], _KNOBS_WORTH_MEASURING):
        found.append(attrs.evolve(config, **knobs))
    for config in kept:
        found += [attrs.evolve(config, **knobs) for knobs in _run_time_knobs(config, problem)]
    valid = (config for config in dict.fromkeys(found) if validity.is_valid_at_run_time(config, problem))
    return tuple(itertools.islice(valid, CONFIGS_TO_MEASURE))


def _best_first(configs: list[Config], problem: Problem, arch: Architecture) -> list[Config]:
    return sorted(configs, key=lambda config: (predicted_ns(config, problem, arch), config.text))


def _in_portfolio(config: Config, problem: Problem) -> bool:
    if config.path is not Family.TMA:
        return True
    if isinstance(config, GemmConfig) and config.scheduler is Scheduler.STREAM_K:
        return config.tile == (*_STREAM_K_TILE, _depth(problem))
    return config.tile[2] == _depth(problem) and (config.schedule, config.tile[:2], config.cluster) in _PORTFOLIO


def _compiled_space(problem: Problem, arch: Architecture) -> list[Config]:
    made = itertools.chain(_tma_space(problem), _mma_space(problem, arch), _simt_space(problem))
    families: dict[Family, list[Config]] = {path: [] for path in Family}
    for config in made:
        if validity.is_valid(config, arch, problem):
            families[config.path].append(config)
    # The 2.x path runs on sm_90a too, at half its speed, and SIMT kernels run anywhere: for chips that have nothing better.
    return next((families[path] for path in (Family.TMA, Family.MMA, Family.SIMT) if families[path]), [])


def _tma_space(problem: Problem) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    size = BYTES[problem.a_format]
    depth = _depth(problem)
    for schedule, tiles in ((Schedule.COOPERATIVE, _COOPERATIVE), (Schedule.PINGPONG, _PINGPONG)):
        for (rows, columns), cluster in itertools.product(tiles, _CLUSTERS):
            config = cls(Family.TMA, (rows, columns, depth), cluster=cluster, schedule=schedule)
            yield config
            if not isinstance(config, GemmConfig) or cluster == (1, 1):
                continue
            if (rows, columns) in _SHALLOW and depth * size == 128:
                yield attrs.evolve(config, tile=(rows, columns, depth // 2))
            if schedule is Schedule.COOPERATIVE and cluster == (2, 1):
                yield attrs.evolve(config, scheduler=Scheduler.STREAM_K)


def _depth(problem: Problem) -> int:
    """Elements of a tile's depth: 128 bytes, or half of that where the channels of a tap do not fill them.

    A short k is no reason for a library of its own: such products wait for memory.
    """
    size = BYTES[problem.a_format]
    return (64 if isinstance(problem, ConvProblem) and problem.group_channels * size % 128 else 128) // size


def _mma_space(problem: Problem, arch: Architecture) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    size = BYTES[problem.a_format]
    instructions = validity.instructions(arch, problem.a_format)
    if not instructions:
        return
    stages = (3, 4, 5, 6) if arch.async_copies else (2,)
    for ((rows, columns), warp), depth, count in itertools.product(_WARP_TILES, (64 // size, 128 // size), stages):
        config = cls(Family.MMA, (rows, columns, depth), (*warp, depth), instructions[0], count)
        if isinstance(config, ConvConfig) and isinstance(problem, ConvProblem) and validity.mask_reasons(problem):
            config = attrs.evolve(config, iterator=AddressIterator.ANALYTIC)
        yield config


def _simt_space(problem: Problem) -> Iterator[Config]:
    cls = ConvConfig if isinstance(problem, ConvProblem) else GemmConfig
    depth, instruction = (32, (1, 1, 4)) if problem.a_format == "int8" else (8, (1, 1, 1))
    for (rows, columns), warp in _SIMT_TILES:
        yield cls(Family.SIMT, (rows, columns, depth), (*warp, depth), instruction, 2)


def _run_time_knobs(config: Config, problem: Problem) -> Iterator[dict[str, Any]]:
    """Run-time knobs, the default ones first."""
    rasters = (Raster.HEURISTIC, Raster.ALONG_M, Raster.ALONG_N) if config.path is Family.TMA else (Raster.HEURISTIC,)
    splits = (1, 2, 4) if isinstance(config, GemmConfig) and config.scheduler is Scheduler.STREAM_K else (1,)
    for parts, swizzle, raster in itertools.product(splits, (1, 2, 4, 8), rasters):
        knobs: dict[str, Any] = {"splits": parts, "swizzle": swizzle, "raster": raster}
        if validity.is_valid_at_run_time(attrs.evolve(config, **knobs), problem):
            yield knobs
