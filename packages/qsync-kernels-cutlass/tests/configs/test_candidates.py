"""The search space is large enough, the ranking is sane, and libraries are few."""

from __future__ import annotations

import pytest
from kernel_requests import INT8_THROUGHOUT, conv2d, linear

from qsync_core.kernels.backend import Op
from qsync_kernels_cutlass.architectures import SM_75, SM_80, SM_86, SM_89, SM_90A
from qsync_kernels_cutlass.configs import candidates, latency_model, validity
from qsync_kernels_cutlass.configs.config import AddressIterator, Family, GemmConfig, Schedule
from qsync_kernels_cutlass.configs.problem import problem_of

CHIPS = [SM_75, SM_80, SM_86, SM_89, SM_90A]
REQUESTS = {
    "bert": linear(),
    "square": linear(m=8192, k=8192, n=8192),
    "thin": linear(m=16, k=1024, n=1000),
    "grad_weight": linear(Op.LINEAR_GRAD_WEIGHT, 8192, 4096, 4096),
    "int8 grad_weight": linear(Op.LINEAR_GRAD_WEIGHT, 8192, 4096, 4096, variant=INT8_THROUGHOUT),
    "3x3": conv2d(),
    "1x1": conv2d(w=(256, 64, 1, 1), padding="0,0"),
    "grouped": conv2d(x=(32, 64, 56, 56), w=(64, 16, 3, 3), groups="4"),
}


@pytest.mark.parametrize("arch", CHIPS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("name", REQUESTS)
def test_tuning_measures_few_libraries_of_many_valid_configurations(name, arch):
    problem = problem_of(REQUESTS[name])
    if "bfloat16" in (problem.a_format, problem.b_format) and not arch.bfloat16_mma:
        pytest.skip(f"{arch.name} has no bfloat16 tensor cores")
    ranked = candidates.ranked(problem, arch)
    every = list(candidates.all_valid(problem, arch))
    assert len(every) == len(set(every))
    assert set(ranked) <= set(every)
    assert 8 <= len(ranked) <= candidates.CONFIGS_TO_MEASURE
    assert len({config.compiled for config in ranked}) <= candidates.KERNELS_TO_MEASURE
    assert ranked[0] == ranked[0].compiled
    assert all(validity.is_valid(config, arch, problem) for config in every)


@pytest.mark.parametrize("name", ["bert", "square", "3x3", "1x1", "int8 grad_weight"])
def test_an_exhaustive_search_on_hopper_has_hundreds_of_configurations(name):
    every = list(candidates.all_valid(problem_of(REQUESTS[name]), SM_90A))
    assert len(every) >= 200
    assert {config.path for config in every} == {Family.TMA}


@pytest.mark.parametrize("arch", CHIPS, ids=lambda arch: arch.name)
def test_every_accepted_convolution_has_a_configuration(arch):
    long_filter = conv2d(x=(2, 32, 300, 8), w=(32, 32, 290, 1), padding="0,0")
    long_stride = conv2d(stride="9,9", dilation="2,2")
    for request in (long_filter, long_stride):
        problem = problem_of(request)
        ranked = candidates.ranked(problem, arch)
        assert ranked
        assert {config.path for config in ranked} == {Family.MMA}
        assert all(validity.is_valid(config, arch, problem) for config in ranked)
    assert {config.iterator for config in candidates.ranked(problem_of(long_filter), arch)} == {AddressIterator.ANALYTIC}


def test_large_products_take_large_tiles():
    """On an H200 the fastest at 8192 cubed were 128 x 128 ping-pong tiles in clusters, then 256 x 128 cooperative ones."""
    found = [(config.tile[:2], config.schedule) for config in candidates.ranked(problem_of(REQUESTS["square"]), SM_90A)]
    assert found[0] == ((128, 128), Schedule.PINGPONG)
    assert ((256, 128), Schedule.COOPERATIVE) in found


def test_shallow_tiles_are_in_the_search_space():
    """Half as deep, with twice the stages."""
    tiles = {config.tile for config in candidates.all_valid(problem_of(REQUESTS["square"]), SM_90A)}
    assert {(128, 128, 64), (256, 128, 64)} <= tiles


def test_operators_of_a_model_share_few_libraries():
    shapes = [(m, k, n) for m in (512, 4608) for k in (768, 1024, 3072) for n in (768, 1024, 4096)]
    problems = [problem_of(linear(m=m, k=k, n=n)) for m, k, n in shapes]
    compiled = {config.compiled for problem in problems for config in candidates.ranked(problem, SM_90A)}
    assert len(compiled) <= 14


def test_thin_products_take_small_tiles():
    best = candidates.ranked(problem_of(REQUESTS["thin"]), SM_90A)[0]
    assert best.tile[0] == 64
    assert best.tile[0] * best.tile[1] <= 64 * 128


def test_a_chip_with_fewer_multiprocessors_is_ranked_as_such():
    problem = problem_of(linear(m=4608, k=768, n=768))
    config = GemmConfig(Family.TMA, (128, 256, 128), cluster=(2, 1))
    assert latency_model.predicted_ns(config, problem, SM_90A, 33) > 2 * candidates.predicted_ns(config, problem, SM_90A, 132)


def test_a_wave_more_costs_a_wave_more():
    # 66 x 2 tiles fill the 132 multiprocessors; one row of tiles more needs them all once again.
    config = GemmConfig(Family.TMA, (128, 256, 128))
    full = latency_model.predicted_ns(config, problem_of(linear(m=66 * 128, k=4096, n=512)), SM_90A)
    more = latency_model.predicted_ns(config, problem_of(linear(m=67 * 128, k=4096, n=512)), SM_90A)
    same = latency_model.predicted_ns(config, problem_of(linear(m=132 * 128, k=4096, n=512)), SM_90A)
    assert more == pytest.approx(same)
    assert more > 1.8 * full


def test_nothing_is_predicted_to_be_faster_than_memory():
    problem = problem_of(linear(m=100_000, k=64, n=64))
    floor_ns = (problem.m * problem.k + problem.n * problem.k + 2 * problem.m * problem.n) / SM_90A.bandwidth_gbs
    assert min(latency_model.predicted_ns(config, problem, SM_90A) for config in candidates.ranked(problem, SM_90A)) > floor_ns
