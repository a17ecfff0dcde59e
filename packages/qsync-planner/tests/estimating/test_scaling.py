"""The rule by which one kernel's time is scaled: the identity, by hand, monotone in what chips can do; and the chips' figures."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.devices import CHIPS
from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import DATASHEETS, Datasheet, Place, datasheet
from qsync_planner.estimating.scaling import scaled_cast, scaled_ns, scaled_optimizer_ns
from qsync_planner.estimating.work import Work

FLOAT32, FLOAT16 = Precision.FLOAT32, Precision.FLOAT16
H200, T4 = Place(DATASHEETS["H200"], 1.0), Place(DATASHEETS["T4"], 1.0)

times = st.integers(0, 10**11)
shares = st.floats(0.05, 1.0)
works = st.builds(
    Work,
    nbytes=st.floats(0, 1e12),
    launches=st.integers(0, 50),
    products=st.lists(st.tuples(st.sampled_from([FLOAT32, FLOAT16]), st.integers(0, 10**15)), max_size=3).map(tuple),
    blocks=st.sampled_from([0.0, 16.0, 64.0, 512.0]),
    transposed=st.floats(0, 1e12),
    transforms=st.floats(0, 1e12),
)
sheets = st.sampled_from(sorted(DATASHEETS))
places = st.builds(lambda name, share: Place(DATASHEETS[name], share), sheets, shares)


@given(times, works, places, st.booleans())
def test_the_same_place_changes_nothing(time_ns: int, work: Work, place: Place, tf32: bool) -> None:
    assert scaled_ns(time_ns, work, place, Place(place.sheet, place.share), tf32=tf32) == time_ns
    assert scaled_optimizer_ns(time_ns, work, place, place) == time_ns


def _with(sheet: Datasheet, **changed: float) -> Datasheet:
    """A chip with other figures; ``peak`` multiplies every peak."""
    peak = changed.pop("peak", 1.0)
    bandwidth = changed.pop("bandwidth", 1.0)
    peaks = {precision: tera * peak for precision, tera in sheet.chip.peak_tera.items()}
    chip = attrs.evolve(sheet.chip, peak_tera=peaks, bandwidth_gb_s=round(sheet.chip.bandwidth_gb_s * bandwidth))
    return attrs.evolve(sheet, chip=chip, **changed)


@given(times, works, places, sheets, shares, st.floats(1.0, 20.0), st.floats(1.0, 20.0))
def test_a_better_chip_is_never_slower(
    time_ns: int, work: Work, source: Place, name: str, share: float, peak: float, bandwidth: float
) -> None:
    sheet = DATASHEETS[name]
    plain = scaled_ns(time_ns, work, source, Place(sheet, share))
    for better in (
        Place(_with(sheet, peak=peak), share),
        Place(_with(sheet, bandwidth=bandwidth), share),
        Place(_with(sheet, clock_ghz=sheet.clock_ghz * peak), share),
        Place(_with(sheet, multiprocessors=round(sheet.multiprocessors * peak)), share),
        Place(sheet, 1.0),
    ):
        assert scaled_ns(time_ns, work, source, better) <= plain


def test_a_product_by_hand() -> None:
    """100 µs on H200: 2.5 launching, 8.64 MB at 4320 bytes/ns = 2, 2.4 GFLOP at 0.6 · 67 TFLOP/s = 59.70, and 35.80 the rest."""
    work = Work(8_640_000, 1, ((FLOAT32, 2_400_000_000),))
    cycles = (132 * 1.98) / (40 * 1.59)
    by_hand = 2500 + 2000 * (4800 / 320) + 2.4e9 / 40_200 * (67 / 8.1) + (97_500 - 2000 - 2.4e9 / 40_200) * cycles
    assert scaled_ns(100_000, work, H200, T4) == round(by_hand)


def test_products_that_do_not_fit_are_by_winograds_algorithm_as_far_as_they_must() -> None:
    """80.4 GFLOP take 2 ms directly and fit in 1 ms if a share s takes a quarter, and 0.1 ms of memory: 1.5 s - 0.1 s = 1."""
    half, share = Place(H200.sheet, 0.5), 1 / 1.4
    work = Work(0, 0, ((FLOAT32, 80_400_000_000),), transforms=432e6)
    assert scaled_ns(10**6, work, H200, half) == pytest.approx(10**6 * (0.1 * share + 2 * (1 - 0.1 * share)), abs=1)
    assert scaled_ns(2 * 10**6, work, H200, half) == 4 * 10**6  # they fit as they are
    assert scaled_ns(10**5, work, H200, half) == 10**5  # not even that fits: the transforms alone take as long
    in_16_bit = attrs.evolve(work, products=((FLOAT16, 80_400_000_000 * 20),))
    assert scaled_ns(10**6, in_16_bit, H200, half) == 2 * 10**6


def test_transpositions_need_multiprocessors_and_memory() -> None:
    """On half of the multiprocessors twice as long; T4 has a fourth of the cycles, and a 15th of the bandwidth."""
    work = Work(0, 0, transposed=4320e6)
    assert scaled_ns(10**6, work, H200, Place(H200.sheet, 0.5)) == 2 * 10**6
    assert scaled_ns(10**6, work, H200, T4) == 15 * 10**6


def test_tf32_products_lose_their_tensor_cores_on_an_older_chip() -> None:
    work = Work(0, 0, ((FLOAT32, 10**12),))
    time_ns = round(10**12 / (1e3 * 494.7 * 0.6))  # all of it in products at the rate of TF32
    assert scaled_ns(time_ns, work, H200, T4, tf32=True) == pytest.approx(time_ns * 494.7 / 8.1, rel=1e-5)
    a100 = Place(DATASHEETS["A100"], 1.0)
    assert scaled_ns(time_ns, work, H200, a100, tf32=True) == pytest.approx(time_ns * 494.7 / 156, rel=1e-5)


def test_memory_keeps_its_bandwidth_on_half_of_a_chip_and_not_on_a_quarter() -> None:
    """132 · 1.98 GHz · 36 bytes = 9409 bytes/ns, against 0.9 · 4800 = 4320."""
    work = Work(1e12, 0)
    assert scaled_ns(10**6, work, H200, Place(H200.sheet, 0.5)) == 10**6
    assert scaled_ns(10**6, work, H200, Place(H200.sheet, 0.25)) == pytest.approx(10**6 * 4320 / (9408.96 / 4), abs=1)


def test_few_blocks_do_not_miss_the_multiprocessors_that_go() -> None:
    """64 channels in blocks of three leave most of 66 multiprocessors idle; 512 take 66 of 132 twice as long as all of them."""
    half = Place(H200.sheet, 0.5)
    assert scaled_ns(10**6, Work(0, 0, blocks=64 / 3), H200, half) == 10**6
    assert scaled_ns(10**6, Work(0, 0, blocks=512 / 3), H200, half) == 2 * 10**6
    assert scaled_ns(10**6, Work(0, 0, blocks=256 / 3), H200, half) == pytest.approx(10**6 * (256 / 3) / 66, abs=1)


def test_a_cast_that_memory_binds_goes_with_bandwidth_and_a_negative_fit_stays_finite() -> None:
    per_element = 6 / 4320
    assert scaled_cast(per_element, 6, H200, T4) == pytest.approx(per_element * 15)
    assert scaled_cast(2 * per_element, 6, H200, Place(H200.sheet, 0.5)) == pytest.approx(3 * per_element)
    assert scaled_cast(-1e-6, 6, H200, H200) == -1e-6


def test_the_optimizer_by_hand() -> None:
    """1 ms: 161 launches take 402.5 µs, the rest is memory traffic, fifteen times slower."""
    assert scaled_optimizer_ns(10**6, Work(1e6, 161), H200, T4) == 402_500 + 15 * 597_500


@pytest.mark.parametrize("sheet", DATASHEETS.values(), ids=DATASHEETS)
def test_the_figures_of_a_datasheet_agree(sheet: Datasheet) -> None:
    """The float32 peak is two operations per lane and cycle; tensor cores multiply TF32 at most half as fast as float16."""
    by_lanes = sheet.multiprocessors * sheet.float32_lanes * 2 * sheet.clock_ghz / 1e3
    assert sheet.chip.peak_tera[FLOAT32] == pytest.approx(by_lanes, rel=0.01)
    assert sheet.chip is CHIPS[sheet.name]
    assert re.search(r"(datasheet|whitepaper), 20\d\d", sheet.source)
    if sheet.tf32_tera:
        assert sheet.tf32_tera == pytest.approx(sheet.chip.peak_tera[FLOAT16] / 2, rel=0.02)
    assert bool(sheet.tf32_tera) == (Precision.BFLOAT16 in sheet.chip.precisions)


def test_every_chip_of_the_issue_is_there_and_is_found_by_its_makers_name() -> None:
    assert set(DATASHEETS) == {"T4", "V100", "A10", "L4", "L40S", "A100", "H100", "H200", "RTX 3090", "RTX 4090"}
    assert datasheet("Tesla T4").name == "T4"
    assert datasheet("NVIDIA GeForce RTX 3090").name == "RTX 3090"
    assert DATASHEETS["RTX 4090"].chip.peak_tera[Precision.FLOAT8_E4M3FN] == pytest.approx(330.4)


@pytest.mark.parametrize("device", ["B200", "my accelerator", "RTX 4090 Laptop GPU"])
def test_an_unknown_chip_is_refused_with_those_that_are_known(device: str) -> None:
    with pytest.raises(PlanError, match=rf"no datasheet of '{device}' .*; estimates know V100, T4, A100, .*, RTX 4090$"):
        datasheet(device)


def test_a_slice_of_a_chip_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'A100 MIG 3g\.40gb' is a slice of a chip, whose share of memory"):
        datasheet("A100 MIG 3g.40gb")
