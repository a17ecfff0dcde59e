"""Before a profile launches kernels, those of backends that compile where they are launched are compiled side by side."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment
from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_torch.apply.kernel_check import check_numbers
from qsync_torch.apply.plan_fit import Planned, locate
from qsync_torch.kernels import canary, rehearsal
from qsync_torch.kernels.canary import Canary
from qsync_torch.profiling import profile as profiling
from qsync_torch.profiling.profile import ProfileRequest, profile
from qsync_torch.tracing.trace import trace

from ..compiling.chained_models import Vgg
from ..tuning.installed_backends import NamedBackend
from .test_chain_cost import CPU, EFFORTS, LADDER, job_of

GPU = torch.device("cuda")


class RehearsingBackend(NamedBackend):
    """One whose kernels compute nothing in a rehearsal, and tell for what operands they ran and would have run."""

    def __init__(self, fails=""):
        super().__init__("rehearsing", configs=("a",))
        self.fails, self.rehearses = fails, False
        self.compiled, self.launched = set(), set()

    @contextmanager
    def rehearsal(self):
        self.rehearses = True
        yield
        self.rehearses = False

    def build(self, request, config):
        kernel = super().build(request, config)

        def run(*arguments):
            operands = [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else type(x) for x in arguments]
            told = self.compiled if self.rehearses else self.launched
            told.add((request.op, str(request.variant), *operands))
            if not self.rehearses:
                kernel(*arguments)
            elif request.op == self.fails:
                raise RuntimeError("it does not compile")

        return run


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    real = rehearsal.rehearse
    for module in (canary, profiling):
        monkeypatch.setattr(module, "rehearse", lambda calls, device, tell=lambda: None: real(calls, GPU, tell))
    monkeypatch.setattr(canary, "smaller", lambda call: call)


@pytest.mark.parametrize("fails", ["", "quantize"])
def test_what_is_checked_and_measured_was_compiled_before_and_nothing_else(fails, install, as_on_a_gpu, monkeypatch):
    """Forward and backward, casts and chains; whole steps are not rehearsed.  What fails is met again where it is run."""
    backend, job, seen, told = RehearsingBackend(fails), job_of(Vgg()), [], []
    install(backend)

    def then(name):
        real = getattr(profiling, name)

        def run(*arguments):
            seen.append((set(backend.compiled), set(backend.launched)))
            return real(*arguments)

        monkeypatch.setattr(profiling, name, run)

    for name in ("right_kernels", "_operators", "_steps"):
        then(name)
    asked = ProfileRequest(ladder=LADDER, with_chains=True, efforts=EFFORTS, backend="rehearsing+aten")
    found = profile(job, trace(job), asked, progress=lambda done, total, what: told.append(what))
    (checked, none), (measured, of_canary), (_, launched) = seen
    assert not none
    assert {call[0] for call in launched} > {"quantize", "linear.grad_weight", "conv2d.grad_input", "batch_norm.grad_input"}
    if not fails:
        assert checked == of_canary
        assert measured == launched
    assert len(found.chains) > 0
    assert not found.check.wrong
    assert [what for what in told if what.startswith("compiling")] == [
        "compiling: kernels that are checked",
        "compiling: kernels that are measured",
    ]


def test_what_is_measured_already_is_not_compiled_again(install, as_on_a_gpu, tmp_path):
    backend, job = RehearsingBackend(), job_of(Vgg())
    install(backend)
    dag, asked = trace(job), ProfileRequest(ladder=LADDER, with_chains=True, efforts=EFFORTS, backend="rehearsing+aten")
    again = partial(profile, job, dag, asked, resume=tmp_path / "x.partial")
    again()
    for calls in (backend.compiled, backend.launched):
        calls.clear()
    again()
    assert backend.compiled == backend.launched  # by the canary, and no step


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_no_call_is_made_on_a_cpu_or_where_nothing_would_be_compiled(device, install):
    install(NamedBackend("plain") if device == GPU else RehearsingBackend())
    calls = []
    rehearsal.rehearse([lambda: calls.append(1)], device, lambda: calls.append(0))
    assert calls == []


def test_a_rehearsal_ends_nothing(install):
    class Broken(RehearsingBackend):
        def rehearsal(self):
            raise RuntimeError("no compiler")

    install(Broken())
    rehearsal.rehearse([pytest.fail], GPU)
    backend, calls = RehearsingBackend(), []
    install(backend)
    rehearsal.rehearse([lambda: 1 / 0, lambda: calls.append(backend.rehearses)], GPU)
    assert calls == [True]
    assert not backend.rehearses


def test_backward_is_rehearsed_in_the_same_thread(install):
    install(RehearsingBackend())
    seen = []
    rehearsal.rehearse([lambda: seen.append(torch._C._is_multithreading_enabled())], GPU)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()


def test_a_plan_s_kernels_are_compiled_before_they_are_checked(install, as_on_a_gpu):
    backend = RehearsingBackend()
    install(backend)
    model, int8 = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), Assignment(Variant.of(Precision.INT8), "rehearsing", "", "")
    planned = Planned({OpId(name): int8 for name in "01"}, None, None, Precision.FLOAT32, ())
    check_numbers(locate(model, planned.on(CPU), None), Canary(CPU))
    assert backend.compiled == backend.launched != set()
