"""A backend that runs ATen's kernels under another name, and spoils what they write."""

import torch

from qsync_core.kernels.backend import BACKEND_API_VERSION, KernelConfig
from qsync_torch.aten.backend import AtenBackend


class SpoiltBackend:
    """``spoil`` is called with a kernel and its arguments, in its place; ``refuses``: reasons against every request."""

    api_version = BACKEND_API_VERSION

    def __init__(self, name, spoil=lambda kernel, *arguments: kernel(*arguments), refuses=(), configs=("",)):
        self.name, self.spoil, self.refuses, self.configs = name, spoil, list(refuses), configs
        self._aten = AtenBackend()
        self.kernel_specs = self._aten.kernel_specs

    def unsupported_reasons(self, request):
        return self.refuses or self._aten.unsupported_reasons(request)

    def candidate_configs(self, request):
        return [KernelConfig(text) for text in self.configs]

    def build(self, request, config):
        kernel = self._aten.build(request, KernelConfig())
        return lambda *arguments: self.spoil(kernel, *arguments)


def writes_nothing(kernel, *arguments):
    pass


def replaces_the_result(kernel, *arguments):
    kernel(*arguments)
    result = arguments[-1] if isinstance(arguments[-1], torch.Tensor) else arguments[1]  # of a product, or a copy
    result.data = result.data.float()


def forgets_the_transposed_copy(kernel, *arguments):
    kernel(*arguments[:7], arguments[7].clone(), *arguments[8:])


def draws_the_transposed_copy_anew(kernel, *arguments):
    x, q, scale, stream, seed, *others = arguments
    kernel(x, q.clone(), scale, stream, seed + 1, *others)
    forgets_the_transposed_copy(kernel, *arguments)


def forgets_factors_of_rows(kernel, *arguments):
    kernel(*arguments[:8])


def spoils_a_scale_of_the_last_column(kernel, *arguments):
    kernel(*arguments)
    arguments[2][-1] *= 2


def hands_out_earlier_results():
    """What it wrote first for operands at these addresses, whatever they hold by now."""
    kept = {}

    def spoil(kernel, *arguments):
        tensors = [a for a in arguments if hasattr(a, "data_ptr")]
        key = tuple(a.data_ptr() for a in tensors)
        if key not in kept:
            kernel(*arguments)
            kept[key] = [a.clone() for a in tensors]
        for a, copy in zip(tensors[1:], kept[key][1:], strict=True):
            a.copy_(copy)

    return spoil


def spoils_the_last_scale_a_little(kernel, *arguments):
    kernel(*arguments)
    arguments[2][-1] *= 1.01


def forgets_the_last_row(kernel, *arguments):
    kernel(*arguments)
    out = next(a for a in reversed(arguments) if getattr(a, "dim", lambda: 0)() > 1)
    out[-1] = 0
