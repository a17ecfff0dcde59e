"""Every artifact survives being written and read, and equal artifacts give equal bytes."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
from artifact_examples import examples
from artifact_strategies import ARTIFACTS
from hypothesis import given
from hypothesis import strategies as st

from hypothesis_profiles import tries
from qsync_core.artifacts import files as artifact
from qsync_core.artifacts import schema
from qsync_core.errors import ArtifactError
from qsync_core.ir.chain import ChainForm, ChainVariant
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import ChainAssignment, PrecisionPlan, RecommendedWay
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import (
    AlternatingDispatch,
    BatchStep,
    ChainCost,
    Compiled,
    Compiler,
    KernelCheck,
    MixedStep,
    OpCost,
    Profile,
    WrongKernels,
)
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.timeline import Timeline
from qsync_core.ir.variant import Variant


def test_every_kind_has_a_strategy_and_an_example() -> None:
    assert set(ARTIFACTS) == set(schema.KINDS.values()) == set(examples(layers=1))


@pytest.mark.parametrize("kind", ARTIFACTS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @tries(60)
    @given(ARTIFACTS[kind])
    def check(value: Any) -> None:
        data = artifact.to_bytes(value)
        again = artifact.from_bytes(data, kind)
        assert again == value
        assert artifact.to_bytes(again) == data

    check()


@pytest.mark.parametrize("kind", ARTIFACTS, ids=lambda kind: kind.__name__)
def test_real_size_through_a_file(kind: type, tmp_path: Path) -> None:
    value = examples()[kind]
    path = tmp_path / "a.qsync"
    artifact.save(value, path)
    assert artifact.load(path) == value
    assert artifact.load(path, kind) == value
    assert artifact.digest(value) == path.read_bytes()[36:68].hex()


@given(st.permutations(range(6)))
def test_order_of_a_mapping_does_not_change_the_bytes(order: list[int]) -> None:
    ranks = {rank: f"group {rank}" for rank in order}
    plain = {rank: f"group {rank}" for rank in range(6)}
    assert artifact.to_bytes(Timeline("predicted", "m", 1, ranks, ())) == artifact.to_bytes(
        Timeline("predicted", "m", 1, plain, ())
    )


def test_digest_depends_on_kind_and_content() -> None:
    digests = {artifact.digest(value) for value in examples(layers=1).values()}
    assert len(digests) == len(schema.KINDS)
    sensitivity = examples(layers=1)[Sensitivity]
    assert artifact.digest(attrs.evolve(sensitivity, model="another")) not in digests


def test_integers_are_floats_where_the_field_is_one() -> None:
    sensitivity = attrs.evolve(examples(layers=1)[Sensitivity], flips={})
    as_int = {op_id: dict.fromkeys(by_variant, 0) for op_id, by_variant in sensitivity.omega.items()}
    as_float = {op_id: dict.fromkeys(by_variant, 0.0) for op_id, by_variant in sensitivity.omega.items()}
    assert artifact.digest(attrs.evolve(sensitivity, omega=as_int)) == artifact.digest(attrs.evolve(sensitivity, omega=as_float))


def test_file_gets_the_permissions_of_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        artifact.save(examples(layers=1)[Timeline], tmp_path / "a.qsync")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a.qsync").stat().st_mode) == 0o640


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.qsync"
    old = examples(layers=1)[Timeline]
    artifact.save(old, path)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ArtifactError, match=r"cannot write .*a\.qsync: No space left on device"):
        artifact.save(attrs.evolve(old, model="new"), path)
    monkeypatch.undo()
    assert artifact.load(path) == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.qsync"]


def test_older_schema_versions_are_migrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version 1 file, in which a field had another name, is read by a version 3 qsync-core in two steps."""
    monkeypatch.delitem(schema._MIGRATIONS, ("Sensitivity", 1))
    sensitivity = attrs.evolve(examples(layers=1)[Sensitivity], flips={}, copies={}, errors={}, masks={}, shifts={})
    data = artifact.to_bytes(sensitivity)
    plain = msgpack.unpackb(data[artifact.HEADER_BYTES :])
    old_plain = {
        "model_name" if name == "model" else name: value for name, value in plain.items() if name not in ("notes", "flips")
    }
    old = _with_header(msgpack.packb(old_plain), version=1)
    monkeypatch.setitem(schema._VERSIONS, "Sensitivity", 3)

    with pytest.raises(ArtifactError, match="schema version 1 can no longer be read; make the file again"):
        artifact.from_bytes(old)
    monkeypatch.setitem(schema._MIGRATIONS, ("Sensitivity", 1), lambda fields: {"model": fields.pop("model_name"), **fields})
    added = {"notes": ["geometric mean"], "flips": {}, "copies": {}, "errors": {}, "masks": {}, "shifts": {}}
    monkeypatch.setitem(schema._MIGRATIONS, ("Sensitivity", 2), lambda fields: {**fields, **added})
    assert artifact.from_bytes(old, Sensitivity) == sensitivity
    with pytest.raises(ArtifactError, match="the content does not fit schema version 1"):
        artifact.from_bytes(_with_header(msgpack.packb({}), version=1))
    with pytest.raises(ArtifactError, match="expected the fields of a Sensitivity, got list"):
        artifact.from_bytes(_with_header(msgpack.packb([]), version=1))


