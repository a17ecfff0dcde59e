"""Backends that keep numbers by a tensor's address, and maxima that leave out an edge; the rest is ``aten``."""

import torch

from qsync_core.kernels.backend import Op

from .mutants import Affine, Mutant, is_plain_int8, mutants_in
from .producer_mutants import ProducerMutant


class KeepsByAddress(Mutant):
    """Prepares an operand once for each address, though its numbers may have changed there."""

    position = 2
    keyword = ""
    """Name of the argument where it is a named one."""

    def key(self, x):
        return (x.data_ptr(), x.shape, x.stride())

    def wrap(self, kernel, request):
        kept = {}

        def of_first_call(x):
            key = self.key(x)
            kept.setdefault(key, (x, x.clone(memory_format=torch.preserve_format)))  # the address stays taken
            return kept[key][1]

        def call(*arguments, **named):
            if not self.keyword and isinstance(arguments[self.position], torch.Tensor):
                replaced = of_first_call(arguments[self.position])
                arguments = (*arguments[: self.position], replaced, *arguments[self.position + 1 :])
            elif named.get(self.keyword) is not None:
                named[self.keyword] = of_first_call(named[self.keyword])
            kernel(*arguments, **named)

        return call


class KeepsWeights(KeepsByAddress):
    pass


class KeepsScalesOfWeights(KeepsByAddress):
    position = 3


class KeepsActivations(KeepsByAddress):
    position = 0


class KeepsScalesOfActivations(KeepsByAddress):
    position = 1


class KeepsBiases(KeepsByAddress):
    position = 4


class KeepsWeightsOfInputGradients(KeepsByAddress):
    op, position = Op.LINEAR_GRAD_INPUT, 1


class KeepsScalesOfInputGradients(KeepsByAddress):
    op, position = Op.LINEAR_GRAD_INPUT, 2


class KeepsActivationsOfWeightGradients(KeepsByAddress):
    op, position = Op.LINEAR_GRAD_WEIGHT, 1


class KeepsFilters(KeepsByAddress):
    op = Op.CONV2D_OUTPUT


class KeepsFiltersOfInputGradients(KeepsByAddress):
    op, position = Op.CONV2D_GRAD_INPUT, 1


class KeepsImagesOfWeightGradients(KeepsByAddress):
    op, position = Op.CONV2D_GRAD_WEIGHT, 1


class KeepsMultipliers(KeepsByAddress):
    op, keyword = Op.QUANTIZE, "multiplier"


class KeepsFactorsOfRows(KeepsByAddress):
    op, keyword = Op.QUANTIZE, "row_multiplier"


class KeepsOffsets(KeepsByAddress):
    """In tensors, whose numbers the next step changes."""

    op, position = Op.QUANTIZE, 5


class KeepsParametersOfABatchNorm(KeepsByAddress):
    op, position = Op.BATCH_NORM_OUTPUT, 1


class KeepsParametersOfALayerNorm(KeepsByAddress):
    op, position = Op.LAYER_NORM_GRAD_INPUT, 5


class KeepsSumsOverWeights(Affine):
    """Which correct for a zero point."""

    wrap, key = KeepsByAddress.wrap, KeepsByAddress.key
    position, keyword = 2, ""


class KeepsScalesOfTensors(Mutant):
    """Finds the largest magnitude once for each address."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        kept = {}

        def quantize(x, q, scale, *others, **named):
            kernel(x, q, scale, *others, **named)
            scale.copy_(kept.setdefault((x.data_ptr(), x.shape), (x, scale.clone()))[1])

        return quantize


class KeepsCopies(Mutant):
    """Hands out the copy of an earlier call, as long as the tensor at this address has not changed by its version."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        kept = {}

        def quantize(x, q, scale, stream, *others, **named):
            outputs = [out for out in (q, scale, stream, named.get("transposed_out")) if out is not None]
            key = (x.data_ptr(), x.shape, x.stride(), x._version, *map(int, others[:2]))
            if key not in kept:
                kernel(x, q, scale, stream, *others, **named)
                kept[key] = (x, [out.clone() for out in outputs])
            for out, copy in zip(outputs, kept[key][1], strict=True):
                out.copy_(copy)

        return quantize


