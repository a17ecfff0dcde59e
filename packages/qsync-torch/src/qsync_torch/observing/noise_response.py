"""How all weight gradients respond to noise on the operands of every operator at once (docs/design/indicator.md#propagation).

With g = ∂L/∂θ, a direction u over all parameters and noise e added to some tensor of the step, h = ∂⟨g, u⟩/∂e is one double
backward pass away, for every tensor at once.  For u of independent random signs, E[h_j²] = ‖∂g/∂e_j‖².

The tensors are copies made at each call of an operator: of its activation, its weight and its bias, of the gradient that comes
in and of the one that goes out; and its output.  A copy belongs to one operator, as the cast that ``apply_`` puts there does, and
is read by its forward product and by its backward ones, as the saved cast is.  Responses are handed on as they arise and not kept.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch.autograd.graph import GradientEdge

from qsync_core.geometry import Geometry
from qsync_core.ir.dag import Operator
from qsync_core.ir.noise import EXACT, GradientCopies
from qsync_core.ir.semantics import CastTarget
from qsync_torch.kernels.library_ops import rows
from qsync_torch.kinds.products import product
from qsync_torch.observing.collector import parameter_of
from qsync_torch.observing.mask_flips import Masks
from qsync_torch.observing.rounding_noise import Scales, cast_scale
from qsync_torch.observing.second_derivatives import differentiable_product
from qsync_torch.operators.channel_factors import largest_by_column, next_factors
from qsync_torch.torch_internals import version_of


class Place(enum.StrEnum):
    """A tensor of a call that rounding adds noise to."""

    X = "x"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"


@attrs.define(eq=False, slots=False)
class Site:
    """One call of an operator and the values around it, detached.

    Attributes:
        parameter, bias_parameter: the weight and the bias as they were handed over, with their graphs.
        masks_before: how many masks ran before the call.
        kept: the output itself, where it costs little: what follows a convolution keeps it anyway.
        grad_output, grad_input: gradients of the loss; None until backward has passed, and for an input that needs none.
        scales: of the operands, as far as they have been computed.
    """

    operator: Operator
    geometry: Geometry
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    parameter: torch.Tensor
    bias_parameter: torch.Tensor | None
    masks_before: int
    kept: torch.Tensor | None = None
    grad_output: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None
    scales: defaultdict[Place, Scales] = attrs.field(factory=lambda: defaultdict(dict))

    def __attrs_post_init__(self) -> None:
        self._kept_version = None if self.kept is None else version_of(self.kept)

    @functools.cached_property
    def output(self) -> torch.Tensor:
        """The output, computed anew where it was not kept or has been overwritten in place since."""
        if self.kept is not None and version_of(self.kept) == self._kept_version:
            return self.kept
        with torch.no_grad():
            return product(self.x, self.weight, self.bias, self.geometry)

    @functools.cached_property
    def factor(self) -> torch.Tensor | None:
        """The factors of the input channels, were this step's magnitudes the last one's; None of a convolution."""
        if self.weight.dim() > 2:
            return None
        x, w = largest_by_column(self.x), largest_by_column(self.weight)
        return next_factors(torch.ones_like(w), x, w)

    def operand(self, place: Place) -> torch.Tensor:
        """The values of ``x``, ``weight`` or ``bias``."""
        found = {Place.X: self.x, Place.WEIGHT: self.weight, Place.BIAS: self.bias}[place]
        assert found is not None
        return found

    def handed_over(self, place: Place) -> torch.Tensor:
        """The weight or the bias with its graph."""
        found = {Place.WEIGHT: self.parameter, Place.BIAS: self.bias_parameter}[place]
        assert found is not None
        return found


class Phase(enum.Enum):
    """What a backward pass carries."""

    FORWARD = enum.auto()
    """None has begun."""
    GRADIENT = enum.auto()
    """The gradient of the loss, with its graph."""
    RESPONSE = enum.auto()
    """The gradient of ⟨g, u⟩: Σ σ²·h² is the smooth part."""
    AGAIN = enum.auto()
    """The same along a further direction."""
    FLIPS = enum.auto()
    """What masks' windows add to it, with a random sign for every element of a mask."""


