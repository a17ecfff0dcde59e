"""What fused chains cost: each distinct chain in every way to run that a plan may lead to.

See docs/design/cost-mapper.md#fused-chains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from qsync_core.chains.calls import eps_of
from qsync_core.chains.finding import chains_of
from qsync_core.ir.chain import Chain, ChainVariant, Producer
from qsync_core.ir.dag import PrecisionDag
from qsync_core.ir.op_id import OpId
from qsync_core.ir.precision import Precision
from qsync_core.ir.semantics import ChainRun, chain_run, possible_results
from qsync_core.ir.variant import Variant
from qsync_core.kernels.backend import KernelRequest
from qsync_core.kernels.choice import KernelChoice
from qsync_torch.dtypes import TORCH_DTYPE
from qsync_torch.kernels.producers import ProducerBinding, producer_binding
from qsync_torch.operators.chains import CHAINS
from qsync_torch.profiling.benchmark_case import BenchmarkCase, ReadyCall
from qsync_torch.profiling.cast_cost import activation_precisions
from qsync_torch.tracing.aten_call import AtenCall

KEPT = (ChainVariant(), ChainVariant(saved=Precision.INT8))
"""How a fused chain may keep its input."""


@attrs.frozen
class ChainItem:
    """One distinct measurement and the chains that it holds for.

    Attributes:
        chain: the first of them.
        shape: of the operand of its kernels: (B, C, H, W) of a batch norm, (M, K) of the others.
        images: the last two dimensions are an image's; channels are the second.
    """

    chain: Chain
    run: ChainRun
    holders: tuple[OpId, ...]
    shape: tuple[int, ...]
    images: bool

    @property
    def name(self) -> str:
        """The name under which its measurement is kept."""
        return f"chain {self.holders[0]} {self.run.form.attributes} {self.run.form.float_result} {self.run.variant}"

    def binding(self, choice: KernelChoice) -> ProducerBinding:
        """The chain's call of a backend's kernels."""
        return producer_binding(self.chain.producer, self.run.variant, choice, self.run.form)

    def requests(self, device: torch.device) -> tuple[KernelRequest, KernelRequest]:
        """Ask for the chain's kernels, forward and backward."""
        binding = self.binding(KernelChoice())
        return binding.request(binding.output_op, device, self.shape), binding.request(binding.grad_op, device, self.shape)


def distinct_chains(dag: PrecisionDag, ladder: Sequence[Variant]) -> list[ChainItem]:
    """Each distinct chain in every way to run once, with all chains that share it.

    Args:
        ladder: what every reader of a result may run in.
    """
    formats = activation_precisions(ladder)
    holders: dict[tuple[tuple[object, ...], ChainRun], list[Chain]] = {}
    for chain in chains_of(dag):
        members = [dag[member] for member in chain.members]
        if any(AtenCall.of(member) is None for member in members):
            continue
        key = (
            chain.producer,
            _is_of_images(dag, chain),
            members[0].inputs.index(chain.x),
            *((member.cost_key, member.no_grad_inputs) for member in members),
        )
        results = possible_results(chain, [ladder] * len(chain.product_readers))
        for way in itertools.product(KEPT, results, formats):
            holders.setdefault((key, chain_run(chain, *way)), []).append(chain)
    found = []
    for (_, run), chains in holders.items():
        names, images = tuple(chain.name for chain in chains), _is_of_images(dag, chains[0])
        found.append(ChainItem(chains[0], run, names, _kernel_shape(dag, chains[0], images), images))
    return found


def _is_of_images(dag: PrecisionDag, chain: Chain) -> bool:
    """Whether rows of the result are positions of images, as convolutions read them."""
    if chain.product_readers:
        return dag[chain.product_readers[0]].is_convolution
    return len(dag[chain.last].output_shape) == 4


def _kernel_shape(dag: PrecisionDag, chain: Chain, images: bool) -> tuple[int, ...]:
    shape = dag[chain.last].output_shape
    if chain.producer is Producer.BATCH_NORM:
        return shape
    width = shape[1 if images and chain.producer is Producer.ACTIVATION else -1]
    return math.prod(shape) // max(1, width), width