class KeepsWeightsOfAVersion(KeepsByAddress):
    def key(self, x):
        return (*super().key(x), x._version)


class TakesTheScaleOfTheRowBefore(Mutant):
    """For the last row, whose number is no multiple of what a program takes."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, *others, **named):
            kernel(x, q, scale, *others, **named)
            if str(request.variant.x_granularity) == "row" and is_plain_int8(request) and scale.numel() % 8 > 1:
                scale[-1] = scale[-2]

        return quantize


class WritesAnOutputOnce(Mutant):
    """Takes an output at a known address for one that it has written."""

    def wrap(self, kernel, request):
        written = {}

        def product(*arguments):
            out = arguments[-1]
            if out.data_ptr() not in written:
                written[out.data_ptr()] = out  # the address stays taken
                kernel(*arguments)

        return product


class Overlooks(Mutant):
    """Scales tensors by the largest magnitude of a part of them."""

    op = Op.QUANTIZE

    def part(self, x):
        return x[..., :-1]

    def wrap(self, kernel, request):
        if not is_plain_int8(request) or request.multiplied or str(request.variant.rounding) != "nearest":
            return kernel

        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            seen = self.part(x)
            if seen.numel() and scale.numel() == 1 and seen.abs().max() > 0:
                scale.copy_((seen.abs().max().float() / 127).clamp(min=2.0**-126))
                q.copy_((x.float() / scale + 0.5).floor().clamp(-127, 127))

        return quantize


class OverlooksTheLastColumn(Overlooks):
    pass


class OverlooksTheLastRow(Overlooks):
    def part(self, x):
        return x[:-1]


class OverlooksTheFirstElement(Overlooks):
    def part(self, x):
        return x.as_strided((x.numel(),), (1,), x.storage_offset())[1:]


class OverlooksTheTail(Overlooks):
    """What is left of whole blocks of 128."""

    def part(self, x):
        return x.as_strided((x.numel() // 128 * 128,), (1,), x.storage_offset())


class OverlooksTheEndsOfBlocks(Overlooks):
    """Every 128th element."""

    def part(self, x):
        flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
        return flat[torch.arange(x.numel()) % 128 != 127]


class OverlooksWhatIsNotRowMajor(Overlooks):
    """Looks at as many elements as the first row has, in memory, of a tensor in another order."""

    def part(self, x):
        return x if x.is_contiguous() else x.as_strided((x.numel() - x.shape[-1],), (1,), x.storage_offset())


class OverlooksTheLastColumnOfRows(Mutant):
    """Where each row has a scale."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        if str(request.variant.x_granularity) != "row" or not request.variant.symmetric:
            return kernel

        def quantize(x, q, scale, *others, **named):
            kernel(x, q, scale, *others, **named)
            if x.shape[-1] > 1:
                scale.copy_((x[..., :-1].abs().amax(-1).float() / 127).reshape(-1).clamp(min=2.0**-126))

        return quantize


class OverlooksTheLastColumnOfARange(Affine):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, *others, **named):
            kernel(x, q, scale, *others, **named)
            if scale.numel() == 2 and x.shape[-1] > 1:
                kernel(x.clamp(x[..., :-1].min(), x[..., :-1].max()), q, scale, None, *others[1:], **named)

        return quantize


class OverlooksTheLastChannelOfABatchNorm(ProducerMutant):
    """In the largest magnitude of the result."""

    def after(self, a, request):
        if a["absmax_out"] is not None and a["out"].shape[1] > 1:
            a["absmax_out"].copy_(a["out"][:, :-1].abs().max())


class OverlooksTheFirstColumnOfALayerNorm(ProducerMutant):
    """In the scale of the copy."""

    op = Op.LAYER_NORM_OUTPUT

    def after(self, a, request):
        if a["scale_out"] is not None and a["scale_out"].numel() == 1 and a["out"] is not None and a["out"].shape[1] > 1:
            a["scale_out"].copy_(a["out"][:, 1:].abs().max() / 127)


ALL = mutants_in(vars(), KeepsByAddress, Overlooks)
