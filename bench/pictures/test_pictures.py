"""Pictures: numbers against the replayer and by hand, files against what an SVG must be."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hybrid_pictures
from qsync_core.ir.dfg import Phase, Resource
from qsync_core.ir.timeline import Interval, Timeline

from .composition import composition, draw_composition
from .errors import Predicted, draw_errors, predictions
from .stored import read_job
from .svg_picture import WIDTH, ticks
from .timelines import Stretch, aligned, draw_timelines, stretches

SVG = "{http://www.w3.org/2000/svg}"


def checked(svg: str) -> ElementTree.Element:
    """Parses, has a name, a style for dark pages and a class for everything; nothing lies outside."""
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme:dark" in style
    height = float(root.get("height", "0"))
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", "0")), float(box.get("y", "0"))
        assert x >= 0
        assert x + float(box.get("width", "0")) <= WIDTH + 0.5
        assert y + float(box.get("height", "0")) <= height
    for part in root.iter():
        for name in part.get("class", "").split():
            assert f".{name}{{" in style
    return root


@pytest.mark.parametrize("name", ["resnet50", "bert-base"])
def test_the_parts_of_operators_are_the_predicted_step(name: str) -> None:
    replayer, _ = read_job(name)
    rung = replayer.cluster.group("infer").ladder[0]
    variants = dict.fromkeys((operator.op_id for operator in replayer.dag.adjustable), rung)
    total: Counter[str] = Counter()
    for parts in composition(replayer, "infer", variants).values():
        total.update(parts)
    predicted = replayer.replay({"infer": variants}).groups["infer"]
    assert total["forward"] + total["cast-forward"] == predicted.forward_ns
    assert total["backward"] + total["cast-backward"] == predicted.backward_ns
    assert total["cast-forward"] > 0


def test_the_composition_names_kinds_and_precisions() -> None:
    texts = [text.text for text in checked(draw_composition(("bert-base",))).iter(f"{SVG}text")]
    for wanted in ("linear", "float32", "bfloat16", "int8>float32", "casts, forward", "BERT-base, batch 12"):
        assert wanted in texts


def test_waiting_is_what_a_collective_takes_beyond_the_last_rank_s() -> None:
    def rank(number: int, *rows: tuple[Phase, Resource, int, int]) -> tuple[Interval, ...]:
        return tuple(
            Interval("all-reduce", None, phase, resource, number, start, end - start) for phase, resource, start, end in rows
        )

    link, gpu = (Phase.COMMUNICATION, Resource.COMMUNICATION), (Phase.BACKWARD, Resource.COMPUTE)
    quick = rank(0, (*gpu, 0, 100), (*link, 100, 450), (*link, 450, 480))
    slow = rank(1, (*gpu, 1_000, 1_400), (*link, 1_400, 1_450), (*link, 1_450, 1_480))  # a clock of its own
    timeline = Timeline("measured", "m", 480, {0: "quick", 1: "slow"}, (*quick, *slow))
    together = aligned(timeline)
    assert stretches(together, 0, Resource.COMMUNICATION, 0) == [Stretch("waiting", 100, 400), Stretch("transfer", 400, 480)]
    assert stretches(together, 1, Resource.COMMUNICATION, 0) == [Stretch("transfer", 400, 480)]
    assert stretches(together, 1, Resource.COMPUTE, 0) == [Stretch("backward", 0, 400)]
    texts = [text.text for text in checked(draw_timelines("m", timeline, timeline)).iter(f"{SVG}text")]
    assert texts.count("slow communicates") == 2


ROWS = {
    "H1-resnet50-float32-measured": 100.0,
    "H1-resnet50-float32-predicted": 99.0,
    "H1-resnet50-float32-error": -0.01,
    "H1-bert-base-layers 1, 3, 5-measured": 60.0,  # without its prediction
    "H2-bert-base-qsync-default-measured": 80.0,
    "H2-bert-base-qsync-default-predicted": 84.0,
    "H3-resnet50-float32-measured": 3.0,
}


def test_pairs_of_rows_become_points() -> None:
    points = list(predictions({key: {"id": key, "value": value} for key, value in ROWS.items()}))
    assert points == [
        Predicted("H1", "resnet50", "float32", 100.0, 99.0),
        Predicted("H2", "bert-base", "qsync-default", 80.0, 84.0),
    ]
    root = checked(draw_errors(points))
    assert root.get("aria-label") == "Predicted against measured step time: 3.0% off in the mean, 5.0% at worst"
    assert len(list(root.iter(f"{SVG}circle"))) == 1


def test_what_is_missing_is_named_and_the_rest_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps({"rows": [{"id": "K5", "value": 7.0}]}))
    out = tmp_path / "images"
    monkeypatch.setattr(sys, "argv", ["hybrid_pictures.py", "--results", str(tmp_path), "--out", str(out)])
    hybrid_pictures.main()
    printed = capsys.readouterr().out
    assert f"no picture of backends: {tmp_path / 'kernels.json'} lacks K5b, K9a, K9b, K9c, K9d" in printed
    assert "no picture of errors" in printed
    assert sorted(path.name for path in out.iterdir()) == ["cost-composition.svg", "uniform-against-qsync.svg"]
    for path in out.iterdir():
        checked(path.read_text())


def test_ticks_are_round() -> None:
    assert ticks(160) == [0, 20, 40, 60, 80, 100, 120, 140, 160]
    assert ticks(7.04) == [0, 1, 2, 3, 4, 5, 6, 7]