def test_a_sensitivity_of_version_1_is_read() -> None:
    path = Path(__file__).resolve().parents[4] / "tests" / "data" / "h200" / "resnet50" / "sensitivity.qsync"
    assert int.from_bytes(path.read_bytes()[24:28], "big") == 1
    sensitivity = artifact.load(path, Sensitivity)
    assert sensitivity.indicator == "lossvar"
    assert len(sensitivity.omega) == 54
    assert sensitivity.flips == {}
    assert artifact.from_bytes(artifact.to_bytes(sensitivity)) == sensitivity


def version_of(stored: Any) -> int:
    return int.from_bytes(artifact.to_bytes(stored)[24:28], "big")


def test_graphs_and_plans_of_one_micro_batch_are_stored_as_before_there_were_several() -> None:
    made = examples(layers=1)
    dag = attrs.evolve(made[PrecisionDag], accumulate=1, calls_are_known=False)
    plan = attrs.evolve(made[PrecisionPlan], accumulate=1)
    for stored, newest in ((dag, 4), (plan, 6)):
        several = attrs.evolve(stored, accumulate=8)
        assert version_of(stored) < version_of(several) == newest
        assert artifact.from_bytes(artifact.to_bytes(several)) == several
        for wrong in (0, -1, 1.5, True, 2**16 + 1):
            with pytest.raises(ValueError, match=r"accumulate must be an integer in 1\.\.2\*\*16, got "):
                attrs.evolve(stored, accumulate=wrong)


def test_plans_and_profiles_without_chains_are_stored_as_before_there_were_any() -> None:
    made = examples(layers=1)
    plan = attrs.evolve(made[PrecisionPlan], software={"train": {"torch": "2.13"}})
    group = attrs.evolve(
        plan.groups[0], chains={OpId("norm"): ChainAssignment(ChainVariant(saved=Precision.INT8), "b", "c", "why")}
    )
    with_chains = attrs.evolve(plan, groups=(group, *plan.groups[1:]))
    assert [version_of(p) for p in (plan, with_chains)] == [2, 3]
    assert artifact.from_bytes(artifact.to_bytes(with_chains), PrecisionPlan) == with_chains
    group = attrs.evolve(group, chain_forms={OpId("norm"): ChainForm(residual=True)})
    with_forms = attrs.evolve(plan, groups=(group, *plan.groups[1:]))
    assert version_of(with_forms) == 4
    assert artifact.from_bytes(artifact.to_bytes(with_forms), PrecisionPlan) == with_forms
    best = RecommendedWay((plan.groups[0].group,), {plan.groups[0].group: 12}, 99_000_000, 121.2, "--solver dynamic-batch")
    recommending = attrs.evolve(plan, recommended_way=best)
    assert version_of(recommending) == 5
    assert artifact.from_bytes(artifact.to_bytes(recommending), PrecisionPlan) == recommending
    with pytest.raises(ValueError, match="a way with group 'nowhere' is recommended"):
        attrs.evolve(plan, recommended_way=attrs.evolve(best, groups=("nowhere",)))
    with pytest.raises(ValueError, match=r"has a form of norm#0, which is no chain that it fuses"):
        attrs.evolve(plan, groups=(attrs.evolve(group, chains={}), *plan.groups[1:]))
    without_any = attrs.evolve(with_chains, **NEW_IN_2)
    assert version_of(without_any) == 3
    profile = attrs.evolve(made[Profile], synchronises=True)
    row = ChainCost((OpId("norm"),), ChainForm(), Variant.of(Precision.INT8), OpCost(1, 2, 3, 4))
    assert [version_of(p) for p in (profile, attrs.evolve(profile, chains=(row,)))] == [2, 3]
    assert version_of(attrs.evolve(profile, synchronises=False, chains=(row,))) == 3
    with pytest.raises(ValueError, match=r"two costs of chain norm#0 in one way to run"):
        attrs.evolve(profile, chains=(row, row))


