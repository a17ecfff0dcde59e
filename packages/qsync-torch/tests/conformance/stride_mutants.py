"""Backends that mind the stride of a dimension of size 1, as a library does that is told a row's length; the rest is ``aten``."""

import torch

from qsync_core.kernels.backend import Op

from .mutants import Mutant, mutants_in


def is_refused(x):
    """Whether a library refuses what passes for contiguous: a row, or a pixel, that ends behind the start of the next one."""
    x = x.movedim(1, -1) if x.dim() > 2 else x
    return x.dim() > 1 and x.is_contiguous() and x.stride(-2) < x.shape[-1]


class RefusesShortRows(Mutant):
    """Copies what is not contiguous, and leaves the rest to a library, which writes nothing where it refuses."""

    position = 0

    def operand(self, x):
        return x

    def wrap(self, kernel, request):
        def call(*arguments, **named):
            if not is_refused(self.operand(arguments[self.position])):
                kernel(*arguments, **named)

        return call


class RefusesShortRowsOfWeights(RefusesShortRows):
    position = 2


class RefusesShortRowsOfGradients(RefusesShortRows):
    op = Op.LINEAR_GRAD_INPUT


class RefusesShortColumnsOfGradients(RefusesShortRows):
    """The product of a transposed gradient of one column: its only row has the stride 1."""

    op = Op.LINEAR_GRAD_WEIGHT

    def operand(self, x):
        return x.t() if x.dtype is torch.int8 else x.flatten()


class RefusesShortRowsOfSavedCopies(RefusesShortRows):
    op, position = Op.LINEAR_GRAD_WEIGHT, 1


class RefusesShortPixels(RefusesShortRows):
    op = Op.CONV2D_OUTPUT


class RefusesShortPixelsOfFilters(RefusesShortRows):
    op, position = Op.CONV2D_OUTPUT, 2


class RefusesShortPixelsOfGradients(RefusesShortRows):
    op = Op.CONV2D_GRAD_INPUT


class RefusesShortPixelsOfSavedCopies(RefusesShortRows):
    op, position = Op.CONV2D_GRAD_WEIGHT, 1


class RefusesShortRowsOfTensors(RefusesShortRows):
    op = Op.QUANTIZE


class RefusesShortRowsOfActivations(RefusesShortRows):
    op = Op.ACTIVATION_OUTPUT


class ReadsScalesByTheirStride(Mutant):
    """Takes a vector of one number that has another stride than 1 for one that it must copy, into memory that it never fills."""

    def wrap(self, kernel, request):
        def product(x, x_scale, *others):
            kernel(x, x_scale if x_scale.stride() == (1,) or x_scale.numel() > 1 else torch.zeros_like(x_scale), *others)

        return product


ALL = mutants_in(vars())
