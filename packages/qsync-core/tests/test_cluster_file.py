"""Cluster files: what a good one means, and one clear sentence for each way in which one can be wrong."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from artifact_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from qsync_core.artifacts import files as artifact
from qsync_core.cluster_file import check_profiles, parse_cluster, read_cluster
from qsync_core.errors import ClusterError
from qsync_core.ir.cluster import Cluster, DeviceGroup, Link
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Granularity, Precision, Rounding, Storage
from qsync_core.ir.profile import Profile
from qsync_core.ir.variant import Variant

INT8, FLOAT8, BF16, FP16, FP32 = Precision

GOOD = """
name = "night shift"

[[group]]
name = "train"
device = "V100"
count = 2
role = "train"

[[group]]
name = "infer"
device = "T4"
count = 4
role = "infer"
base = "float32"
ladder = ["int8", "float16", "float32"]
memory = "15 GiB"
share = 0.5
sync_per_step = true

[[link]]
between = ["train", "infer"]
latency_us = 20
bandwidth_gbps = 32
"""


def refused(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(text, "c.toml")
    assert str(caught.value).startswith("c.toml")
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return refused(GOOD.replace(old, new))


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD)
    # T4 has no bfloat16, so int8's gradients are float16; 32 Gbit/s are a quarter of a nanosecond per byte.
    ladder = (Variant.of(INT8, sixteen_bit=FP16), Variant.plain(FP16), Variant.plain(FP32))
    cluster = read_cluster(path)
    assert cluster == Cluster(
        "night shift",
        (
            DeviceGroup("train", "V100", 2, Role.TRAIN, FP32, (Variant.plain(FP32),)),
            DeviceGroup("infer", "T4", 4, Role.INFER, FP32, ladder, 15 * 2**30, 0.5, True),
        ),
        (Link(("train", "infer"), 20_000.0, 0.25),),
    )
    assert artifact.from_bytes(artifact.to_bytes(cluster), Cluster) == cluster
    assert cluster.group("infer").count == 4
    with pytest.raises(KeyError):
        cluster.group("nobody")


def test_the_file_name_names_a_cluster_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "night.toml"
    path.write_text(GOOD.replace('name = "night shift"', "", 1))
    assert read_cluster(path).name == "night"


def test_options_of_bare_names() -> None:
    options = 'ladder = ["int8", "float16", "float32"]\nrounding = "nearest"\nw_granularity = "tensor"\noutput = "float32"'
    cluster = parse_cluster(GOOD.replace('ladder = ["int8", "float16", "float32"]', options))
    int8, float16, _ = cluster.group("infer").ladder
    assert (int8.rounding, int8.w_granularity, int8.output) == (Rounding.NEAREST, Granularity.PER_TENSOR, FP32)
    assert float16 == Variant.plain(FP16)


def test_zero_points_and_int8_gradients_have_names_that_take_the_group_s_settings() -> None:
    options = 'ladder = ["int8", "int8-affine", "float32"]\nrounding = "nearest"\noutput = "float32"'
    symmetric, affine, _ = parse_cluster(GOOD.replace('ladder = ["int8", "float16", "float32"]', options)).group("infer").ladder
    assert affine == attrs.evolve(symmetric, symmetric=False)
    assert (affine.output, affine.rounding, affine.grad_input, affine.label) == (
        FP32,
        Rounding.NEAREST,
        FP16,
        "int8-affine>float32",
    )
    options = 'ladder = ["int8-all", "int8", "float32"]\nrounding = "nearest"'
    every, forward, _ = parse_cluster(GOOD.replace('ladder = ["int8", "float16", "float32"]', options)).group("infer").ladder
    assert every == attrs.evolve(forward, grad_input=INT8, grad_weight=INT8, x_granularity=Granularity.PER_ROW)
    assert (every.output, every.rounding, every.label) == (FP16, Rounding.NEAREST, "int8-all")
    with pytest.raises(ClusterError, match="gradients in 8 bit belong to int8, got 'float16-all'"):
        parse_cluster(GOOD.replace('"int8", ', '"float16-all", '))
    with pytest.raises(ClusterError, match="zero points belong to int8 activations, got 'float32-affine'"):
        parse_cluster(GOOD.replace('"int8", ', '"float32-affine", '))


def test_a_rung_may_name_its_output() -> None:
    """Both outputs of int8 on one ladder; what a rung says itself goes before the group's ``output``."""
    asked = GOOD.replace('"int8"', '"int8", "int8>float32"')
    int8 = Variant.of(INT8, sixteen_bit=FP16)
    assert parse_cluster(asked).group("infer").ladder[:2] == (int8, attrs.evolve(int8, output=FP32))
    one = GOOD.replace('"int8", ', '"int8>float32", ').replace('role = "infer"', 'role = "infer"\noutput = "float16"')
    assert parse_cluster(one).group("infer").ladder[0] == attrs.evolve(int8, output=FP32)
    assert "output must be one of int8" in changed('"int8"', '"int8>float33"')