def test_profiles_without_affine_casts_are_stored_as_before_there_were_any() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    first = profile.casts[0]
    affine = attrs.evolve(profile, casts=(attrs.evolve(first, key=attrs.evolve(first.key, symmetric=False)), *profile.casts))
    assert [version_of(p) for p in (profile, affine)] == [2, 4]
    assert artifact.from_bytes(artifact.to_bytes(affine), Profile) == affine
    old = msgpack.unpackb(artifact.to_bytes(profile)[artifact.HEADER_BYTES :])
    assert all(set(cast["key"]) == {"source", "target", "granularity", "rounding"} for cast in old["casts"])


def test_profiles_in_which_nothing_is_handed_on_are_stored_as_before() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    first = next(iter(profile.cost_index))
    handing = attrs.evolve(profile, handed_on=(first,))
    assert [version_of(p) for p in (profile, handing)] == [2, 5]
    assert artifact.from_bytes(artifact.to_bytes(handing), Profile) == handing
    with pytest.raises(ValueError, match=rf"Profile\.handed_on lists {first} twice"):
        attrs.evolve(profile, handed_on=(first, first))
    with pytest.raises(ValueError, match=r"Profile\.handed_on has stray#0, which it has no cost of"):
        attrs.evolve(profile, handed_on=(OpId("stray"),))


def test_profiles_without_alternating_steps_are_stored_as_before() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    saying = attrs.evolve(profile, alternating=AlternatingDispatch(Variant.of(Precision.BFLOAT16), 1_000_000, 0))
    assert [version_of(p) for p in (profile, saying)] == [2, 6]
    assert artifact.from_bytes(artifact.to_bytes(saying), Profile) == saying


def test_profiles_that_say_nothing_of_their_kernels_are_stored_as_before() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    first = next(iter(profile.cost_index))
    wrong = WrongKernels((first,), Variant.of(Precision.BFLOAT16), "linear.output of aten", "3 of its 8 elements are not finite")
    saying = attrs.evolve(profile, check=KernelCheck(12, (wrong,)))
    assert [version_of(p) for p in (profile, saying)] == [2, 7]
    assert artifact.from_bytes(artifact.to_bytes(saying), Profile) == saying
    with pytest.raises(ValueError, match=r"kernels"):
        KernelCheck(-1)


def test_profiles_of_eager_steps_are_stored_as_before() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    compiled = attrs.evolve(profile, compiled=Compiled(Compiler.QSYNC, around_ddp=True))
    keeping = attrs.evolve(compiled, steps=tuple(attrs.evolve(step, saved_bytes=123) for step in profile.steps))
    first = next(iter(profile.cost_index))
    mixing = attrs.evolve(keeping, mixed=(MixedStep((first,), keeping.steps[0]),))
    assert [version_of(p) for p in (profile, compiled, keeping, mixing)] == [2, 8, 8, 8]
    for newer in (compiled, keeping, mixing):
        assert artifact.from_bytes(artifact.to_bytes(newer), Profile) == newer
    with pytest.raises(ValueError, match=r"Profile\.mixed lowers stray#0, which it has no cost of"):
        attrs.evolve(mixing, mixed=(MixedStep((OpId("stray"),), keeping.steps[0]),))
    with pytest.raises(ValueError, match="saved_bytes"):
        attrs.evolve(profile.steps[0], saved_bytes=-1)


def test_profiles_of_one_batch_size_are_stored_as_before() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    saying = attrs.evolve(profile, batches=(BatchStep(3, profile.steps[0]), BatchStep(6, profile.steps[0])))
    assert [version_of(p) for p in (profile, saying)] == [2, 10]
    assert artifact.from_bytes(artifact.to_bytes(saying), Profile) == saying
    with pytest.raises(ValueError, match=r"Profile\.batches has steps at \[6, 3\] samples, which do not rise"):
        attrs.evolve(profile, batches=saying.batches[::-1])
    with pytest.raises(ValueError, match="batch_size"):
        BatchStep(0, profile.steps[0])


