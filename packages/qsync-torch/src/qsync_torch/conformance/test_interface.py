"""What a backend says about itself, and what it does with requests that no backend can run."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import attrs
import pytest

from qsync_core.errors import BackendError
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import BACKEND_API_VERSION, KernelConfig, KernelRequest, Op
from qsync_core.plugins.backends import CheckedBackend
from qsync_torch.conformance.stored import STORAGES
from qsync_torch.conformance.subject import Subject, check_sentences
from qsync_torch.conformance.table import TABLE

INT8 = Variant.of(Precision.INT8, output=Precision.FLOAT32, rounding=Rounding.NEAREST)
AHEAD = frozenset({"float8_e5m2"})
"""Formats that kernels may offer before variants can name them."""
CONFIG_TEXT = re.compile(r"[A-Za-z0-9_.,;:=x-]*")


def samples(subject: Subject, op: str, variant: Variant) -> list[KernelRequest]:
    """Requests of which a backend that offers the operator should have no reason to refuse all."""
    asked = [case.draw(subject.device).asked for case in TABLE[op].typical]
    variants = [attrs.evolve(variant, storage=each) for each in STORAGES] if op == Op.DEQUANTIZE else [variant]
    pairs = itertools.product(variants, asked)
    return list(dict.fromkeys(subject.request(op, one, each.shapes, **each.fields) for one, each in pairs))


def variants_of(compute: str) -> list[Variant]:
    """Standard variants of a format, and for 8-bit ones those whose gradients are computed in the same format."""
    found = [Variant.of(Precision(compute), sixteen_bit=p) for p in (Precision.BFLOAT16, Precision.FLOAT16)]
    per_tensor = [attrs.evolve(variant, w_granularity=Granularity.PER_TENSOR) for variant in found]
    same = [attrs.evolve(variant, grad_input=Precision(compute), grad_weight=Precision(compute)) for variant in found + per_tensor]
    sixteen = [attrs.evolve(variant, output=Precision.BFLOAT16) for variant in found + per_tensor]
    return [*found, *per_tensor, *same, *sixteen]


def test_it_has_a_name_and_this_api_version(subject: Subject) -> None:
    """Plans name backends, and join names by "+"."""
    backend = subject.backend
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", backend.name), f"a name has letters, digits, '_', '.' and '-', got {backend.name!r}"
    assert backend.api_version == BACKEND_API_VERSION


def test_it_is_imported_without_torch(subject: Subject) -> None:
    """QSync imports a plugin whenever it starts, for commands and on machines that have no use for torch, too."""
    if not isinstance(subject.backend, CheckedBackend):
        pytest.skip("it comes from no installed plugin")
    module = subject.backend.module
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert found.returncode == 0, f"{module} imports torch; import it inside build"


def test_its_specifications_are_data(subject: Subject) -> None:
    """``qsync backends`` prints them."""
    specs = subject.backend.kernel_specs()
    assert specs, "kernel_specs is empty: the backend offers nothing"
    for spec in specs:
        assert spec.op in Op.ALL, f"there is no operator {spec.op!r}; operators are {', '.join(Op.ALL)}"
        unknown = set(spec.compute) - set(Precision) - AHEAD
        assert not unknown, f"{spec.op}: unknown formats {unknown}; known are {', '.join(Precision)}"
        assert spec.compute
        assert set(spec.device_kinds) <= {"cpu", "cuda"}
        assert re.fullmatch(r"|\d+\.\d+", spec.min_compute_capability)


@pytest.mark.parametrize("op", TABLE)
def test_it_takes_what_its_specifications_offer(subject: Subject, op: str) -> None:
    """An offer that every ordinary request is refused under is none."""
    offered = {compute for spec in subject.backend.kernel_specs() if spec.op == op for compute in spec.compute}
    offered = {compute for compute in offered - AHEAD if subject.offers(op, Precision(compute))}
    if not offered:
        pytest.skip(f"{subject.backend.name} does not offer {op} on {subject.device.type}")
    for compute in sorted(offered):
        asked = [request for variant in variants_of(compute) for request in samples(subject, op, variant)]
        reasons = [subject.backend.unsupported_reasons(request) for request in asked]
        if not all(reasons):
            break
    else:
        refused = sorted(set(itertools.chain(*reasons)))
        pytest.fail(f"it offers {op} in {', '.join(sorted(offered))}, and refuses every request for it: {refused}")


@pytest.mark.parametrize(
    "what, change",
    [
        ("an operator that does not exist", {"op": "linear.sideways"}),
        ("a device that does not exist", {"device_kind": "abacus"}),
    ],
)
def test_it_refuses_with_sentences(subject: Subject, what: str, change: dict[str, Any]) -> None:
    """Users see every backend's reasons, and ``build`` refuses too."""
    request = attrs.evolve(samples(subject, Op.LINEAR_OUTPUT, INT8)[0], **change)
    reasons = subject.backend.unsupported_reasons(request)
    check_sentences(reasons)
    assert reasons, f"it has no reason against {what}"
    with pytest.raises(BackendError):
        subject.backend.build(request, KernelConfig())


@pytest.mark.parametrize("op", TABLE)
def test_configurations_are_texts_that_plans_can_store(subject: Subject, op: str) -> None:
    """A backend has at least one configuration, each once, in the characters that plans reserve; an unknown one is refused."""
    for compute in Precision:
        if not subject.offers(op, compute):
            continue
        for request in itertools.chain.from_iterable(samples(subject, op, variant) for variant in variants_of(compute)):
            if subject.backend.unsupported_reasons(request):
                continue
            texts = [config.text for config in subject.backend.candidate_configs(request)]
            assert texts, "candidate_configs is empty for a request that has no reasons against it"
            assert len(set(texts)) == len(texts), f"configurations repeat: {texts}"
            for text in texts:
                assert CONFIG_TEXT.fullmatch(text), f"a configuration has letters, digits and _.,;:=- only, got {text!r}"
            with pytest.raises(BackendError):
                subject.backend.build(request, KernelConfig("no.such:configuration;x=1"))
            return
    pytest.skip(f"{subject.backend.name} runs no {op} on {subject.device.type}")
