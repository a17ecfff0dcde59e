"""The reference backend `aten`: PyTorch's own kernels (cuBLAS, cuDNN, oneDNN), and quantization in plain PyTorch."""
