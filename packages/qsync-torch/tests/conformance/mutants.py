"""Backends that are ``aten`` with one mistake each, of kinds that real kernels have."""

import attrs
import torch

from qsync_core.ir.precision import Precision
from qsync_core.kernels.backend import KernelConfig, KernelSpec, Op
from qsync_torch.aten.backend import AtenBackend
from qsync_torch.aten.quantize import multiplied
from qsync_torch.aten.random_bits import checksum, stream_key, stream_of


class Mutant(AtenBackend):
    """Wraps the kernels of one operator."""

    op = Op.LINEAR_OUTPUT

    def build(self, request, config):
        kernel = super().build(request, config)
        return self.wrap(kernel, request) if request.op == self.op else kernel

    def wrap(self, kernel, request):
        return kernel


def mutants_in(names, *abstract):
    """The mutants that a module defines, by its ``vars()``: those that it imports are put to the suite by their own."""
    found = (value for value in names.values() if isinstance(value, type) and issubclass(value, Mutant))
    return [value for value in found if value.__module__ == names["__name__"] and value not in abstract]


def is_plain_int8(request):
    """Whether what a mutant writes itself is what the request asks for, but for its mistake."""
    return request.variant.compute is Precision.INT8 and request.variant.symmetric


class Float32Accumulation(Mutant):
    """Sums products in float32."""

    def wrap(self, kernel, request):
        if not is_plain_int8(request):
            return kernel

        def product(x, x_scale, w, w_scale, bias, out):
            y = (x.float() @ w.float().t()) * x_scale.view(-1, 1) * w_scale
            out.copy_(y if bias is None else y + bias)

        return product


class Float32AccumulationOfAnInputGradient(Mutant):
    op = Op.LINEAR_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda grad, w, scale, out: (
            out.copy_((grad.float() @ w.float()) * scale) if grad.dtype is torch.int8 else kernel(grad, w, scale, out)
        )


class Float32AccumulationOfAWeightGradient(Mutant):
    op = Op.LINEAR_GRAD_WEIGHT

    def wrap(self, kernel, request):
        return lambda grad, x, scale, out: (
            out.copy_((grad.float().t() @ x.float()) * scale.view(-1, 1))
            if grad.dtype is torch.int8
            else kernel(grad, x, scale, out)
        )


class Float32AccumulationOfConvolutions(Mutant):
    """Of those over many channels: others are exact in float32 too."""

    op = Op.CONV2D_OUTPUT

    def wrap(self, kernel, request):
        if request.geometry.groups != 1 or not is_plain_int8(request):
            return kernel
        geometry = {name: getattr(request.geometry, name) for name in ("stride", "padding", "dilation")}

        def convolution(x, x_scale, w, w_scale, bias, out):
            y = torch.nn.functional.conv2d(x.float(), w.float(), **geometry) * (x_scale * w_scale).view(1, -1, 1, 1)
            out.copy_(y if bias is None else y + bias.view(1, -1, 1, 1))

        return convolution


class SumsTheFirst8192Only(Mutant):
    def wrap(self, kernel, request):
        return lambda x, x_scale, w, *others: kernel(x[:, :8192], x_scale, w[:, :8192], *others)


class MultipliesAScaleInPlace(Mutant):
    def wrap(self, kernel, request):
        def product(x, x_scale, w, w_scale, bias, out):
            kernel(x, x_scale, w, w_scale, bias, out)
            x_scale.mul_(w_scale[:1] * 3)

        return product


class RoundsBeforeTheBias(Mutant):
    def wrap(self, kernel, request):
        def product(x, x_scale, w, w_scale, bias, out):
            kernel(x, x_scale, w, w_scale, None, out)
            if bias is not None:
                out.add_(bias)

        return product


class RoundsConvolutionsBeforeTheBias(RoundsBeforeTheBias):
    op = Op.CONV2D_OUTPUT

    def wrap(self, kernel, request):
        def convolution(x, x_scale, w, w_scale, bias, out):
            kernel(x, x_scale, w, w_scale, None, out)
            if bias is not None:
                out.add_(bias.view(1, -1, 1, 1))

        return convolution


class ForgetsBias(Mutant):
    def wrap(self, kernel, request):
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, x_scale, w, w_scale, None, out)


class OneScaleForAllRows(Mutant):
    def wrap(self, kernel, request):
        if not is_plain_int8(request):
            return kernel
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, x_scale[:1], w, w_scale, bias, out)


class AssumesRowMajor(Mutant):
    """Reads the memory of a weight as if it were row-major."""

    def wrap(self, kernel, request):
        def product(x, x_scale, w, w_scale, bias, out):
            kernel(x, x_scale, w.as_strided(w.shape, (w.shape[1], 1)), w_scale, bias, out)

        return product


