"""The table of all functions that are none of :data:`qsync_core.kinds.KINDS`: which formats each takes, and what it costs.

One row per function (ATen's plain name).  Tracing reads an operator's class from it and counts its operations, prices follow that
and what autocast does, and :mod:`qsync_core.ir.formats` decides by it which operators of a plan may deliver 16 bits.  One that no
row names is dependent, and taken to want float32.

Sources, in PyTorch 2.13: the header of autocast (ATen's autocast_mode.h); what TensorIterator promotes; kernels of norms, of which
CUDA's layer norm refuses float32 weights beside 16-bit activations, its group norm keeps statistics in the activation's format, and
batch norm takes float32 weights and statistics on CPUs, CUDA and in cuDNN.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence

import attrs

from qsync_core.ir.dag import OpClass
from qsync_core.kinds import KINDS


class Takes(enum.StrEnum):
    """Which floating-point operands a function of PyTorch's runs on as right as a 16-bit format allows, called as it is."""

    FLOAT32 = "float32"
    """Float32 alone: it refuses 16 bits, is wrong or far less exact in them, copies their format into numbers that need more, or
    is not known to be right."""
    ONE_FORMAT = "one format"
    """16 bits where all its operands have the same; it refuses others beside them, or is wrong."""
    BESIDE_FLOAT32 = "16 bits beside float32 parameters"
    """The same with parameters and statistics in float32: it computes inside in float32."""
    MIXED = "mixed formats"
    """Any formats: PyTorch promotes its operands, and the result has the widest of them."""


class UnderAutocast(enum.StrEnum):
    """The format in which PyTorch's autocast runs a function."""

    OF_INPUTS = "of inputs"
    BASE = "base"
    """The autocast's own."""
    FLOAT32_ON_CUDA = "float32 on CUDA"
    """Float32 on CUDA, that of its inputs on a CPU."""


Shapes = Sequence[Sequence[int]]
"""Shapes of the floating-point tensors that a call reads, in the order of its arguments."""


@attrs.frozen
class Function:
    """What a function of PyTorch takes and gives, a row of the table.

    Attributes:
        op_class: dependent, guarded or fixed, where nothing else about a call makes it fixed.
        takes: which operands it runs on.
        autocast: what autocast makes of it.
        loss: the loss kind that a graph stores; empty where it is no loss.
        fixed_for_plans_alone: autocast runs it in the format that arrives although it is fixed.
        is_product: it multiplies tensors, and the peaks of products bound its operations.
        flops: its operations, from the shapes that it reads and that of its output; None: PyTorch's own count, or one an element.
        is_recurrent: a layer whose products are inside one function.
        refused: why no plan lowers a call with a parameter; empty where it is nothing that a plan could lower.
    """

    op_class: OpClass = OpClass.DEPENDENT
    takes: Takes = Takes.FLOAT32
    autocast: UnderAutocast = UnderAutocast.OF_INPUTS
    loss: str = ""
    fixed_for_plans_alone: bool = False
    is_product: bool = False
    flops: Callable[[Shapes, Sequence[int]], int] | None = None
    is_recurrent: bool = False
    refused: str = ""


UNKNOWN = Function()
"""The row of a function that the table does not name."""

_BASE, _WIDE = UnderAutocast.BASE, UnderAutocast.FLOAT32_ON_CUDA
_ONE, _MIXED = Takes.ONE_FORMAT, Takes.MIXED


_SUPPORTED = f"a plan lowers {', '.join(KINDS)}"
_OTHER_CONVOLUTIONS = {
    "conv_transpose3d": "transposed convolution",
    "conv_tbc": "time-first convolution",
    "convolution": "convolution called as torch.convolution",
}
"""Convolutions of which no kind is."""


def _out_of_reach(called: str) -> str:
    return f"{called} with a parameter is out of reach; use torch.nn.functional.linear"


