"""A test suite that any kernel backend can be put to: ``pytest --pyargs qsync_torch.conformance --backend NAME``.

It asks for every operator that the backend's ``kernel_specs`` offers, on this machine's device, and compares what the kernels
write with references in float64 and int64.  What each check is about is said in its test's docstring;
``docs/writing-a-backend.md`` is the page for authors.
"""
