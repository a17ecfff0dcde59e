"""The conformance suite passes the reference backend, and fails every one of many broken ones."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forked import Forked
from nightly import nightly_but
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.kernels.backend import Op
from qsync_core.kernels.requests import quantization_variant
from qsync_core.kinds import Kind
from qsync_core.plugins.backends import checked
from qsync_torch.conformance import plugin, product_entries, test_interface
from qsync_torch.conformance.calls import Written
from qsync_torch.conformance.operands import Outputs
from qsync_torch.conformance.products import SIGNATURES, Product
from qsync_torch.conformance.subject import SUBJECT, Subject
from qsync_torch.conformance.table import TABLE
from qsync_torch.kinds.convolution import convolution

from . import address_mutants, mutants, producer_mutants, stride_mutants

HERE = Path(__file__).parent
REPRESENTATIVES = {
    "Float32Accumulation", "OneScaleForAllFilters", "BiasedRounding", "RoundsAlikeWhateverTheData", "DelaysTheScale",
    "KeepsWeights", "KeepsCopies", "RefusesShortColumnsOfGradients", "LeavesOutTheLastElement", "ReplacesItsOutput",
    "OverlooksTheEndsOfBlocks",
}  # fmt: skip
"""One for each part of the suite: a product, convolution, quantization, its numbers, a producer; stale; strides; stored; memory;
maxima."""
MUTANTS = [mutant.__name__ for mutant in (*mutants.ALL, *producer_mutants.ALL, *address_mutants.ALL, *stride_mutants.ALL)]
PLUGIN = "qsync_torch.conformance.plugin"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    "CUDA_VISIBLE_DEVICES": "",
}


def run(*command, cwd):
    process = Forked(command, env=ENVIRONMENT, cwd=cwd)
    output = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, *output)


def run_suite(backend, cwd):
    return run("-m", "pytest", "-q", "-p", PLUGIN, "--pyargs", "qsync_torch.conformance", "--backend", backend, cwd=cwd)


@pytest.fixture(scope="module")
def verdicts(request, tmp_path_factory):
    """The first failure of the suite for each mutant whose test is selected; empty where it passed."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_a_broken_backend_fails"]
    names = [test.callspec.params["name"] for test in tests]
    result = run("-m", "conformance.run_mutants", *names, cwd=tmp_path_factory.mktemp("mutants"))
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", nightly_but({"aten"}, ["aten", "conformance.mutants:Draws"]))
@pytest.mark.slow
def test_backends_without_mistakes_pass(tmp_path, backend):
    result = run_suite(backend, tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "passed" in result.stdout
    assert backend != "aten" or f"aten offers {len(Op.ALL)} operators here; refused by its own reasons: " in result.stdout


def test_the_last_line_has_what_the_backend_refused():
    class Refuses(mutants.Mutant):
        def unsupported_reasons(self, request):
            by_channel = request.op == Op.QUANTIZE and request.variant.x_granularity is Granularity.PER_CHANNEL
            return ["it quantizes no channels"] if by_channel else super().unsupported_reasons(request)

    def skipped(ask):
        with pytest.raises(pytest.skip.Exception) as caught:
            ask()
        return SimpleNamespace(longrepr=("subject.py", 1, f"Skipped: {caught.value}"))

    subject = Subject(Refuses(), torch.device("cpu"), 1)
    variant = quantization_variant(Precision.INT8, Granularity.PER_CHANNEL, Rounding.NEAREST)
    reports = [skipped(lambda: subject.kernels(Op.QUANTIZE, variant, ((4, 5),))) for _ in range(3)]
    reports.append(skipped(lambda: subject.skip_unless_offered("linear.sideways")))
    config = SimpleNamespace(stash={SUBJECT: subject}, invocation_params=SimpleNamespace(args=("--pyargs", plugin.SUITE)))
    lines = []
    plugin.pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append), config)
    assert lines == [
        f"aten offers {len(Op.ALL)} operators here; refused by its own reasons: quantize: it quantizes no channels (3 cases)"
    ]


@pytest.mark.parametrize("name", nightly_but(REPRESENTATIVES, MUTANTS))
def test_a_broken_backend_fails(verdicts, name):
    failure = verdicts[name]
    assert failure, f"{name} passed"
    assert failure.startswith("call") or "elements outside its output" in failure, failure


