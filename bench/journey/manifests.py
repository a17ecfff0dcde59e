"""Row W7: manifests of ``qsync launch``, valid against published schemas with unknown fields forbidden.

What Kubernetes itself defines (Jobs, pods) is held against its own schema, as the package kubernetes-validate brings it.  JobSet's
fields are those of a CustomResourceDefinition in ``--crds FOLDER`` (jobset.x-k8s.io_jobsets.yaml of its release), else those of the
models in the package kubeflow-trainer-api, which are made from it.  KubeRay's are in its CustomResourceDefinition alone
(ray.io_rayjobs.yaml)::

    pip install jsonschema kubernetes-validate kubeflow-trainer-api
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import yaml

from qsync_core.cluster_file import parse_cluster
from qsync_core.launching.jobset import jobset
from qsync_core.launching.machines import PlannedJob, described_job
from qsync_core.launching.pods import PodSettings, Taint
from qsync_core.launching.rayjob import rayjob
from qsync_core.launching.torchrun import Meeting, preparing

CLUSTERS = {
    "GPUs, a share": '[[group]]\nname = "infer"\ndevice = "Tesla T4"\ncount = 2\nrole = "infer"\nshare = 0.5\n'
    'ladder = ["int8", "float16", "float32"]\n[[group]]\nname = "train"\ndevice = "NVIDIA H200"\ncount = 8\nrole = "train"\n',
    "CPUs": '[[group]]\nname = "a"\ndevice = "cpu"\ncount = 4\nrole = "train"\n',
}
BARE = PodSettings("registry.example.com/train:1.0")
Validate = Callable[[Any], list[str]]
"""What is wrong with an object; empty for nothing."""


def rows(crds: Path | None) -> Iterator[dict[str, Any]]:
    """Write every kind of manifest, and hold each against its schema."""
    kubernetes = _kubernetes()
    for kind, identity, checked in (("JobSet", "W7", _jobset(crds)), ("RayJob", "W7b", _by_definition(crds, "RayJob"))):
        if checked is None:
            print(f"no schema of a {kind} is here: give --crds FOLDER", flush=True)
            continue
        own, source = checked
        found = list(manifests(kind))
        wrong = {name: faults for name, manifest in found if (faults := _faults(manifest, own, kubernetes))}
        altered = [changed for _, manifest in found for changed in _altered(manifest)]
        passed = sum(not _faults(changed, own, kubernetes) for changed in altered)
        if passed:
            raise SystemExit(
                f"{passed} of {len(altered)} {kind}s with a field that nobody knows pass: the schemas do not forbid it"
            )
        yield {
            "id": identity,
            "what": f"{kind}s of qsync launch valid against its schema, which is named beside, and Kubernetes' own, unknown fields "
            "forbidden: of all that options and groups make differ (training, elastic or not, and prepare; GPUs, shares, CPUs)",
            "value": f"{len(found) - len(wrong)} of {len(found)}",
            "unit": "manifests",
            "spread": "; ".join(f"{name}: {faults[0]}" for name, faults in wrong.items())
            or f"all of {len(altered)} with a field that nobody knows are refused; schemas: {source}; Kubernetes' of "
            f"kubernetes-validate {metadata.version('kubernetes-validate')}",
            "target": "all",
        }


def manifests(kind: str) -> Iterator[tuple[str, Any]]:
    """Manifests of a kind by what they are for."""
    every = attrs.evolve(
        BARE,
        namespace="ml",
        claims={"runs": "/workspace", "data": "/data"},
        directory="/workspace",
        queue="vision",
        labels={"team": "vision", "example.com/cost-centre": "7"},
    )
    for (name, text), settings in itertools.product(CLUSTERS.items(), (BARE, every)):
        job = described_job(parse_cluster(text, name))
        first, *_ = job.groups
        asked = settings
        if settings is every:
            taints = [Taint.parse(taint) for taint in ("nvidia.com/gpu=present:NoSchedule", "spot", "night:NoExecute")]
            asked = attrs.evolve(settings, tolerations={first.name: taints}, selectors={first.name: {"pool": "night"}})
        label = f"{name}, {'every option' if settings is every else 'an image alone'}"
        yield from ((f"{label}, {what}", yaml.safe_load(text)) for what, text in _texts(kind, job, asked))


def _texts(kind: str, job: PlannedJob, settings: PodSettings) -> Iterator[tuple[str, str]]:
    script = ["train.py", "--lr", "1e-3", "--note", "it's $HOME: on"]
    if kind == "RayJob":
        yield "training", rayjob(job, "night", settings, ["train_ray.py", "run/"], Meeting(""))
        return
    yield "training", jobset(attrs.evolve(job, max_ctas=4), "night", settings, script, Meeting(""))
    yield "elastic", jobset(attrs.evolve(job, fewest_nodes=1), "night", settings, script, Meeting("", elastic=True))
    yield "prepare", jobset(job, "night-prepare", settings, preparing(script, "run", "cluster.toml"), Meeting(""))


def _faults(manifest: Mapping[str, Any], own: Validate, kubernetes: Validate) -> list[str]:
    return [*own(manifest), *(fault for one in _inside(manifest) for fault in kubernetes(one))]


def _inside(manifest: Mapping[str, Any]) -> Iterator[Any]:
    """What is Kubernetes' own in a manifest, as objects of their own."""
    spec = manifest["spec"]
    for entry in spec.get("replicatedJobs", ()):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **entry["template"]}
    if cluster := spec.get("rayClusterSpec"):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}