def test_chips_with_bfloat16_and_unknown_devices_take_bfloat16_gradients() -> None:
    for device in ("A100", "NVIDIA H200", "my accelerator", "cpu"):
        text = GOOD.replace('device = "T4"', f'device = "{device}"')
        assert parse_cluster(text).group("infer").ladder[0].grad_input is BF16


def test_a_rung_may_be_a_whole_variant() -> None:
    variant = Variant.of(INT8, sixteen_bit=FP16, output=FP16, rounding=Rounding.FLOOR)
    assert parse_cluster(GOOD.replace('"int8"', f'"{variant}"')).group("infer").ladder[0] == variant


def test_v100_has_no_int8() -> None:
    message = changed('device = "T4"', 'device = "V100"')
    assert message == (
        "c.toml, group 2 (infer): ladder entry 'int8' asks for int8, but V100 has no int8 hardware; it has float16, float32"
    )


def test_t4_only_emulates_bfloat16() -> None:
    message = changed('"int8", "float16"', '"int8", "bfloat16"')
    assert message == (
        "c.toml, group 2 (infer): ladder entry 'bfloat16' asks for bfloat16, but T4 has no bfloat16 hardware and its emulation "
        "is not support; it has int8, float16, float32"
    )


def test_formats_inside_a_variant_are_checked_too() -> None:
    assert "T4 has no bfloat16 hardware" in changed('"int8"', f'"{Variant.of(INT8, sixteen_bit=BF16)}"')
    assert "T4 has no float8_e4m3fn hardware" in changed('"int8"', '"float8_e4m3fn"')
    assert "T4 has no bfloat16 hardware" in changed('base = "float32"', 'base = "bfloat16"')