def read_as_dense(vector):
    """The numbers in memory from a vector's first one on, whatever its stride."""
    return None if vector is None else vector.as_strided(vector.shape, (1,) * vector.ndim)


class AssumesADenseBias(Mutant):
    def wrap(self, kernel, request):
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, x_scale, w, w_scale, read_as_dense(bias), out)


class AssumesDenseScales(Mutant):
    def wrap(self, kernel, request):
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, read_as_dense(x_scale), w, w_scale, bias, out)


class AssumesADenseScaleOfTheGradient(Mutant):
    op = Op.LINEAR_GRAD_WEIGHT

    def wrap(self, kernel, request):
        return lambda grad, x, scale, out: kernel(grad, x, read_as_dense(scale), out)


class AssumesADenseScaleOfTheWeight(Mutant):
    op = Op.LINEAR_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda grad, w, scale, out: kernel(grad, w, read_as_dense(scale), out)


class AssumesDenseScalesOfFilters(Mutant):
    op = Op.CONV2D_OUTPUT

    def wrap(self, kernel, request):
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, x_scale, w, read_as_dense(w_scale), bias, out)


class AssumesADenseBiasOfImages(Mutant):
    op = Op.CONV2D_OUTPUT

    def wrap(self, kernel, request):
        return lambda x, x_scale, w, w_scale, bias, out: kernel(x, x_scale, w, w_scale, read_as_dense(bias), out)


class WritesNothingWithoutProducts(Mutant):
    """K = 0 launches no program."""

    def wrap(self, kernel, request):
        return lambda x, *others: kernel(x, *others) if x.numel() else None


class WritesNoGradientOfAnEmptyBatch(Mutant):
    op = Op.LINEAR_GRAD_WEIGHT

    def wrap(self, kernel, request):
        return lambda grad, *others: kernel(grad, *others) if grad.numel() else None


class WritesPastTheEnd(Mutant):
    """Rounds the number of rows up to whole tiles."""

    def wrap(self, kernel, request):
        def product(x, x_scale, w, w_scale, bias, out):
            kernel(x, x_scale, w, w_scale, bias, out)
            if out.numel():
                out.as_strided((out.numel() + 4,), (1,), out.storage_offset())[-4:] = 0

        return product


class ReplacesItsOutput(Mutant):
    """Of the same format and strides, in other memory."""

    def wrap(self, kernel, request):
        def product(*arguments):
            kernel(*arguments)
            arguments[-1].data = arguments[-1].data.clone()

        return product


class ReplacesACopyByFloats(Mutant):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, *others, **named):
            kernel(x, q, *others, **named)
            q.data = q.data.float()

        return quantize


class RefusesWithoutReasons(Mutant):
    def unsupported_reasons(self, request):
        return [""] if super().unsupported_reasons(request) else []


class RefusesEverything(Mutant):
    def unsupported_reasons(self, request):
        return ["this chip has too few registers for any kernel"]


class OverflowsInt32(Mutant):
    """Takes contractions whose int32 sum can overflow."""

    def unsupported_reasons(self, request):
        return [reason for reason in super().unsupported_reasons(request) if "could overflow" not in reason]


class RepeatsConfigurations(Mutant):
    def candidate_configs(self, request):
        return (*super().candidate_configs(request), *super().candidate_configs(request))


class BuildsAnyConfiguration(Mutant):
    def build(self, request, config):
        return super().build(request, attrs.evolve(config, text=""))


class OffersAnUnknownOperator(Mutant):
    def kernel_specs(self):
        return (*super().kernel_specs(), KernelSpec("linear.sideways", ("int8",), ("cpu",)))


class RoundsDown(Mutant):
    """Floor where the nearest is asked for."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            if str(request.variant.rounding) == "nearest" and is_plain_int8(request):
                q.copy_((x.float() / scale.max()).floor().clamp(-127, 127))

        return quantize


class TinyGroupsHaveTheScaleOne(Mutant):
    """Though not zeros, of which a tiny negative number is rounded down to -1."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            if scale.numel() == 1 and scale <= 2.0**-126:
                scale.fill_(1.0)
                q.copy_(x.float().floor() if str(request.variant.rounding) == "floor" else torch.zeros_like(q))

        return quantize