def _altered(manifest: Any) -> Iterator[Any]:
    """The manifest with a field that nobody knows, in each object of it whose fields are known."""
    for place in _objects(manifest, ()):
        changed = copy.deepcopy(manifest)
        there = changed
        for step in place:
            there = there[step]
        there["unknown"] = "a"
        yield changed


_OF_PEOPLE = {"labels", "matchLabels", "nodeSelector", "limits", "requests", "rayStartParams"}
"""Objects whose fields are anybody's."""


def _objects(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        if place and place != ("metadata",) and place[-1] not in _OF_PEOPLE:  # the API server's own are not in a definition
            yield place
        for name, inner in value.items():
            yield from _objects(inner, (*place, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _objects(inner, (*place, number))


def _kubernetes() -> Validate:
    import kubernetes_validate

    def validate(one: Any) -> list[str]:
        try:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            return [f"{'.'.join(map(str, error.path))}: {error.message}"]
        return []

    return validate


def _jobset(crds: Path | None) -> tuple[Validate, str] | None:
    return _by_definition(crds, "JobSet") or _by_models()


def _by_models() -> tuple[Validate, str] | None:
    """JobSet by the models that Kubeflow's trainer has of it."""
    try:
        from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
    except ImportError:
        return None
    from pydantic import ValidationError

    def validate(manifest: Any) -> list[str]:
        try:
            read = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()
        except ValidationError as error:
            return [str(error).replace("\n", " ")]
        return [f"unknown {'.'.join(map(str, place))}" for place in _dropped(manifest, read, ())]

    return validate, f"models of JobSet v1alpha2 in kubeflow-trainer-api {metadata.version('kubeflow-trainer-api')}"


def _dropped(written: Any, read: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """What a model did not take of what was written."""
    if isinstance(written, dict):
        for name, value in written.items():
            if not isinstance(read, dict) or name not in read:
                yield (*place, name)
            else:
                yield from _dropped(value, read[name], (*place, name))
    elif isinstance(written, list):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _dropped(one, other, (*place, number))


def _by_definition(crds: Path | None, kind: str) -> tuple[Validate, str] | None:
    """The schema of a kind in a folder of CustomResourceDefinitions, fields that it does not name forbidden."""
    import jsonschema

    for path in sorted(crds.glob("*.y*ml")) if crds else ():
        for document in yaml.safe_load_all(path.read_text()):
            if not document or document.get("kind") != "CustomResourceDefinition" or document["spec"]["names"]["kind"] != kind:
                continue
            stored = next(version for version in document["spec"]["versions"] if version.get("storage"))
            validator = jsonschema.Draft202012Validator(closed(stored["schema"]["openAPIV3Schema"]))
            api = f"{document['spec']['group']}/{stored['name']}"
            notes = ", ".join(f"{name} {value}" for name, value in document["metadata"].get("annotations", {}).items())

            def validate(manifest: Any, validator: Any = validator, api: str = api) -> list[str]:
                faults = [] if manifest["apiVersion"] == api else [f"apiVersion {manifest['apiVersion']} is not {api}"]
                return faults + [
                    f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in validator.iter_errors(manifest)
                ]

            return validate, f"{document['metadata']['name']} {stored['name']} ({notes or 'a definition without annotations'})"
    return None


def closed(schema: Any) -> Any:
    """A definition's schema as a JSON schema, in which an object has no fields but those that it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items() if not name.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(schema.get("properties"), dict):
        found["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found
