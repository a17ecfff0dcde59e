"""A job as a Kubernetes JobSet (jobset.x-k8s.io/v1alpha2): one replicated job per group.

Pods of a group are numbered by their Job (``JOB_COMPLETION_INDEX``), and all meet at the first pod of the first group, by the name
that the JobSet's headless service gives it: ``JOBSET-GROUP-0-0.JOBSET``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from qsync_core.errors import ClusterError
from qsync_core.ir.plan import Role
from qsync_core.ir.profile import DeviceKind
from qsync_core.launching.machines import GroupMachines, PlannedJob
from qsync_core.launching.torchrun import Meeting, environment_of, torchrun_options

PRODUCT = "nvidia.com/gpu.product"
"""Node label of NVIDIA's GPU feature discovery: the driver's name of the GPU, with dashes for blanks."""
_WHOLE, _SHARED = "nvidia.com/gpu", "nvidia.com/gpu.shared"
"""Resources of NVIDIA's device plugin; the second is one of several parts of a GPU (``renameByDefault: true``)."""
_FULL_NAME = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|TITAN) (?!.*\bMIG\b)[A-Za-z0-9 ._-]+", re.ASCII)
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_LONGEST_NAME = 63
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)
_QUANTITY = re.compile(r"[1-9][0-9]{0,14}([KMGT]i?)?", re.ASCII)
_PATH = re.compile(r"/[^:\x00-\x1f]{0,1023}")


@attrs.frozen
class PodSettings:
    """What a JobSet's pods have, beside what the plan says.

    Attributes:
        image: the container image, with torch, QSync and the script.
        namespace: empty for that of ``kubectl``.
        selectors: node labels by group, in the place of the GPU's product.
        resources: by group the resource that stands for its GPUs.
        shared_memory: size of /dev/shm, as Kubernetes writes it; NCCL and data loaders need it.
        claims: mount paths by the name of a PersistentVolumeClaim.
    """

    image: str
    namespace: str = ""
    selectors: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    resources: Mapping[str, str] = attrs.field(factory=dict)
    shared_memory: str = "8Gi"
    claims: Mapping[str, str] = attrs.field(factory=dict)


def jobset(job: PlannedJob, name: str, settings: PodSettings, script: Sequence[str], meeting: Meeting) -> dict[str, Any]:
    """The manifest.

    Args:
        job: groups and machines.
        name: the JobSet's.
        settings: of its pods.
        script: what torchrun starts, with arguments.
        meeting: port, restarts, and whether machines may come and go; host and name are the JobSet's.

    Raises:
        ClusterError: for what Kubernetes would refuse or misunderstand, and a GPU whose node label cannot be known.
    """
    _check(job, name, settings)
    names = _job_names(job, name)
    first = job.groups[0].name
    meeting = attrs.evolve(meeting, host=f"{name}-{names[first]}-0-0.{name}", name=name)
    metadata = {"name": name} | ({"namespace": settings.namespace} if settings.namespace else {})
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": meeting.max_restarts},
    }
    training = [names[group.name] for group in job.groups if group.plan.role is Role.TRAIN]
    if meeting.elastic and training:  # groups that are gone by then have not failed it
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": training}
    spec["replicatedJobs"] = [
        {"name": names[group.name], "replicas": 1, "template": {"spec": _job(job, group, name, names, settings, script, meeting)}}
        for group in job.groups
    ]
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """Write a manifest as YAML, with every string quoted that any reader could take for something else (``1e-3``, ``on``)."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Any, text: str) -> Any:
        plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and text.lower() not in _WORDS
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')

    Dumper.add_representer(str, represent)
    return str(yaml.dump(dict(manifest), Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=10**6))


_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
"""Words that YAML 1.1 or 1.2 readers take for no string."""


def _job(
    job: PlannedJob,
    group: GroupMachines,
    name: str,
    names: Mapping[str, str],
    settings: PodSettings,
    script: Sequence[str],
    meeting: Meeting,
) -> dict[str, Any]:
    """The Job of one group: a pod per machine, each with its index."""
    spec: dict[str, Any] = {"parallelism": group.nodes, "completions": group.nodes, "completionMode": "Indexed"}
    # A machine that is lost ends a fixed job, which the JobSet starts anew; an elastic one goes on, and a new pod joins it.
    spec["backoffLimit"] = meeting.max_restarts * group.nodes if meeting.elastic else 0
    if meeting.elastic:
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        spec["podFailurePolicy"] = {"rules": [{"action": "Ignore", "onPodConditions": [disrupted]}]}
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    if selector := _selector(group, settings):
        pod["nodeSelector"] = selector
    if group.shares_gpus and group.nodes > 1:
        pod["affinity"] = _apart(name, names[group.name])
    mounts = [{"name": claim, "mountPath": path} for claim, path in settings.claims.items()]
    volumes: list[dict[str, Any]] = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in settings.claims]
    if not group.shares_gpus:  # where GPUs are shared, the device plugin mounts the MPS daemon's there
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}})
    container: dict[str, Any] = {
        "name": "train",
        "image": settings.image,
        "command": _command(job, group, meeting),
        "args": [_literal(argument) for argument in script],
        "env": [{"name": key, "value": value} for key, value in environment_of(job, group, meeting).items()],
        "ports": [{"containerPort": meeting.port}],
        "resources": _resources(group, settings),
        "volumeMounts": mounts,
    }
    spec["template"] = {"spec": pod | {"containers": [container], "volumes": volumes}}
    return spec


def _command(job: PlannedJob, group: GroupMachines, meeting: Meeting) -> list[str]:
    options = torchrun_options(job, group, meeting, f"$(({group.first_node} + JOB_COMPLETION_INDEX))")
    if meeting.elastic:
        return ["torchrun", *options]
    return ["sh", "-c", _literal(f'exec torchrun {" ".join(options)} "$@"'), "torchrun"]


def _literal(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands and arguments; ``$$`` stands for a ``$``."""
    return text.replace("$", "$$")


