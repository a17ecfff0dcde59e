"""Row K6: int8 convolutions of ResNet50 against cuDNN in float16, channels-last."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from qsync_core.ir.precision import Precision
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest, Op
from qsync_torch.benchmarking.contenders import compile_ahead
from qsync_torch.benchmarking.problems import Problem
from qsync_torch.benchmarking.shapes import ProductShape

from .bench import Bench, Row, best_of, geometric_mean, ratio
from .shapes import shape_set

_INT8 = Variant.of(Precision.INT8, sixteen_bit=Precision.FLOAT16)


def _images(name: str) -> list[ProductShape]:
    """The convolutions of a set."""
    return [shape for shape in shape_set(name).products if not shape.call.of_rows]


def requests(bench: Bench) -> list[KernelRequest]:
    """What K6 asks backends for."""
    return [Problem(Op.CONV2D_OUTPUT, shape, _INT8).request(bench.device) for shape in _images("resnet50")]


def conv_rows(bench: Bench) -> Iterator[Row]:
    """K6, and K6t: the time of all of them together."""
    shapes = _images("smoke" if bench.quick else "resnet50")
    problems = [Problem(Op.CONV2D_OUTPUT, shape, _INT8) for shape in shapes]
    compile_ahead(bench.backends, [problem.request(bench.device) for problem in problems])
    ratios, own_ns, cudnn_ns, details, missing = [], 0.0, 0.0, [], []
    for problem, shape in zip(problems, shapes, strict=True):
        try:
            measured, used = bench.race_problem(problem, ("float16",), rounds=9)
        except RuntimeError as error:
            print(f"K6: {error}", file=sys.stderr)
            missing.append(shape.label)
            continue
        best = best_of(measured, used)
        found = ratio(measured["float16"], measured[best])
        ratios += [found] * shape.count
        own_ns += measured[best].median_ns * shape.count
        cudnn_ns += measured["float16"].median_ns * shape.count
        tera = problem.flops / measured[best].median_ns / 1e3
        details.append(f"{shape.label} ({shape.count}×) {found:.2f} {best} {tera:.0f} TOP/s")
        bench.say(f"{details[-1]} {used[best]}; " + ", ".join(f"{n} {m.median_ns / 1e3:.1f} µs" for n, m in measured.items()))
    lacking = f"; not measured: {', '.join(missing)}" if missing else ""
    batch = shapes[0].batch
    what = (
        f"int8 conv2d.output to float16 over ResNet50's {len(ratios)} convolutions, batch {batch}, over cuDNN float16 channels-last"
    )
    yield bench.row("K6", f"{what}: geometric mean{lacking}", geometric_mean(ratios), "×", "≥ 1.2", "; ".join(details))
    each = f"{cudnn_ns / 1e6:.3f} and {own_ns / 1e6:.3f} ms"
    yield bench.row("K6t", f"{what}: all of them one after the other{lacking}", cudnn_ns / own_ns, "×", "reported", each)
