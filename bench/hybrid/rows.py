"""From what was measured to the rows of ``docs/results/hybrid.json``: plain arithmetic on the files that the processes wrote."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qsync_core.ir.communication import CollectiveCosts
from qsync_core.ir.profile import Profile

Found = Mapping[str, Any]
Row = dict[str, Any]
GIB = 2**30


def median_ms(measured: Found) -> float:
    """Step time of a run: the median of its repetitions."""
    return statistics.median(measured["step_ms"])


def spread_ms(measured: Found) -> float | None:
    """Interquartile range of the repetitions; None of one, which has none."""
    if len(measured["step_ms"]) < 2:
        return None
    low, _, high = statistics.quantiles(measured["step_ms"], n=4, method="inclusive")
    return high - low


def _row(row_id: str, what: str, value: float, unit: str, target: str = "reported", **more: object) -> Row:
    return {"id": row_id, "what": what, "value": value, "unit": unit, "target": target, **more}


BOUND = "where the device binds the step"


def measured_at(found: Found, rows: Iterable[Row]) -> list[Row]:
    """The rows with machine, versions and commit of their file, where it says so."""
    own = {name: found[name] for name in ("machine", "versions", "commit", "device") if name in found}
    return [{**row, **own} for row in rows]


def on_devices(files: Iterable[Found], rows: Iterable[Row]) -> list[Row]:
    """Rows that sum several files up, with the devices of all of them."""
    devices = ", ".join(dict.fromkeys(found["device"] for found in files if found.get("device")))
    return [{**row, "device": devices} if devices else row for row in rows]


def device_binds(predicted: Mapping[str, float]) -> bool:
    """Whether a step is as long as the device's work: one that the CPU's dispatch binds is as steady as the CPU is."""
    return predicted["dispatch_ns"] < predicted["compute_ns"]


def share_rows(share: float, files: Mapping[str, Found], estimated: Mapping[str, Mapping[str, tuple[float, bool]]]) -> list[Row]:
    """Row H9 at one share: step times estimated from the whole GPU's profile (and whether the device binds them), by workload and
    plan, against measured ones."""
    rows: list[Row] = []
    errors: dict[str, float] = {}
    bound: dict[str, float] = {}
    files = {name: found for name, found in files.items() if estimated.get(name)}
    percent = f"{share:.0%}"
    for name, found in files.items():
        for label, run in found["runs"].items():
            case = f"{name}-{label}"
            what = f"{name} b{found['batch']} at {percent} of the SMs, {label}"
            step_ms, of_device = estimated[name][label]
            own, errors[case] = _case(f"H9-{percent[:-1]}-{case}", what, median_ms(run), spread_ms(run), step_ms)
            rows += measured_at(found, own)
            if of_device:
                bound[case] = errors[case]
    worst = "≤ 0.08" if share >= 0.5 else "≤ 0.12"
    row_id, title = f"H9-{percent[:-1]}", f"step time at {percent} of the SMs, estimated from the whole GPU"
    summaries = _summary(row_id, title, errors, "reported", worst)
    return rows + on_devices(files.values(), summaries + _summary(f"{row_id}-device", f"{title}, {BOUND}", bound))


def steps_alone(infer: Found) -> dict[str, Any]:
    """What ``together.py``'s weak rank measured of its steps without communication, in the form of a file of row H9.

    Without the plan for little memory: under its cap cuDNN takes slower algorithms, which no share of multiprocessors explains.
    """
    own = {name: infer[name] for name in ("batch", "machine", "versions", "commit", "device") if name in infer}
    return {
        **own,
        "runs": {run["plan"]: {"step_ms": [run["measured"]["alone_ms"]]} for run in infer["runs"] if run["plan"] != "small"},
    }


def _case(prefix: str, what: str, measured_ms: float, spread: float | None, predicted_ms: float) -> tuple[list[Row], float]:
    """One configuration: measured, predicted, and the error of the prediction."""
    error = predicted_ms / measured_ms - 1
    return [
        _row(f"{prefix}-measured", f"step time, measured, {what}", measured_ms, "ms", spread=spread),
        _row(f"{prefix}-predicted", f"step time, predicted, {what}", predicted_ms, "ms"),
        _row(f"{prefix}-error", f"step time, predicted over measured less 1, {what}", error, "fraction"),
    ], error


def _summary(row_id: str, what: str, errors: Mapping[str, float], mean: str = "reported", worst: str = "reported") -> list[Row]:
    """Mean and worst absolute error of some cases."""
    if not errors:
        return []
    name = max(errors, key=lambda case: abs(errors[case]))
    average = statistics.fmean(abs(error) for error in errors.values())
    return [
        _row(row_id, f"{what}, mean of {len(errors)} configurations", average, "fraction", mean),
        _row(f"{row_id}-worst", f"{what}, worst: {name}", abs(errors[name]), "fraction", worst),
    ]


def alone_rows(files: Mapping[str, Found]) -> list[Row]:
    """Rows H1, H3 and H8, by workload what ``alone.py`` wrote on a whole GPU."""
    rows: list[Row] = []
    times: dict[str, float] = {}
    peaks: dict[str, float] = {}
    reserves: dict[str, float] = {}
    bound: dict[str, float] = {}
    fastest: dict[str, float] = {}
    for name, found in files.items():
        for label, run in found["runs"].items():
            case, measured, predicted = f"{name}-{label}", run["measured"], run["predicted"]
            what = f"{name} b{found['batch']}, {label}"
            least_ms = min(measured["step_ms"])
            fastest[case] = predicted["iteration_ns"] / 1e6 / least_ms - 1
            own, times[case] = _case(f"H1-{case}", what, median_ms(measured), spread_ms(measured), predicted["iteration_ns"] / 1e6)
            if device_binds(predicted):
                bound[case] = times[case]
            peaks[case] = predicted["peak_bytes"] / measured["peak_bytes"] - 1
            reserves[case] = predicted["reserved_bytes"] / measured["reserved_bytes"] - 1
            memory = [
                _row(f"H3-{case}-measured", f"peak allocated, measured, {what}", measured["peak_bytes"] / GIB, "GiB"),
                _row(f"H3-{case}-predicted", f"peak allocated, predicted, {what}", predicted["peak_bytes"] / GIB, "GiB"),
                _row(f"H3-{case}-reserved", f"peak reserved, measured, {what}", measured["reserved_bytes"] / GIB, "GiB"),
                _row(
                    f"H3-{case}-reserved-predicted", f"peak reserved, predicted, {what}", predicted["reserved_bytes"] / GIB, "GiB"
                ),
            ]
            own.append(_row(f"H1-{case}-fastest", f"step time, fastest repetition, {what}", least_ms, "ms"))
            rows += measured_at(found, [*own, *memory, *_host(case, what, measured, predicted)])
        what = f"profile of {name} b{found['batch']}"
        parts = found["profile_s"]
        total = sum(seconds for part, seconds in parts.items() if part != "compile")
        profiled = [_row(f"H8-{name}", f"{what}, kernels at hand", total, "s", "≤ 45")]
        profiled += [
            _row(f"H8-{name}-{part.replace(' ', '-')}", f"{what}: {part}", seconds, "s") for part, seconds in parts.items()
        ]
        rows += measured_at(found, profiled)
    summaries = [
        *_summary("H1", "step time of one GPU, error of the prediction", times, "≤ 0.015", "≤ 0.04"),
        *_summary("H1-device", f"step time of one GPU, error of the prediction, {BOUND}", bound),
        *_summary("H1-fastest", "the same against the fastest repetition, which the CPU's other work delays least", fastest),
        *_summary("H3", "peak allocated, error of the prediction", peaks, "≤ 0.02", "≤ 0.04"),
        *_summary("H3-reserved", "peak reserved, error of the prediction", reserves, "≤ 0.04", "reported")[:1],
    ]
    return rows + on_devices(files.values(), summaries)


def _host(case: str, what: str, measured: Found, predicted: Found) -> list[Row]:
    """The CPU's time to issue a step, and its time for a small call, which tells a slower CPU from more work for it."""
    if "issue_ms" not in measured:
        return []
    return [
        _row(f"H1-host-{case}-measured", f"CPU's time to issue a step, measured, {what}", sum(measured["issue_ms"]), "ms"),
        _row(f"H1-host-{case}-predicted", f"CPU's time to issue a step, predicted, {what}", predicted["dispatch_ns"] / 1e6, "ms"),
        _row(f"H1-host-{case}-call", f"CPU's time for a small call beside it, {what}", measured["call_us"], "us"),
    ]