def _resources(group: GroupMachines, settings: PodSettings) -> dict[str, Any]:
    if group.plan.device.kind is DeviceKind.CPU and group.name not in settings.resources:
        return {"requests": {"cpu": str(group.ranks_each)}}
    return {"limits": {settings.resources.get(group.name, _SHARED if group.shares_gpus else _WHOLE): str(group.ranks_each)}}


def _selector(group: GroupMachines, settings: PodSettings) -> dict[str, str]:
    if group.name in settings.selectors:
        return dict(settings.selectors[group.name])
    device = group.plan.device
    if device.kind is DeviceKind.CPU:
        return {}
    if not _FULL_NAME.fullmatch(device.name):
        raise ClusterError(
            f"which nodes have group {group.name!r}'s {device.name} is not known, because {PRODUCT} is a GPU's full name: look it "
            f"up with 'kubectl get nodes -L {PRODUCT}' and give --select {group.name}={PRODUCT}=…"
        )
    return {PRODUCT: device.name.replace(" ", "-")}


def _apart(name: str, job_name: str) -> dict[str, Any]:
    """Pods with a share of a GPU on machines of their own: two of them on one GPU are what NCCL refuses."""
    labels = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": job_name}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _job_names(job: PlannedJob, name: str) -> dict[str, str]:
    """Names of the replicated jobs by group: a group's name in lower-case, with dashes for ``_`` and ``.``.

    Raises:
        ClusterError: for one that is no DNS label then, or that two groups have, or that makes pods' names too long.
    """
    names: dict[str, str] = {}
    for group in job.groups:
        label = group.name.lower().replace("_", "-").replace(".", "-")
        if not _LABEL.fullmatch(label):
            raise ClusterError(
                f"group {group.name!r} cannot name a replicated job: Kubernetes' names begin with a letter, end with a letter or "
                "digit, and have no others but '-' between"
            )
        if label in names.values():
            other = next(known for known, taken in names.items() if taken == label)
            raise ClusterError(
                f"groups {other!r} and {group.name!r} would both be the replicated job {label!r}; rename one of them"
            )
        pod = f"{name}-{label}-0-{group.nodes - 1}-12345"
        if len(pod) > _LONGEST_NAME:
            raise ClusterError(
                f"pods of group {group.name!r} would have names of {len(pod)} letters ({pod}), and Kubernetes allows "
                f"{_LONGEST_NAME}: give a shorter --name"
            )
        names[group.name] = label
    return names


def _check(job: PlannedJob, name: str, settings: PodSettings) -> None:
    for what, label in (("JobSet", name), ("namespace", settings.namespace), *(("claim", claim) for claim in settings.claims)):
        if (label and not _LABEL.fullmatch(label)) or (what == "JobSet" and not label):
            raise ClusterError(
                f"a {what} cannot be called {label[:80]!r}: Kubernetes' names have up to 63 lower-case letters, digits and '-', "
                "begin with a letter and do not end with '-'"
            )
    if "shared-memory" in settings.claims:
        raise ClusterError("the volume 'shared-memory' is /dev/shm's; give the claim of that name another one")
    if not settings.image:
        raise ClusterError(
            "a JobSet needs a container image with torch, QSync and the script; name it, for example with --image "
            "registry.example.com/train:1.0"
        )
    if not _IMAGE.fullmatch(settings.image):
        raise ClusterError(f"not a container image: {settings.image[:80]!r}; write for example registry.example.com/train:1.0")
    if not _QUANTITY.fullmatch(settings.shared_memory):
        raise ClusterError(f"not a size as Kubernetes writes it: {settings.shared_memory[:80]!r}; write for example 8Gi")
    for path in settings.claims.values():
        if not _PATH.fullmatch(path):
            raise ClusterError(f"a claim is mounted at an absolute path without ':', got {path[:80]!r}")
    known = [group.name for group in job.groups]
    for owner in (*settings.selectors, *settings.resources):
        if owner not in known:
            raise ClusterError(f"a selector or resource is given for group {owner!r}, but the job's groups are {', '.join(known)}")
    for key, value in ((key, value) for labels in settings.selectors.values() for key, value in labels.items()):
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ClusterError(f"not a node label: {f'{key}={value}'[:120]!r}; write for example {PRODUCT}=Tesla-T4")
    for resource in settings.resources.values():
        if not _KEY.fullmatch(resource):
            raise ClusterError(f"not a resource: {resource[:80]!r}; write for example {_SHARED}")
    for group in job.groups:
        if group.shares_gpus and group.ranks_each > 1:
            raise ClusterError(
                f"group {group.name!r} has a share of each GPU, of which a pod gets one: leave out its processes per machine"
            )
