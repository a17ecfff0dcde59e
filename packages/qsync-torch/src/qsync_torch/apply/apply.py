"""``apply_``: make a model run as a precision plan says, in place and reversibly.

Parameters stay plain float32 under their old names (docs/design/precision-semantics.md#parameters-and-gradients).  A plan is read
and checked here;
:mod:`qsync_torch.apply.planned_modules` puts its operators into the model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qsync_core.artifacts.files import load
from qsync_core.errors import PlanError
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, PrecisionPlan
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.choice import KernelChoice
from qsync_core.run_folder import RunFolder
from qsync_torch.apply.applied_plan import MARK, AppliedPlan
from qsync_torch.apply.first_step import device_of
from qsync_torch.apply.job_settings import check_settings
from qsync_torch.apply.loading import Checkpoint
from qsync_torch.apply.place_in_job import PlaceInJob
from qsync_torch.apply.plan_fit import Planned, check_outputs
from qsync_torch.apply.planned_model import PlannedModel
from qsync_torch.apply.planned_modules import is_planned
from qsync_torch.apply.sharded_parameters import check_whole_model
from qsync_torch.apply.stored_modules import Sum, checksums, fingerprints, stored_names
from qsync_torch.caller import Caller
from qsync_torch.distributed.buffers import left_to_ranks
from qsync_torch.distributed.exchange import by_value
from qsync_torch.distributed.groups_present import groups_present, run_folder_of, warn_of_restarts
from qsync_torch.distributed.process_group import keep_until_exit
from qsync_torch.distributed.ranks import plan_facts, together, told_by_all, which_group
from qsync_torch.elastic.resizing import Resize
from qsync_torch.failures import tell_torchrun_of_refusals
from qsync_torch.job import without_shape
from qsync_torch.sharing.job_check import check_job
from qsync_torch.sharing.share import refuse_deferred


def apply_(
    model: nn.Module,
    plan: PrecisionPlan
    | RunFolder
    | str
    | os.PathLike[str]
    | Mapping[OpId, Variant | Assignment]
    | Mapping[str, Variant | Assignment | str],
    *,
    group: str | None = None,
    backend: str | None = None,
    seed: int = 0,
    base: Precision | str = Precision.FLOAT32,
    allow_flags: Collection[str] = (),
    lower_eval: bool = False,
    resize: Resize | None = None,
    keep_stored: bool = False,
) -> AppliedPlan:
    """Make ``model`` run as planned, in place.

    Call it before wrapping the model in DistributedDataParallel or ``torch.compile``, and after ``init_process_group``: then all
    ranks compare their plans and versions, and what one of them refuses is refused on all; so every rank must call it.  (Variants
    by operator concern this rank alone.)

    Args:
        model: any module; its parameters stay as they are.
        plan: a plan, or the path of one; a run folder, or the path of one, whose plan for exactly those groups is applied that the
            job's ranks are of (docs/run-folder.md); or variants (or whole assignments) by operator, where operators and
            variants may be texts, as in ``{"encoder.0#0": "int8"}``.  An operator with a variant alone runs on the kernels that
            were tuned fastest on a GPU, and on PyTorch's own on a CPU, and delivers float32: without a graph it is not known who
            reads its result.  A whole assignment delivers what it says.
        group: which device group of the plan this process belongs to; by default what
            :func:`qsync_torch.distributed.ranks.which_group` finds.
        backend: run every operator on this kernel backend instead of the planned one; ``a+b`` takes b for what a does not offer,
            ``auto`` the kernels that were tuned fastest here.
        seed: of the stochastic rounding; ranks draw different numbers from the same seed.
        base: format of the autocast that the model trains under, for variants by operator; a plan says that itself.
        allow_flags: settings in which this process may differ from the one that measured its group's profile although that changes
            numbers, as in ``["cudnn_tf32"]`` (docs/training.md#settings-that-a-plan-holds-for).
        lower_eval: keep the plan in force in eval mode.  By default a model in eval mode runs in full precision, and draws no
            random numbers.
        resize: what stays where the job has other ranks than planned, so that a step would have another number of samples:
            ``"keep-global"``: the planned global batch, by accumulation over :meth:`AppliedPlan.micro_batches`; ``"keep-local"``:
            each rank's batch, with a learning rate that the script chooses (docs/coming-and-going.md).  Without it such a job is
            refused.
        keep_stored: keep frozen weights that the plan stores in another format as they were, on the CPU: ``state_dict()``, copies
            and ``remove()`` then have their bits.  Without it they are dequantized, with a warning.

    Returns:
        A handle with ``remove()``.

    Raises:
        PlanError: when the plan is for another model, names an operator the model does not have, the model has a plan already,
            the ranks hold different plans, or this process computes with other settings than its group's profile (TF32, another
            device); when a run folder is not there, or has no plan for the groups of this job; when its global batch is not the
            planned one and ``resize`` does not say what stays.
        ArtifactError, ClusterError: when a plan's file, or the cluster file of a run folder, cannot be read.
        CompatibilityError: when the ranks run different versions of QSync.
        BackendError: when a planned backend is missing, or refuses a kernel that an operator needs forward or backward, with all
            reasons.
        RankError: when a rank of the job does not come here within ``QSYNC_RANK_TIMEOUT_S`` seconds, 30 by default, or its process
            ends while it builds kernels.
    """
    return apply_for(
        Caller("apply_", run_folder_of(plan)), model, plan, group=group, backend=backend, seed=seed, base=base,
        allow_flags=allow_flags, lower_eval=lower_eval, resize=resize, keep_stored=keep_stored,
    )  # fmt: skip


def load_planned(
    model: nn.Module,
    plan: Any,
    checkpoint: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    rename: Callable[[str], str] | None = None,
    **options: Any,
) -> AppliedPlan:
    """Put a model under a plan, and load its weights straight into the formats in which the plan stores them.

    A call of all ranks, as :func:`apply_`, which ranks that have the memory may call in its place with the
    same weights: what one of them refuses is refused on all, and so are ranks that read other frozen weights.

    Args:
        model: its parameters on the meta device (``with torch.device("meta"): ...``); what is elsewhere already, adapters with
            values of their own and buffers say, is kept and moved.
        plan: as :func:`apply_` takes it.
        checkpoint: a safetensors file, a folder with one (``model.safetensors``) or with several and their index, or the index
            (``model.safetensors.index.json``).
        device: where the model is to run.
        rename: the name of a parameter in the checkpoint, from that in the model; by default the same, without what PEFT's
            adapters put into it (``base_model.model.`` and ``.base_layer``).
        options: of :func:`apply_`, such as ``group``.

    Returns:
        A handle, as of ``apply_``.  ``state_dict()`` holds stored weights as the checkpoint has them, in the
        model's format, while its files are there as they were; dequantized after that, with a warning.

    Raises:
        PlanError: when a file is missing or cannot be read; when it lacks a weight or holds one of another shape or in a format
            that is no float of 16 or 32 bits; when a buffer is on the meta device; when ranks read different weights.
        QSyncError: as ``apply_``.
    """
    caller = Caller("apply_", run_folder_of(plan))
    return apply_for(caller, model, plan, checkpoint=Checkpoint(checkpoint, device, rename), **options)


def apply_for(
    caller: Caller,
    model: nn.Module,
    plan: Any,
    *,
    group: str | None = None,
    backend: str | None = None,
    seed: int = 0,
    base: Precision | str = Precision.FLOAT32,
    allow_flags: Collection[str] = (),
    lower_eval: bool = False,
    resize: Resize | None = None,
    fuses: bool = False,
    keep_stored: bool = False,
    checkpoint: Checkpoint | None = None,
) -> AppliedPlan:
    """:func:`apply_`, in the words of its caller.

    Args:
        caller: whom messages speak to.
        fuses: the caller runs the chains fused that the plan runs so.
        model, plan, group, backend, seed, base, allow_flags, lower_eval, resize, keep_stored: as :func:`apply_` takes them.
        checkpoint: from which weights on the meta device are loaded.

    Raises:
        QSyncError: as :func:`apply_`.
    """
    keep_until_exit()
    tell_torchrun_of_refusals()
    whole_plan = not isinstance(plan, Mapping)
    run, what = caller.run, caller.call
    present = groups_present(what, run, group) if run else None
    whole: PrecisionPlan | None = None
    with _on_all_ranks(what, whole_plan) as facts:
        _check_model(model, caller)
        if checkpoint is not None:
            checkpoint.check(model)
        if run and present:
            plan, group = run.load_plan_to_train(present.names), present.own
            whole = run.load_plan(present.of_cluster)
        elif isinstance(plan, (str, os.PathLike)):
            plan = load(Path(plan), PrecisionPlan)
        if backend is not None:
            KernelChoice.parse(backend)
        if isinstance(plan, PrecisionPlan):
            facts |= plan_facts(plan) | {"resize": str(resize)}
            group = which_group(plan) if group is None else group
            if "share" not in allow_flags:
                refuse_deferred()
            check_settings(plan, group, model, allow_flags, caller)
            check_outputs(plan, group, caller)
            planned = Planned(plan, group, backend, plan.base, tuple(allow_flags), caller, fuses)
        else:
            planned = Planned(_read(plan), None, backend, _base(base), tuple(allow_flags))
        in_model = PlannedModel(model, planned, seed=seed, lower_eval=lower_eval, keep_stored=keep_stored)
        if isinstance(plan, PrecisionPlan):
            facts["parameters"] = _described(model, stored_names(model, plan, {}))
        in_model.check_parameters(device_of(model))
        in_model.check_kernels()
    if isinstance(plan, PrecisionPlan) and group is not None:
        groups = check_job(what, plan, group, model, allow_flags, caller)
        in_model.take_place(PlaceInJob.of(model, planned, seed, groups, whole, resize))
        in_model.watch_lag(True)
        warn_of_restarts(stacklevel=4)
    applied, stored = AppliedPlan(in_model, seed), stored_names(model, plan, {}) if isinstance(plan, PrecisionPlan) else ()
    with ExitStack() as undo:
        undo.callback(applied.remove)
        with _on_all_ranks(f"{what}, building kernels", whole_plan, slow=True):
            sums = checksums(model, stored)
            in_model.lower()
            if checkpoint is not None:
                sums |= checkpoint.load(model, stored)
        if stored:
            _check_frozen(what, sums)
        undo.pop_all()
    model.__dict__[MARK] = applied
    return applied


def _check_frozen(what: str, sums: Mapping[str, Sum]) -> None:
    """Weights that some group stores are not broadcast: ranks must have loaded the same.

    Ranks that hold them in different formats are not compared.

    Raises:
        PlanError: on every rank.
    """
    told = told_by_all(f"{what}, frozen weights", fingerprints(sums))
    for dtype in sorted({dtype for facts in told.values() for dtype in facts}):
        found = {rank: facts[dtype] for rank, facts in told.items() if dtype in facts}
        if len(set(found.values())) > 1:
            raise PlanError(
                f"the ranks of this job hold different frozen weights in {dtype} ({by_value(found)}), and what a plan stores is "
                "not broadcast: load the same checkpoint on every rank, or give every rank the same seed"
            )


def _described(model: nn.Module, stored: Collection[str]) -> str:
    """How many a model has in which format, of those that ranks share: DistributedDataParallel compares their shapes alone."""
    counts: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    left_out = {*stored, *left_to_ranks(model)}
    for name, parameter in model.named_parameters():
        if name not in left_out:
            kind = "trained" if parameter.requires_grad else "frozen"
            counts[kind, str(parameter.dtype).removeprefix("torch.")].append(parameter.numel())
    return ", ".join(
        f"{len(sizes)} {kind} with {sum(sizes):,} elements in {dtype}"
        for (kind, dtype), sizes in sorted(counts.items(), reverse=True)
    )


def _on_all_ranks(what: str, whole_plan: bool, *, slow: bool = False) -> AbstractContextManager[dict[str, str]]:
    """Variants by operator are this rank's own affair: other ranks may run other ones, or none, and need not call ``apply_``."""
    return together(what, slow=slow) if whole_plan else nullcontext({})


