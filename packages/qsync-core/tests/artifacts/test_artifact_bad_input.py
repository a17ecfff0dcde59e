"""Whatever is wrong with an artifact gives one ArtifactError that says what and where."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
from artifact_examples import examples

from qsync_core.artifacts import files as artifact
from qsync_core.artifacts.schema import KINDS
from qsync_core.errors import ArtifactError
from qsync_core.ir.cluster import Cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.dfg import GlobalDfg, LocalDfg, Phase, Resource
from qsync_core.ir.observations import Observations
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Interval, Timeline

EXAMPLES = examples(layers=2)
HEADER = struct.Struct(">8s16sIQ")


def seal(content: bytes, kind: str = "Timeline", version: int | None = None, length: int | None = None) -> bytes:
    """A header with a digest that matches, so that the decoder itself is reached; of the example's version unless given."""
    if version is None:
        version = int.from_bytes(artifact.to_bytes(EXAMPLES[KINDS[kind]])[24:28], "big") if kind in KINDS else 1
    front = HEADER.pack(artifact.MAGIC, kind.encode(), version, len(content) if length is None else length)
    return front + hashlib.sha256(front + content).digest() + content


def plain(kind: type) -> Any:
    return msgpack.unpackb(artifact.to_bytes(EXAMPLES[kind])[artifact.HEADER_BYTES :])


def refused(data: bytes, kind: type | None = None) -> str:
    with pytest.raises(ArtifactError) as caught:
        artifact.from_bytes(data, kind, name="a.qsync")
    message = str(caught.value)
    assert message.startswith("a.qsync ")
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("length", [1, 8, 40, 67, 68, 200, -1])
def test_truncated(length: int) -> None:
    data = artifact.to_bytes(EXAMPLES[Profile])
    assert "is truncated" in refused(data[:length])


def test_truncated_says_how_much_is_missing() -> None:
    data = artifact.to_bytes(EXAMPLES[Profile])
    size = len(data) - artifact.HEADER_BYTES
    assert refused(data[:-5]).endswith(
        f"its header announces {size} bytes of content, {size - 5} are there; copy the file again, or make it anew: in a run "
        "folder with 'qsync prepare', elsewhere with 'qsync profile'"
    )


def test_bit_flips_anywhere() -> None:
    data = artifact.to_bytes(examples(layers=1)[Sensitivity])
    for position in range(len(data)):
        refused(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])


def test_bit_flip_in_the_content_is_named_as_such() -> None:
    data = bytearray(artifact.to_bytes(EXAMPLES[Profile]))
    data[-1] ^= 0x10
    assert "was altered: its content does not match its digest" in refused(bytes(data))


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 10**6])
def test_oversized_length_in_the_header(length: int) -> None:
    assert f"its header announces {length} bytes of content, 5 are there" in refused(seal(b"12345", length=length))


@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion items
        b"\xdf\xff\xff\xff\xff",  # a mapping of as many
        b"\xdb\xff\xff\xff\xff",  # a string
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xc9\xff\xff\xff\xfe\x01",  # an extension
        b"\xdd\x00\x10\x00\x00" * 500 + b"\xc0" * 1000,  # 500 nested lists of a million each
    ],
)
def test_oversized_length_inside_the_content(content: bytes) -> None:
    assert "is not valid msgpack" in refused(seal(content))


def test_deep_nesting() -> None:
    assert "is not valid msgpack" in refused(seal(b"\x91" * 100_000 + b"\xc0"))
    assert "expected the fields of a Timeline, got list" in refused(seal(b"\x91" * 400 + b"\xc0"))


def test_bytes_after_the_end() -> None:
    content = artifact.to_bytes(EXAMPLES[Timeline])[artifact.HEADER_BYTES :]
    assert "3 bytes after the end of its content" in refused(seal(content + b"\0\0\0"))
    assert "has bytes after its end" in refused(seal(content) + b"\0")


