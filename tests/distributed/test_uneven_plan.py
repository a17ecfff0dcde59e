"""Plans that may choose local batches, of profiles in which one worker is slow and of ``qsync prepare``, trained over gloo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
import uneven_script
from launching import run_ranks
from torch.utils.data import DataLoader

from clusters import cluster_text
from qsync_core.artifacts.files import digest, from_bytes, load, to_bytes
from qsync_core.cluster_file import parse_cluster
from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.plan import PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_core.ir.variant import Variant
from qsync_core.run_folder import RunFolder
from qsync_torch import UnevenBatchSampler, capture
from qsync_torch.prepare.asked import Asked
from qsync_torch.prepare.board import Board
from qsync_torch.prepare.folder import Folder, Made
from qsync_torch.prepare.measuring import Bench
from qsync_torch.prepare.planning import Planning
from qsync_torch.profiling.bench import Efforts
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.timing import Effort
from qsync_torch.tracing.trace import trace

pytestmark = pytest.mark.distributed(seconds=45)

FLOAT32, BFLOAT16 = Variant.plain(Precision.FLOAT32), Variant.of(Precision.BFLOAT16)
ONCE = Effort(min_repeats=1, max_repeats=1, budget_s=0.0, warmup=0)
CLUSTER = cluster_text(link=(1, 100), fast={}, slow={"ladder": ["bfloat16", "float32"]})


def slowed(measured: Profile, factor: float) -> Profile:
    """As of a device on which an operator takes 1 ms times ``factor`` in float32, and half of that in bfloat16."""
    lowered = {index for by in measured.cost_index.values() for variant, index in by.items() if variant.compute != "float32"}
    times = [round(1e6 * factor * (0.5 if index in lowered else 1.0)) for index in range(len(measured.costs))]
    costs = [
        attrs.evolve(cost, forward_compute_ns=ns, backward_compute_ns=ns) for cost, ns in zip(measured.costs, times, strict=True)
    ]
    forward = sum(times[by_variant[FLOAT32]] for by_variant in measured.cost_index.values())
    step = attrs.evolve(
        measured.steps[0],
        iteration_ns=2 * forward + measured.optimizer_compute_ns,
        forward_compute_ns=forward,
        backward_compute_ns=forward,
        optimizer_compute_ns=measured.optimizer_compute_ns,
    )
    return attrs.evolve(measured, costs=tuple(costs), steps=(step,))


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.values()]).clone()


def trained_on_whole_batches(size: int) -> torch.Tensor:
    """The parameters that one process comes to."""
    model, optimizer, criterion, data = uneven_script.make()
    sampler = UnevenBatchSampler(data, [size])
    for epoch in range(uneven_script.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model.state_dict())


def test_a_free_plan_moves_samples_and_trains_as_one_process_with_whole_batches(tmp_path: Path) -> None:
    model, optimizer, criterion, data = uneven_script.make()
    job = capture(model, optimizer, criterion, DataLoader(data, batch_size=uneven_script.BATCH))
    dag = trace(job)
    measured = profile(
        job, dag, ProfileRequest(ladder=(BFLOAT16, FLOAT32), with_collectives=False, efforts=Efforts(ONCE, ONCE, ONCE))
    )
    omega = {operator.op_id: {BFLOAT16: 1.0, FLOAT32: 0.0} for operator in dag.adjustable}
    folder = Folder(RunFolder(tmp_path / "run"), None, writes=True)
    folder.run.ledger.parent.mkdir(parents=True)
    cluster, inputs = parse_cluster(CLUSTER), {"graph": digest(dag)}
    folder.publish(
        {
            "cluster": Made(inputs, CLUSTER.encode()),
            "profile fast": Made(inputs, to_bytes(slowed(measured, 1.0))),
            "profile slow": Made(inputs, to_bytes(slowed(measured, 3.0))),
            "sensitivity": Made(inputs, to_bytes(Sensitivity(dag.model, digest(dag), "", "by hand", omega))),
        }
    )
    planning = Planning(folder, dag, cluster, Board(None), Asked(batch="free"))
    folder.publish(*planning.plan())
    plan = from_bytes(folder.read("plan fast+slow"), PrecisionPlan)
    fast, slow = plan.local_batches["fast"], plan.local_batches["slow"]
    assert plan.recommended_way is not None
    wanted = dict(plan.recommended_way.local_batches)
    assert planning.batches_to_measure() == wanted
    seen: list[int] = []
    watching = attrs.evolve(job, loss=lambda output, batch: (seen.append(len(output)), job.loss(output, batch))[1])
    bench = Bench(watching, dag, torch.device("cpu"), SimpleNamespace(rank=0), folder, Board(None))  # type: ignore[arg-type]
    folder.publish(bench.profile_at(cluster.group("slow"), wanted["slow"]))
    assert set(seen) == {wanted["slow"]}
    assert [one.batch_size for one in planning.profiles()["slow"].batches] == [wanted["slow"]]
    assert planning.batches_to_measure() == {"fast": wanted["fast"]}
    failing = attrs.evolve(bench, job=attrs.evolve(job, batch=lambda step, size: job.batch(step, 10**9 if size > 16 else size)))
    assert failing.profile_at(cluster.group("fast"), 17) == {}
    assert slow < uneven_script.BATCH < fast

    scripts = [[uneven_script.__file__, str(folder.run.path), str(tmp_path / "saved")]] * 2
    ended = run_ranks(scripts, [{"QSYNC_GROUP": "slow"}, {"QSYNC_GROUP": "fast"}])
    assert [one.status for one in ended] == [0, 0], ended
    places = [{"QSYNC_GROUP": "slow"}, {"QSYNC_GROUP": "fast"}]
    for one in run_ranks([[uneven_script.__file__, str(folder.run.path)]] * 2, places):
        assert one.status == 1
        assert "PlanError: the plan has local batches of different sizes" in one.output, "in these words, compiled too"
        assert "InternalTorchDynamoError" not in one.output
    saved = {group: torch.load(tmp_path / f"saved.{rank}") for rank, group in enumerate(("slow", "fast"))}

    assert saved["fast"]["sizes"][:3] == [fast] * 3
    assert saved["slow"]["sizes"][:3] == [slow] * 3
    assert sum(saved["fast"]["sizes"] + saved["slow"]["sizes"]) == uneven_script.EPOCHS * uneven_script.SAMPLES
    before, whole = flat(model.state_dict()), trained_on_whole_batches(fast + slow)
    ours = [flat(one["model"]) for one in saved.values()]
    assert torch.equal(*ours)
    assert (ours[0] - whole).norm() < 0.02 * (whole - before).norm(), "what bfloat16 on the slow worker leaves"


def test_two_ranks_a_group_are_prepared_for_uneven_batches_and_train_as_one_process(tmp_path: Path) -> None:
    run, groups = RunFolder(tmp_path / "run"), ("fast", "fast", "slow", "slow")
    script = [uneven_script.__file__, str(run.path), str(tmp_path / "saved")]
    command = ["-m", "qsync", "prepare", script[0], "-o", str(run.path), "--batch", "free", "--keep", "re:.*", "--", *script[1:]]
    seconds = {"fast": "0.003", "slow": "0.0045"}
    ended = run_ranks([command] * 4, [{"QSYNC_GROUP": group, "SAMPLE_S": seconds[group]} for group in groups])
    assert [one.status for one in ended] == [0] * 4, ended

    assert {(group.name, group.count) for group in run.read_cluster().groups} == {("fast", 2), ("slow", 2)}
    for names, ranks in ((("fast", "slow"), 4), (("fast",), 2), (("slow",), 2)):
        costs = load(run.communication(names), CollectiveCosts)
        assert costs.ranks == dict.fromkeys(names, 2)
        assert [entry.all_reduce.world_size for entry in costs.measured] == [ranks]
        assert run.load_plan(names).communication is not None
    plan = run.load_plan(("fast", "slow"))
    alone = run.load_plan(("fast",)).predicted_iteration_ns
    assert plan.verdict.training_only_ns == alone, "the verdict's job without others is that of the plan for it"
    fast, slow = plan.local_batches["fast"], plan.local_batches["slow"]
    assert 2 * fast + 2 * slow == 4 * uneven_script.BATCH
    assert slow < uneven_script.BATCH < fast
    for group, batch in plan.local_batches.items():
        measured = [one.batch_size for one in load(run.profile(group), Profile).batches]
        assert min(abs(one - batch) for one in measured) <= batch / 32, "in rounds of uneven batches"
    assert f"({fast} a rank of fast, {slow} a rank of slow)" in run.start.read_text()
    assert run.report.is_file()
    assert not run.trace.exists(), "no operator's time is known in uneven batches"

    ended = run_ranks([script] * 4, [{"QSYNC_GROUP": group} for group in groups])
    assert [one.status for one in ended] == [0] * 4, ended
    saved = [torch.load(tmp_path / f"saved.{rank}") for rank in range(4)]
    assert [one["sizes"][0] for one in saved] == [fast, fast, slow, slow]
    assert sum(sum(one["sizes"]) for one in saved) == uneven_script.EPOCHS * uneven_script.SAMPLES
    first, *others = (flat(one["model"]) for one in saved)
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first, trained_on_whole_batches(2 * fast + 2 * slow), rtol=1e-4, atol=1e-6)