def profile_rows(files: Mapping[str, Found], profiles: Mapping[str, Profile]) -> list[Row]:
    """Beside H1: the steps that profiles hold, which calibrate the predictions."""
    rows = []
    for name, found in files.items():
        for step in profiles[name].steps:
            rung = str(step.variant.compute)
            what = f"step time, in the profile, {name} b{found['batch']}, {rung}"
            rows += measured_at(found, [_row(f"H1-{name}-{rung}-profiled", what, step.iteration_ns / 1e6, "ms")])
    return rows


def ablation_rows(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Row]:
    """Beside H1: mean error with a part of the model left out; by workload, part and plan the error."""
    rows = []
    for part in dict.fromkeys(part for of_model in errors.values() for part in of_model):
        every = [abs(error) for of_model in errors.values() for error in of_model[part].values()]
        what = f"step time of one GPU, error of the prediction without {part}, mean of {len(every)} configurations"
        rows.append(_row(f"H1-without-{part}", what, statistics.fmean(every), "fraction"))
    return rows


def budget_rows(files: Mapping[str, Found]) -> list[Row]:
    """Rows H3b: plans for memory budgets, run under a cap of that budget."""
    entries = [(name, entry) for name, found in files.items() for entry in found.get("budgets", ())]
    if not entries:
        return []
    ran = [(name, entry) for name, entry in entries if "error" not in entry]
    used = [
        (
            (entry["reserved_bytes"] + entry["outside_bytes"]) / entry["budget_bytes"],
            f"{name} {entry['budget_bytes'] / GIB:.2f} GiB",
        )
        for name, entry in ran
    ]
    rows = [
        _row("H3b", f"plans of {len(entries)} budgets that ran under the cap", len(ran) / len(entries), "fraction", "≥ 1"),
    ]
    if used:
        least, where = min(used)
        rows.append(_row("H3b-used", f"least share of a budget that its plan used: {where}", least, "fraction", "≥ 0.92"))
    return on_devices((found for found in files.values() if found.get("budgets")), rows)


