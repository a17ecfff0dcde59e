"""What an operator has to do at least: bytes to move, operations by format, kernels to start (docs/absent-gpus.md#the-rule).

Bytes count every operand once, and once more for each pass over memory that kernels are known to make: batch normalisation reads
its input for the statistics and again for the result, ATen's 8-bit operators write what lies between their steps.  Counted apart
are transpositions, as of contiguous images for a tensor core's convolution and back, and the transforms of Winograd's algorithm.
"""

from __future__ import annotations

import math

import attrs

from qsync_core.geometry import Geometry
from qsync_core.ir.dag import Operator, PrecisionDag
from qsync_core.ir.functions import function_of
from qsync_core.ir.precision import Precision, Rounding
from qsync_core.ir.profile import CastKey, Profile
from qsync_core.ir.variant import Variant
from qsync_core.kinds import KINDS

_INTEGER_OUTPUT_BYTES = 16
"""ATen's 8-bit product: int32 sums are read, scaled to float32, and read and written once more with the bias."""
_RESIDENT_BLOCKS = 3
"""Blocks of 512 threads, one per channel in batch normalisation, that a multiprocessor runs at a time."""
_NORM_COLUMNS, _NORM_ROWS = 32, 2**16
"""Features whose gradients one block of ATen's layer normalisation sums, over all rows; of more rows than that, many blocks do."""
_PRODUCT_TILE = 64
"""Rows and columns of the smallest tiles that libraries make products in without splitting sums."""
_TILE = 36 / 16
"""Winograd's F(4×4, 3×3): a tile of 6 × 6 for every 4 × 4 elements (Lavin and Gray, 2015)."""


@attrs.frozen
class Work:
    """What one phase of an operator has to do.

    Attributes:
        nbytes: read and written.
        launches: kernels that it starts, at least.
        products: operations by format.
        blocks: how many multiprocessors can share its work; 0 for any number.
        transposed: bytes read and written by kernels that only transpose.
        transforms: bytes read and written around float32 products if Winograd's algorithm makes them; 0 where it cannot.
        tiles: of 64 × 64 results, the smallest that products are made in, each by one multiprocessor; 0 for any number.
    """

    nbytes: float
    launches: int = 1
    products: tuple[tuple[Precision, int], ...] = ()
    blocks: float = 0.0
    transposed: float = 0.0
    transforms: float = 0.0
    tiles: float = 0.0


def work_of(operator: Operator, run: Variant, backend: str, contiguous: bool) -> tuple[Work, Work]:
    """The forward and the backward of an operator.

    Args:
        run: the variant that it runs in.
        contiguous: whether images lie channel by channel in memory.
    """
    if operator.weight_shape and operator.kind in KINDS:
        return _weighted(operator, run, backend == "aten", contiguous and operator.is_convolution)
    size = run.compute.nbytes
    inputs, output = sum(map(math.prod, operator.input_shapes)), operator.output_numel
    if operator.kind == "batch_norm":
        blocks = operator.input_shapes[0][1] / _RESIDENT_BLOCKS if len(operator.input_shapes[0]) > 1 else 0.0
        return Work(3 * output * size, blocks=blocks), Work(5 * output * size, blocks=blocks)
    if operator.kind == "layer_norm" and operator.parameters:
        columns = operator.input_shapes[0][-1]
        blocks = columns / _NORM_COLUMNS if output <= columns * _NORM_ROWS else 0.0
        return Work((inputs + output) * size), Work((inputs + 2 * output) * size, blocks=blocks)
    if operator.kind == "contiguous":
        copy = Work(0, transposed=(inputs + output) * size)
        return copy, copy
    is_product = function_of(operator.kind).is_product
    forward = ((run.compute, operator.flops),) if is_product else ()
    backward = ((run.compute, 2 * operator.flops),) if is_product else ()
    return Work((inputs + output) * size, products=forward), Work((inputs + 2 * output) * size, products=backward)


def _weighted(operator: Operator, run: Variant, eager: bool, image: bool) -> tuple[Work, Work]:
    """A linear or convolution; ``image``: a convolution of contiguous tensors; ``eager``: by ATen, step by step."""
    x, w, out = operator.input_numel(0), operator.weight_numel, operator.output_numel

    def transposed(precision: Precision) -> int:
        """Bytes of activation and output that a tensor core's convolution reads and writes once more."""
        return 2 * precision.nbytes * (x + out) if image and precision is not Precision.FLOAT32 else 0

    def transforms(precision: Precision) -> float:
        """Bytes of tiles, and of 36 values for each 9 of the weight, that Winograd's algorithm writes and reads once."""
        possible = precision is Precision.FLOAT32 and _allows_winograd(operator)
        return 2 * precision.nbytes * (_TILE * (x + out) + 4 * w) if possible else 0.0

    nbytes, launches = (x + w) * run.compute.nbytes + out * run.output.nbytes, 1
    turned = transposed(run.compute)
    if not run.compute.needs_scale:
        launches += 2 * (turned > 0)
    elif eager:
        nbytes, launches = nbytes + out * _INTEGER_OUTPUT_BYTES, 4
        if operator.is_convolution:
            patches = out // operator.weight_shape[0] * math.prod(operator.weight_shape[1:])
            nbytes += 2 * patches * (math.prod(operator.weight_shape[2:]) > 1)
            turned = image * (2 * x + 2 * out * run.output.nbytes)
            launches += 3
    columns = operator.weight_shape[0]
    forward = Work(
        nbytes,
        launches,
        ((run.compute, operator.flops),),
        transposed=turned,
        transforms=transforms(run.compute),
        tiles=0.0 if operator.is_convolution else math.ceil(out / columns / _PRODUCT_TILE) * math.ceil(columns / _PRODUCT_TILE),
    )

    nbytes, launches, products, turned, around = 4 * w, 0, [], 0, 0.0
    dequantized = run.saved.needs_scale and eager
    wanted = [(run.grad_weight, x, 0)]  # format, elements of the saved operand that it multiplies, of the gradient that it writes
    if 0 not in operator.no_grad_inputs:
        wanted.append((run.grad_input, w, x))
    for precision, saved, written in wanted:
        nbytes += (out + saved + written) * precision.nbytes
        again = transposed(precision)
        turned += again
        around += transforms(precision)
        launches += 1 + 2 * (again > 0)
        if dequantized and not precision.needs_scale:
            nbytes += saved * (1 + precision.nbytes)
            launches += 1
        products.append((precision, operator.flops))
    return forward, Work(nbytes, launches, tuple(products), transposed=turned, transforms=around)


def _allows_winograd(operator: Operator) -> bool:
    """Whether Winograd's F(4×4, 3×3) can make its products: 3 × 3 weights on neighbouring elements, of all channels."""
    return operator.weight_shape[2:] == (3, 3) and attrs.evolve(operator.geometry, padding=(0, 0)) == Geometry()


def cast_bytes(key: CastKey) -> int:
    """Bytes per element of a cast; to 8 bits with its range found first and, by eager kernels, rounded in float32 between."""
    if not key.target.needs_scale:
        return key.source.nbytes + key.target.nbytes
    passes = 2 if key.rounding is Rounding.STOCHASTIC else 1
    return 2 * key.source.nbytes + 8 * passes + key.target.nbytes


def optimizer_work(dag: PrecisionDag, profile: Profile) -> Work:
    """An optimizer's step with gradient zeroing: parameters, gradients and state read and written, a kernel per parameter."""
    trained = [parameter for parameter in dag.parameters if parameter.requires_grad]
    return Work(20 * sum(parameter.numel for parameter in trained) + 2 * profile.optimizer_state_bytes, len(trained))
