from contextlib import nullcontext

import pytest
import torch

from qsync_core.plugins.doctor import DoctorLine, Status
from qsync_torch.doctor import machine, products
from qsync_torch.doctor.machine import doctor_lines, has_kernels, wheel_advice
from qsync_torch.sharing.mps import Daemon


def test_it_speaks_about_torch_the_processor_and_every_precision():
    topics = {line.topic for line in doctor_lines()}
    assert {"torch", "cpu", "cpu int8", "cpu bfloat16", "cuda", "gloo", "c++ compiler"} <= topics


def test_it_says_whether_products_are_right_on_each_gpu_and_under_the_shares_of_one(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # what is said of the GPUs themselves
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(machine, "find_daemon", Daemon)
    monkeypatch.delenv(products.SHARE_VARIABLE, raising=False)
    monkeypatch.setattr(products, "wrong_sentences", lambda calls, formats, device: ["garbage"] if device.index else [])
    monkeypatch.setattr(products, "probing", lambda *_: nullcontext(lambda shares: dict.fromkeys(shares, "")))
    first, shares, second = (line for line in doctor_lines() if line.topic.endswith((" products", " shares")))
    assert first == DoctorLine("cuda:0 products", "right, compared with exact ones")
    assert shares == DoctorLine("cuda:0 shares", "products are right at 10, 20, 30, 40, 50, 60, 70, 80, 90%")
    assert (second.topic, second.finding, second.status) == ("cuda:1 products", "wrong: garbage", Status.ERROR)


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


@pytest.mark.parametrize(
    ("capabilities", "advice"),
    [
        (
            [(7, 0), (9, 0)],
            "that for CUDA 12.6 has sm_50 to sm_90: pip install torch --index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            [(7, 5), (12, 0)],
            "that for CUDA 13.0 has sm_75 to sm_120: pip install torch --index-url https://download.pytorch.org/whl/cu130",
        ),
        ([(12, 0), (7, 0), (7, 0)], "no wheel of PyTorch has all of these, so build it with TORCH_CUDA_ARCH_LIST='7.0;12.0'"),
    ],
)
def test_the_wheel_that_serves_all_gpus_is_named(capabilities, advice):
    assert wheel_advice(capabilities) == advice