def test_repeated_key_and_longer_numbers() -> None:
    twice = b"\x82" + 2 * (msgpack.packb("a") + b"\x01")
    assert "is not encoded canonically" in refused(seal(twice))
    assert "is not encoded canonically" in refused(seal(b"\x81\xa1a\xcd\x00\x01"))


def test_extension_types_and_bytes() -> None:
    for value in (msgpack.ExtType(5, b"x"), msgpack.Timestamp(5, 6), b"bytes"):
        assert "exceeds" in refused(seal(msgpack.packb(plain(Timeline) | {"model": value})))
    assert "model: expected a string, got bytes" in refused(seal(msgpack.packb(plain(Timeline) | {"model": b""})))
    assert "exceeds max_ext_len" in refused(seal(b"\xc9\xff\xff\xff\xff"))  # a length that wraps round to 0 inside msgpack


def test_text_that_is_not_utf8() -> None:
    assert "is not valid msgpack" in refused(seal(b"\x81\xa1\xff\x01"))


def test_not_an_artifact() -> None:
    assert "is not a QSync artifact: it starts with b'import t'" in refused(b"import torch")
    assert "a.qsync is empty; copy the file again, or make it anew: in a run folder with 'qsync prepare'" in refused(b"")
    assert "is not a QSync artifact" in refused(b"\x80\x04\x95" + b"\0" * 100)


def test_wrong_kind() -> None:
    message = refused(artifact.to_bytes(EXAMPLES[Profile]), PrecisionPlan)
    assert message == "a.qsync holds a Profile, but a PrecisionPlan is needed here"
    message = refused(artifact.to_bytes(EXAMPLES[Profile]), Observations)
    assert message == "a.qsync holds a Profile, but an Observations is needed here"


def test_kind_of_the_header_is_not_that_of_the_content() -> None:
    content = artifact.to_bytes(EXAMPLES[Profile])[artifact.HEADER_BYTES :]
    assert "is not a valid Timeline: the whole: Timeline lacks source" in refused(seal(content))


def test_unknown_kind() -> None:
    assert "holds an unknown kind of artifact, 'Recipe'" in refused(seal(b"\x80", kind="Recipe"))


def test_wrong_schema() -> None:
    content = artifact.to_bytes(EXAMPLES[Timeline])[artifact.HEADER_BYTES :]
    expected = "has schema version 7 of Timeline, this qsync-core reads up to 2; upgrade qsync-core"
    assert expected in refused(seal(content, version=7))
    assert "versions start at 1" in refused(seal(content, version=0))