def test_graphs_without_views_are_stored_as_before() -> None:
    dag = attrs.evolve(examples(layers=1)[PrecisionDag], base=Precision.FLOAT32, batch_axes={}, calls_are_known=False)
    reader = next(operator for operator in dag.operators if len(operator.inputs) == 1)
    seeing = attrs.evolve(dag, operators=tuple(attrs.evolve(o, views=(1,)) if o is reader else o for o in dag.operators))
    assert [version_of(d) for d in (dag, seeing)] == [1, 3]
    assert artifact.from_bytes(artifact.to_bytes(seeing), PrecisionDag) == seeing
    for wrong in ((1, 1), (-1,)):
        with pytest.raises(ValueError, match=rf"{reader.op_id}: views .* must be a number from 0 for each of its 1 inputs"):
            attrs.evolve(reader, views=wrong)


def test_graphs_and_plans_from_before_outputs_were_decided_are_stored_as_they_were() -> None:
    dag = attrs.evolve(examples(layers=1)[PrecisionDag], base=Precision.FLOAT32, batch_axes={}, calls_are_known=False)
    first, *others = dag.operators
    saying = attrs.evolve(dag, calls_are_known=True)
    in_place = attrs.evolve(dag, operators=(attrs.evolve(first, in_place=True, also_read_by=("argmax",)), *others))
    assert [version_of(d) for d in (dag, saying, in_place)] == [1, 5, 5]
    assert [artifact.from_bytes(artifact.to_bytes(d), PrecisionDag) for d in (dag, saying, in_place)] == [dag, saying, in_place]
    plan = attrs.evolve(examples(layers=1)[PrecisionPlan], output_formats=None)
    decided = attrs.evolve(plan, output_formats=OutputFormats({"a": ("a", "b"), "b": ("b",)}))
    assert version_of(plan) < version_of(decided) == 7
    assert artifact.from_bytes(artifact.to_bytes(decided), PrecisionPlan) == decided


def test_costs_without_transfer_shares_are_stored_as_before() -> None:
    costs = examples(layers=1)[CollectiveCosts]
    first, *others = costs.measured
    saying = attrs.evolve(costs, measured=(attrs.evolve(first, transfer_share={"train": 0.25, "infer": 0.5}), *others))
    assert [version_of(c) for c in (costs, saying)] == [1, 2]
    assert artifact.from_bytes(artifact.to_bytes(saying), CollectiveCosts) == saying
    with pytest.raises(ValueError, match="the transfer share with 0 CTAs and ranks name different groups: 'infer'"):
        attrs.evolve(costs, measured=(attrs.evolve(first, transfer_share={"train": 0.25}), *others))


NEW_IN_2: dict[str, Any] = {
    name: value for name, value in schema._ADDED["PrecisionPlan", 2].items() if name not in ("base", "recommended_groups")
}


def test_a_newer_version_than_the_content_needs_is_refused() -> None:
    profile = attrs.evolve(examples(layers=1)[Profile], synchronises=True)
    plain = msgpack.unpackb(artifact.to_bytes(profile)[artifact.HEADER_BYTES :]) | {"chains": []}
    with pytest.raises(ArtifactError, match="with this content it is stored in schema version 2"):
        artifact.from_bytes(_with_header(msgpack.packb(plain), version=3, kind="Profile"))


@pytest.mark.parametrize("kind", [PrecisionDag, PrecisionPlan])
def test_a_float32_base_is_not_stored_and_another_one_is(kind: type) -> None:
    """Files from before AMP keep their bytes, and with them the digest that profiles and plans name."""
    plain: Any = examples(layers=1)[kind]
    before = {"software": {}, "communication": None} if kind is PrecisionPlan else {"calls_are_known": False}
    plain = attrs.evolve(plain, **before)
    data = artifact.to_bytes(plain)
    assert int.from_bytes(data[24:28], "big") == 1
    assert "base" not in msgpack.unpackb(data[artifact.HEADER_BYTES :])
    groups = {} if kind is PrecisionDag else {"groups": tuple(attrs.evolve(g, base=Precision.BFLOAT16) for g in plain.groups)}
    under_amp = attrs.evolve(plain, base=Precision.BFLOAT16, **groups)
    data = artifact.to_bytes(under_amp)
    assert int.from_bytes(data[24:28], "big") == 2
    assert artifact.from_bytes(data, kind) == under_amp
    content = msgpack.unpackb(data[artifact.HEADER_BYTES :])
    with pytest.raises(ArtifactError, match="it is stored in schema version 1"):
        artifact.from_bytes(_with_header(msgpack.packb({**content, "base": "float32"}), version=2, kind=kind.__name__))
    with pytest.raises(ArtifactError, match="base must be a 16- or 32-bit float"):
        artifact.from_bytes(_with_header(msgpack.packb({**content, "base": "int8"}), version=2, kind=kind.__name__))