def pick(found: Found, plan: str, label: str | None = None) -> Found | None:
    """The run of a plan: under a way to communicate by its label; else the way that the plan chose, which comes last."""
    runs = [run for run in found["runs"] if run["plan"] == plan and (label is None or run.get("label") == label)]
    return runs[-1] if runs else None


def together_rows(files: Mapping[str, Sequence[Found]], whole: Mapping[str, Sequence[Found]]) -> list[Row]:
    """Rows H2, H4, H4b, H6 and H7: by workload what both ranks of ``together.py`` wrote; ``whole``: with both GPUs whole."""
    rows: list[Row] = []
    errors: dict[str, float] = {}
    for name, (train, infer) in files.items():
        for run in train["runs"]:
            case = f"{name}-{run['plan']}-{'default' if run['label'] == DEFAULT else 'chosen'}"
            what = f"{name} b{train['batch']} per rank, {run['plan']}, {run['label']}"
            own, errors[case] = _case(
                f"H2-{case}", what, median_ms(run["measured"]), spread_ms(run["measured"]), run["predicted"]["iteration_ns"] / 1e6
            )
            rows += measured_at(train, own)
        rows += measured_at(train, list(_against_uniform(name, train, infer, whole.get(name))))
    summary = _summary("H2", "step time of a hybrid job, error of the prediction", errors, "≤ 0.02", "≤ 0.05")
    return rows + on_devices((train for train, _ in files.values()), summary)


