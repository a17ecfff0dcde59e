"""How all weight gradients respond to noise on the operands of every operator at once (DESIGN 6.1).

With g = ∂L/∂θ, a direction u over all parameters and noise e added to some tensor of the step, h = ∂⟨g, u⟩/∂e is one double
backward pass away, for every tensor at once.  For u of independent random signs, E[h_j²] = ‖∂g/∂e_j‖².

The tensors are copies made at each call of an operator: of its activation, of its weight, of the gradient that comes in and of the
one that goes out; and its output.  A copy belongs to one operator, as the cast that ``apply_`` puts there does, and is read by
its forward product and by its backward ones, as the saved cast is.  Responses are handed on as they arise and not kept.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from qsync_core.dag import Operator
from qsync_torch.observing import convolution
from qsync_torch.observing.geometry import Geometry


class Place(enum.StrEnum):
    """A tensor of a call that rounding adds noise to."""

    X = "x"
    WEIGHT = "weight"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"


@attrs.define(eq=False, slots=False)
class Site:
    """One call of an operator and the values around it, detached.

    Attributes:
        operator, geometry: what was called.
        x, weight: its operands.
        parameter: the weight as it was handed over, with its graph.
        output_variance: mean over channels (features) of the variance of the output, 0-d.
        grad_output, grad_input: gradients of the loss; None until backward has passed, or where nobody asks for the input's.
    """

    operator: Operator
    geometry: Geometry
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    parameter: torch.Tensor
    output_variance: torch.Tensor
    grad_output: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None

    @functools.cached_property
    def output(self) -> torch.Tensor:
        """The output, computed anew: the one of the forward pass may have been overwritten in place since."""
        with torch.no_grad():
            return self.geometry.product(self.x, self.weight, self.bias)


Respond = Callable[[Site, Place, torch.Tensor], None]


class NoiseResponse:
    """A watcher (:mod:`.watch`) of one forward pass; afterwards :meth:`differentiate`, then :meth:`respond` as often as wanted.

    Args:
        respond: called in the second backward pass for every site and place, with h of the tensor's shape.
    """

    def __init__(self, respond: Respond) -> None:
        self.sites: list[Site] = []
        self._hand_on = respond
        self._leaves: list[torch.Tensor] = []
        self._gradients: tuple[torch.Tensor, ...] = ()
        self._parameters: list[torch.Tensor] = []
        self._second = False

    def start_forward(self) -> None:
        """The model's forward begins."""

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """Run the operator on copies of its operands."""
        x_copy, weight_copy = self._copy(x), self._copy(weight)
        output = convolution.product(x_copy, weight_copy, bias, geometry)
        channel = 1 if weight.dim() == 4 and output.dim() == 4 else output.dim() - 1
        others = [dim for dim in range(output.dim()) if dim != channel]
        variance = output.detach().var(dim=others, correction=0).mean() if others else output.detach().new_zeros(())
        bias_values = None if bias is None else bias.detach()
        site = Site(operator, geometry, x.detach(), weight.detach(), bias_values, weight, variance)
        self.sites.append(site)
        for place, tensor in ((Place.X, x_copy), (Place.WEIGHT, weight_copy), (Place.OUTPUT, output)):
            tensor.register_hook(functools.partial(self._passed, site, place))
        return output

    def differentiate(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Mapping[torch.Tensor, torch.Tensor]:
        """First backward pass: the gradient of every parameter that the loss depends on, detached."""
        gradients = torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True)
        reached = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        self._second = True
        self._gradients = tuple(g for _, g in reached)
        self._parameters = [p for p, _ in reached]
        return {p: g.detach() for p, g in reached}

    def respond(self, direction: Mapping[torch.Tensor, torch.Tensor], *, again: bool) -> None:
        """Second backward pass, of ⟨g, direction⟩; hands on every response.

        Args:
            direction: u, a tensor per parameter.
            again: whether the graph is needed once more.
        """
        pairs = [(g, direction[p]) for p, g in zip(self._parameters, self._gradients, strict=True) if g.requires_grad]
        if not pairs:
            return
        torch.autograd.grad(
            [g for g, _ in pairs],
            [*self._parameters, *self._leaves],
            [u for _, u in pairs],
            retain_graph=again,
            allow_unused=True,
        )

    def release(self) -> None:
        """Let go of the graph.  Its hooks hold this object, and references through a graph are not seen by the garbage collector."""
        self._gradients = ()
        self._parameters.clear()
        self._leaves.clear()
        self.sites.clear()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values with a response of its own."""
        if tensor.requires_grad:
            return tensor.view_as(tensor)
        copy = tensor.detach().requires_grad_()
        self._leaves.append(copy)
        return copy

    def _responded(self, site: Site, place: Place, response: torch.Tensor) -> None:
        self._hand_on(site, place, response.detach())

    def _passed(self, site: Site, place: Place, grad: torch.Tensor) -> torch.Tensor | None:
        """A gradient comes by: in the first pass that of the loss, in the second a response."""
        if self._second:
            self._hand_on(site, place, grad.detach())
            return None
        if place is Place.WEIGHT:
            return None
        noisy = Place.GRAD_OUTPUT if place is Place.OUTPUT else Place.GRAD_INPUT
        setattr(site, noisy, grad.detach())
        copy = self._copy(grad)
        copy.register_hook(functools.partial(self._responded, site, noisy))
        return copy
