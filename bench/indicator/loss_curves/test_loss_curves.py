"""Curves by hand, runs that differ in nothing but their precision, and everything from observing to the page on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from indicator.accuracy.methods import FULL, QSYNC, UNIFORM
from indicator.loss_curves.curves import at, final, largest_gap, smoothed
from indicator.loss_curves.finished import Finished
from indicator.loss_curves.images import CLASSES, IMAGES, _labels, image_batch, responses, waves
from indicator.loss_curves.methods import DEFAULT, Which, all_runs
from indicator.loss_curves.page import BEGIN, END, write_page
from indicator.loss_curves.rows import rows
from indicator.loss_curves.subjects import SUBJECTS
from indicator.loss_curves.training import How, learning_rate_share, train
from indicator.measuring import FLOAT32, INT8
from qsync_torch.tracing.trace import trace


def test_curves_worked_by_hand() -> None:
    curve = [float(i) for i in range(1, 21)]  # windows of 2
    assert smoothed(curve, 20) == [i + 0.5 for i in range(1, 20)]
    assert at(curve, 20, 0.1) == 1.5
    assert at(curve, 20, 0.5) == 9.5
    assert final(curve, 20) == 19.5
    assert final(curve[:-1], 20) is None  # it diverged
    assert at(curve[:-1], 20, 0.75) == 14.5


def test_largest_gap_worked_by_hand() -> None:
    flat = {0: [1.0] * 20, 1: [3.0] * 20, 2: [1.0] * 7}
    other = {seed: list(curve) for seed, curve in flat.items()}
    other[0][0] = 9.0  # too early to count
    other[0][9] = 1.4
    other[1][10] = 3.4
    found = largest_gap(other, flat, 20)
    # Updates 10 and 11 have .4 more in one of two seeds: their mean is 2.2 against 2, where single ones move it by .1.
    assert found is not None
    assert found.relative == pytest.approx(0.1)
    assert found.update == 11
    assert found.text == "+10.00% after 11 updates"
    assert largest_gap({2: flat[2]}, flat, 20) is None


def test_learning_rate_rises_and_falls() -> None:
    shares = [learning_rate_share(update, 100) for update in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == shares[10] == 1.0
    assert shares[55] == pytest.approx(0.5)
    assert 0 < shares[99] < 0.02


def test_teacher_sees_the_same_in_a_rolled_image() -> None:
    images = waves(4, torch.Generator().manual_seed(0))
    assert torch.allclose(responses(images), responses(images.roll((6, 38), (2, 3))), atol=1e-4)
    assert not torch.allclose(responses(images), responses(images.flip(1)), atol=1e-2)
    assert float(images.std()) == pytest.approx(1.0, abs=0.3)
    assert abs(float(images.mean())) < 0.2


def test_every_class_occurs_and_batches_follow_the_seed(monkeypatch) -> None:
    counts = _labels(torch.randn(2000, 32, generator=torch.Generator().manual_seed(1)).abs()).bincount(minlength=CLASSES)
    assert int(counts.min()) > 20
    images = torch.randn(IMAGES, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("indicator.loss_curves.images._pool", lambda: (images, torch.arange(IMAGES)))
    first, again, other = (image_batch(step, 8, seed=seed) for step, seed in ((3, 1), (3, 1), (3, 2)))
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.target, other.target)
    for image, label in zip(first.args[0], first.target, strict=True):  # rolled, and otherwise what the pool has
        assert torch.equal(image.flatten(1).sort().values, images[label].flatten(1).sort().values)


def test_all_of_a_seed_comes_before_the_next() -> None:
    found = all_runs(["resnet18", "bert-base"], list(DEFAULT), range(2))
    assert [which.seed for which in found] == sorted(which.seed for which in found)
    assert len(set(found)) == len(found) == 2 * 2 * len(DEFAULT)
    assert {which.task.setting for which in found} == {"int8", "floor"}
    assert len({which.task for which in found}) == len(found)


@pytest.mark.parametrize("model", ["trial-resnet", "trial-bert"])
def test_runs_repeat_and_differ_by_precision_alone(model) -> None:
    names = [operator.op_id for operator in trace(SUBJECTS[model].job(0)).adjustable]
    how = How(updates=4, device="cpu")
    full, again, low = (train(Which(model, FULL, 1), dict.fromkeys(names, v), how) for v in (FLOAT32, FLOAT32, INT8))
    assert full["losses"] == again["losses"]
    assert full["losses"] != low["losses"]
    assert low["losses"][0] == pytest.approx(full["losses"][0], abs=0.05)  # other weights or batches would change it by more


def test_a_run_that_diverges_keeps_what_was_finite(monkeypatch) -> None:
    losses = iter([2.0, 1.0, math.inf, 1.0])
    job = SUBJECTS["trial-resnet"].job(0)
    parameter = next(job.model.parameters())
    monkeypatch.setattr(type(job), "compute_loss", lambda self, batch, model: next(losses) + 0 * next(model.parameters()).sum())
    assert parameter.requires_grad
    assert train(Which("trial-resnet", FULL, 0), {}, How(4, "cpu"))["losses"] == [2.0, 1.0]


def test_rows_and_page(tmp_path) -> None:
    losses = {FULL: (1.0, 2.0, 4.0), UNIFORM: (1.1, 2.4, 5.2), QSYNC: (1.0, 2.1, 4.0)}
    curves = {Which("resnet18", name, seed): [value] * 20 for name, values in losses.items() for seed, value in enumerate(values)}
    curves[Which("resnet18", "paper", 0)] = [1.0] * 5
    finished = Finished(curves, dict.fromkeys(curves, "9 low"), 20, "a chip")
    finished.save(tmp_path / "curves.json")
    finished = Finished.load(tmp_path / "curves.json")
    found = {row["id"]: row for row in rows(finished)}
    assert set(found) == {"L-resnet18-float32", "L-resnet18-qsync", "L-resnet18-uniform"}  # paper has no final loss
    assert found["L-resnet18-float32"]["value"] == pytest.approx(7 / 3, abs=1e-5)
    uniform = found["L-resnet18-uniform"]
    # Ratios 1.1, 1.2, 1.3: standard deviation .1, error .1/√3, times 4.3027 (t of 2 degrees) is .24841.
    assert uniform["value"] == 1.2
    assert "95% CI 0.95159 to 1.44841, 3 pairs" in uniform["spread"]
    assert "largest gap between the smoothed mean curves +24.29%" in uniform["spread"]  # 8.7 over 7
    assert "less QSync's plan +0.18333" in uniform["spread"]
    assert uniform["device"] == "a chip"
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nstale\n{END}\n\nafter\n", encoding="utf-8")
    for _ in range(2):
        write_page(finished, page)
        text = page.read_text(encoding="utf-8")
        assert "| all operators int8, stochastic | 2.9000 | 2.9000 | 2.9000 | 2.9000 | 2.9000 | 1.2000 [0.9516, 1.4484] |" in text
        assert "| plan by the paper's indicator | 1.0000 | 1.0000 | – | – | – | –; 1 diverged | – | – |" in text
        assert "stale" not in text
        assert text.startswith("before")
        assert text.endswith("after\n")


@pytest.mark.slow
def test_the_script_trains_and_goes_on(tmp_path, capsys) -> None:
    from loss_curves import main

    command = [
        "--save", str(tmp_path / "runs"), "--models", "trial-resnet", "--device", "cpu", "--seeds", "1", "--updates", "5",
        "--observe-after", "1", "--observe", "2", "--directory", str(tmp_path / "results"),
    ]  # fmt: skip
    main(command)
    first = capsys.readouterr()
    stored = json.loads((tmp_path / "results" / "accuracy.json").read_text(encoding="utf-8"))
    assert {row["id"] for row in stored["rows"]} == {f"L-trial-resnet-{name}" for name in DEFAULT}
    main(command)
    again = capsys.readouterr()
    assert ", 0 to do" not in first.err
    assert ", 0 to do" in again.err
    assert again.out == first.out
    finished = Finished.load(tmp_path / "runs" / "curves.json")
    assert [len(curve) for curve in finished.curves.values()] == [5] * len(DEFAULT)
    # Plans of equal time are lower than nothing and higher than everything.
    assert 0 < int(finished.plan("trial-resnet", QSYNC).split()[0]) < 21
