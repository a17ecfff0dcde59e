"""Versions and settings of a process on which its times and numbers depend, and how two records of them differ.

A profile records those of the process that measured it (:attr:`qsync_core.ir.profile.Profile.software`), a plan carries them per
group, and a measured timeline those of the job: names to texts.  :data:`SETTINGS` says of each what a difference means.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from qsync_core.devices import same_device


@attrs.frozen
class Setting:
    """One version or setting.

    Attributes:
        advice: how a job comes to have the value that ``{}`` stands for.
        changes_numbers: a difference changes results, or makes every prediction worthless, and is refused; any other changes only
            times, and gives a warning.
    """

    what: str
    advice: str
    changes_numbers: bool = False


CHECKED_ON = "checked_on"
"""Name under which a profile, and a plan by it, has the GPU on which kernels were checked; on another they are checked anew."""
_MATMUL = "torch.backends.cuda.matmul.allow_{name} = {{}}"

SETTINGS: dict[str, Setting] = {
    "device": Setting("the device", "start this process on a {}", True),
    "share": Setting(
        "the share of the GPU's SMs",
        "call qsync_torch.use_share at the top of the script, before CUDA starts, which asks MPS for {} (docs/shared-gpus.md)",
        True,
    ),
    "autocast": Setting("autocast in the forward pass", "run it with autocast {}", True),
    "float32_matmul": Setting("the precision of float32 products", 'torch.set_float32_matmul_precision("{}")', True),
    "cudnn_tf32": Setting("TF32 in cuDNN's convolutions", "torch.backends.cudnn.allow_tf32 = {}", True),
    "cudnn_rnn_tf32": Setting(
        "TF32 in cuDNN's recurrent layers", 'torch.backends.cudnn.rnn.fp32_precision = "tf32" if {} else "ieee"', True
    ),
    **{
        f"matmul_{name}": Setting(what, _MATMUL.format(name=name), True)
        for name, what in {
            "fp16_reduced_precision_reduction": "float16 sums inside float16 products",
            "bf16_reduced_precision_reduction": "bfloat16 sums inside bfloat16 products",
            "fp16_accumulation": "float16 accumulation of float16 products",
        }.items()
    },
    "cudnn_enabled": Setting("whether cuDNN is used", "torch.backends.cudnn.enabled = {}"),
    "cudnn_benchmark": Setting("cuDNN's search for the fastest kernels", "torch.backends.cudnn.benchmark = {}"),
    "cudnn_deterministic": Setting("deterministic kernels in cuDNN", "torch.backends.cudnn.deterministic = {}"),
    "deterministic_algorithms": Setting("deterministic kernels", "torch.use_deterministic_algorithms({})"),
    "expandable_segments": Setting(
        "whether the CUDA allocator's segments can grow", "start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{}"
    ),
    "compiled": Setting("whether the model is compiled", "have it compiled: {} (docs/compiling.md)"),
    "memory_format": Setting("the layout of the convolutions' weights", "bring model and batches to the layout {}"),
    "threads": Setting("the threads of an operator", "torch.set_num_threads({}), or OMP_NUM_THREADS={}"),
    "torch": Setting("PyTorch's version", "install torch {}"),
    "qsync-torch": Setting("qsync-torch's version", "install qsync-torch {}"),
    "cuda": Setting("CUDA's version", "install a torch for CUDA {}"),
    "cudnn": Setting("cuDNN's version", "install cuDNN {}"),
    "driver": Setting("the driver's version", "install driver {}"),
    "machine": Setting("the CPU's architecture", "start this process on a {}"),
    "cpu_capability": Setting("the CPU's instructions", "start this process on a CPU with {}"),
}
"""The settings that are compared, by name; others that are recorded (Python's version, those of kernel backends) are not."""


@attrs.frozen
class Difference:
    """A setting that a job has otherwise than the profile of its group.

    Attributes:
        name: in :data:`SETTINGS`.
    """

    name: str
    profile: str
    job: str

    @property
    def changes_numbers(self) -> bool:
        """Whether it changes more than times."""
        return SETTINGS[self.name].changes_numbers

    def sentence(self, group: str, again: str = "profile the job as it runs and plan again") -> str:
        """The difference, and how to end it: by the setting, or by what ``again`` says."""
        setting = SETTINGS[self.name]
        return (
            f"{self.name} ({setting.what}) was {self.profile} when group {group!r} was profiled and is {self.job} in this job; "
            f"{setting.advice.replace('{}', self.profile)}, or {again}"
        )


def differences(profile: Mapping[str, str], job: Mapping[str, str]) -> tuple[Difference, ...]:
    """The settings in which a job differs from what was profiled, those that change numbers first.

    Only what both records hold is compared: a record of an older version of QSync holds less.  A build of PyTorch
    (``2.13.0+cu128``) counts as its release, because CUDA's version is a setting of its own; names of one chip are the same device.
    """
    return tuple(
        Difference(name, profile[name], job[name])
        for name in SETTINGS
        if name in profile and name in job and not _same(name, profile[name], job[name])
    )


def _same(name: str, one: str, other: str) -> bool:
    if name == "device":
        return same_device(one, other)
    return one == other or (name == "torch" and one.partition("+")[0] == other.partition("+")[0])
