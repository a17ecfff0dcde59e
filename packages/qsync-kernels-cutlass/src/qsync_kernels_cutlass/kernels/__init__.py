"""Front-ends of the compiled kernels: they take torch tensors.  Nothing here is imported before a kernel is built."""