CASES = [
    ('count = 4', "count = 0", "count is the number of ranks, at least 1, got 0"),
    ('count = 4', 'count = "4"', "count must be an integer, got '4'"),
    ('count = 4', "count = true", "count must be an integer, got True"),
    ('count = 4', "", "c.toml, group 2 (infer) lacks 'count'"),
    ('device = "T4"', 'device = " "', "device is empty; name the device type as its profile does"),
    ('role = "infer"', 'role = "boss"', "role must be one of train, infer, got 'boss'"),
    ('memory = "15 GiB"', 'memroy = "15 GiB"', "unknown key 'memroy'; did you mean 'memory'?"),
    ('memory = "15 GiB"', 'xyzzy = "15 GiB"', "unknown key 'xyzzy'; known are name, device,"),
    ('memory = "15 GiB"', 'memory = "15 loaves"', "memory is not a size: '15 loaves'"),
    ('memory = "15 GiB"', "memory = 0", "memory is a positive size such as '15 GiB' (leave it out for no limit), got 0"),
    ('memory = "15 GiB"', "memory = -5", "memory is a positive size"),
    ('memory = "15 GiB"', 'memory = "40 GiB"', "memory is '40 GiB', but T4 has at most 16 GB"),
    ('memory = "15 GiB"', "memory = 21", "memory is 21 bytes, less than 1 MiB; write its unit, such as '21 GiB'"),
    ('memory = "15 GiB"', 'memory = "21"', "memory is 21 bytes, less than 1 MiB; write its unit, such as '21 GiB'"),
    ('device = "V100"', 'device = "V100-SXM2-16GB"\nmemory = "20 GiB"', "memory is '20 GiB', but V100 16GB has at most 16 GB"),
    ("share = 0.5", "share = 0", "share is a fraction of each device, above 0 and at most 1, got 0"),
    ("share = 0.5", "share = nan", "share must be a number, got nan"),
    ("share = 0.5", 'share = "half"', "share must be a number, got 'half'"),
    ("sync_per_step = true", "sync_per_step = 1", "sync_per_step must be true or false, got 1"),
    ('base = "float32"', 'base = "int8"', "base is the precision of what a plan does not lower"),
    ('base = "float32"', 'base = "float16"', "the ladder must end with the base precision, float16"),
    ('"float16", "float32"]', '"float16"]', "the ladder must end with the base precision, float32"),
    ('"int8", "float16"', '"float16", "int8"', "but int8 does not come above float16"),
    ('"int8", "float16"', '"int8", "int8"', "but int8 does not come above int8"),
    ('"int8", "float16"', '"int9", "float16"', "ladder must be one of int8, float8_e4m3fn, bfloat16, float16, float32, got 'int9'"),
    ('"int8", "float16"', '8, "float16"', "a ladder holds precision names or variants as text, got 8"),
    ('"int8", "float16"', '"int8;out=float32", "float16"', "not a variant: 'int8;out=float32'"),
    ('ladder = ["int8", "float16", "float32"]', "", "c.toml, group 2 (infer) lacks 'ladder'"),
    ('ladder = ["int8", "float16", "float32"]', 'ladder = "int8"', "ladder must be a list, got 'int8'"),
    ('role = "train"', 'role = "train"\nladder = ["float16", "float32"]', "a training group stays at its base precision (float32)"),
    ('name = "infer"', 'name = "train"', "has two groups called 'train'; give each its own name"),
    ('name = "infer"', 'name = "a=b"', "and '.', and begins with a letter or a digit, got 'a=b'"),
    ('between = ["train", "infer"]', 'between = ["train", "x"]', "names two groups out of train, infer, got ['train', 'x']"),
    ('between = ["train", "infer"]', 'between = ["train"]', "between names two groups"),
    ("bandwidth_gbps = 32", "bandwidth_gbps = 0", "bandwidth_gbps is in gigabits per second, above 0, got 0"),
    ("bandwidth_gbps = 32", "", "c.toml, link 1 lacks 'bandwidth_gbps'"),
    ("latency_us = 20", "latency_us = -1", "latency_us is in microseconds, 0 or more, got -1"),
    ("[[link]]", '[[link]]\nbetween = ["infer", "train"]\nbandwidth_gbps = 1\n[[link]]', "two links between 'train' and 'infer'"),
    ("share = 0.5", 'w_granularity = "row"', "w_granularity must be one of channel, tensor, got 'row'"),
    ("share = 0.5", 'rounding = "up"', "rounding must be one of stochastic, nearest, floor, got 'up'"),
    ("share = 0.5", 'output = "int8"', "an operator's output is a 16- or 32-bit float, got int8"),
    ("share = 0.5", 'output = "int9"', "output must be one of int8, float8_e4m3fn,"),
    ("[[link]]", "[link]", "write each link as a table of its own, [[link]]"),
    ('name = "night shift"', "name = 5", "name must be a string, got 5"),
    ('name = "night shift"', "name = ", "is not valid TOML: Invalid value (at line 2, column 8)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_bad_files(old: str, new: str, expected: str) -> None:
    assert expected in changed(old, new)


def test_no_groups() -> None:
    assert refused("").startswith("c.toml describes no device group; add a [[group]] table")


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read .*none\.toml: No such file or directory"):
        read_cluster(tmp_path / "none.toml")
    path = tmp_path / "c.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ClusterError, match=r"c\.toml is not UTF-8 text \(byte 8\)"):
        read_cluster(path)
    path.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ClusterError, match=r"c\.toml: it has 1048577 bytes; cluster files have at most 1048576"):
        read_cluster(path)


@given(st.text(max_size=200) | st.sampled_from(GOOD.splitlines()).flatmap(lambda line: st.just(GOOD.replace(line, "", 1))))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except ClusterError:
        return
    assert artifact.from_bytes(artifact.to_bytes(cluster)) == cluster


CLUSTER = parse_cluster(GOOD)
PROFILE = examples(layers=1)[Profile]
PROFILES = {
    "train": attrs.evolve(PROFILE, device=attrs.evolve(PROFILE.device, name="Tesla V100-SXM2-32GB")),
    "infer": attrs.evolve(PROFILE, device=attrs.evolve(PROFILE.device, name="Tesla T4", share=0.5)),
}


def test_matching_profiles() -> None:
    check_profiles(CLUSTER, PROFILES)


def test_a_group_without_a_profile() -> None:
    with pytest.raises(ClusterError) as caught:
        check_profiles(CLUSTER, {"train": PROFILES["train"]})
    assert str(caught.value) == (
        "group 'infer' of cluster 'night shift' has no profile; run 'qsync profile' on a T4 and pass it with --profile infer=PATH"
    )


def test_profiles_of_something_else() -> None:
    with pytest.raises(ClusterError, match="there is a profile for group 'night', but cluster 'night shift' has train, infer"):
        check_profiles(CLUSTER, PROFILES | {"night": PROFILE})
    with pytest.raises(ClusterError, match="group 'infer' is made of T4, but its profile was measured on Tesla V100-SXM2-32GB"):
        check_profiles(CLUSTER, PROFILES | {"infer": PROFILES["train"]})
    whole = attrs.evolve(PROFILE, device=attrs.evolve(PROFILE.device, share=1.0))
    with pytest.raises(ClusterError, match=r"gets share 0\.5 of each T4, but its profile was measured at share 1"):
        check_profiles(CLUSTER, PROFILES | {"infer": whole})


def test_a_mark_of_the_order_of_bytes_at_the_beginning_is_left_out() -> None:
    """Editors on Windows write one."""
    assert parse_cluster("\ufeff" + GOOD) == parse_cluster(GOOD)


def test_a_ladder_lists_storages_of_frozen_weights_by_name():
    def ladder(*rungs):
        listed = ", ".join(f'"{rung}"' for rung in rungs)
        group = f'[[group]]\nname = "a"\ndevice = "cpu"\ncount = 1\nrole = "infer"\nbase = "bfloat16"\nladder = [{listed}]\n'
        return parse_cluster(group).groups[0].ladder

    names = ("int8@int8-row", "bfloat16@nf4", "bfloat16@int8-block", "bfloat16")
    assert [rung.label for rung in ladder(*names)] == list(names)
    assert ladder(*names)[1].storage is Storage.NF4
    with pytest.raises(
        ClusterError, match="storage of a ladder's entry must be one of as-is, int8-row, int8-block, nf4, got 'nf5'"
    ):
        ladder("bfloat16@nf5", "bfloat16")
    with pytest.raises(ClusterError, match="a product in int8 does not read a weight stored as nf4"):
        ladder("int8@nf4", "bfloat16")
    with pytest.raises(ClusterError, match="bfloat16 does not come above bfloat16"):
        ladder("bfloat16@as-is", "bfloat16")