def transfer_rows(files: Mapping[str, Sequence[Found]], costs: Mapping[str, CollectiveCosts]) -> list[Row]:
    """Beside H2: which share of an all-reduce's duration each group's compute loses to it, by the number of CTAs."""
    rows = []
    for name, (train, _) in files.items():
        for entry in costs[name].measured:
            ctas = f"{entry.max_ctas} CTAs" if entry.max_ctas else "its own CTAs"
            for group, share in entry.transfer_share.items():
                what = f"{name}: share of a transfer's time that compute of {group} loses, beside {ctas}"
                rows += measured_at(train, [_row(f"H2-{name}-transfer-{group}-{entry.max_ctas}", what, share, "fraction")])
    return rows


def dynamic_rows(files: Mapping[str, Found], jobs: Mapping[str, Sequence[Found]]) -> list[Row]:
    """Row H5: QSync's samples per second over those of measured dynamic batch sizing, whose global batch is the same."""
    rows = []
    for name, found in files.items():
        if name not in jobs or pick(jobs[name][0], "qsync") is None:
            continue
        ours = sum(found["batches"]) / _best_ms(jobs[name][0], "qsync") * 1e3
        what = f"samples per second of QSync over dynamic batches of {' and '.join(map(str, found['batches']))}, {name}"
        every = [f"{one['samples_per_s']:.0f} with {' and '.join(map(str, one['batches']))}" for one in found.get("tried", [])]
        more = {"spread": f"samples per second: QSync {ours:.0f}, dynamic {', '.join(every)}"} if every else {}
        rows += measured_at(found, [_row(f"H5-{name}", what, ours / found["samples_per_s"], "ratio", "≥ 1.15", **more)])
    return rows


DEFAULT = "PyTorch's defaults"


def _best_ms(found: Found, plan: str) -> float:
    return min(median_ms(run["measured"]) for run in found["runs"] if run["plan"] == plan)


def _against_uniform(name: str, train: Found, infer: Found, whole: Sequence[Found] | None) -> Iterable[Row]:
    if not {"uniform", "qsync"} <= {run["plan"] for run in train["runs"]}:
        return  # the run was cut off
    uniform, qsync = _best_ms(train, "uniform"), _best_ms(train, "qsync")
    yield _row(
        f"H4-{name}",
        f"step of QSync over uniform, each under its own best communication, {name}",
        qsync / uniform,
        "ratio",
        "≤ 1.01",
    )
    low, mine, full = (pick(infer, plan) for plan in ("uniform", "qsync", "full"))
    strong = pick(train, "full")
    if low and mine and full and strong:
        slack = strong["measured"]["alone_ms"] - low["measured"]["alone_ms"]
        used = mine["measured"]["alone_ms"] - low["measured"]["alone_ms"]
        given_back = used / (full["measured"]["alone_ms"] - low["measured"]["alone_ms"])
        yield _row(
            f"H4b-{name}",
            f"share of the slack beside the strong rank that precision uses, {name}",
            used / slack,
            "fraction",
            "≥ 0.9",
        )
        yield _row(
            f"H4b-{name}-all",
            f"share of all low-precision time that is given back to float32, {name}",
            given_back,
            "fraction",
            "≥ 0.4" if name == "resnet50" else "reported",
        )
    if whole is not None and (both := pick(whole[0], "full")) and strong:
        slowed = _best_ms(train, "full")
        delay = slowed - median_ms(both["measured"])
        yield _row(
            f"H6-{name}",
            f"straggler delay of full precision that is removed, {name}",
            (slowed - qsync) / delay,
            "fraction",
            "≥ 0.97",
        )
        yield _row(f"H6-{name}-whole", f"step with both GPUs whole, {name}", median_ms(both["measured"]), "ms")
    if small := pick(train, "small"):
        yield _row(
            f"H7-{name}",
            f"step within a tight memory budget over uniform's, {name}",
            median_ms(small["measured"]) / uniform,
            "ratio",
            "≤ 1.02",
        )
