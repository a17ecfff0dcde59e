"""Producers with one mistake each, of kinds that fused kernels have; the rest is ``aten``."""

import attrs
import torch

from qsync_core.ir.chain import Activation
from qsync_core.kernels.backend import Op
from qsync_torch.aten.random_bits import stream_of

from .mutants import Mutant, mutants_in

NAMES = {
    Op.BATCH_NORM_OUTPUT: (
        "x weight bias eps residual residual_absmax mean_out var_out out absmax_out q_out scale_out stream_out x_q_out x_scale_out "
        "open_out seed x_seed offset"
    ),
    Op.BATCH_NORM_GRAD_INPUT: (
        "grad x x_scale mean var weight bias eps open grad_input_out grad_residual_out grad_weight_out grad_bias_out "
        "multiplier grad_q_out grad_scale_out seed offset"
    ),
    Op.LAYER_NORM_OUTPUT: (
        "x weight bias eps residual sum_out mean_out rstd_out out q_out scale_out stream_out x_q_out x_scale_out seed x_seed offset"
    ),
    Op.RMS_NORM_OUTPUT: (
        "x weight eps residual sum_out rstd_out out q_out scale_out stream_out x_q_out x_scale_out seed x_seed offset"
    ),
    Op.RMS_NORM_GRAD_INPUT: "grad x x_scale rstd weight grad_input_out grad_weight_out",
    Op.GLU_OUTPUT: (
        "x factor out q_out scale_out stream_out x_q_out x_scale_out factor_q_out factor_scale_out seed x_seed factor_seed offset"
    ),
    Op.GLU_GRAD_INPUT: "grad x x_scale factor factor_scale grad_input_out grad_factor_out scale q_out seed offset",
    Op.LAYER_NORM_GRAD_INPUT: "grad x x_scale mean rstd weight grad_input_out grad_weight_out grad_bias_out",
}


class ProducerMutant(Mutant):
    """Arguments by their names: ``before`` changes them, ``after`` changes what was written."""

    op = Op.BATCH_NORM_OUTPUT

    def before(self, a):
        return {}

    def after(self, a, request):
        pass

    def wrap(self, kernel, request):
        names = NAMES[self.op].split()

        def call(*arguments, **named):  # maxima, by their names
            a = dict(zip(names, arguments, strict=False))  # a copy of the gradient is not always asked for
            kernel(*(a | self.before(a)).values(), **named)
            if a[names[0]].numel():
                self.after(a, request)

        return call


class DelaysTheScale(ProducerMutant):
    """Takes that of a step before, which clips what has grown since."""

    def after(self, a, request):
        if a["scale_out"] is not None:
            a["q_out"].copy_((a["q_out"].float() / 0.9).clamp(-127, 127))
            a["scale_out"].mul_(0.9)


class DelaysTheScaleOfWhatIsKept(ProducerMutant):
    def after(self, a, request):
        if a["x_scale_out"] is not None:
            a["x_q_out"].copy_((a["x_q_out"].float() / 0.9).clamp(-127, 127))
            a["x_scale_out"].mul_(0.9)


class TakesTooLargeAScale(ProducerMutant):
    """As if negative results passed the ReLU."""

    def after(self, a, request):
        if a["scale_out"] is not None and request.chain.activation is Activation.RELU:
            a["q_out"].copy_((a["q_out"].float() / 1.5).round())
            a["scale_out"].mul_(1.5)


class ShiftsTheMask(ProducerMutant):
    """By one channel."""

    def after(self, a, request):
        if a["open_out"] is not None:
            a["open_out"].copy_(a["open_out"] << 1)


class SkipsTheBitsOfTheLastChannels(ProducerMutant):
    """Those that are no whole byte."""

    def after(self, a, request):
        if a["open_out"] is not None and a["x"].shape[1] % 8:
            a["open_out"][..., -1] = 0


class DividesByOneLess(ProducerMutant):
    """The variance as running statistics want it."""

    def after(self, a, request):
        positions = a["x"].numel() / a["x"].shape[1]
        a["var_out"].mul_(positions / max(positions - 1, 1))


class SubtractsASquaredMean(ProducerMutant):
    """A mean of squares without a squared mean, in float32."""

    def after(self, a, request):
        x = a["x"].float()
        a["var_out"].copy_((x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()).clamp(min=0))


class SharesAStream(ProducerMutant):
    def before(self, a):
        return {"x_seed": a["seed"]}


class TakesTheStreamOfItsResult(ProducerMutant):
    """Whose bits differ from one device to the next."""

    def after(self, a, request):
        if a["stream_out"] is not None and a["out"] is not None:
            a["stream_out"].fill_(stream_of(a["offset"], a["out"]))


class BoundsTheLargestMagnitude(ProducerMutant):
    """Though the next block adds its own to it."""

    def after(self, a, request):
        if a["absmax_out"] is not None and a["residual"] is not None:
            a["absmax_out"].mul_(1.25)


class HidesNanInAProducer(ProducerMutant):
    def before(self, a):
        return {"x": a["x"].nan_to_num(0.0, 1.0, -1.0)}


class TakesStatisticsOfAnotherSum(ProducerMutant):
    """Takes the statistics of the sum before it is rounded to the format that backward reads."""

    op = Op.LAYER_NORM_OUTPUT

    def after(self, a, request):
        if a["sum_out"] is not None:
            a["mean_out"].copy_((a["x"].float() + a["residual"].float()).mean(1) + 0.01)


class OneScaleForAllTokens(ProducerMutant):
    op = Op.LAYER_NORM_OUTPUT

    def after(self, a, request):
        if a["scale_out"] is not None and a["scale_out"].numel() > 1:
            most = a["scale_out"].max()
            a["q_out"].copy_((a["q_out"] * (a["scale_out"] / most)[:, None]).round())
            a["scale_out"].fill_(most)


