"""Which kernels an operator runs with: a chain of backends, or for each product the one that measured fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import CastKey
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import CompilingBackend, KernelBackend, KernelRequest, Op
from qsync_core.kernels.choice import AUTO_BACKEND, FLOAT_BACKEND, QUANTIZE_WEIGHT, KernelChoice, OpChoice, split_chain
from qsync_core.kernels.requests import CallShapes, operator_requests, quantization_variant
from qsync_core.plugins.backends import Answer
from qsync_core.tuning.store import TuningStore
from qsync_torch.devices import device_facts
from qsync_torch.kernels.installed import installed
from qsync_torch.kernels.selection import AUTO, DEFAULT_BACKEND, default_backend, find_backends, reasons_against
from qsync_torch.tuning.compiling import Group, group_of, kernel_of


class KernelChooser:
    """Answers for one device.

    Attributes:
        chain: backends of which the first that takes a request runs it; ``("auto",)``: the fastest.
        untuned: requests that were answered without a measurement, by operator.
        to_compile: backend, request and configuration of the answers that some backend compiles, each kernel once.
    """

    def __init__(self, device: torch.device, backend: str | None = None, store: TuningStore | None = None) -> None:
        """Make a chooser.

        Args:
            backend: None takes :func:`default_backend`.
            store: tuning records; without one every backend's first candidate is taken.

        Raises:
            BackendError: when a named backend is not installed.
        """
        self.device = device
        self.chain = split_chain(default_backend(device) if backend is None else backend)
        find_backends(self.chain)
        self._store = store
        self.untuned: set[KernelRequest] = set()
        self.to_compile: dict[Group, tuple[KernelBackend, KernelRequest, str]] = {}
        self._left_out: set[tuple[str, KernelRequest]] = set()

    @property
    def is_trivial(self) -> bool:
        """ATen alone: it has one configuration, so there is nothing to choose."""
        return self.chain == (DEFAULT_BACKEND,)

    def for_operator(self, call: CallShapes, variant: Variant, name: str = "") -> KernelChoice:
        """Backends and configurations of one operator in a variant, forward and backward.

        Raises:
            BackendError: when no backend that may be asked runs one of its kernels, with every reason.
        """
        if not variant.compute.needs_scale:
            if not {AUTO_BACKEND, FLOAT_BACKEND} & set(self.chain):
                chain = "+".join(self.chain)
                raise BackendError(
                    f"{name or call.kind} cannot run as {variant.label} on backend {chain}: operators in float formats run "
                    f"on PyTorch's own kernels; add them as 'qsync … --backend {chain}+{FLOAT_BACKEND}'"
                )
            return KernelChoice()
        ops: dict[str, OpChoice] = {}
        for asked in operator_requests(call, variant, *device_facts(self.device)):
            if self.is_trivial:
                if reasons := reasons_against(asked.request, KernelChoice()):
                    raise BackendError(f"{name or call.kind} cannot run {asked.role} as {variant.label}: {'; '.join(reasons)}")
                continue
            answer = self.answer(asked.request)
            # Weights of all shapes share one quantization, so that one's configuration is of no use.
            ops[asked.role] = OpChoice(answer.backend, "" if asked.role == QUANTIZE_WEIGHT else answer.config)
        return _chosen(ops) if ops else KernelChoice()

    def for_cast(self, key: CastKey, shape: Sequence[int]) -> KernelChoice:
        """Who quantizes a tensor of this shape.

        Raises:
            BackendError: as :meth:`for_operator`.
        """
        if self.is_trivial or not key.target.needs_scale:
            return KernelChoice()
        variant = quantization_variant(key.target, key.granularity, key.rounding, key.symmetric)
        kind, capability = device_facts(self.device)
        answer = self.answer(KernelRequest(Op.QUANTIZE, variant, (tuple(shape),), device_kind=kind, compute_capability=capability))
        return _chosen({Op.QUANTIZE: OpChoice(answer.backend, answer.config)})

    def for_chain(self, requests: Sequence[KernelRequest]) -> KernelChoice | None:
        """Whose kernels run a fused chain, given its requests; None where no backend that may be asked has one of them.

        ``auto``, for which nothing was tuned, takes the backend that is the fastest to quantize the result by itself, as
        compiled graphs do, before PyTorch's own, which are a reference.
        """
        if self.is_trivial:
            return None if any(reasons_against(request, KernelChoice()) for request in requests) else KernelChoice()
        ops: dict[str, OpChoice] = {}
        for request in requests:
            try:
                answer = self.answer(request)
            except BackendError:
                return None
            if answer.latency_ns is None and self.chain == AUTO:
                (known,) = installed().answers(request, [self._quantizer(request)], store=self._store)
                answer = answer if known.reasons else known
            ops[request.op] = OpChoice(answer.backend, answer.config)
        return _chosen(ops) if ops else KernelChoice()

    def _quantizer(self, producer: KernelRequest) -> str:
        """The backend that quantizes what a producer writes, in int8 where it writes no copy."""
        asked = producer.variant
        variant = quantization_variant(Precision.INT8, asked.x_granularity, Rounding.STOCHASTIC)
        if asked.compute.needs_scale:
            variant = quantization_variant(asked.compute, asked.x_granularity, asked.rounding, asked.symmetric)
        kind, capability = device_facts(self.device)
        request = KernelRequest(Op.QUANTIZE, variant, producer.shapes, device_kind=kind, compute_capability=capability)
        return self.answer(request).backend

    def leave_out(self, backend: str, request: KernelRequest) -> None:
        """Never answer a request with this backend again: its kernel is wrong here."""
        self._left_out.add((backend, request))

    def versions(self, chosen: Iterable[KernelChoice]) -> dict[str, str]:
        """Versions of the backends that were chosen, other than PyTorch's own kernels, as a profile records them."""
        used = {name for kernels in chosen for name in kernels.chain} - {DEFAULT_BACKEND}
        versions = installed().backend_versions() if used else {}
        return {f"backend {name}": versions.get(name, "unknown") for name in sorted(used)}

    def answer(self, request: KernelRequest) -> Answer:
        """Who runs one request, with which configuration.

        Raises:
            BackendError: when no backend does, with every reason.
        """
        registry = installed()
        names = None if self.chain == AUTO else self.chain
        answers = [
            attrs.evolve(answer, reasons=("its kernel computes wrong numbers here",))
            if (answer.backend, request) in self._left_out
            else answer
            for answer in registry.answers(request, names, store=self._store)
        ]
        if names is not None:
            # A chain: the first that takes the request, however fast the others are.
            by_name = {answer.backend: answer for answer in answers}
            able = [by_name[name] for name in names if not by_name[name].reasons]
            answers = able[:1] or answers
        answer = registry.choose(request, answers)
        if answer.latency_ns is None and request.op not in Op.PRODUCERS:  # which 'qsync tune' does not tune
            self.untuned.add(request)
        (backend,) = find_backends((answer.backend,))
        if isinstance(backend, CompilingBackend):
            kernel = (answer.backend, group_of(request), kernel_of(answer.config))
            self.to_compile.setdefault(kernel, (backend, request, answer.config))
        return answer


def _chosen(ops: dict[str, OpChoice]) -> KernelChoice:
    used = {choice.backend for choice in ops.values()}
    # One order for all operators, ATen last, because it takes almost everything.
    chain = tuple(sorted(used, key=lambda name: (name == DEFAULT_BACKEND, name)))
    if used == {DEFAULT_BACKEND} and not any(choice.config for choice in ops.values()):
        return KernelChoice()
    return KernelChoice(chain, tuple(ops.items()))
