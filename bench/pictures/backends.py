"""The paper's Fig. 8: what low precision costs by backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .svg_picture import WIDTH, Picture

LEFT, RIGHT = 280, 70
_BAR = 15
QUANTIZING = (("K5", "eager PyTorch"), ("K5b", "torch.compile"), (None, "Triton (QSync)"))
OVERHEADS = (
    ("K9a", "ATen quantization, dequantization apart"),
    ("K9b", "Triton quantization, dequantization apart"),
    ("K9c", "… dequantization fused into the product"),
    ("K9d", "… output in float16"),
)


NEEDED = {key for key, _ in (*QUANTIZING, *OVERHEADS) if key}


def draw_backends(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Fig. 8: (a) a tensor's quantization by backend; (b) what int8 costs over float16, step by step."""
    picture = Picture(
        "What low precision costs by backend", "A tensor's quantization, and ResNet50's training step at batch 128, on an H200"
    )
    quantizing = [(name, 1.0 if key is None else rows[key]["value"], None) for key, name in QUANTIZING]
    graphs = {key: rows[f"{key}-graph"]["value"] * 100 if f"{key}-graph" in rows else None for key, _ in OVERHEADS}
    overheads = [(name, rows[key]["value"] * 100, graphs[key]) for key, name in OVERHEADS]
    for head, unit, bars in (
        ("(a) quantize 512×64×56×56 to int8, stochastic: time over the fastest", "×", quantizing),
        ("(b) a step in int8: time more than in float16", "%", overheads),
    ):
        picture.y += 24
        picture.text(16, picture.y, head, "ink head")
        if unit == "%":
            picture.y += 6
            picture.legend([("first", "issued by the CPU, kernel by kernel"), ("third", "as a CUDA graph")])
        picture.y += 10
        most = max(max(first, second or 0) for _, first, second in bars)
        left, right = LEFT, WIDTH - RIGHT
        rows_shown = sum(1 + (second is not None) for _, _, second in bars)
        picture.scale(left, right, most, unit, picture.y, picture.y + rows_shown * _BAR + 6 * len(bars))
        for name, first, second in bars:
            picture.text(left - 8, picture.y + 12, name, "ink", "end")
            for css, value in (("first" if unit == "%" else "fourth", first), ("third", second)):
                if value is not None:
                    width = value / most * (right - left)
                    picture.box(left, picture.y + 2, width, _BAR - 3, css, f"{name}: {value:.3g} {unit}")
                    picture.text(left + width + 5, picture.y + 12, f"{value:.3g} {unit}", "soft small")
                    picture.y += _BAR
            picture.y += 6
        picture.y += 20
    return picture.render("Rows K5, K5b and K9 of docs/results/kernels.json.")