def test_the_groups_of_a_plan_under_autocast_share_its_base() -> None:
    with pytest.raises(ValueError, match="the job's base is bfloat16, but group 'train' has base float32"):
        attrs.evolve(examples(layers=1)[PrecisionPlan], base=Precision.BFLOAT16)


@pytest.mark.parametrize("kind", [PrecisionPlan, Timeline])
def test_versions_and_settings_that_are_not_known_are_not_stored(kind: type) -> None:
    """Files from before plans and timelines carried them keep their bytes and are read; one with them is of version 2."""
    known: Any = examples(layers=1)[kind]
    assert int.from_bytes(artifact.to_bytes(known)[24:28], "big") == 2
    unknown = attrs.evolve(known, software={}, **({"communication": None} if kind is PrecisionPlan else {}))
    data = artifact.to_bytes(unknown)
    assert int.from_bytes(data[24:28], "big") == 1
    assert "software" not in msgpack.unpackb(data[artifact.HEADER_BYTES :])
    assert artifact.from_bytes(data, kind) == unknown


def test_a_profile_of_version_1_is_read_and_keeps_its_bytes() -> None:
    path = Path(__file__).resolve().parents[4] / "tests" / "data" / "h200" / "resnet50" / "profile.infer.qsync"
    assert int.from_bytes(path.read_bytes()[24:28], "big") == 1
    profile = artifact.load(path, Profile)
    assert (profile.synchronises, profile.memory) == (False, None)
    assert {cost.backward_workspace_bytes for cost in profile.costs} == {None}
    assert artifact.to_bytes(profile) == path.read_bytes()
    costs = (attrs.evolve(profile.costs[0], backward_workspace_bytes=0), *profile.costs[1:])
    for newer in (attrs.evolve(profile, synchronises=True), attrs.evolve(profile, costs=costs)):
        data = artifact.to_bytes(newer)
        assert int.from_bytes(data[24:28], "big") == 2
        assert artifact.from_bytes(data, Profile) == newer


def test_a_sensitivity_without_noise_of_copies_keeps_its_bytes() -> None:
    newer = attrs.evolve(examples(layers=1)[Sensitivity], errors={}, masks={})
    data = artifact.to_bytes(newer)
    assert int.from_bytes(data[24:28], "big") == 3
    assert artifact.from_bytes(data, Sensitivity) == newer
    with_masks = examples(layers=1)[Sensitivity]
    with_errors = attrs.evolve(with_masks, masks={})
    assert (version_of(with_errors), version_of(with_masks)) == (4, 5)
    [(op_id, by_variant)] = newer.copies.items()
    with_shifts = attrs.evolve(with_masks, shifts={op_id: dict.fromkeys(by_variant, (0.5, -0.25))})
    assert version_of(with_shifts) == 6
    with pytest.raises(ValueError, match="must be finite numbers"):
        attrs.evolve(with_masks, shifts={op_id: dict.fromkeys(by_variant, (0.5, float("nan")))})
    with pytest.raises(ValueError, match=r"along the same directions, but they are \[1, 2\] in number"):
        attrs.evolve(with_shifts, shifts={**with_shifts.shifts, OpId("other"): dict.fromkeys(by_variant, (0.5,))})
    for written in (with_errors, with_masks, with_shifts):
        assert artifact.from_bytes(artifact.to_bytes(written)) == written
    older = attrs.evolve(newer, copies={})
    data = artifact.to_bytes(older)
    assert int.from_bytes(data[24:28], "big") == 2
    assert "copies" not in msgpack.unpackb(data[artifact.HEADER_BYTES :])
    assert artifact.from_bytes(data, Sensitivity) == older
    [(op_id, by_variant)] = newer.copies.items()
    with pytest.raises(ValueError, match="must be a finite number"):
        attrs.evolve(newer, copies={op_id: dict.fromkeys(by_variant, -0.5)})


def _with_header(content: bytes, *, version: int, kind: str = "Sensitivity") -> bytes:
    import hashlib

    front = struct.pack(">8s16sIQ", artifact.MAGIC, kind.encode(), version, len(content))
    return front + hashlib.sha256(front + content).digest() + content
