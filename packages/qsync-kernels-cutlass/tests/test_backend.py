"""The backend refuses everything, with a reason, and the plugin fits the registry."""

from __future__ import annotations

import pytest

from qsync_core.backend import KernelBackend, KernelConfig, KernelRequest, Op
from qsync_core.errors import BackendError
from qsync_core.precision import Precision
from qsync_core.registry import Registry
from qsync_core.variant import Variant
from qsync_kernels_cutlass import plugin
from qsync_kernels_cutlass.backend import CutlassBackend


@pytest.mark.parametrize("op", Op.ALL)
def test_every_operator_is_refused_with_a_reason_that_names_it(op):
    request = KernelRequest(op, Variant.of(Precision.INT8), ((8, 8), (8, 8)), device_kind="cuda", compute_capability="9.0")
    backend = CutlassBackend()
    (reason,) = backend.unsupported_reasons(request)
    assert "has no kernels yet" in reason
    assert op in reason
    assert list(backend.candidate_configs(request)) == []
    with pytest.raises(BackendError, match=rf"backend cutlass can not run {op} on \[\(8, 8\), \(8, 8\)\]: .*no kernels yet"):
        backend.build(request, KernelConfig())


def test_it_offers_nothing():
    assert isinstance(CutlassBackend(), KernelBackend)
    assert list(CutlassBackend().kernel_specs()) == []


def test_a_request_gets_its_reason_through_the_registry():
    registry = Registry()
    registry.register(plugin, "qsync-kernels-cutlass")
    assert registry.disabled == {}
    request = KernelRequest(Op.LINEAR_OUTPUT, Variant.of(Precision.INT8), ((8, 8), (8, 8)))
    with pytest.raises(BackendError, match=r"cutlass: this version of qsync-kernels-cutlass has no kernels yet"):
        registry.select(request)
