"""The kernels that a job's model needs in the settings that it is going to run in: compiled side by side, tuned, chosen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.variant import Variant
from qsync_core.kernels.requests import CallShapes, OperatorRequest, operator_requests
from qsync_core.tuning.record import formats_of
from qsync_torch.benchmarking.contenders import compile_ahead
from qsync_torch.devices import device_facts
from qsync_torch.kernels.installed import open_store
from qsync_torch.load_job import load_job
from qsync_torch.tracing.trace import trace
from qsync_torch.tuning.chooser import KernelChooser
from qsync_torch.tuning.job_tuning import Effort, JobTuning, tune_requests

from .bench import Bench

EFFORT = Effort(budget=5, samples=(3, 9))
"""Enough for whole steps, where a few per cent of one kernel do not show."""


class JobKernels:
    """A traced job on the bench's device, and the choice of its kernels.

    Attributes:
        dag: its operators.
        path: the tuning store's file, the default one if None.
    """

    def __init__(self, bench: Bench, job_text: str, batch_size: int, path: Path | None = None) -> None:
        self.bench, self.job_text, self.path = bench, job_text, path
        self.dag: PrecisionDag = trace(load_job(job_text, batch_size))

    def requests(self, variants: Iterable[Variant]) -> list[OperatorRequest]:
        """Every distinct kernel of the model's adjustable operators in these variants."""
        found: dict[tuple[object, ...], OperatorRequest] = {}
        for variant in variants:
            for call in self._calls().values():
                for asked in operator_requests(call, offered(variant, call), *device_facts(self.bench.device)):
                    request = asked.request
                    key = (
                        request.op,
                        formats_of(request),
                        request.shapes,
                        request.geometry,
                        request.multiplied,
                        request.transposed,
                    )
                    found.setdefault(key, asked)
        return list(found.values())

    def _calls(self) -> dict[OpId, CallShapes]:
        return {operator.op_id: CallShapes.of(operator) for operator in self.dag.adjustable}

    def build(self, variants: Iterable[Variant]) -> None:
        """Compile the candidates side by side, so that neither tuning nor a training step waits for a compiler."""
        requests = [asked.request for asked in self.requests(variants)]
        self.bench.say(f"{self.job_text}: {len(requests)} distinct kernels")
        compile_ahead(self.bench.backends, requests)
        self.bench.say(f"{self.job_text}: compiled")

    def tune(self, variants: Iterable[Variant], effort: Effort = EFFORT) -> JobTuning:
        """Measure the candidates of every backend; what the store has already is not measured again."""
        shown = [0.0]

        def progress(number: int, total: int, what: str) -> None:
            if total and number / total >= shown[0]:
                shown[0] = number / total + 0.1
                self.bench.say(f"  {number}/{total} {what}")

        store = open_store(self.bench.device, self.path)
        backends = list(self.bench.backends.by_name.values())
        found = tune_requests(self.requests(variants), backends, store, self.bench.device, effort=effort, progress=progress)
        self.bench.say(f"{self.job_text}: tuned in {found.seconds:.1f} s, {found.reused} searches known already")
        return found

    def assignments(self, variant: Variant, backend: str | None, config: str = "") -> dict[OpId, Assignment]:
        """Every operator in the variant, with the fastest kernels by the tuning store (``backend`` None), or as they are named."""
        chooser = KernelChooser(self.bench.device, None, open_store(self.bench.device, self.path)) if backend is None else None
        found = {}
        for op_id, call in self._calls().items():
            each = offered(variant, call)
            if not each.compute.needs_scale:
                found[op_id] = Assignment(each, "aten", "", "")
            elif chooser is None:
                found[op_id] = Assignment(each, str(backend), config, "")
            else:
                chosen = chooser.for_operator(call, each, str(op_id))
                found[op_id] = Assignment(each, chosen.backend, chosen.config, "")
        if chooser is not None and chooser.untuned:
            self.bench.say(f"{self.job_text}, {variant.label}: {len(chooser.untuned)} kernels were never measured")
        return found


def offered(variant: Variant, call: CallShapes) -> Variant:
    """The variant with 16-bit gradients where no backend offers 8-bit ones: of a convolution's weight, and of a strided or grouped
    one's input."""
    if call.kind == "linear":
        return variant
    if variant.grad_weight.needs_scale:
        variant = attrs.evolve(variant, grad_weight=variant.output)
    plain = call.geometry.stride == (1, 1) and call.geometry.groups == 1
    if variant.grad_input.needs_scale and not plain:
        variant = attrs.evolve(variant, grad_input=variant.output)
    return variant
