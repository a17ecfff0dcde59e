"""The rule by which one kernel's time is scaled: the identity, by hand, monotone in what chips can do; and the chips' figures."""

from __future__ import annotations

import math
import re

import attrs
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from qsync_core.devices import CHIPS
from qsync_core.errors import PlanError
from qsync_core.ir.precision import Precision
from qsync_planner.estimating.chips import DATASHEETS, Datasheet, Place, datasheet
from qsync_planner.estimating.scaling import modelled_ns, scaled_cast, scaled_ns, scaled_optimizer_ns
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
    tiles=st.sampled_from([0.0, 16.0, 4096.0]),
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


FEW_TILES = Work(1e5, 1, ((FLOAT32, 10**9),), tiles=16.0)


@given(times, works, places, sheets, shares, st.floats(1.0, 20.0), st.floats(1.0, 20.0), st.sampled_from([1, 2, 4, 16]))
@example(10**5, FEW_TILES, Place(DATASHEETS["V100"], 1.0), "T4", 0.4, 1.0, 1.0, 1)  # power holds the whole T4, not 16 tiles on it
@example(10**5, FEW_TILES, Place(DATASHEETS["V100"], 1.0), "A10", 1.0, 1.0, 1.0, 2)
def test_a_better_chip_is_never_slower(
    time_ns: int, work: Work, source: Place, name: str, share: float, peak: float, bandwidth: float, more: int
) -> None:
    """More multiprocessors of one peak are each slower, as few tiles show; with theirs they are better.  Powers of two of them:
    floating point scales by these exactly."""
    assume(name != source.sheet.name)  # another rule compares a chip with its shares
    sheet = DATASHEETS[name]
    for better in (
        Place(_with(sheet, peak=peak), share),
        Place(_with(sheet, bandwidth=bandwidth), share),
        Place(_with(sheet, clock_ghz=sheet.clock_ghz * peak), share),
        Place(_with(sheet, multiprocessors=sheet.multiprocessors * more, peak=more), share),
        Place(sheet, 1.0),
    ):
        assert scaled_ns(time_ns, work, source, better) <= scaled_ns(time_ns, work, source, Place(sheet, share))
    any_tiles, of_one_peak = attrs.evolve(work, tiles=0.0), _with(sheet, multiprocessors=round(sheet.multiprocessors * peak))
    plain = scaled_ns(time_ns, any_tiles, source, Place(sheet, share))
    assert scaled_ns(time_ns, any_tiles, source, Place(of_one_peak, share)) <= plain


def test_a_product_on_another_share_by_hand() -> None:
    """100 µs on H200: 2.5 launching, 8.64 MB at 4320 bytes/ns = 2, 2.4 GFLOP at 0.6 · 67 TFLOP/s = 59.70, and 35.80 the rest."""
    work = Work(8_640_000, 1, ((FLOAT32, 2_400_000_000),))
    by_hand = 2500 + 2000 + 2 * 97_500 - 2 * 2000
    assert scaled_ns(100_000, work, H200, Place(H200.sheet, 0.5)) == by_hand


def test_a_product_on_another_chip_by_hand() -> None:
    """The power of T4 holds float16 at 70 W / (0.263 pJ · 12) = 22.18 TFLOP/s, of H200 at 700 / (0.263 · 4) = 665.4."""
    work = Work(8_640_000, 1, ((FLOAT16, 2_400_000_000),))
    on_h200 = math.hypot(2000, 2.4e9 / 665_399)
    on_t4 = math.hypot(30_000, 2.4e9 / 22_179.97)
    assert scaled_ns(6000, work, H200, T4) == pytest.approx(2500 + 3500 * on_t4 / on_h200, rel=1e-4)
    rest = 97_500 - 1.5 * on_h200  # what is beyond one and a half times the bound goes with the cycles
    by_hand = 2500 + 1.5 * on_t4 + rest * (132 * 1.98) / (40 * 1.59)
    assert scaled_ns(100_000, work, H200, T4) == pytest.approx(by_hand, rel=1e-4)
    assert modelled_ns(work, T4) == pytest.approx(2500 + on_t4, rel=1e-4)