class OverflowsOnTheWay(Mutant):
    """Multiplies by 256 before it divides."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            if is_plain_int8(request):
                q.masked_fill_(torch.isinf(x.float() * 256), 0)

        return quantize


class BiasedRounding(Mutant):
    """Rounds up with a probability that is a little too high."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            stochastic = is_plain_int8(request) and str(request.variant.rounding) == "stochastic"
            if stochastic and scale.numel() == 1 and x.dtype is torch.float32:
                y = x / scale
                q.copy_(torch.maximum(q, (y + 0.03).floor().clamp(-127, 127) * (y % 1 > 0.97) + -128 * (y % 1 <= 0.97)))

        return quantize


class IgnoresTheSeed(Mutant):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, q, scale, stream, seed, offset, *more, **named: kernel(x, q, scale, stream, 0, offset, *more, **named)


class TruncatesTheOffset(Mutant):
    """Keeps 32 bits of it."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, q, scale, stream, seed, offset, *more, **named: kernel(
            x, q, scale, stream, seed, offset & 0xFFFFFFFF, *more, **named
        )


class KeepsTheFirstOffset(Mutant):
    """What a captured graph does that has the number of its capture in it."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        kept = []

        def quantize(x, q, scale, stream, seed, offset, *more, **named):
            if isinstance(offset, torch.Tensor):
                kept.append(offset.clone())
                offset = kept[0]
            kernel(x, q, scale, stream, seed, offset, *more, **named)

        return quantize


class RoundsAlikeWhateverTheData(Mutant):
    """Its draws are those of seed and offset; its stream is as it should be."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, *more, **named):
            kernel(x, q, scale, None, seed, int(offset) - int(checksum(x)) * (0x9E3779B9 << 32), *more, **named)
            if stream is not None:
                stream.fill_(stream_of(offset, x))

        return quantize


class AddsUpProducts(Mutant):
    """Takes the checksum behind the multiplier."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            if multiplier is not None:
                x, multiplier = multiplied(x, multiplier), None
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)

        return quantize


class SumsUpScales(Mutant):
    """Takes the bits of the largest magnitude for those of the data."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, *more, **named):
            found = int(x.abs().max().float().view(torch.int32)) if x.numel() else 0
            shift = (found - int(checksum(x))) * (0x9E3779B9 << 32)
            kernel(x, q, scale, stream, seed, int(offset) + shift, *more, **named)

        return quantize


class Draws(Mutant):
    """Rounds one tensor stochastically with draws of its own; all else as it should be."""

    op = Op.QUANTIZE

    def kernel_specs(self):
        """Not producers, whose draws are those of ``aten``."""
        return [spec for spec in super().kernel_specs() if spec.op in Op.UNFUSED]

    def draws(self, count, seed, offset):
        """In [0, 1), as many as asked for."""
        generator = torch.Generator().manual_seed(stream_key(seed, int(offset)))
        return torch.rand(count, generator=generator)

    def in_memory_order(self, x):
        return x.as_strided((x.numel(),), (1,), x.storage_offset())

    def wrap(self, kernel, request):
        v = request.variant
        if (str(v.rounding), str(v.x_granularity), v.compute, v.symmetric) != ("stochastic", "tensor", "int8", True):
            return kernel

        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier)
            drawn = stream_of(offset, x)
            if multiplier is not None:
                x = multiplied(x, multiplier)
            u = self.draws(x.numel(), seed, drawn)
            y = self.in_memory_order(x).double() / scale.double()
            self.in_memory_order(q).copy_((y + u.double()).floor().clamp(-127, 127))
            if transposed_out is not None:
                transposed_out.copy_(q.t())

        return quantize


class RepeatsDraws(Draws):
    period = 4096

    def draws(self, count, seed, offset):
        return super().draws(self.period, seed, offset).repeat(count // self.period + 1)[:count]


class RepeatsDrawsLater(RepeatsDraws):
    period = 1 << 16


class RepeatsDrawsOddly(RepeatsDraws):
    period = 99_991


class DrawsOfEightBits(Draws):
    def draws(self, count, seed, offset):
        return (super().draws(count, seed, offset) * 256).floor() / 256


class DrawsOfElevenBits(Draws):
    """In the middle of each interval, so that a half rounds without bias."""

    def draws(self, count, seed, offset):
        return ((super().draws(count, seed, offset) * 2048).floor() + 0.5) / 2048


class DrawsUpToOne(Draws):
    """16 bits divided by the largest number of 16 bits."""

    def draws(self, count, seed, offset):
        return (super().draws(count, seed, offset) * 65536).floor() / 65535


class NumbersDrawsLogically(Draws):
    def in_memory_order(self, x):
        return x.reshape(-1) if x.dtype is not torch.int8 or x.is_contiguous() else LogicalOrder(x)


class LogicalOrder:
    def __init__(self, x):
        self.x = x

    def copy_(self, values):
        self.x.copy_(values.view(self.x.shape))


class KeepsRangeOfSmallValues(Mutant):
    """Scales are at least 1e-20."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            scale.clamp_(min=1e-20)

        return quantize


