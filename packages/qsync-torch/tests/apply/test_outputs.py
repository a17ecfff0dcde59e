"""Outputs of a model under a plan leave in float32, whatever holds them."""

import dataclasses
import functools
import types

import pytest
import torch
from torch import nn

from qsync_torch import apply_

from .small_models import BFLOAT16, named
from .two_layers import BOTH, TwoLayers


def test_parts_leave_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply_(model, named(**{"0": BFLOAT16, "1": BFLOAT16}))
    assert model[0](torch.randn(3, 4)).dtype is torch.float32


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    rest: list


class Own:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = "value"


class Rows(list):
    pass


class Named(dict):
    pass


class Private:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value

    def get(self):
        return self.__value


class Pair(tuple):
    def first(self):
        return self[0]


ANEW = ["private slots", "tuple of a class", "set", "read-only dict", "values of a dict"]
LATER = ["iterator", "map", "generator in a list", "closure", "default", "partial", "method of a tensor", "method of an object"]


@pytest.mark.parametrize(
    "wrap", ["dataclass", "own", "slots", "nested", "list of a class", "dict of a class", "distribution", *ANEW, *LATER]
)
def test_outputs_leave_in_float32_whatever_holds_them(x, wrap):
    def hold(y):
        slotted = Slotted()
        slotted.value = y
        return {
            "dataclass": lambda: Result(y, [y, {"y": y}]),
            "own": lambda: Own({"y": y}),
            "slots": lambda: slotted,
            "nested": lambda: {"r": [Result(y, [Own(y)])]},
            "list of a class": lambda: Rows([y]),
            "dict of a class": lambda: Named({"y": y}),
            "distribution": lambda: torch.distributions.Normal(y, torch.ones_like(y), validate_args=False),
            "private slots": lambda: Private(y),
            "tuple of a class": lambda: Pair((y, {"y": y})),
            "set": lambda: {y},
            "read-only dict": lambda: types.MappingProxyType({"y": [y]}),
            "values of a dict": lambda: {"y": y}.values(),
            "iterator": lambda: iter([y]),
            "map": lambda: map(torch.abs, [y]),
            "generator in a list": lambda: [(part for part in [y])],
            "closure": lambda: lambda: y,
            "default": lambda: lambda y=y: y,
            "partial": lambda: functools.partial(torch.mul, y, other=2),
            "method of a tensor": lambda: y.abs,
            "method of an object": lambda: Private(y).get,
        }[wrap]()

    class Holding(TwoLayers):
        def forward(self, x):
            return hold(self.body(x))

    model = Holding()
    apply_(model, BOTH)
    output = model(x)
    tensors = {
        "dataclass": lambda: [output.logits, output.rest[0], output.rest[1]["y"]],
        "own": lambda: [output.value["y"]],
        "slots": lambda: [output.value],
        "nested": lambda: [output["r"][0].logits, output["r"][0].rest[0].value],
        "list of a class": lambda: list(output),
        "dict of a class": lambda: list(output.values()),
        "distribution": lambda: [output.loc, output.scale],
        "private slots": lambda: [output.get()],
        "tuple of a class": lambda: [output.first(), output[1]["y"]],
        "set": lambda: list(output),
        "read-only dict": lambda: output["y"],
        "values of a dict": lambda: list(output),
        "iterator": lambda: list(output),
        "map": lambda: list(output),
        "generator in a list": lambda: list(output[0]),
        **dict.fromkeys(["closure", "default", "partial", "method of a tensor", "method of an object"], lambda: [output()]),
    }[wrap]()
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    tensors[0].sum().backward()
    assert model.a.weight.grad.abs().sum() > 0


def test_an_output_that_refers_to_itself(x):
    class Cyclic(TwoLayers):
        def forward(self, x):
            found = Own(self.body(x))
            found.me = found
            return found

    model = Cyclic()
    apply_(model, BOTH)
    assert model(x).value.dtype is torch.float32


def test_objects_of_an_output_that_refer_to_each_other_are_met_once(x):
    """A grid of neighbours has more ways through it than can be walked; what is one object or tuple stays one."""
    side = 6

    class Grid(TwoLayers):
        def forward(self, x):
            y = self.body(x)
            pair = Pair((y, y + 1))
            cells = [[Own(y * (row * side + column)) for column in range(side)] for row in range(side)]
            for row in range(side):
                for column in range(side):
                    cell = cells[row][column]
                    cell.down, cell.right = cells[(row + 1) % side][column], cells[row][(column + 1) % side]
                    cell.up, cell.left = cells[row - 1][column], [cells[row][column - 1]]
                    cell.pair = pair
            return cells[0][0]

    model = Grid()
    apply_(model, BOTH)
    corner = model(x)
    below, cells = corner, []
    for _ in range(side):
        cell = below
        for _ in range(side):
            cells.append(cell)
            cell = cell.right
        assert cell is below
        below = below.down
    assert below is corner
    assert len({id(cell) for cell in cells}) == side * side
    assert {cell.value.dtype for cell in cells} == {torch.float32}
    assert {id(cell.pair) for cell in cells} == {id(corner.pair)}
    assert {part.dtype for part in corner.pair} == {torch.float32}
    assert all(cell.right.left[0] is cell and cell.down.up is cell for cell in cells)


class Remembers(nn.Module):
    """Puts another tensor into the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.fc(x)
        self.mean = y.detach().mean(0)
        return y + self.mean


@pytest.mark.parametrize("part", [True, False])
def test_buffers_that_a_forward_replaces_stay_in_float32(part):
    model = nn.Sequential(Remembers())
    apply_(model, named(**{"0.fc": BFLOAT16}))
    (model[0] if part else model)(torch.randn(4, 16))
    assert model.state_dict()["0.mean"].dtype is torch.float32
    assert model[0].mean.any()