def test_power_holds_no_half_rate_tensor_core() -> None:
    """RTX 3090: 350 W / (0.263 pJ · 8) = 166 TFLOP/s are more than its peak of 71.2, of which clocks above the stated one reach
    1.04; an A100's 217 are fewer than its 312."""
    assert Place(DATASHEETS["RTX 3090"], 1.0).sustained_per_ns(FLOAT16, False) == pytest.approx(1.04 * 71_200)
    assert Place(DATASHEETS["A100"], 1.0).sustained_per_ns(FLOAT16, False) == pytest.approx(400 / (0.263 * 7) * 1e3)
    assert Place(DATASHEETS["A100"], 1.0).sustained_per_ns(FLOAT32, True) == pytest.approx(200 / (0.263 * 7) * 1e3)


def test_what_memory_does_not_explain_goes_with_the_cycles() -> None:
    """1 ms of which memory explains .6: the other .8, at right angles, goes with 132 · 1.98 against 108 · 1.41 cycles."""
    a100 = Place(DATASHEETS["A100"], 1.0)
    by_hand = math.hypot(0.6e6 * 4800 / 2039, 0.8e6 * (132 * 1.98) / (108 * 1.41))
    assert scaled_ns(10**6, Work(0.6e6 * 4320, 0), H200, a100) == pytest.approx(by_hand, abs=1)


def test_few_tiles_fill_a_small_chip_and_leave_a_large_one_idle() -> None:
    """20 tiles keep 20 of 132 multiprocessors busy, which no power holds, and 20 of an A2's 10."""
    work = Work(0, 0, ((FLOAT16, 10**10),), tiles=20)
    a2 = Place(DATASHEETS["A2"], 1.0)
    peak_per_ns = 1e3 * H200.sheet.chip.peak_tera[FLOAT16]
    assert modelled_ns(work, H200) == pytest.approx(1e10 / (1.04 * peak_per_ns * 20 / 132))
    assert modelled_ns(work, a2) == pytest.approx(1e10 / a2.sustained_per_ns(FLOAT16, False))


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
    """V100 multiplies float32 at .93 · 15.7 TFLOP/s, TF32 of an H200 is held by its power at 700 / (0.526 · 4)."""
    work = Work(0, 0, ((FLOAT32, 10**12),))
    tf32_ns, float32_ns = 10**12 / H200.sustained_per_ns(FLOAT32, True), 10**12 / H200.sustained_per_ns(FLOAT32, False)
    v100 = Place(DATASHEETS["V100"], 1.0)
    slower = 700 / (0.526 * 4) / (0.93 * 15.7)
    assert scaled_ns(round(tf32_ns), work, H200, v100, tf32=True) == pytest.approx(tf32_ns * slower, rel=1e-5)
    assert scaled_ns(round(float32_ns), work, H200, v100) == pytest.approx(float32_ns * (67 / 15.7), rel=1e-5)


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
    """The float32 peak is two operations per lane and cycle; tensor cores multiply TF32 at most half as fast as float16.

    H20's datasheet states 44 TFLOP/s, which its 78 multiprocessors reach at 2.2 GHz, and 1.98 GHz at most.
    """
    by_lanes = sheet.multiprocessors * sheet.float32_lanes * 2 * sheet.clock_ghz / 1e3
    assert sheet.chip.peak_tera[FLOAT32] == pytest.approx(by_lanes, rel=0.12 if sheet.name == "H20" else 0.01)
    assert sheet.chip is CHIPS[sheet.name]
    assert re.search(r"(datasheet|whitepaper), 20\d\d", sheet.source)
    if sheet.tf32_tera:
        assert sheet.tf32_tera == pytest.approx(sheet.chip.peak_tera[FLOAT16] / 2, rel=0.02)
    assert bool(sheet.tf32_tera) == (Precision.BFLOAT16 in sheet.chip.precisions)
    assert min(sheet.chip.memory_gb, sheet.chip.bandwidth_gb_s, sheet.watts, sheet.process_nm) > 0