Respond = Callable[[Phase, Site, Place, torch.Tensor], None]


class NoiseResponse:
    """A call hook of one forward pass, and the backward passes after it, in the order of :class:`Phase`.

    Args:
        respond: called for every site and place with a response of the tensor's shape; in the pass of the gradient for weights
            and biases alone, with their gradients.
        masks: active during the forward pass.

    Attributes:
        sites: the calls of the forward pass.
        phase: what the present backward pass carries.
    """

    def __init__(self, respond: Respond, masks: Masks) -> None:
        self.sites: list[Site] = []
        self._hand_on = respond
        self._masks = masks
        self._leaves: list[torch.Tensor] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.phase = Phase.FORWARD

    def start_forward(self) -> None:
        """The model's forward begins."""

    def call(
        self, operator: Operator, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry
    ) -> torch.Tensor:
        """Run the operator on copies of its operands."""
        if not torch.is_grad_enabled():
            return product(x, weight, bias, geometry)
        x_copy, weight_copy = self.copy(x), self.copy(weight)
        bias_copy = None if bias is None else self.copy(bias)
        output = differentiable_product(x_copy, weight_copy, bias_copy, geometry)
        bias_values = None if bias is None else bias.detach()
        kept = output.detach() if weight.dim() > 2 else None
        site = Site(operator, geometry, x.detach(), weight.detach(), bias_values, weight, bias, len(self._masks.seen), kept)
        self.sites.append(site)
        places = ((Place.X, x_copy), (Place.WEIGHT, weight_copy), (Place.BIAS, bias_copy), (Place.OUTPUT, output))
        for place, tensor in places:
            if tensor is not None:
                tensor.register_hook(functools.partial(self._passed, site, place))
        return output

    def carry_back(self, edges: Sequence[GradientEdge], flips: Sequence[torch.Tensor]) -> None:
        """Last backward pass, of ⟨tensors, flips⟩ through the forward pass; hands on every response.

        Args:
            edges: where the graphs of what masks read begin; flips: of the tensors' shapes.
        """
        self.phase = Phase.FLIPS
        torch.autograd.backward(list(edges), list(flips))

    def differentiate(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Backward pass of the gradient; the norm of that of all parameters, 0-d."""
        self.phase = Phase.GRADIENT
        gradients = torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True)
        self._gradients = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        return torch.nn.utils.get_total_norm([g.detach() for _, g in self._gradients])

    def respond(self, direction: Callable[[int], Mapping[torch.Tensor, torch.Tensor]], count: int, *, again: bool) -> None:
        """Second backward passes, of ⟨g, direction⟩; hand on every response and release the graph of g.

        Every node is visited, not only those that lead somewhere: one without a second derivative says so only then.

        Args:
            direction: the u of each pass by its number, a tensor per parameter.
            count: how many passes; those after the first are :attr:`Phase.AGAIN`.
            again: whether the graph of the forward pass is needed once more.
        """
        differentiable = [(p, g) for p, g in self._gradients if g.requires_grad]
        self._gradients.clear()
        for number in range(count):
            self.phase = Phase.AGAIN if number else Phase.RESPONSE
            u = direction(number)
            if differentiable:
                parameters, gradients = zip(*differentiable, strict=True)
                torch.autograd.backward(gradients, [u[p] for p in parameters], retain_graph=again or number < count - 1)

    def release(self) -> None:
        """Release the graph.  Its hooks hold this object, and the garbage collector does not see references through a graph."""
        self._gradients.clear()
        self._leaves.clear()
        self.sites.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values with a response of its own."""
        if tensor.requires_grad:
            return tensor.view_as(tensor)
        copy = tensor.detach().requires_grad_()
        self._leaves.append(copy)
        return copy

    def _passed(self, site: Site, place: Place, grad: torch.Tensor) -> torch.Tensor | None:
        """A backward pass reaches a tensor of a call."""
        if self.phase is not Phase.GRADIENT:
            self._hand_on(self.phase, site, place, grad.detach())
            return None
        if place in (Place.WEIGHT, Place.BIAS):
            self._hand_on(self.phase, site, place, grad.detach())
            return None
        noisy = Place.GRAD_OUTPUT if place is Place.OUTPUT else Place.GRAD_INPUT
        # Only the gradient of the output is in memory anyway; of the other one, two bytes tell the spacing of a format as well.
        setattr(site, noisy, grad.detach() if noisy is Place.GRAD_OUTPUT else grad.detach().bfloat16())
        copy = self.copy(grad)
        copy.register_hook(functools.partial(self._responded, site, noisy))
        return copy

    def _responded(self, site: Site, place: Place, response: torch.Tensor) -> None:
        self._hand_on(self.phase, site, place, response.detach())


def lowered_copies(
    site: Site, copies: GradientCopies, grad: torch.Tensor, h: torch.Tensor, direction: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[CastTarget, torch.Tensor, torch.Tensor]]:
    """The copies that products read in a lower format: the cast, what is cast, and the response to noise on that.

    Args:
        site: the call; copies: of the variant.
        grad: the gradient of the call's output.
        h: the response of all weight gradients, along a direction u, to noise on ``grad`` wherever it is read.
        direction: u, a tensor per trainable parameter.
    """
    if copies.shared and not copies.to_input.precision.needs_scale:
        yield copies.to_input, grad, h
        return
    # ⟨g, u⟩ depends on the copy for the weight's gradient by ⟨grad_outputᵀ·x, u⟩ alone and on that for the bias's by ⟨grad, u⟩;
    # the rest goes through the input's.  A bias's gradient is the sum of a float copy if there is one, else of the gradient itself.
    of_bias = None if site.bias_parameter is None else direction.get(site.bias_parameter)
    by_bias = torch.zeros_like(h) if of_bias is None else _by_output_channel(site, of_bias)
    if copies.shared:
        yield copies.to_input, *_multiplied(site, copies, grad, h - by_bias)
        return
    stored, is_transposed = parameter_of(site.parameter)
    of_weight = direction.get(stored)
    if of_weight is not None and is_transposed:
        of_weight = of_weight.transpose(0, 1)
    by_weight = torch.zeros_like(h) if of_weight is None else product(site.x, of_weight, None, site.geometry)
    by_input = h - by_weight - by_bias
    if not copies.to_weight.precision.needs_scale:
        by_weight = by_weight + by_bias
    elif not copies.to_input.precision.needs_scale:
        by_input = by_input + by_bias
    if copies.by_column is not None:
        x = site.x / site.factor if copies.by_column.factored and site.factor is not None else site.x
        of_rows = cast_scale(x, copies.by_column.precision, copies.by_column.granularity)
        scaled, its_response = (rows(of).t().contiguous() for of in (grad * of_rows, by_weight / of_rows))
        yield copies.to_weight, scaled, its_response
    elif copies.to_weight != EXACT:
        yield copies.to_weight, grad, by_weight
    if copies.to_input != EXACT:
        yield copies.to_input, *_multiplied(site, copies, grad, by_input)


def _multiplied(site: Site, copies: GradientCopies, grad: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is cast for the input's gradient, and the response to noise on that."""
    if copies.multiplied is None or 0 in site.operator.no_grad_inputs:
        return grad, h
    weight = site.weight * site.factor if copies.multiplied.factored and site.factor is not None else site.weight
    scale = cast_scale(weight, copies.multiplied.precision, copies.multiplied.granularity).flatten()
    factor = _by_output_channel(site, scale)
    return grad * factor, h / factor


def _by_output_channel(site: Site, values: torch.Tensor) -> torch.Tensor:
    """A number per output channel, to be broadcast to the output."""
    return values.view(-1, *(1,) * (site.weight.dim() - 2))
