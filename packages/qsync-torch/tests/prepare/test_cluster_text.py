"""The cluster file that is written reads as what was meant, and a change of it is seen."""

from __future__ import annotations

import pytest

from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.cluster import DeviceGroup
from qsync_core.ir.plan import Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.devices import int8_rungs
from qsync_torch.prepare.cluster_text import cluster_text, is_changed, rung_texts, with_links

FLOAT32 = Variant.plain(Precision.FLOAT32)
TRAIN = DeviceGroup("v100", "Tesla V100-SXM2-32GB", 2, Role.TRAIN, Precision.FLOAT32, (FLOAT32,), 32 << 30)


def infer(device: str, *rungs: Variant, share: float = 1.0) -> DeviceGroup:
    return DeviceGroup("low", device, 3, Role.INFER, Precision.FLOAT32, (*rungs, FLOAT32), 0, share)


@pytest.mark.parametrize(
    "group, texts",
    [
        (infer("Tesla T4", *int8_rungs(Precision.FLOAT16)), ["int8", "int8>float32", "float32"]),
        (infer("cpu", Variant.of(Precision.INT8), Variant.of(Precision.BFLOAT16)), ["int8", "bfloat16", "float32"]),
        # Of a chip that nobody knows a name means gradients in bfloat16, which this one has not.
        (infer("Quadro X", odd := Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16), share=0.5), [str(odd), "float32"]),
    ],
)
def test_what_is_written_reads_as_what_was_meant(group, texts):
    links = with_links([TRAIN, group], 20_000.0, 0.25)
    text = cluster_text('a "job"', [TRAIN, group], links)
    read = parse_cluster(text)
    assert (read.name, read.groups) == ('a "job"', (TRAIN, group))
    assert rung_texts(group) == texts
    (link,) = read.links
    assert (set(link.between), link.alpha_ns, link.beta_ns_per_byte) == ({"v100", "low"}, 20_000.0, 0.25)


def test_three_groups_have_three_links():
    others = [DeviceGroup(name, "T4", 1, Role.TRAIN, Precision.FLOAT32, (FLOAT32,)) for name in "ab"]
    assert [set(link.between) for link in with_links([TRAIN, *others], 1.0, 1.0)] == [{"v100", "a"}, {"v100", "b"}, {"a", "b"}]


def test_a_change_by_a_person_is_seen():
    text = cluster_text("job", [TRAIN], ())
    assert not is_changed(text)
    assert is_changed(text.replace("count = 2", "count = 8"))
    assert is_changed(text + "\n# 8 soon\n")
    assert is_changed('[[group]]\nname = "a"\n')
    assert is_changed("")
