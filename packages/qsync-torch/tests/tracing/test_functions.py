"""The table of functions against PyTorch: each row is an operator of ATen, and what it takes gives right results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qsync_core.ir.dag import OpClass
from qsync_core.ir.functions import FUNCTIONS, Takes

ATEN = torch.ops.aten
PYTHON_ONLY = {
    "hinge_embedding_loss", "soft_margin_loss", "rnn_tanh", "rnn_relu", "nuclear_norm", "frobenius_norm", "cross_entropy_loss",
    "grouped_mm_fallback",
}  # fmt: skip
"""Composites, some of which a build of PyTorch may lack as operators, and one of transformers' own."""

_LINALG = (
    *("cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "householder_product", "inv", "inv_ex"),
    *("ldl_factor", "ldl_factor_ex", "ldl_solve", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "matrix_exp"),
    *(
        "matrix_rank",
        "pinv",
        "qr",
        "slogdet",
        "solve",
        "solve_ex",
        "solve_triangular",
        "svd",
        "svdvals",
        "tensorinv",
        "tensorsolve",
    ),
)
_FFT = tuple(name for name in dir(torch.fft) if name.endswith(("fft", "fft2", "fftn")) and not name.startswith("_"))
_OLDER = (
    *("cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "complex", "det", "inverse", "istft", "logdet", "lu_solve"),
    "matrix_exp",
    *("nanquantile", "ormqr", "pdist", "pinverse", "polar", "qr", "quantile", "slogdet", "stft", "svd", "triangular_solve"),
    "view_as_complex",
)
_SUMS_OF_EXPONENTIALS = ("logsumexp", "logcumsumexp")
"""Their gradient is ``exp(x - result)``: rounded to bfloat16, a result of 30 scales it by up to 6%."""

FLOAT32_FUNCTIONS: tuple[Callable[..., Any], ...] = tuple(
    getattr(owner, name)
    for owner, names in (
        (torch.fft, _FFT),
        (torch.linalg, _LINALG),
        (torch.special, _SUMS_OF_EXPONENTIALS),
        *((owner, _OLDER + _SUMS_OF_EXPONENTIALS) for owner in (torch, torch.Tensor)),
    )
    for name in names
    if hasattr(owner, name)
)
"""Functions that PyTorch has in float32 and float64 only (on most devices) or that are wrong in 16 bits, as a model calls them."""

LOSSES: tuple[Callable[..., Any], ...] = tuple(
    getattr(F, name)
    for name in (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    )
)
"""Loss functions of ``torch.nn.functional``."""


def operator(name: str) -> Any:
    """The ATen operator of a row; those that are private begin with an underscore."""
    return next((getattr(ATEN, n) for n in (name, f"_{name}", f"{name}_") if hasattr(ATEN, n)), None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_row_is_an_operator_of_pytorch(name: str) -> None:
    known = operator(name) is not None or name in PYTHON_ONLY
    owners = (torch, torch.nn.functional, torch.special, torch.linalg)
    assert known or any(hasattr(owner, name.split("_", 1)[-1] if owner is torch.special else name) for owner in owners)


def test_what_exists_in_float32_only_is_fixed() -> None:
    fixed = {name for name, row in FUNCTIONS.items() if row.op_class is OpClass.FIXED}
    assert all(FUNCTIONS[name].takes is Takes.FLOAT32 for name in fixed)
    transforms = {f"fft_{name}" for name in dir(torch.fft) if name.endswith(("fft", "fft2", "fftn")) and not name.startswith("_")}
    assert transforms <= fixed
    called = {function.__name__.removeprefix("special_") for function in (*FLOAT32_FUNCTIONS, *LOSSES)}
    listed = {part for name in fixed for part in (name, name.removeprefix("fft_"), name.removeprefix("linalg_"))}
    listed |= {name.removeprefix("special_") for name in fixed} | {"cross_entropy", "multilabel_soft_margin_loss"}
    python_losses = {"gaussian_nll_loss", "triplet_margin_with_distance_loss"}  # made of others
    assert called - listed - python_losses == set()


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


X, IMAGE, VOLUME = _tensor(4, 6), _tensor(2, 4, 6, 6), _tensor(2, 4, 4, 6, 6)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "leaky_relu": (X, 0.1), "threshold": (X, 0.1, 0.0), "clamp": (X, -0.5, 0.5), "clip": (X, -0.5, 0.5), "clamp_min": (X, -0.5),
    "clamp_max": (X, 0.5), "dropout": (X, 0.0, True), "native_dropout": (X, 0.0, True), "alpha_dropout": (X, 0.0, True),
    "feature_dropout": (IMAGE, 0.0, True), "feature_alpha_dropout": (IMAGE, 0.0, True), "reshape": (X, [6, 4]),
    "pad": (X, [1, 1]), "constant_pad_nd": (X, [1, 1]), "reflection_pad1d": (IMAGE[0], [1, 1]), "roll": (X, [1], [0]),
    "reflection_pad2d": (IMAGE, [1, 1, 1, 1]), "replication_pad1d": (IMAGE[0], [1, 1]), "flip": (X, [0]),
    "replication_pad2d": (IMAGE, [1, 1, 1, 1]), "pixel_shuffle": (IMAGE, 2), "pixel_unshuffle": (IMAGE, 2),
    "channel_shuffle": (IMAGE, 2), "max_pool1d": (IMAGE[0], [2]), "max_pool2d": (IMAGE, [2]), "avg_pool1d": (IMAGE[0], [2]),
    "max_pool2d_with_indices": (IMAGE, [2]), "avg_pool2d": (IMAGE, [2]), "adaptive_avg_pool1d": (IMAGE[0], [2]),
    "max_pool3d": (VOLUME, [2]), "max_pool3d_with_indices": (VOLUME, [2]),
    "adaptive_avg_pool3d": (VOLUME, [2, 2, 2]), "adaptive_avg_pool2d": (IMAGE, [2, 2]),
    "adaptive_max_pool2d": (IMAGE, [2, 2]), "mean": (X,), "pow": (X, 2.0),
    "where": (X > 0, X, 2 * X), "cat": ([X, 2 * X],), "concat": ([X, 2 * X],), "concatenate": ([X, 2 * X],),
    "stack": ([X, 2 * X],), "hstack": ([X, 2 * X],), "vstack": ([X, 2 * X],), "matmul": (X, X.t()), "mm": (X, X.t()),
    "linalg_matmul": (X, X.t()), "bmm": (IMAGE[0], IMAGE[1]), "baddbmm": (IMAGE[0], IMAGE[0], IMAGE[1]),
    "addmm": (_tensor(4, 4), X, X.t()), "addbmm": (_tensor(6, 6), IMAGE[0], IMAGE[1]),
    "scaled_dot_product_attention": (IMAGE, 2 * IMAGE, IMAGE), "softmax": (X, -1), "log_softmax": (X, -1), "safe_softmax": (X, -1),
    "layer_norm": (X, [6]), "native_layer_norm": (X, [6], None, None, 1e-5),
    "batch_norm": (IMAGE, torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4), True, 0.1, 1e-5, False),
    "native_batch_norm": (IMAGE, torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
    "instance_norm": (IMAGE, torch.ones(4), torch.zeros(4), None, None, True, 0.1, 1e-5, False),
}  # fmt: skip
_TWO = ("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def run(function: Callable[..., Any], arguments: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The result and the gradients of activations, whose formats are given in turn; statistics of norms keep theirs."""
    leaves: list[torch.Tensor] = []

    def cast(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return [cast(item) for item in value]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape == (4,):
            return value.clone() if isinstance(value, torch.Tensor) else value
        leaves.append(value.detach().to(dtypes[len(leaves) % len(dtypes)]).requires_grad_())
        return leaves[-1]

    result = function(*map(cast, arguments))
    result = result[0] if isinstance(result, (tuple, list)) else result
    result.backward(torch.ones_like(result) / 2)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def close(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], rounding: float) -> None:
    for one, other in zip(found, right, strict=True):
        assert (one.float() - other).norm() <= 4 * rounding * max(other.norm().item(), 1.0)


ROWS = [name for name, row in FUNCTIONS.items() if row.takes is not Takes.FLOAT32]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_a_function_that_takes_16_bits_is_right_in_them(name: str, dtype: torch.dtype) -> None:
    function = operator(name) or getattr(torch.nn.functional, name)
    arguments = _ARGUMENTS.get(name, (X, 2 * X) if name in _TWO else (X,))
    right = run(function, arguments, [torch.float32])
    found = run(function, arguments, [dtype])
    assert found[0].dtype is dtype
    close(found, right, ROUNDING[dtype])
    if FUNCTIONS[name].takes is Takes.MIXED and len(right) > 2:
        mixed = run(function, arguments, [dtype, torch.float32])
        assert [tensor.dtype for tensor in mixed] == [torch.float32, dtype, torch.float32]
        close(mixed, right, ROUNDING[dtype])
