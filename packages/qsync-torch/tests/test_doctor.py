import pytest

from qsync_core.plugins.doctor import Status
from qsync_torch.doctor import compare_ranks, doctor_lines, has_kernels


def test_ranks_that_agree():
    (line,) = compare_ranks([{"torch": "2.13.0", "nccl": "2.28"}] * 3)
    assert (line.finding, line.status) == ("all 3 ranks have the same versions", Status.OK)


def test_ranks_that_differ_are_named_with_what_they_have():
    (line,) = compare_ranks([{"torch": "2.13.0"}, {"torch": "2.12.0"}, {"torch": "2.13.0"}])
    assert line.topic == "ranks: torch"
    assert line.finding == "2.13.0 on ranks 0, 2; 2.12.0 on rank 1"
    assert (line.status, line.advice) == (Status.ERROR, "install the same versions everywhere")


def test_a_rank_without_the_package_counts_as_different():
    (line,) = compare_ranks([{"nccl": "2.28"}, {}])
    assert line.finding == "2.28 on rank 0; nothing on rank 1"


def test_unequal_gpus_are_no_error():
    (line,) = compare_ranks([{"cuda": "CUDA 13"}, {"cuda": "CUDA 12"}])
    assert line.status is Status.WARNING


def test_it_speaks_about_torch_the_processor_and_every_precision():
    topics = {line.topic for line in doctor_lines()}
    assert {"torch", "cpu", "cpu int8", "cpu bfloat16", "cuda", "gloo", "c++ compiler"} <= topics


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"], False),  # wheels for CUDA 12.8 and later
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"], True),  # those for CUDA 12.6
        ((8, 9), ["sm_75", "sm_80", "sm_86", "sm_90"], True),
        ((12, 1), ["sm_90", "compute_120"], True),
        ((10, 0), ["sm_80", "sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_a_torch_without_kernels_for_a_chip_is_known(capability, arch_list, runs):
    assert has_kernels(capability, arch_list) is runs