class CutsTheSeed(Mutant):
    """To 62 bits."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, q, scale, stream, seed, *more, **named: kernel(x, q, scale, stream, seed & ((1 << 62) - 1), *more, **named)


class CutsTheOffset(Mutant):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, q, scale, stream, seed, offset, *more, **named: kernel(
            x, q, scale, stream, seed, offset & ((1 << 62) - 1), *more, **named
        )


class RaisesNoErrorOnACpu(Mutant):
    """Writes a scale that is not finite where a CPU is to raise."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, *more, **named):
            if bool(torch.isfinite(x).all()):
                kernel(x, q, scale, *more, **named)
            else:
                scale.fill_(float("nan"))

        return quantize


class HidesNan(Mutant):
    """Its maximum ignores values that are not numbers."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, *rest, **named: kernel(x.nan_to_num(0.0, 1.0, -1.0), *rest, **named)


class ForgetsTheMultiplier(Mutant):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda x, q, scale, stream, seed, offset, multiplier=None, *more, **named: kernel(
            x, q, scale, stream, seed, offset, None, *more, **named
        )


class ForgetsFactorsOfRows(Mutant):
    """Of which the transposed copy with scales of its own is."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        return lambda *operands, row_multiplier=None, **named: kernel(*operands, **named)


class MultipliesRowsOfBothCopies(Mutant):
    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, *others, row_multiplier=None, **named):
            kernel(x, q, scale, stream, *others, row_multiplier=row_multiplier, **named)
            if row_multiplier is not None:
                kernel(x.float() * row_multiplier[:, None], q, scale, None, *others, **named)

        return quantize


class OverlooksFactorsInScalesOfColumns(Mutant):
    """Finds the largest magnitudes of columns before it multiplies rows."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, *others, row_multiplier=None, **named):
            kernel(x, q, scale, *others, row_multiplier=row_multiplier, **named)
            if row_multiplier is not None:
                kernel(x, q, scale, *others, **named | {"transposed_out": named["transposed_out"].clone()})

        return quantize


class KnowsOneMaximum(Mutant):
    """Reads the last of the partial maxima that it is given."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(*operands, maxima=None, **named):
            known = {} if maxima is None else {"maxima": torch.stack([maxima[0, -1].expand(maxima.shape[1]), maxima[1]])}
            kernel(*operands, **named, **known)

        return quantize


class SwapsGradientStrides(Mutant):
    """Takes the weight of an int8 gradient for transposed."""

    op = Op.LINEAR_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda grad, w, scale, out: kernel(grad, w.flip(0) if w.dtype is torch.int8 else w, scale, out)


class OneScaleForAllChannels(Mutant):
    op = Op.LINEAR_GRAD_WEIGHT

    def wrap(self, kernel, request):
        return lambda grad, x, scale, out: kernel(grad, x, scale[:1], out)


class IgnoresDilation(Mutant):
    op = Op.CONV2D_OUTPUT

    def build(self, request, config):
        geometry = request.geometry
        if request.op == self.op and geometry.dilation == (2, 2) and geometry.padding == (2, 2):
            dense = attrs.evolve(geometry, dilation=(1, 1), padding=(1, 1))
            inner = super().build(attrs.evolve(request, geometry=dense), config)
            return inner
        return super().build(request, config)


class ForgetsToFlip(Mutant):
    """An input gradient with the filters as they are."""

    op = Op.CONV2D_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda grad, w, scale, out: kernel(grad, w.flip(2, 3), scale, out)


class SkipsAPosition(Mutant):
    """A float gradient of an image without the filters' first position."""

    op = Op.CONV2D_GRAD_INPUT

    def wrap(self, kernel, request):
        def gradient(grad, w, scale, out):
            if grad.dtype is not torch.int8 and w.shape[2] > 1:
                w = w.clone(memory_format=torch.channels_last)
                w[:, :, 0, 0] = 0
            kernel(grad, w, scale, out)

        return gradient


class OneScaleForAllFilters(Mutant):
    op = Op.CONV2D_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda grad, w, scale, out: kernel(grad, w, scale[:1].expand_as(scale), out)


class SkipsAnImage(Mutant):
    """A float gradient of filters without the batch's last image."""

    op = Op.CONV2D_GRAD_WEIGHT

    def wrap(self, kernel, request):
        def gradient(grad, x, scale, out):
            images = max(1, grad.shape[0] - 1)
            kernel(grad[:images], x[:images], scale, out)

        return gradient