def _set(path: list[Any], value: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = value

    return change


def _reorder(tree: dict[str, Any]) -> None:
    tree["source"] = tree.pop("source")


def _second_reduction(tree: dict[str, Any]) -> None:
    tree["nodes"].append(tree["nodes"][-2] | {"node_id": len(tree["nodes"])})


_LAYER = "bert.encoder.layer.0.attention.self.query#0"
_CASES: list[tuple[type, Callable[[Any], Any], str]] = [
    (Timeline, _set(["iteration_ns"], "5"), "iteration_ns: expected an integer, got str"),
    (Timeline, _set(["iteration_ns"], True), "iteration_ns: expected an integer, got bool"),
    (Timeline, _set(["iteration_ns"], 5.0), "iteration_ns: expected an integer, got float"),
    (Timeline, _set(["iteration_ns"], -5), "Timeline.iteration_ns must be an integer in 0..2**62, got -5"),
    (Timeline, _set(["iteration_ns"], 2**63), "must be an integer in 0..2**62"),
    (Timeline, _set(["model"], None), "model: expected a string, got NoneType"),
    (Timeline, _set(["model"], "x" * 70_000), "model: expected a string of at most 65536 characters, got 70000"),
    (Timeline, _set(["source"], "guessed"), "the whole: 'source' must be in ('predicted', 'measured')"),
    (Timeline, _set(["surprise"], 1), "the whole: Timeline has no field surprise"),
    (Timeline, lambda tree: tree.pop("model"), "the whole: Timeline lacks model"),
    (Timeline, _reorder, "the fields of Timeline are stored in the order source, model,"),
    (Timeline, _set(["rank_group"], {"x": "a"}), "rank_group[x]: expected a non-negative integer as key, got 'x'"),
    (Timeline, _set(["rank_group"], {"01": "a"}), "rank_group[01]: expected a non-negative integer as key"),
    (Timeline, _set(["rank_group"], {"9" * 5000: "a"}), "expected a non-negative integer as key"),
    (Timeline, _set(["rank_group"], []), "rank_group: expected a mapping, got list"),
    (Timeline, _set(["rank_group"], {"0": "a"}), "is of rank 1, which belongs to no group"),
    (Timeline, _set(["intervals"], "abc"), "intervals: expected a list, got str"),
    (Timeline, _set(["intervals", 3], 7), "intervals[3]: expected the fields of a Interval, got int"),
    (Timeline, _set(["intervals", 3, "op_id"], "a"), "intervals[3].op_id: an operator is stored as 'a#0', got 'a'"),
    (Timeline, _set(["intervals", 3, "op_id"], "a#-1"), "intervals[3].op_id: an operator is written 'fqn#call'"),
    (Timeline, _set(["intervals", 3, "phase"], "lunch"), "intervals[3].phase: expected one of forward, backward, optimizer"),
    (PrecisionDag, _set(["operators", 1, "variant"], "int8"), "operators[1].variant: a variant is stored as 'int8;out=bfloat16"),
    (PrecisionDag, _set(["operators", 1, "variant"], "int9"), "operators[1].variant: not a variant: 'int9'"),
    (PrecisionDag, _set(["operators", 1, "inputs"], ["nobody#0"]), "reads nobody#0, which does not come before it"),
    (PrecisionDag, _set(["operators", 1, "inputs"], []), "0 inputs but 1 input shapes"),
    (PrecisionDag, _set(["operators", 2, "op_id"], _LAYER), f"operator {_LAYER} stands in the graph twice"),
    (PrecisionDag, _set(["operators", 1, "output_shape"], [2**40, 2**40]), "has more than 2**44 elements"),
    (PrecisionDag, _set(["operators"], []), "a graph has at least one operator"),
    (PrecisionDag, _set(["operators", 1, "kind"], "relu"), " operators are adjustable, not 'relu'"),
    (PrecisionDag, _set(["batch_size"], 2**31), "PrecisionDag.batch_size must be an integer in 0..2**20, got 2147483648"),
    (Profile, _set(["costs", 0, "forward_compute_ns"], 2**50), "OpCost.forward_compute_ns must be an integer in 0..2**48"),
    (Profile, _set(["casts", 0, "ns_per_element"], 1e300), "CastModel.ns_per_element must be a number of at most 2**48"),
    (PrecisionDag, _set(["operators", 1, "output_shape"], [-1]), "Operator.output_shape must be an integer in 0..2**62, got -1"),
    (PrecisionDag, _set(["operators", 1, "attributes"], {"b": "1", "a": "2"}), "[a]: keys are stored in ascending order"),
    (
        Profile,
        lambda tree: tree["cost_index"][_LAYER].update(dict.fromkeys(tree["cost_index"][_LAYER], 99)),
        "points at cost 99 of 40",
    ),
    (Profile, _set(["casts", 0, "r2"], math.nan), "casts[0].r2: expected a finite number, got nan"),
    (Profile, _set(["casts", 0, "r2"], math.inf), "casts[0].r2: expected a finite number, got inf"),
    (Profile, _set(["casts", 0, "r2"], 1), "casts[0].r2: expected a floating-point number, got int"),
    (Profile, _set(["casts", 0, "samples", 2], [1, 2, 3]), "casts[0].samples[2]: expected 2 items, got 3"),
    (Profile, lambda tree: tree["casts"].append(tree["casts"][0]), "Profile.casts has two models for one kind of cast"),
    (Profile, _set(["device", "share"], 0.0), "device: DeviceType.share must be in (0, 1], got 0.0"),
    (
        Sensitivity,
        lambda tree: tree["omega"][_LAYER].update(dict.fromkeys(tree["omega"][_LAYER], -1.0)),
        f"Ω of {_LAYER} at bfloat16 must be a finite number ≥ 0, got -1.0",
    ),
    (LocalDfg, _set(["nodes", 2, "deps"], [2]), "depends on 2, which does not come before it"),
    (LocalDfg, _set(["nodes", 2, "node_id"], 9), "has id 9 at position 2"),
    (Observations, _set(["series", 0, "values"], [1.0]), "series loss.value of None has 1 values for 10 iterations"),
    (Observations, _set(["iterations", 3], 12), "the observed iterations must ascend, got (10, 11, 12, 12, 14"),
    (Observations, lambda tree: tree["series"].append(tree["series"][1]), f"lossvar.omega of {_LAYER} at int8 has two series"),
    (PrecisionDag, lambda tree: tree["parameters"].append(tree["parameters"][0]), "word_embeddings.weight is listed twice"),
    (PrecisionDag, lambda tree: tree["buckets"].append(tree["buckets"][0]), "output.dense.bias is in the gradient buckets twice"),
    (PrecisionDag, _set(["buckets", 0, "parameters"], ["nothing"]), "bucket holds nothing, which is no parameter of the model"),
    (Profile, lambda tree: tree["steps"].append(tree["steps"][0]), "Profile.steps has two measurements of the step at int8"),
    (LocalDfg, _second_reduction, "gradient bucket 0 is reduced by two nodes"),
    (GlobalDfg, _set(["groups", 1, "group"], "train"), "group 'train' stands in the graph twice"),
    (Cluster, lambda tree: tree["links"].append(tree["links"][0]), "two links connect the groups ['infer', 'train']"),
    (Cluster, lambda tree: tree["groups"][1]["ladder"].append(tree["groups"][1]["ladder"][0]), "of group 'infer' has int8 twice"),
    (Timeline, _set(["software"], {"guests": {}}), "software has an entry of group 'guests', to which no rank belongs"),
    (Timeline, _set(["peak_bytes"], {"guests": 5}), "peak_bytes has an entry of group 'guests', to which no rank belongs"),
    (
        PrecisionPlan,
        lambda tree: tree["operator_ids"].pop(0),
        f"'train' assigns a variant to {_LAYER}, which is not one",
    ),
    (
        PrecisionPlan,
        lambda tree: tree["groups"][1]["assignments"].pop(_LAYER),
        f"group 'infer' has no assignment for {_LAYER}",
    ),
    (
        PrecisionPlan,
        lambda tree: tree["unaddressed_ids"].append(_LAYER),
        f"{_LAYER} stands twice in",
    ),
    (
        PrecisionPlan,
        _set(["local_batches"], {"guests": 5}),
        "local_batches has an entry for group 'guests', but",
    ),
    (PrecisionPlan, _set(["groups", 1, "group"], "train"), "a plan has one entry per group"),
    (PrecisionPlan, _set(["rank0_group"], "nobody"), "rank 0 is to belong to group 'nobody'"),
    (PrecisionPlan, _set(["groups", 1, "role"], "boss"), "groups[1].role: expected one of train, infer; got 'boss'"),
]


@pytest.mark.parametrize(("kind", "change", "expected"), _CASES, ids=lambda value: getattr(value, "__name__", str(value)[:40]))
def test_wrong_values(kind: type, change: Callable[[Any], Any], expected: str) -> None:
    tree = plain(kind)
    change(tree)
    message = refused(seal(msgpack.packb(tree), kind=kind.__name__))
    assert f"a.qsync is not a valid {kind.__name__}: " in message
    assert expected in message


def test_long_values_do_not_make_long_messages() -> None:
    tree = plain(PrecisionDag)
    tree["operators"][1]["output_shape"] = [1] * 4_000 + [2**62, 2]
    assert "has more than 2**44 elements" in refused(seal(msgpack.packb(tree), kind="PrecisionDag"))


def not_stored(value: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        artifact.to_bytes(value)
    return str(caught.value)


def test_what_can_not_be_stored() -> None:
    assert "a dict is not an artifact; artifacts are PrecisionDag, Profile" in not_stored({})
    timeline, observations = EXAMPLES[Timeline], EXAMPLES[Observations]
    interval = Interval("x", OpId("a"), Phase.FORWARD, Resource.COMPUTE, 0, 0, 0)
    assert not_stored(attrs.evolve(timeline, model=5)) == "this Timeline cannot be stored: model: expected a string, got int"
    wrong = attrs.evolve(timeline, intervals=(interval, attrs.evolve(interval, phase="forward")))
    assert "intervals[1].phase: expected a Phase, got str" in not_stored(wrong)
    assert "intervals[0].op_id: expected a OpId, got str" in not_stored(
        attrs.evolve(timeline, intervals=(attrs.evolve(interval, op_id="a#0"),))
    )
    assert "rank_group: expected a mapping, got tuple" in not_stored(_unchecked(timeline, rank_group=(), intervals=()))
    assert "intervals: expected a tuple, got str" in not_stored(attrs.evolve(timeline, intervals=""))
    assert "intervals[0]: expected a Interval, got int" in not_stored(_unchecked(timeline, intervals=(5,)))
    bad = (attrs.evolve(observations.series[0], values=(math.nan,) * 10),)
    assert "series[0].values[0]: expected a finite number, got nan" in not_stored(attrs.evolve(observations, series=bad))


def _unchecked(value: Any, **changes: Any) -> Any:
    """A frozen object with fields that its validators would refuse."""
    copy = attrs.evolve(value)
    for name, field in changes.items():
        object.__setattr__(copy, name, field)
    return copy


def test_files_that_can_not_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read .*none\.qsync: No such file or directory"):
        artifact.load(tmp_path / "none.qsync")
    with pytest.raises(ArtifactError, match=r"cannot read .*: Is a directory"):
        artifact.load(tmp_path)
    with pytest.raises(ArtifactError, match=r"/dev/zero: it is not a regular file and not a pipe"):
        artifact.load("/dev/zero")
    with pytest.raises(ArtifactError, match=r"cannot write .*a\.qsync: No such file or directory"):
        artifact.save(EXAMPLES[Timeline], tmp_path / "missing" / "a.qsync")


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\x81\xa0\xc0", b"\x91\xc0", b"\xa2ab"], ids=repr)
def test_a_small_file_does_not_take_much_memory(item: bytes) -> None:
    """Each item takes 60 to 200 bytes in memory and 1 to 3 in the file."""
    count = 2_000_000 // len(item)
    data = seal(b"\xdd" + struct.pack(">I", count) + item * count)
    tracemalloc.start()
    try:
        refused(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 * len(data)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.qsync"
    with path.open("wb") as file:
        os.truncate(file.fileno(), artifact.MAX_BYTES + 1000)  # sparse
    with pytest.raises(ArtifactError, match=r"has 1073742824 bytes; artifacts have at most 1073741824"):
        artifact.load(path)


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b1A", "a\rb", "\x07", "\x7f", "a\u202eb", "\u2066", "\U000e0041", "\ufeff"])
def test_text_that_a_terminal_obeys_is_refused_and_stored_spelled_out(text: str) -> None:
    tree = plain(Timeline)
    tree["model"] = f"bert {text}"
    message = refused(seal(msgpack.packb(tree)))
    assert f"model: expected text without control characters, got {tree['model']!r}" in message
    assert text not in message
    stored = artifact.from_bytes(artifact.to_bytes(attrs.evolve(EXAMPLES[Timeline], model=tree["model"]))).model
    assert stored == "bert " + text.encode("unicode_escape").decode()


def test_lines_tabs_and_all_letters_are_text() -> None:
    model = "two\n\tlines, Ω → µs, \N{WOMAN}\u200d\N{PERSONAL COMPUTER}, עברית"
    assert artifact.from_bytes(artifact.to_bytes(attrs.evolve(EXAMPLES[Timeline], model=model))).model == model
