"""Noise of the int8 copy that a fused batch norm with a residual writes: its scale is a bound, and Ω is of that scale."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_core.ir import observations as terms
from qsync_core.ir.chain import Activation, ChainForm
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Granularity, Precision, Rounding
from qsync_core.ir.variant import Variant
from qsync_torch.aten.batch_norm import build_batch_norm_output
from qsync_torch.job import Batch, Job
from qsync_torch.observing import hutchinson
from qsync_torch.observing.collector import ObservedStep
from qsync_torch.observing.hutchinson import HutchinsonCollector
from qsync_torch.observing.kept_inputs import CopyScales
from qsync_torch.observing.montecarlo import MonteCarloCollector, squared_norm, step_gradients
from qsync_torch.tracing.trace import trace

FLOAT32, INT8 = Precision.FLOAT32, Precision.INT8
FORWARD = attrs.evolve(Variant.of(INT8, output=FLOAT32), grad_input=FLOAT32, grad_weight=FLOAT32)
READER = OpId("reader")
DRAWS = 100
ADDITIONS = {
    "plus": lambda z, x: z + x,
    "plus, the other way round": lambda z, x: x + z,
    "in place": lambda z, x: z.add_(x),
    "function": lambda z, x: torch.add(x, z),
}


class Net(nn.Module):
    """A block with a shortcut, an operator that reads its result and whose weight int8 holds exactly, and a smooth rest."""

    def __init__(self, add=ADDITIONS["plus"], relu=True):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.reader, self.out = nn.Conv2d(3, 2, 1, bias=False), nn.Linear(2, 2)
        self.add, self.relu = add, relu
        nn.init.ones_(self.reader.weight).mul_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))

    def forward(self, x):
        z = self.add(self.norm(self.conv(x)), x)
        return self.out(self.reader(F.relu(z) if self.relu else z).square().mean((2, 3)))


def _step(**options):
    torch.manual_seed(0)
    with torch.no_grad():
        model = Net(**options)
    generator = torch.Generator().manual_seed(1)
    batch = Batch((torch.randn(4, 3, 4, 4, generator=generator),))
    job = Job(
        "net", model, lambda step, size: batch, lambda output, batch: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=4,
    )  # fmt: skip
    return ObservedStep(job, model.train(), trace(job), batch, 0, 3)


def _written(model, x, draw):
    """The copy and its scale, by the kernel of the fused chain."""
    form = ChainForm(Activation.RELU if model.relu else Activation.NONE, residual=True)
    variant = Variant(INT8, FLOAT32, FLOAT32, FLOAT32, FLOAT32, Granularity.PER_TENSOR, rounding=Rounding.STOCHASTIC)
    with torch.no_grad():
        normalized = model.conv(x).contiguous(memory_format=torch.channels_last)
    residual = x.contiguous(memory_format=torch.channels_last)
    mean, var, q, scale = torch.empty(3), torch.empty(3), torch.empty_like(normalized, dtype=torch.int8), torch.empty(1)
    norm, most = model.norm, x.abs().amax().view(1)
    build_batch_norm_output(variant, form)(
        normalized, norm.weight.detach(), norm.bias.detach(), norm.eps, residual, most, mean, var, None, None, q, scale, None,
        None, None, None, 7, 8, draw,
    )  # fmt: skip
    return q, scale


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("add", ADDITIONS)
def test_the_scale_is_that_which_the_kernel_writes(add, relu):
    step = _step(add=ADDITIONS[add], relu=relu)
    x = step.batch.args[0]
    with CopyScales(step.dag) as scales:
        step.model(x)
    assert set(scales.by_reader()) == {READER}
    torch.testing.assert_close(scales.by_reader()[READER].view(1), _written(step.model, x, 0)[1])


def _direction_averaged_out(step, monkeypatch):
    """The reader's terms, summed over the coordinates of the direction: Σ σ²·‖∂g/∂e‖², exactly."""
    found: dict[str, float] = {}
    for index in range(sum(p.numel() for p in step.model.parameters())):

        def along(tensors, seed, index=index):
            listed = list(tensors)
            flat = (torch.arange(sum(t.numel() for t in listed)) == index).float()
            return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in listed]), listed, strict=True)]

        monkeypatch.setattr(hutchinson, "random_signs", along)
        for (op_id, _, term), value in HutchinsonCollector().collect_step(step, [FORWARD]).items():
            if op_id == READER:
                found[term] = found.get(term, 0.0) + value
    return found


def test_noise_of_the_copy_against_training_with_the_copy_of_the_kernel(monkeypatch):
    step = _step()
    x = step.batch.args[0]
    found = _direction_averaged_out(step, monkeypatch)
    undisturbed = step_gradients(step)
    copies = iter(range(DRAWS))

    def read(module, args):
        q, scale = _written(step.model, x, next(copies))
        return (args[0] + (q * scale - args[0]).detach(),)

    with step.model.reader.register_forward_pre_hook(read):
        fused = sum(squared_norm(step_gradients(step), undisturbed) for _ in range(DRAWS)) / DRAWS
    by_itself = MonteCarloCollector(draws=DRAWS, operators=[READER], together=False).collect_step(step, [FORWARD])
    unfused = sum(by_itself[READER, FORWARD, half] for half in (terms.FIRST_HALF, terms.SECOND_HALF)) / 2
    assert unfused / found[terms.OPERANDS] == pytest.approx(1.0, rel=0.2)
    assert fused / found[terms.OPERANDS] == pytest.approx(2.2, rel=0.2)  # what was missing where the copy was rated like its own
    assert fused / found[terms.COPY] == pytest.approx(1.0, rel=0.2)


def test_copies_without_a_scale_of_their_own_are_not_rated():
    """A reader whose weight gradient is in 8 bit makes its own copy, and the noise of float8 hardly depends on the scale."""
    for variant in (attrs.evolve(FORWARD, grad_weight=INT8), Variant.of(Precision.FLOAT8_E4M3FN), Variant.of(Precision.BFLOAT16)):
        found = {term for op_id, _, term in HutchinsonCollector().collect_step(_step(), [variant]) if op_id == READER}
        assert terms.OPERANDS in found
        assert not found & {terms.COPY, terms.COPY_FLIPS, terms.COPY_NOISE}
