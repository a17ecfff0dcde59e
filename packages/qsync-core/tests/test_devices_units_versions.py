"""Small tables: chips, sizes and durations as text, and which versions work together."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.devices import CHIPS, find_chip, precision_problem, same_device, sized_chip
from qsync_core.errors import CompatibilityError
from qsync_core.ir.precision import Precision
from qsync_core.plugins.compat import check_versions, installed_versions, series
from qsync_core.units import format_bytes, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("T4", "T4"),
        ("Tesla T4", "T4"),
        ("tesla v100-sxm2-16gb", "V100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", None),
        ("A1000", None),
        ("cpu", None),
    ],
)
def test_device_names(device: str, chip: str | None) -> None:
    found = find_chip(device)
    assert (found.name if found else None) == chip


@pytest.mark.parametrize(
    ("device", "memory_gb", "bandwidth_gb_s"),
    [
        ("A100", 80, 2039),
        ("NVIDIA A100-SXM4-80GB", 80, 2039),
        ("NVIDIA A100-SXM4-40GB", 40, 1555),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 80, 2039),
        ("Tesla V100-SXM2-16GB", 16, 900),
        ("RTX 3080 10 GB", 10, 760),
        ("NVIDIA GH200 480GB", 96, 4000),
        ("NVIDIA H100 80GB HBM3", 80, 3350),
        ("A100 20GB", 20, 0),
        ("A100 40", 40, 1555),
        ("A100_40GB", 40, 1555),
        ("a100-40", 40, 1555),
        ("RTX 3060", 12, 360),
        ("NVIDIA RTX 6000 Ada Generation", 48, 960),
    ],
)
def test_the_memory_that_a_name_says(device: str, memory_gb: int, bandwidth_gb_s: int) -> None:
    chip = sized_chip(device)
    assert chip is not None
    assert (chip.memory_gb, chip.bandwidth_gb_s) == (memory_gb, bandwidth_gb_s)
    assert find_chip(chip.name) is find_chip(device)


def test_same_device() -> None:
    assert same_device("T4", "Tesla T4")
    assert same_device("odd", "odd")
    assert not same_device("T4", "V100")
    assert not same_device("odd", "other")
    assert same_device("H100", "NVIDIA H100 80GB HBM3")
    assert not same_device("H100", "NVIDIA H100 PCIe")
    assert same_device("A100 MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert not same_device("A100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb")


def test_precisions_follow_the_compute_capability() -> None:
    """Tensor cores: int8 since 7.5 (Turing), bfloat16 since 8.0 (Ampere), float8 since 8.9 (Ada, Hopper)."""
    since = {Precision.INT8: (7, 5), Precision.BFLOAT16: (8, 0), Precision.FLOAT8_E4M3FN: (8, 9)}
    for chip in CHIPS.values():
        if not chip.compute_capability:
            continue  # AMD's
        capability = tuple(int(part) for part in chip.compute_capability.split("."))
        for precision, first in since.items():
            assert (precision in chip.precisions) == (capability >= first), (chip.name, precision)
        assert {Precision.FLOAT32, Precision.FLOAT16} <= chip.precisions
        assert chip.sixteen_bit is (Precision.BFLOAT16 if capability >= (8, 0) else Precision.FLOAT16)


def test_figures_of_a_chip_agree_with_each_other() -> None:
    """Narrower formats are no slower, memory is read in 5 to 120 ms, and names are found by themselves."""
    for name, chip in CHIPS.items():
        assert find_chip(name) is chip
        widest_first = [chip.peak_tera[p] for p in (Precision.FLOAT32, Precision.FLOAT16, Precision.INT8) if p in chip.precisions]
        assert widest_first == sorted(widest_first), name
        assert 5 <= 1e3 * chip.memory_gb / chip.bandwidth_gb_s <= 120, name
        assert chip.rungs[-1] is Precision.FLOAT32
    assert CHIPS["V100"].rungs == (Precision.FLOAT16, Precision.FLOAT32)
    assert CHIPS["T4"].rungs == (Precision.INT8, Precision.FLOAT16, Precision.FLOAT32)
    assert CHIPS["RTX 3090"].rungs == (Precision.INT8, Precision.BFLOAT16, Precision.FLOAT32)
    assert Precision.FLOAT8_E4M3FN not in CHIPS["MI300X"].precisions


def test_unknown_devices_are_not_restricted() -> None:
    assert all(precision_problem("my accelerator", precision) is None for precision in Precision)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("15 GiB", 15 * 2**30),
        ("800MB", 800_000_000),
        ("1.5 KiB", 1536),
        ("1024", 1024),
        (" 7 b ", 7),
        ("2TB", 2 * 10**12),
        ("999999999999999999", 999_999_999_999_999_999),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1 GiBs", "1e3", "15 loaves", "٣ GB", "1" * 40, "1,5 GB", "nan", "inf GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size: .*; write a number and a unit, for example '15 GiB' or '800 MB'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["5000000 TiB", "9" * 18 + " GB", "9" * 18 + ".9 TB"])
def test_sizes_beyond_any_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"is more than any memory has \(2\*\*62 bytes\)"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_shown_sizes_are_within_a_hundredth(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).replace(",", "").split()
    assert parse_bytes(f"{float(number):.6f} {unit}" if unit != "B" else number) == pytest.approx(nbytes, rel=0.01)


@given(st.integers(0, 2**49))
def test_sizes_that_are_asked_for_are_enough_as_they_are_shown(nbytes: int) -> None:
    assert nbytes <= parse_bytes(format_bytes(nbytes, up=True)) <= 1.011 * nbytes


def test_durations() -> None:
    assert format_ns(212_345) == "212.3 µs"
    assert format_ns(1_830_000) == "1.83 ms"
    assert format_ns(1_234_567_890) == "1,234.57 ms"
    assert format_ns(75_000_000_000) == "75.0 s"


def test_series() -> None:
    assert series("0.1.7") == "0.1"
    assert series("0.12.0rc1") == "0.12"
    assert series("2.3.0") == "2"
    with pytest.raises(CompatibilityError, match="'tomorrow' is not a version of a QSync package"):
        series("tomorrow")


def test_versions_that_work_together() -> None:
    check_versions({"qsync-core": "0.1.0", "qsync-torch": "0.1.9"})
    check_versions({"qsync-core": "1.4.0", "qsync-torch": "1.0.2"})
    with pytest.raises(CompatibilityError, match=r"qsync-torch 1\.0\.2 does not work with qsync-core 2\.4\.0"):
        check_versions({"qsync-core": "2.4.0", "qsync-torch": "1.0.2"})


def test_core_is_installed() -> None:
    assert series(installed_versions()["qsync-core"]) == "0.1"


def test_importing_core_imports_nothing_heavy() -> None:
    """What takes long, or is not a dependency, is imported when it is used; torch and numpy never."""
    code = (
        "import sys, qsync_core.artifacts.files, qsync_core.cluster_file\n"
        "heavy = ('torch', 'numpy', 'rich', 'click', 'cattrs', 'pluggy', 'importlib.metadata')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
