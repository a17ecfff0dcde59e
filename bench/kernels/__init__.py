"""Kernels measured side by side: every operator, on the shapes of real models, on every backend and on PyTorch's own kernels.

``page``, ``charts``, ``compare`` and ``suite_file`` read stored results and import no torch: the documentation is built from them.
"""
