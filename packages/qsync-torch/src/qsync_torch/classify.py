"""What a plan may do with each ATen operator: its kind, and its class of DESIGN section 5."""

from __future__ import annotations

from qsync_core.dag import OpClass

LINEAR = "linear"
CONV2D = "conv2d"

LOSSES = {
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
"""ATen loss functions and the loss kind that a PrecisionDag stores."""

GUARDED = frozenset(
    {
        "softmax",
        "log_softmax",
        "safe_softmax",
        "logsumexp",
        "batch_norm",
        "native_batch_norm",
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "native_group_norm",
        "instance_norm",
        "rms_norm",
        "local_response_norm",
    }
)
"""Compute inside in float32 whatever they are given."""

FIXED = frozenset({"embedding", "embedding_bag", "weight_norm"})
"""Never touched, whatever they read."""

PRODUCTS_WITH_A_PARAMETER = {
    "matmul": "torch.matmul",
    "mm": "torch.mm",
    "bmm": "torch.bmm",
    "mv": "torch.mv",
    "addmm": "torch.addmm",
    "addmv": "torch.addmv",
    "baddbmm": "torch.baddbmm",
    "addbmm": "torch.addbmm",
    "einsum": "torch.einsum",
    "tensordot": "torch.tensordot",
    "dot": "torch.dot",
    "bilinear": "torch.nn.functional.bilinear",
}
"""Linear maps where one factor is a parameter: work for a plan in principle, but written in a way that apply_ does not reach."""

UNSUPPORTED_CONVOLUTIONS = {
    "conv1d": "one-dimensional convolution",
    "conv3d": "three-dimensional convolution",
    "conv_transpose1d": "transposed convolution",
    "conv_transpose2d": "transposed convolution",
    "conv_transpose3d": "transposed convolution",
    "conv_tbc": "time-first convolution",
    "convolution": "convolution called as torch.convolution",
}
"""Convolutions that no backend interface describes."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
"""Layers whose products are inside one fused operator."""


def op_name(target_name: str) -> str:
    """The plain name of an ATen operator: no overload, no marks of in-place or private variants (``add_``, ``_softmax``)."""
    return target_name.split(".")[0].strip("_")


def class_of(name: str, *, has_activation: bool, mixes_float32: bool) -> OpClass:
    """The class of an operator that is neither linear nor a convolution.

    Args:
        name: plain name.
        has_activation: it reads at least one floating-point activation.
        mixes_float32: it also reads a parameter, buffer or constant of at least one dimension, which is float32: PyTorch's
            promotion then computes in float32 whatever the activations are.
    """
    if not has_activation or name in FIXED or name in LOSSES or name in RECURRENT:
        return OpClass.FIXED
    if name in GUARDED:
        return OpClass.GUARDED
    return OpClass.FIXED if mixes_float32 else OpClass.DEPENDENT
