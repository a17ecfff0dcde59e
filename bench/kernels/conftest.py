"""Options of the kernel suite, the clock that pytest-benchmark reads, and what becomes of the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import pytest

torch = pytest.importorskip("torch")

from kernels import baselines, compare, shapes, suite_file  # noqa: E402
from qsync_core.ir.precision import Precision  # noqa: E402
from qsync_torch.benchmarking.bench import name_of, row_of  # noqa: E402
from qsync_torch.benchmarking.contenders import Backends, Contender, compile_ahead  # noqa: E402
from qsync_torch.benchmarking.errors import Reference  # noqa: E402
from qsync_torch.benchmarking.page import render  # noqa: E402
from qsync_torch.benchmarking.peaks import Peaks, measure_peaks  # noqa: E402
from qsync_torch.benchmarking.problems import Problem, problems  # noqa: E402
from qsync_torch.benchmarking.race import Measured, Timer, is_lost, why_failed  # noqa: E402
from qsync_torch.benchmarking.results import BASELINES, Row, Suite  # noqa: E402
from qsync_torch.kernels.operands import Arguments  # noqa: E402


class DeviceClock:
    """A clock that a measurement moves on by the device's time of one call."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = DeviceClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel suite")
    group.addoption("--set", default="", help=f"shape sets, comma-separated: {', '.join(shapes.SET_NAMES)}; default all on a "
                    "CUDA device, smoke on a CPU")  # fmt: skip
    group.addoption("--op", default="", help="operators whose name contains this")
    group.addoption("--contender", default="", help="contenders, comma-separated; default all")
    group.addoption("--rounds", type=int, default=15, help="samples of each measurement")
    group.addoption("--libraries", type=int, default=2, help="kernels that a request may have compiled")
    group.addoption("--just-in-time", type=int, default=3, help="configurations of a product from backends that do not compile")
    group.addoption("--out", type=Path, help="folder for the result: JSON (merged with what is there) and page")
    group.addoption("--compare", type=Path, help="a stored result to compare with")


def pytest_configure(config: pytest.Config) -> None:
    """Read the result to compare with at once: nobody wants to hear after an hour of measuring that it is not there."""
    if (stored := config.getoption("--compare", default=None)) is not None:
        try:
            config.stash[_STORED] = suite_file.read_suite(stored)
        except ValueError as error:
            raise pytest.UsageError(f"--compare: {error}") from None


def device_of() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@attrs.define
class Session:
    """What a run of the suite gathers."""

    device: torch.device
    backends: Backends
    timer: Timer
    rows: list[Row] = attrs.field(factory=list)
    left_out: dict[str, str] = attrs.field(factory=dict)
    _peaks: Peaks | None = None
    _operands: tuple[Problem, list[Arguments], Reference] | None = None
    _broken: str = ""

    def peaks(self) -> Peaks:
        """Measured once, when first asked for."""
        if self._peaks is None:
            self._peaks = measure_peaks(self.device)
        return self._peaks

    def operands(self, problem: Problem) -> tuple[list[Arguments], Reference]:
        """Those of the problem at hand, and its result in float64; the last problem's are let go."""
        if self._operands is None or self._operands[0] != problem:
            self._operands = None
            sets = problem.operands(self.device)
            self._operands = problem, sets, Reference.of(problem, sets[0])
        return self._operands[1:]

    def contender(self, problem: Problem, name: str) -> Contender:
        """Ready to be timed; skips the test, with the reason, where it cannot be."""
        if self._broken:
            pytest.fail(self._broken)
        if name in self.backends.by_name:
            if reasons := self.backends.reasons(name, problem.request(self.device)):
                self.leave_out(problem, name, "; ".join(reasons))
            return self.backends.contender(name, problem, self.operands(problem)[0], self.device)
        if why := baselines.why_not(name, problem, self.device):
            self.leave_out(problem, name, why)
        return baselines.contender(name, problem, self.operands(problem)[0], self.device)

    def note(self, problem: Problem, contender: Contender, samples: list[float]) -> Row:
        """Keep the figures of a measurement, with the error of backends and of 16-bit products."""
        error: tuple[float, ...] = ()
        if contender.name in (*self.backends.by_name, *BASELINES):
            same = contender.problem == problem
            reference = self.operands(problem)[1] if same else Reference.of(contender.problem, contender.operands)
            error = reference.error_of(contender), reference.allowed
        self.rows.append(row_of(problem, contender, Measured(tuple(samples)), self.peaks(), *error))
        return self.rows[-1]

    def leave_out(self, problem: Problem, name: str, why: str) -> None:
        """Skip, and remember why."""
        self.left_out[f"{problem.set_name} {problem.label}: {name}"] = f"{name}: {why}"
        pytest.skip(why)

    def fail(self, problem: Problem, name: str, error: Exception) -> None:
        """Remember a contender that should run and does not; an error of the device ends the session's measurements."""
        text = why_failed(error)
        self.left_out[f"{problem.set_name} {problem.label}: {name}"] = f"{name} failed: {text}"
        if is_lost(text):
            self._broken = f"the device does not answer since {name} ran {problem.label}: {text}"


