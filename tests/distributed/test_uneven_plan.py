"""A plan that may choose local batches, of profiles in which one worker is slow, trained by two workers over gloo."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
import uneven_script
from launching import run_ranks
from torch.utils.data import DataLoader

from clusters import cluster_text
from qsync_core.artifacts.files import digest, from_bytes, to_bytes
from qsync_core.cluster_file import parse_cluster
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

pytestmark = pytest.mark.distributed

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
    bench = Bench(watching, dag, torch.device("cpu"), None, folder, Board(None))  # type: ignore[arg-type]
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
    saved = {group: torch.load(tmp_path / f"saved.{group}") for group in ("fast", "slow")}

    assert saved["fast"]["sizes"][:3] == [fast] * 3
    assert saved["slow"]["sizes"][:3] == [slow] * 3
    assert sum(saved["fast"]["sizes"] + saved["slow"]["sizes"]) == uneven_script.EPOCHS * uneven_script.SAMPLES
    sampler = UnevenBatchSampler(data, [fast + slow])
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()
    for epoch in range(uneven_script.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    whole, *ours = (
        torch.cat([value.flatten() for value in state.values()])
        for state in (model.state_dict(), saved["fast"]["model"], saved["slow"]["model"])
    )
    assert torch.equal(*ours)
    assert (ours[0] - whole).norm() < 0.02 * (whole - before).norm(), "what bfloat16 on the slow worker leaves"
