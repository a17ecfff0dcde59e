"""What the collectors ``paper`` and ``hessian`` write, in the notation of :mod:`qsync_core.ir.observations`.

Collector ``paper``, one series per adjustable operator, ``variant=None`` unless said otherwise:

==================  =================================================================================================
``v_sq_norm``       ‖v‖², squared Euclidean norm of the activation input
``x_sq_norm``       ‖x‖² of the weight
``gv_sq_norm``      ‖∇v‖² of the gradient that enters the operator's backward (with respect to its *output*)
``v_numel``         D_v, elements of the activation input in the observed (half) batch
``x_numel``         D_x, elements of the weight
``gv_numel``        D_∇v, elements of that gradient
``v_exponent``      e_v = floor(log2(max |v|)), the effective exponent; the smallest normal float32 exponent for an all-zero tensor
``x_exponent``      e_x, likewise of the weight
``gv_exponent``     e_∇v, likewise of the gradient
``v_scale_sq``      per (operator, variant with fixed-point ``compute``): q_v², mean over elements of the squared scale
``x_scale_sq``      likewise q_x² (per output channel: the mean over channels of the squared scales)
==================  =================================================================================================

γ is not observed: it follows from the loss of the PrecisionDag.  The quantized norms ‖v̂‖² need no term either: for an unbiased
quantizer E‖v̂‖² = ‖v‖² + Var[v̂], the second summand being Proposition 2.

Collector ``hessian``, one series per adjustable operator unless said otherwise:

====================  ================================================================================================
``top_eigenvalue``    largest-magnitude eigenvalue of the loss's Hessian with respect to the operator's weight, by power iteration
``weight_numel``      elements of that weight
``weight_error``      per variant: ‖Q(w) − w‖², expected over stochastic rounding
====================  ================================================================================================
"""

from __future__ import annotations

PAPER = "paper"
V_SQ_NORM = "v_sq_norm"
X_SQ_NORM = "x_sq_norm"
GV_SQ_NORM = "gv_sq_norm"
V_NUMEL = "v_numel"
X_NUMEL = "x_numel"
GV_NUMEL = "gv_numel"
V_EXPONENT = "v_exponent"
X_EXPONENT = "x_exponent"
GV_EXPONENT = "gv_exponent"
V_SCALE_SQ = "v_scale_sq"
X_SCALE_SQ = "x_scale_sq"

HESSIAN = "hessian"
TOP_EIGENVALUE = "top_eigenvalue"
WEIGHT_NUMEL = "weight_numel"
WEIGHT_ERROR = "weight_error"