class LeavesOutTheSecondMean(ProducerMutant):
    """Of h and x̂'s product."""

    op = Op.BATCH_NORM_GRAD_INPUT

    def after(self, a, request):
        if a["grad_input_out"] is None or a["grad_weight_out"] is None or a["x_scale"] is not None:
            return
        image = (1, -1, 1, 1)
        rstd, positions = (a["var"] + a["eps"]).rsqrt(), a["x"].numel() / a["x"].shape[1]
        xhat = (a["x"].float() - a["mean"].view(image)) * rstd.view(image)
        left_out = xhat * (a["grad_weight_out"] / positions * rstd * (1 if a["weight"] is None else a["weight"])).view(image)
        a["grad_input_out"].copy_(a["grad_input_out"].float() + left_out)


class GivesTheResidualAllOfTheGradient(ProducerMutant):
    """Also where the ReLU was closed."""

    op = Op.BATCH_NORM_GRAD_INPUT

    def after(self, a, request):
        if a["grad_residual_out"] is not None:
            a["grad_residual_out"].copy_(a["grad"])


class ReadsWhatIsKeptWithOneScale(ProducerMutant):
    op = Op.LAYER_NORM_GRAD_INPUT

    def before(self, a):
        return {} if a["x_scale"] is None or not a["x_scale"].numel() else {"x_scale": a["x_scale"][:1].expand_as(a["x_scale"])}


class TakesTheOtherGelu(Mutant):
    """The derivative of the approximation."""

    op = Op.ACTIVATION_GRAD_INPUT

    def build(self, request, config):
        if request.op == self.op and request.chain.activation is Activation.GELU:
            request = attrs.evolve(request, chain=attrs.evolve(request.chain, activation=Activation.GELU_TANH))
        return super().build(request, config)


class ForgetsTheHighBitsOfASeed(Mutant):
    op = Op.ACTIVATION_OUTPUT

    def wrap(self, kernel, request):
        return lambda *arguments: kernel(*arguments[:-3], arguments[-3] & 0xFFFFFFFF, *arguments[-2:])


class WritesNothingPastAWholeBlock(Mutant):
    """Rows beyond a multiple of 16 keep what was there."""

    op = Op.ACTIVATION_OUTPUT

    def wrap(self, kernel, request):
        def activation(x, out, *others):
            kernel(x, out, *others)
            if out is not None and x.shape[0] > 16:
                out[x.shape[0] // 16 * 16 :] = torch.nan

        return activation


class ForgetsTheMultiplierOfAGradient(ProducerMutant):
    op = Op.BATCH_NORM_GRAD_INPUT

    def before(self, a):
        return {"multiplier": None} if a.get("multiplier") is not None else {}


class GuessesTheScaleOfAGradient(ProducerMutant):
    """From the incoming gradient alone: a weight makes the outgoing one larger."""

    op = Op.BATCH_NORM_GRAD_INPUT

    def after(self, a, request):
        if a.get("grad_scale_out") is not None:
            guess = a["grad"].abs().amax().float() / 127 / a["grad_scale_out"]
            a["grad_q_out"].copy_((a["grad_q_out"].float() / guess).round().clamp(-127, 127))
            a["grad_scale_out"].mul_(guess)


class LeavesEpsOutOfAnRmsNorm(ProducerMutant):
    op = Op.RMS_NORM_OUTPUT

    def before(self, a):
        return {"eps": 0.0}


class SubtractsAMeanInTheGradientOfAnRmsNorm(ProducerMutant):
    """As a layer norm does."""

    op = Op.RMS_NORM_GRAD_INPUT

    def after(self, a, request):
        if a["grad_input_out"] is not None:
            a["grad_input_out"].sub_(a["grad_input_out"].float().mean(1, keepdim=True))


class RoundsBothOperandsOfAGatedUnitAlike(ProducerMutant):
    """With one seed: their errors then have something to do with each other."""

    op = Op.GLU_OUTPUT

    def before(self, a):
        return {"factor_seed": a["x_seed"]}


class ChangesTheGradientsOfAGatedUnit(ProducerMutant):
    op = Op.GLU_GRAD_INPUT

    def after(self, a, request):
        if a["grad_input_out"] is not None and a["grad_factor_out"] is not None:
            x = a["grad_input_out"].clone()
            a["grad_input_out"].copy_(a["grad_factor_out"])
            a["grad_factor_out"].copy_(x)


class WritesTheCopyAgainUnderTheScaleOfTheFirstRow(ProducerMutant):
    op = Op.GLU_GRAD_INPUT

    def before(self, a):
        return {} if a.get("scale") is None or not a["scale"].numel() else {"scale": a["scale"][:1].expand_as(a["scale"])}


class LeavesFactorsOutOfMaxima(Mutant):
    op = Op.GLU_GRAD_INPUT

    def wrap(self, kernel, request):
        return lambda *operands, multiplier=None, **named: kernel(*operands, **named)


class TakesMaximaBeforeTheyAreWritten(Mutant):
    """Of float32 numbers, which the gradient's format rounds."""

    op = Op.GLU_GRAD_INPUT

    def wrap(self, kernel, request):
        def gradient(*operands, maxima_out=None, **named):
            kernel(*operands, **named)
            if maxima_out is not None:
                named.pop("factor_maxima_out")
                wide = [x.float() if isinstance(x, torch.Tensor) and x.dtype.itemsize == 2 else x for x in operands]
                kernel(*wide, maxima_out=maxima_out, **named)

        return gradient


ALL = mutants_in(vars(), ProducerMutant)