def _attention_flops(shapes: Shapes, output: Sequence[int]) -> int:
    """Query (…, L, E) by key (…, S, E), and the scores (…, L, S) by value (…, S, V)."""
    if len(shapes) < 3:
        return math.prod(output)
    query, key, value = shapes[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _vector_flops(shapes: Shapes, output: Sequence[int]) -> int:
    return 2 * max(map(math.prod, shapes), default=0)


def _grouped_flops(shapes: Shapes, output: Sequence[int]) -> int:
    return 2 * math.prod(output) * shapes[0][-1]


def _bilinear_flops(shapes: Shapes, output: Sequence[int]) -> int:
    return 2 * math.prod(shapes[0][:-1]) * math.prod(shapes[2])


def _rows() -> Iterator[tuple[str, Function]]:
    def row(names: str, function: Function) -> Iterator[tuple[str, Function]]:
        for name in names.split():
            yield name, function

    # Elementwise, or copies: kernels read 16 bits and compute in float32.
    yield from row(
        "relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid log_sigmoid logsigmoid tanh hardtanh hardsigmoid hardswish "
        "threshold glu neg negative abs sign square clamp clip clamp_min clamp_max dropout native_dropout alpha_dropout "
        "feature_dropout feature_alpha_dropout contiguous clone reshape flatten alias pad constant_pad_nd reflection_pad1d "
        "reflection_pad2d replication_pad1d replication_pad2d roll flip pixel_shuffle pixel_unshuffle channel_shuffle",
        Function(takes=_ONE),
    )
    yield from row(
        "max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices avg_pool1d avg_pool2d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d mean",
        Function(takes=_ONE),
    )
    yield from row("pow", Function(takes=_MIXED, autocast=_WIDE))
    yield from row("softplus", Function(takes=_ONE, autocast=_WIDE))
    yield from row(
        "add sub subtract rsub mul multiply div divide true_divide where maximum minimum cat concat concatenate stack hstack "
        "vstack",
        Function(takes=_MIXED),
    )
    # Products of activations, which refuse mixed formats.
    for name in ["matmul", "mm", "bmm", "baddbmm", "addmm", "addbmm"]:
        yield name, Function(takes=_ONE, autocast=_BASE, is_product=True, refused=_out_of_reach(f"torch.{name}"))
    yield "scaled_dot_product_attention", Function(takes=_ONE, autocast=_BASE, is_product=True, flops=_attention_flops)
    yield "linalg_matmul", Function(takes=_ONE, is_product=True, refused=_out_of_reach("torch.linalg.matmul"))
    yield "einsum", Function(autocast=_BASE, is_product=True, refused=_out_of_reach("torch.einsum"))
    for name in ("mv", "addmv"):
        yield name, Function(autocast=_BASE, flops=_vector_flops, refused=_out_of_reach(f"torch.{name}"))
    yield "dot", Function(flops=_vector_flops, refused=_out_of_reach("torch.dot"))
    yield "vdot", Function(flops=_vector_flops)
    yield "tensordot", Function(refused=_out_of_reach("torch.tensordot"))
    yield "bilinear", Function(flops=_bilinear_flops, refused=_out_of_reach("torch.nn.functional.bilinear"))
    grouped = _out_of_reach("torch.nn.functional.grouped_mm")
    yield from row("grouped_mm grouped_mm_fallback", Function(flops=_grouped_flops, refused=grouped))
    for name, what in _OTHER_CONVOLUTIONS.items():
        yield name, Function(autocast=_BASE, is_product=True, refused=f"{what} is not supported; {_SUPPORTED}")
    yield from row("addr chain_matmul linalg_multi_dot linalg_vecdot prelu", Function(autocast=_BASE))
    recurrent = "recurrent layers are not supported: their products are inside one operator"
    yield from row(
        "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        Function(OpClass.FIXED, autocast=_BASE, is_recurrent=True, refused=recurrent),
    )
    # Guarded: 16 bits in and out, float32 inside.
    yield from row("softmax log_softmax", Function(OpClass.GUARDED, _ONE, _WIDE))
    yield from row("safe_softmax", Function(OpClass.GUARDED, _ONE))
    yield from row("batch_norm native_batch_norm instance_norm", Function(OpClass.GUARDED, Takes.BESIDE_FLOAT32))
    yield from row("layer_norm native_layer_norm", Function(OpClass.GUARDED, _ONE, _WIDE))
    yield from row("group_norm rms_norm", Function(OpClass.GUARDED, autocast=_WIDE))
    yield from row("native_group_norm local_response_norm", Function(OpClass.GUARDED))
    # Fixed: float32 in and out.
    yield from row("embedding embedding_bag weight_norm", Function(OpClass.FIXED))
    yield from row(
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn "
        "fft_irfft "
        "fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig "
        "linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor "
        "linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex "
        "linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve cholesky cholesky_inverse "
        "cholesky_solve complex det inverse istft logdet lu_solve matrix_exp nanquantile ormqr pinverse polar qr quantile slogdet "
        "stft svd triangular_solve view_as_complex",
        Function(OpClass.FIXED),
    )
    yield from row("cdist pdist", Function(OpClass.FIXED, autocast=_WIDE))
    # Their gradient is exp(x - result): rounded to bfloat16, a result of 30 scales it by up to 6%.
    yield from row("logsumexp", Function(OpClass.FIXED, autocast=_WIDE, fixed_for_plans_alone=True))
    yield from row("logcumsumexp", Function(OpClass.FIXED, fixed_for_plans_alone=True))
    yield from row("special_logsumexp", Function(OpClass.FIXED))
    # Sums and functions that leave the range or the digits of 16 bits.
    yield from row(
        "norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm renorm cosine_similarity dist sum prod cumsum "
        "cumprod "
        "exp expm1 log log10 log1p log2 reciprocal rsqrt acos asin cosh sinh tan erfinv upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d upsample_linear1d "
        "upsample_bilinear2d upsample_bilinear2d_aa upsample_bicubic2d upsample_bicubic2d_aa upsample_trilinear3d",
        Function(autocast=_WIDE),
    )
    for name, loss in _LOSSES.items():
        yield name, Function(OpClass.FIXED, loss=loss)


_LOSSES = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss": "nll",
    "nll_loss_nd": "nll",
    "nll_loss2d": "nll",
    "mse_loss": "mse",
    "l1_loss": "l1",
    "smooth_l1_loss": "smooth_l1",
    "huber_loss": "huber",
    "binary_cross_entropy": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy",
    "kl_div": "kl_div",
    "ctc_loss": "ctc",
    "cosine_embedding_loss": "cosine_embedding",
    "hinge_embedding_loss": "hinge_embedding",
    "margin_ranking_loss": "margin_ranking",
    "multi_margin_loss": "multi_margin",
    "multilabel_margin_loss": "multilabel_margin",
    "soft_margin_loss": "soft_margin",
    "triplet_margin_loss": "triplet_margin",
    "poisson_nll_loss": "poisson_nll",
}

FUNCTIONS: dict[str, Function] = {name: function for name, function in _rows() if name not in KINDS}
"""Every row, by the plain name of a function."""
_OF_KINDS = dict.fromkeys(KINDS, Function(autocast=UnderAutocast.BASE, is_product=True))
"""What functions of adjustable kinds are where a plan cannot pick their precision."""


def function_of(name: str) -> Function:
    """The row of a function, :data:`UNKNOWN` where the table does not name it."""
    return FUNCTIONS.get(name) or _OF_KINDS.get(name, UNKNOWN)