def _check_model(model: nn.Module, caller: Caller) -> None:
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        which = f"module {scripted[0]!r} of this model" if scripted[0] else "this model"
        raise PlanError(
            f"{which} is TorchScript, whose operators cannot be replaced: call {caller.call} on the model that was scripted"
        )
    if missing := without_shape(model):
        raise PlanError(
            f"{missing} of this {type(model).__name__} has no shape yet, which its lazy module takes from a batch: run the model "
            f"on one before {caller.call}"
        )
    check_whole_model(model)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        raise PlanError(f"call {caller.call} on the model itself, before it is wrapped ({type(model).__name__})")
    for name, module in model.named_modules():
        if module.__dict__.get(MARK) is not None or is_planned(module):
            which = f"module {name!r} of this model" if name else "this model"
            raise PlanError(
                f"{which} has a plan already: call {caller.call} once, before the loop, or remove() on what it returned before "
                "another plan is applied"
            )


def _base(base: Precision | str) -> Precision:
    """Raises PlanError for what is no format of an autocast, nor float32."""
    floats = [str(precision) for precision in Precision if not precision.needs_scale]
    if base not in floats:
        raise PlanError(f"base is {base!r}, but a model trains in one of {', '.join(floats)}: give one of these")
    return Precision(base)


def _read(entries: Any) -> dict[OpId, Variant | Assignment]:
    """Operators and variants, of which some may be texts.  Raises PlanError for anything else."""
    if not isinstance(entries, Mapping):
        raise PlanError(f"apply_ takes a plan, the path of one, or variants by operator, got {type(entries).__name__}")
    found = {}
    for op_id, entry in entries.items():
        try:
            key = OpId.parse(op_id) if isinstance(op_id, str) else op_id
            value = Variant.parse(entry) if isinstance(entry, str) else entry
        except ValueError as error:
            raise PlanError(f"not an operator and its variant: {op_id!r}: {entry!r} ({error}); write {{'0#0': 'int8'}}") from None
        if not isinstance(key, OpId) or not isinstance(value, (Variant, Assignment)):
            raise PlanError(f"not an operator and its variant: {op_id!r}: {entry!r}; write {{'0#0': 'int8'}}")
        found[key] = value
    return found
