"""Runs problems on backends and on PyTorch's own 16-bit product: each checked against float64, then all timed in turns."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import attrs
import torch

from qsync_core.errors import BackendError
from qsync_core.progress import ProgressCallback, silent
from qsync_torch.benchmarking.contenders import Backends, Contender, RefusedError, compile_ahead, in_16_bit
from qsync_torch.benchmarking.errors import Reference
from qsync_torch.benchmarking.peaks import Peaks, measure_peaks
from qsync_torch.benchmarking.problems import Problem, renew
from qsync_torch.benchmarking.race import Measured, Timer, is_lost, race, why_failed
from qsync_torch.benchmarking.results import Row, Suite
from qsync_torch.devices import software_versions


def compare(
    problems: Sequence[Problem], backends: Backends, device: torch.device, *, rounds: int = 15, progress: ProgressCallback = silent
) -> Suite:
    """Every problem by every backend that runs it, its fastest candidate, and by PyTorch in the problem's 16-bit format.

    Meanwhile cuDNN looks for its fastest algorithms.

    Args:
        rounds: samples of each contender.

    Raises:
        BackendError: when a kernel leaves the device unusable.
    """
    earlier, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        return _compare(problems, backends, device, rounds, progress)
    finally:
        torch.backends.cudnn.benchmark = earlier


def _compare(
    problems: Sequence[Problem], backends: Backends, device: torch.device, rounds: int, progress: ProgressCallback
) -> Suite:
    progress(0, len(problems), "compiling")
    compile_ahead(backends, [problem.request(device) for problem in problems])
    formats = {str(precision) for problem in problems for precision in (problem.arithmetic, problem.variant.output)}
    peaks, timer = measure_peaks(device, formats), Timer(device)
    timed: list[Timed] = []
    left_out = {name: f"plugin {name} is disabled: {why}" for name, why in backends.disabled.items()}
    for number, problem in enumerate(problems):
        progress(number, len(problems), problem.label)
        found, missing = _race_on(problem, backends, device, rounds, timer)
        timed += found
        for name, why in missing.items():
            left_out[f"{problem.label}: {name}"] = f"{name}: {why}"
            if is_lost(why):
                raise BackendError(
                    f"the device does not answer since {name} ran {problem.label} ({why}); start again without it: --backend names "
                    "those that are compared"
                )
    right = (
        (one.contender.problem, one.measured)
        for one in timed
        if one.error is not None and one.allowed is not None and one.error <= one.allowed
    )
    peaks = peaks.raised((str(own.arithmetic), own.flops / measured.median_ns * 1e9) for own, measured in right if own.flops)
    rows = [row_of(one.problem, one.contender, one.measured, peaks, one.error, one.allowed) for one in timed]
    return Suite(name_of(device), software_versions(device), peaks.as_rates(), tuple(rows), left_out)


@attrs.frozen(eq=False)
class Timed:
    """A contender that ran, without its operands."""

    problem: Problem
    contender: Contender
    measured: Measured
    error: float | None
    allowed: float | None


def _race_on(
    problem: Problem, backends: Backends, device: torch.device, rounds: int, timer: Timer
) -> tuple[list[Timed], dict[str, str]]:
    """What ran, with its times, error and bound; and why the others did not.

    Raises:
        BackendError: when the operands do not fit into memory.
    """
    try:
        operands = problem.operands(device)
    except RuntimeError as error:
        raise BackendError(f"no operands can be made for {problem.label} ({why_failed(error)}); choose a smaller shape") from error
    contenders, missing = backends.accepting(problem, operands, device)
    try:
        contenders.append(in_16_bit(problem, problem.variant.output, device))
    except RefusedError:
        pass
    except Exception as error:
        missing[str(problem.variant.output)] = f"failed: {why_failed(error)}"
    errors = _errors_of(contenders, missing, device)
    measured, failed = race({one.name: one.thunks for one in contenders if one.name in errors}, device, rounds=rounds, timer=timer)
    missing |= {name: f"failed: {why}" for name, why in failed.items()}
    found = [
        Timed(problem, attrs.evolve(one, thunks=(), operands=()), measured[one.name], *errors[one.name])
        for one in contenders
        if one.name in measured
    ]
    return found, missing


def _errors_of(
    contenders: Sequence[Contender], missing: dict[str, str], device: torch.device
) -> dict[str, tuple[float | None, float | None]]:
    """The errors of all that run, and their bounds; ``missing`` gets the reasons of those that do not.

    Each is looked at twice, the second time with other numbers in the same memory: who hands out what an earlier call found is the
    fastest of all.
    """
    errors: dict[str, tuple[float | None, float | None]] = {}
    for number in range(2):
        references: dict[Problem, Reference] = {}
        for one in contenders:
            if one.name in missing or f"{one.name}, error" in missing:
                continue
            try:
                if one.problem not in references:
                    if number:
                        renew(one.operands, one.problem, device)
                    references[one.problem] = Reference.of(one.problem, one.operands)
                reference = references[one.problem]
                found = reference.error_of(one), reference.allowed
                errors[one.name] = max(errors.get(one.name, found), found, key=_excess)
            except torch.OutOfMemoryError:
                errors[one.name] = None, None
                missing[f"{one.name}, error"] = "float64 takes more memory than there is, so its error is not known"
            except Exception as error:  # what one contender cannot do another may
                errors.pop(one.name, None)
                missing[one.name] = f"failed: {why_failed(error)}"
    return errors


def _excess(found: tuple[float | None, float | None]) -> float:
    error, allowed = found
    return 0.0 if error is None or allowed is None else error / allowed


def row_of(
    problem: Problem,
    contender: Contender,
    measured: Measured,
    peaks: Peaks,
    error: float | None = None,
    allowed: float | None = None,
) -> Row:
    """The figures of one measurement; a contender's work is that in its own formats."""
    own, time_ns = contender.problem, measured.median_ns
    share, bound = peaks.share(own.flops, own.floor_bytes, str(own.arithmetic), time_ns)
    return Row(
        set_name=problem.set_name,
        op=problem.op,
        formats=problem.format_label,
        shape=problem.shape_label,
        count=problem.count,
        contender=contender.name,
        config=contender.config,
        median_ns=time_ns,
        spread=measured.spread,
        samples=len(measured.samples_ns),
        tflops=own.flops / time_ns / 1e3 if own.flops else own.floor_bytes / time_ns,
        unit="TFLOP/s" if own.flops else "GB/s",
        share=share,
        bound=bound,
        error=error,
        allowed=allowed,
    )


def name_of(device: torch.device) -> str:
    """The device for people: a GPU's name, or the CPU with the threads that PyTorch uses there."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"
