"""Models with stored profiles: two H200 that train, two halves of one that help."""

from __future__ import annotations

from pathlib import Path

from qsync_core.artifacts.files import load
from qsync_core.cluster_file import read_cluster
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.profile import Profile
from qsync_core.ir.sensitivity import Sensitivity
from qsync_planner.matching import Inputs
from qsync_planner.replayer.replay import Replayer

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "h200"
TITLES = {"resnet50": "ResNet50", "bert-base": "BERT-base", "vgg16-bn": "VGG16-BN", "roberta-base": "RoBERTa-base"}


def read_job(name: str) -> tuple[Replayer, Sensitivity]:
    """A replayer of a stored model, and its sensitivities."""
    folder = DATA / name
    cluster = read_cluster(folder / "cluster.toml")
    profiles = {group.name: load(folder / f"profile.{group.name}.qsync", Profile) for group in cluster.groups}
    replayer = Replayer(Inputs(load(folder / "dag.qsync", PrecisionDag), cluster, profiles))
    return replayer, load(folder / "sensitivity.qsync", Sensitivity)