def test_a_plugin_that_imports_torch_is_told():
    heavy = type("Heavy", (mutants.Mutant,), {"__module__": "torch.nn"})
    with pytest.raises(AssertionError, match=r"torch\.nn imports torch; import it inside build"):
        test_interface.test_it_is_imported_without_torch(Subject(checked(heavy()), torch.device("cpu"), 1))


def test_the_table_has_every_operator():
    assert set(TABLE) == set(Op.ALL)


@pytest.mark.parametrize("row", [
    Kind("conv1d", dimensions=1),
    Kind("conv3d", dimensions=3),
    Kind("conv_transpose2d", dimensions=2, transposed=True),
    Kind("conv_transpose3d", dimensions=3, transposed=True),
], ids=lambda row: row.name)  # fmt: skip
def test_the_entries_of_a_new_kind_follow_from_its_row(row):
    kind = product_entries.of_images(convolution(row))
    for part in SIGNATURES:
        entry = product_entries.entry_of(kind, part)
        for case in entry.ones:
            assert any(1 in x.shape for x in case.draw(torch.device("cpu")).operands.values()), case.name
        for case in entry.typical:
            call = case.draw(torch.device("cpu"))
            right = call.product(*call.dequantized())
            if call.bias is not None:
                right = right + call.bias.double().view(-1, *(1,) * row.dimensions)
            call.check(Written(out=right.float()))
            wrong = right.clone()
            wrong[(-1,) * wrong.dim()] += 1 + wrong.abs().max()
            with pytest.raises(AssertionError, match=r"1 of .* differ|errors up to"):
                call.check(Written(out=wrong.float()))


def test_a_random_case_says_in_its_name_what_it_draws():
    drawn = [case for entry in TABLE.values() for case in entry.values if ", random " in case.name]
    assert len(drawn) == 24 * 4 + 12 * 10
    for case in drawn:
        call = case.draw(torch.device("cpu"))
        if isinstance(call, Product):
            (m, k), (n, _) = call.size.x, call.size.w
            assert f": {m}x{k}x{n} to {call.out}, scales by {call.variant.x_granularity} and " in case.name
        else:
            first = call.operands["kept" if "kept" in call.operands else "x"]
            assert f" {tuple(first.shape)}" in case.name


def test_a_failure_says_how_to_make_the_call_again():
    case = next(case for case in TABLE["linear.grad_weight"].ones if "24x40x1, int8" in case.name)
    call = case.draw(torch.device("cpu"))
    with pytest.raises(AssertionError) as caught:
        call.check(Written(out=torch.full((1, 40), 5e7)))
    said = str(caught.value)
    assert said.startswith("linear.grad_weight in int8;out=float32;save=int8;gi=int8;gw=int8;")
    assert (
        "; grad int8 [24, 1] of strides (1, 1); x int8 [24, 40] of strides (40, 1); x_scale float32 [1] of strides (1,): " in said
    )
    assert "40 of 40 elements differ" in said
    assert "\n" not in said

    with pytest.raises(AssertionError, match=r": nothing was written into out$"):
        call.check(call.allocate(Outputs(torch.device("cpu"))))

    def fails(*arguments):
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today") as raised:
        call.launch(fails, Written(out=torch.zeros(1, 40)))
    assert raised.value.__notes__ == [f"raised by the kernel of {call}"]


def test_a_wrong_command_line_is_one_sentence(tmp_path):
    result = run_suite("nowhere", tmp_path)
    assert result.returncode == 4
    assert "there is no kernel backend 'nowhere' here; installed are " in result.stderr
    assert "aten" in result.stderr
    result = run_suite("conformance.mutants:Nobody", tmp_path)
    assert "--backend conformance.mutants:Nobody: module 'conformance.mutants' has no attribute 'Nobody'" in result.stderr


def test_other_test_runs_have_no_such_options(tmp_path):
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    result = run("-m", "pytest", "-q", "-p", PLUGIN, "test_nothing.py", "--help", cwd=tmp_path)
    assert "--backend" not in result.stdout
    assert run("-m", "pytest", "-q", "-p", PLUGIN, "test_nothing.py", cwd=tmp_path).returncode == 0
