"""What can be differentiated twice, and how an error says that something can not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

_SIGNS = ("is not implemented", "differentiate twice", "once_differentiable", "double backward", "derivative for")


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain products inside: fused kernels give the same values and have no second derivative."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def no_second_derivative(error: BaseException) -> str:
    """What lacks a second derivative, where that is what an error says; "" for any other error."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if any(sign in str(error) for sign in _SIGNS) else ""