def chain_case(dag: PrecisionDag, item: ChainItem, choice: KernelChoice, device: torch.device) -> BenchmarkCase:
    """Fresh random operands for a fused chain, in the layouts of the trace, and its call as compiled graphs make it.

    Args:
        dag: the graph that it is of.
        item: the chain and how it runs.
    """
    chain, binding = item.chain, item.binding(choice)
    dtype = TORCH_DTYPE[item.run.variant.output]
    operands: dict[tuple[OpId, int], torch.Tensor] = {}
    for member in (dag[name] for name in chain.members):
        made = _call_of(dag, member.op_id).make_inputs([dtype] * len(member.inputs), device)
        for index, (source, tensor) in enumerate(zip(member.inputs, made, strict=True)):
            operands.setdefault((source, member.view(index)), tensor.requires_grad_(index not in member.no_grad_inputs))
    residual, factor = (_last_of(operands, name) for name in (chain.residual, chain.factor))
    x = next(tensor for (source, _), tensor in operands.items() if source == chain.x)
    streams = binding.key, 1, torch.zeros(1, dtype=torch.int64, device=device)
    affine, buffers = _affine(dag, chain, device), list[torch.Tensor]()
    arguments: tuple[Any, ...]
    match chain.producer:
        case Producer.ACTIVATION:
            arguments = (x, item.images)
        case Producer.GLU:
            arguments = (x, factor)
        case Producer.LAYER_NORM:
            args = _call_of(dag, chain.name).args
            arguments = (x, *affine, args[4] if len(args) > 4 else 1e-5, residual)
        case Producer.RMS_NORM:
            arguments = (x, *affine, eps_of(dag, chain.name), residual)
        case Producer.BATCH_NORM:
            args = _call_of(dag, chain.name).args
            if args[3] is not None:
                buffers = [
                    torch.zeros(x.shape[1], dtype=torch.float32, device=device),
                    torch.ones(x.shape[1], dtype=torch.float32, device=device),
                ]
            absmax = None if residual is None else residual.detach().abs().amax().float().view(1)
            arguments = (x, *affine, *(buffers or (None, None)), *args[6:8], residual, absmax)
    run = partial(CHAINS[chain.producer], *arguments, *streams)
    trained = [tensor for tensor in affine if tensor is not None]
    activations = tuple({id(tensor): tensor for tensor in (x, residual, factor) if tensor is not None}.values())
    wanted = tuple(tensor for tensor in (*activations, *trained) if tensor.requires_grad)
    is_channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return BenchmarkCase(
        lambda: ReadyCall(run, wanted),
        activations,
        (*trained, *buffers),
        gradient_layout=torch.channels_last if is_channels_last else torch.contiguous_format,
    )


def _last_of(operands: Mapping[tuple[OpId, int], torch.Tensor], name: OpId | None) -> torch.Tensor | None:
    """What a chain reads of an operator; a gated unit may read two parts of one, of which the function's comes first."""
    return [tensor for (source, _), tensor in operands.items() if source == name][-1] if name is not None else None


def _affine(dag: PrecisionDag, chain: Chain, device: torch.device) -> list[torch.Tensor | None]:
    """Weight and bias of a norm as its kernels take them, in float32; of an RMS norm a weight alone."""
    if not chain.producer.normalizes:
        return []
    if chain.weight is not None:
        return [torch.randn(dag[chain.last].output_shape[-1:], dtype=torch.float32, device=device).requires_grad_()]
    written_out = chain.producer is Producer.RMS_NORM and dag[chain.name].kind != "rms_norm"
    call = _call_of(dag, chain.last if written_out else chain.name)
    parameters = [parameter.requires_grad_() for parameter in call.make_parameters(device)]
    if written_out:
        return [*parameters, None][:1]
    first = 1 if chain.producer is Producer.BATCH_NORM else 2
    specs = (call.args + [None] * 2)[first : first + (1 if chain.producer is Producer.RMS_NORM else 2)]
    return [None if spec is None else parameters[spec["parameter"]] for spec in specs]


def _call_of(dag: PrecisionDag, name: OpId) -> AtenCall:
    call = AtenCall.of(dag[name])
    assert call is not None, f"{name} carries no call"
    return call