class LosesTheLastShareOfPositions(Mutant):
    """Where programs share the positions that a gradient of the weight sums, the last one stops too early."""

    op = Op.CONV2D_GRAD_WEIGHT

    def wrap(self, kernel, request):
        def gradient(grad, x, x_scale, out):
            if grad[:, 0].numel() > 2048:
                grad = grad.clone()
                grad[-1, :, -2:] = 0
            kernel(grad, x, x_scale, out)

        return gradient


class Affine(Mutant):
    """A mistake with zero points alone."""

    def build(self, request, config):
        kernel = super(Mutant, self).build(request, config)
        return self.wrap(kernel, request) if request.op == self.op and not request.variant.symmetric else kernel


class ForgetsTheZeroPoint(Affine):
    def wrap(self, kernel, request):
        def product(x, x_scale, *others):
            scale, zero_point = x_scale.chunk(2)
            kernel(x, torch.cat([scale, torch.zeros_like(zero_point)]), *others)

        return product


class OneZeroPointForAllRows(Affine):
    def wrap(self, kernel, request):
        def product(x, x_scale, *others):
            scale, zero_point = x_scale.chunk(2)
            kernel(x, torch.cat([scale, zero_point[:1].expand_as(zero_point)]), *others)

        return product


class ForgetsTheZeroPointOfTheSavedCopy(Affine):
    op = Op.LINEAR_GRAD_WEIGHT

    def wrap(self, kernel, request):
        def gradient(grad, x, x_scale, out):
            scale, zero_point = x_scale.chunk(2)
            kernel(grad, x, torch.cat([scale, torch.zeros_like(zero_point)]), out)

        return gradient


class PadsWithTheIntegerZero(Affine):
    """Corrects for the zero point as if it were around the image too."""

    op = Op.CONV2D_OUTPUT

    def wrap(self, kernel, request):
        symmetric = AtenBackend().build(
            attrs.evolve(request, variant=attrs.evolve(request.variant, symmetric=True)), KernelConfig()
        )

        def convolution(x, x_scale, w, w_scale, bias, out):
            scale, zero_point = x_scale.chunk(2)
            symmetric(x, scale, w, w_scale, bias, out)
            out.sub_((scale * zero_point * w_scale * w.sum((1, 2, 3))).view(1, -1, 1, 1))

        return convolution


class ClipsTheEnds(Affine):
    """The range over 255 with a rounded zero point: half a step at either end is missing."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, stream, seed, offset, multiplier=None, transposed_out=None, row_multiplier=None, **named):
            kernel(x, q, scale, stream, seed, offset, multiplier, transposed_out, row_multiplier, **named)
            low, high = x.float().amin().clamp(max=0), x.float().amax().clamp(min=0)
            if scale.numel() == 2 and x.numel() and low * high < 0:
                step = (high - low) / 255
                scale.copy_(torch.stack([step, (-128 - low / step).round()]))
                u = torch.rand(x.shape) if str(request.variant.rounding) == "stochastic" else 0.5
                q.copy_((x.float() / step + u).floor().add(scale[1]).clamp(-128, 127))

        return quantize


class ZeroIsNearlyZero(Affine):
    """Leaves 0 out of the range of a tensor of one sign."""

    op = Op.QUANTIZE

    def wrap(self, kernel, request):
        def quantize(x, q, scale, *others, **named):
            kernel(x, q, scale, *others, **named)
            if scale.numel() == 2 and x.numel() and x.float().min() > 0:
                kernel(x - x.min(), q, scale, *others, **named)

        return quantize


class DequantizesInTheResultsFormat(Mutant):
    """Rounds the constants of NF4 blocks, and scales of int8, to 16 bits before it multiplies."""

    op = Op.DEQUANTIZE

    def wrap(self, kernel, request):
        return lambda values, scale, constants, mean, out: kernel(values, scale.to(out.dtype).float(), constants, mean, out)


class LeavesOutTheLastElement(Mutant):
    """Of a weight with an odd number of them."""

    op = Op.DEQUANTIZE

    def wrap(self, kernel, request):
        def dequantize(*operands):
            out, kept = operands[-1], operands[-1].clone()
            kernel(*operands)
            if out.numel() % 2:
                out.view(-1)[-1] = kept.view(-1)[-1]

        return dequantize


class OneScaleForAllConstants(Mutant):
    op = Op.DEQUANTIZE

    def wrap(self, kernel, request):
        return lambda values, scale, *others: kernel(
            values, scale[:1].expand_as(scale) if others[0] is not None else scale, *others
        )


ALL = mutants_in(vars(), Mutant, Draws, Affine)