PER_CYCLE = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192, "12.0": 1024}
"""float16 operations of a multiprocessor's tensor cores in a cycle, by compute capability, as the whitepapers have them."""


@pytest.mark.parametrize("sheet", DATASHEETS.values(), ids=DATASHEETS)
def test_tensor_cores_do_the_operations_of_their_generation_or_half_of_them(sheet: Datasheet) -> None:
    """Half where the maker slows sums in float32 (GeForce, A10G, L40); an H20 has a fourth.  Clocks of the float16 peak differ."""
    capability = sheet.chip.compute_capability
    if capability not in PER_CYCLE:  # P100 has no tensor cores, MI300X other ones
        return
    per_cycle = sheet.chip.peak_tera[FLOAT16] * 1e3 / (sheet.multiprocessors * sheet.clock_ghz)
    shares = {"H20": (1 / 4,)}.get(sheet.name, (1, 1 / 2))
    assert any(per_cycle == pytest.approx(share * PER_CYCLE[capability], rel=0.12) for share in shares)


@pytest.mark.parametrize(
    ("one", "other", "what", "ratio"),
    [
        ("RTX 4090", "RTX 3090", "float32", 2.32),
        ("RTX 5090", "RTX 4090", "bandwidth", 1.78),
        ("RTX 2080 Ti", "RTX 2080", "multiprocessors", 68 / 46),
        ("RTX A6000", "A40", "multiprocessors", 1.0),
        ("H200", "H100", "bandwidth", 1.43),
        ("A100", "V100", "float16", 2.5),
        ("B200", "H100", "float16", 2.27),
        ("A30", "A100", "multiprocessors", 56 / 108),
    ],
)
def test_ratios_of_related_cards(one: str, other: str, what: str, ratio: float) -> None:
    """As their makers state them."""

    def figure(name: str) -> float:
        sheet = DATASHEETS[name]
        known = {"bandwidth": sheet.chip.bandwidth_gb_s, "multiprocessors": sheet.multiprocessors}
        return known[what] if what in known else sheet.chip.peak_tera[Precision(what)]

    assert figure(one) / figure(other) == pytest.approx(ratio, rel=0.01)


def test_the_chips_that_people_have_are_there_and_are_found_by_their_makers_names() -> None:
    cards = ("2080 Ti", "3060", "3090", "4090", "5090")
    names = {"T4", "V100", "P100", "A2", "A10", "A10G", "A30", "A40", "L4", "L40S", "A100", "H20", "H100", "H200", "B200", "MI300X"}
    assert names | {f"RTX {card}" for card in (*cards, "A6000")} <= set(DATASHEETS)
    assert datasheet("Tesla T4").name == "T4"
    assert datasheet("NVIDIA GeForce RTX 3090").name == "RTX 3090"
    assert DATASHEETS["RTX 4090"].chip.peak_tera[Precision.FLOAT8_E4M3FN] == pytest.approx(330.4)


def test_an_estimate_says_of_which_generation_nothing_is_known() -> None:
    assert DATASHEETS["RTX 3060"].remark == DATASHEETS["T4"].remark == ""
    assert "never compared with a chip of its generation" in DATASHEETS["RTX 5090"].remark
    assert DATASHEETS["MI300X"].remark == "the rule assumes NVIDIA's kernels, which do not run on it"


def test_an_unknown_chip_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        PlanError, match=r"no datasheet of 'my accelerator' to estimate with; estimates know P100, V100, .*, MI300X$"
    ):
        datasheet("my accelerator")
    with pytest.raises(PlanError, match=r"of 'RTX 4090 Laptop GPU' .* did you mean RTX 4090\? estimates know"):
        datasheet("RTX 4090 Laptop GPU")
    with pytest.raises(PlanError, match=r"of 'A100X' .* did you mean A100\? estimates know"):
        datasheet("A100X")
    with pytest.raises(PlanError, match=r"of 'RTX3O60' .* did you mean RTX 3060"):
        datasheet("RTX3O60")


def test_a_slice_of_a_chip_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'A100 MIG 3g\.40gb' is a slice of a chip, whose share of memory"):
        datasheet("A100 MIG 3g.40gb")
