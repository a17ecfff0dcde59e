"""Small models with the chains of the usual families, and their steps."""

import torch
import torch.nn.functional as F
from torch import nn

import qsync_torch as qsync
from qsync_core.ir.formats import OutputFormats
from qsync_core.ir.op_id import OpId
from qsync_core.ir.plan import Assignment, ChainAssignment, GroupPlan, PrecisionPlan, Role
from qsync_core.ir.precision import Precision
from qsync_core.ir.profile import DeviceKind, DeviceType
from qsync_core.ir.variant import Variant
from qsync_torch.apply.applied_plan import applied_to

INT8 = Variant.parse("int8>float32")


def lowered(model, variant=INT8, without=()):
    """Every linear and convolution module in a variant."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
    return {OpId(name): variant for name, module in modules if name not in without}


def images(batch=4, channels=8, size=6):
    """Channels-last, as the kernels want them."""
    return torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)


class Bottleneck(nn.Module):
    def __init__(self, width_in, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Two blocks, the first of which changes the number of channels, as torchvision writes them."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Bottleneck(8, 16), Bottleneck(16, 16), Bottleneck(16, 16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


class Vgg(nn.Module):
    """A pooling stands between one ReLU and its convolution; the last two have no batch norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


class Bert(nn.Module):
    """A layer that normalizes after each sum; Q, K and V read one tensor, which is the next sum's shortcut too."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.norm0 = nn.Linear(width, width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, 4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        x = self.norm0(self.embed(x))
        attended = F.scaled_dot_product_attention(self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None])[:, 0]
        x = self.norm1(self.dropout(self.o(attended)) + x)
        x = self.norm2(self.down(F.gelu(self.up(x))) + x)
        return self.head(x)


class Llama(nn.Module):
    """Normalizes without a mean, and multiplies the activation with another tensor."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def tokens(width=16):
    return torch.randn(2, 5, width)


def step(run, model, x):
    """Result, gradient of the input, and gradients by the parameters' names."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    if (applied := applied_to(model)) is not None:
        applied.advance()
    return {"y": y.detach().clone(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def distance(found, expected):
    """The largest difference of a tensor in relation to it; a gradient that is next to nothing has no digits to compare."""
    nothing = 1e-3 * max(float(value.norm()) for value in expected.values())
    return max(float((found[name] - value).norm() / (value.norm() + nothing)) for name, value in expected.items())


def plan_of(model, variant, chains, backend="aten", forms=None, base=Precision.FLOAT32, without=()):
    """A plan of one group with all linears and convolutions in a variant, and what it says of chains by their names."""
    variants = lowered(model, variant, without)
    said = {OpId.parse(name): ChainAssignment(how, backend if how.fused else "", "", "") for name, how in chains.items()}
    forms = {OpId.parse(name): form for name, form in (forms or {}).items()}
    group = GroupPlan(
        "infer", Role.INFER, 1, DeviceType("cpu", DeviceKind.CPU), base,
        {name: Assignment(variant, "aten", "", "") for name, variant in variants.items()}, chains=said, chain_forms=forms,
    )  # fmt: skip
    return PrecisionPlan(
        "chained", "", tuple(variants), {}, "greedy", "lossvar", time_limit_ns=1, predicted_iteration_ns=1, objective=0.0,
        bound=None, groups=(group,), rank0_group="infer", output_formats=OutputFormats(decides=False), base=base,
    )  # fmt: skip


def compiled(model, plan, **options):
    """Without inductor, which takes long."""
    return qsync.compile(model, plan, **({"backend": "aot_eager", "fullgraph": True} | options))