_SESSION = pytest.StashKey[Session]()
_STORED = pytest.StashKey[Suite]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "problem" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if _SESSION not in config.stash:
        torch.backends.cudnn.benchmark = True
        backends = Backends(config.getoption("--libraries"), config.getoption("--just-in-time"))
        config.stash[_SESSION] = Session(device_of(), backends, Timer(device_of()))
    found = config.stash[_SESSION]
    chosen = config.getoption("--set")
    default = shapes.CUDA_SETS if found.device.type == "cuda" else ("smoke",)
    names = chosen.split(",") if chosen else default
    wanted = set(filter(None, config.getoption("--contender").split(",")))
    compiled = set()

    def marks(problem: Problem, contender: str) -> Iterable[pytest.MarkDecorator]:
        """Every operator's first problem is compiled in CI; the compiler takes seconds for each."""
        if not contender.startswith("torch.compile"):
            return ()
        known = (problem.op, contender) in compiled
        compiled.add((problem.op, contender))
        return (pytest.mark.nightly,) if known else ()

    cases = [
        pytest.param(problem, contender, id=f"{name}-{problem.label}-{contender}", marks=marks(problem, contender))
        for name in names
        for problem in problems(shapes.shape_set(name), images_16_bit=Precision.FLOAT16)
        if config.getoption("--op") in problem.op
        for contender in (*found.backends.by_name, *baselines.baseline_names(problem.op))
        if not wanted or contender in wanted
    ]
    metafunc.parametrize("problem,contender", cases)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the chosen benchmarks need, side by side, before the first of them waits for it."""
    gathered = session.config.stash.get(_SESSION, None)
    if gathered is None or gathered.device.type != "cuda" or session.config.option.collectonly:
        return
    parameters = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(found["problem"] for found in parameters if "problem" in found)
    compile_ahead(gathered.backends, [problem.request(gathered.device) for problem in chosen])


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Session:
    return request.config.stash[_SESSION]


def pytest_sessionfinish(session: pytest.Session) -> None:
    gathered = session.config.stash.get(_SESSION, None)
    if gathered is None or not gathered.rows:
        return
    from results import commit, machine, versions

    provenance = {"machine": machine(), "versions": versions(), "commit": commit(),
                  "command": "pytest " + " ".join(session.config.invocation_params.args)}  # fmt: skip
    rates = gathered.peaks().as_rates()
    suite = Suite(name_of(gathered.device), provenance, rates, tuple(gathered.rows), gathered.left_out)
    if out := session.config.getoption("--out"):
        for written in _write(suite, out):
            print(f"\nwrote {os.path.relpath(written)}", end="")
    if stored := session.config.stash.get(_STORED, None):
        print("\n" + compare.comparison_text(stored, suite))


def _write(suite: Suite, folder: Path) -> Iterator[Path]:
    path = folder / f"{suite_file.slug_of(suite)}.json"
    merged = suite_file.merge(suite_file.read_suite(path) if path.exists() else None, suite)
    suite_file.write_suite(merged, path)
    yield path
    html = path.with_suffix(".html")
    html.write_text(render(merged), encoding="utf-8")
    yield html
