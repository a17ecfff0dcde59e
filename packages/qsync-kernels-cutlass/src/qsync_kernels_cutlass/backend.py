"""The backend ``cutlass``: what it takes, with which configurations, and where its kernels are built."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qsync_core.errors import BackendError
from qsync_core.kernels.backend import BACKEND_API_VERSION, Kernel, KernelConfig, KernelRequest, KernelSpec, Op
from qsync_core.progress import ProgressCallback
from qsync_kernels_cutlass import support
from qsync_kernels_cutlass.architectures import Architecture, architecture_of
from qsync_kernels_cutlass.compiling import ahead
from qsync_kernels_cutlass.compiling.background import BACKGROUND
from qsync_kernels_cutlass.compiling.compile import TALLY, compile_files, interrupt, must_compile, print_progress
from qsync_kernels_cutlass.configs import candidates, validity
from qsync_kernels_cutlass.configs.config import Config, ConvConfig, GemmConfig
from qsync_kernels_cutlass.configs.problem import ConvProblem, problem_of
from qsync_kernels_cutlass.sources import KernelSource, needed_sources


class CutlassBackend:
    """Products of int8, float8 and 16-bit operands from CUTLASS templates, with dequantization and bias in the epilogue."""

    name = "cutlass"
    api_version = BACKEND_API_VERSION
    offset_tensors = True
    reports_launches = True

    def kernel_specs(self) -> Sequence[KernelSpec]:
        """What the backend offers, as data only."""
        eight_bit = ("int8", "float8_e4m3fn")
        all_formats = (*eight_bit, "float16", "bfloat16")
        return (
            KernelSpec(Op.LINEAR_OUTPUT, eight_bit, ("cuda",), "7.0"),
            KernelSpec(Op.LINEAR_GRAD_INPUT, all_formats, ("cuda",), "7.0"),
            KernelSpec(Op.LINEAR_GRAD_WEIGHT, all_formats, ("cuda",), "7.0"),
            KernelSpec(Op.CONV2D_OUTPUT, ("int8",), ("cuda",), "7.5", ("channels_last",)),
            KernelSpec(Op.CONV2D_GRAD_INPUT, ("int8",), ("cuda",), "7.5", ("channels_last",)),
        )

    def unsupported_reasons(self, request: KernelRequest) -> list[str]:
        """Why it cannot run the request, each reason half a sentence; empty means it can."""
        if found := support.reasons(request):
            return found
        arch = _architecture(request)
        if not candidates.ranked(problem_of(request), arch):
            return [f"no configuration of its templates fits {request.op} as {request.variant.label} on {arch.name}"]
        missing = ahead.unavailable_reason(request, arch)
        return [missing] if missing else []

    def candidate_configs(self, request: KernelRequest) -> Sequence[KernelConfig]:
        """Configurations worth trying, best guess first; none for a request that it does not take.

        Where nothing can be compiled, those whose kernels were compiled ahead.
        """
        if support.reasons(request):
            return ()
        return tuple(KernelConfig(found.text) for found in ahead.available_configs(request, _architecture(request)))

    def compile_ahead(self, requests: Sequence[KernelRequest], arch: str, progress: ProgressCallback) -> ahead.CompiledAhead:
        """Compile the candidates of requests for a chip (``sm_75``, ``sm_90a``) that this machine need not have.

        ``progress`` receives every compiled kernel.  Where standard error is no terminal, and so has no bar that moves, each is a
        line there too.

        Raises:
            BackendError: when the chip is not known, the compiler is missing or does not have it, or a kernel does not compile.
        """

        def report(done: int, total: int, what: str, /) -> None:
            progress(done, total, what)
            if not sys.stderr.isatty():
                print_progress(done, total, what)

        return ahead.compile_ahead(requests, arch, report)

    def interrupt_compiling(self) -> None:
        """End all compilers that run for this process; builds that wait for one raise a BackendError."""
        interrupt()

    def is_compiled(self, request: KernelRequest, config: KernelConfig) -> bool:
        """Whether ``build`` would run no compiler: all that it needs is in the cache, or it refuses.

        What :meth:`compile_later` was asked for stays missing for this process.
        """
        try:
            return not any(source in BACKGROUND.given or must_compile(source) for source in _sources(request, config))
        except BackendError:
            return True

    def compile_later(self, request: KernelRequest, config: KernelConfig) -> None:
        """Compile what ``build`` would need, beside whatever this process does next; how that ended is said on standard error."""
        BACKGROUND.add(_sources(request, config))

    def build(self, request: KernelRequest, config: KernelConfig) -> Kernel:
        """A callable kernel, compiled now if it is not in the cache; the signatures are in ``docs/writing-a-backend.md``.

        Raises:
            BackendError: naming operator, shapes, formats and configuration, when the request is not supported, the configuration
                is not one or does not fit.  An :class:`~.ahead.UnobtainableKernelError` when the kernel can be neither compiled nor
                loaded, which does not depend on the sizes in the request.
        """
        what = f"{request.op} as {request.variant.label} on {list(request.shapes)}"
        if found := self.unsupported_reasons(request):
            raise BackendError(f"backend cutlass cannot run {what}: {'; '.join(found)}")
        arch = _architecture(request)
        chosen = parse_config(request, config.text)
        if found := validity.reasons(chosen, arch, problem_of(request)):
            raise BackendError(f"backend cutlass cannot run {what} with the configuration {config.text}: {'; '.join(found)}")
        try:
            compile_files(needed_sources(request, chosen, arch), progress=TALLY.update)  # side by side, before each is loaded
            if request.op.startswith("linear"):
                from qsync_kernels_cutlass.kernels import linear

                return linear.build(request, chosen, arch)
            from qsync_kernels_cutlass.kernels import conv2d

            return conv2d.build(request, chosen, arch)
        except BackendError as error:  # sizes and configuration were found to fit
            raise ahead.UnobtainableKernelError(
                f"backend cutlass cannot run {what} with {config.text or 'any configuration'}: {error}"
            ) from error


def parse_config(request: KernelRequest, text: str) -> Config:
    """The configuration that a text means for a supported request; the empty text means the best guess that is available here.

    Raises:
        BackendError: when it is not the text of a configuration of the request's kind.
    """
    problem = problem_of(request)
    if not text:
        arch = _architecture(request)
        return next(iter(ahead.available_configs(request, arch)), candidates.ranked(problem, arch)[0])
    try:
        return ConvConfig.parse(text) if isinstance(problem, ConvProblem) else GemmConfig.parse(text)
    except ValueError as error:
        raise BackendError(f"backend cutlass, {request.op} on {list(request.shapes)}: {error}") from None


def _sources(request: KernelRequest, config: KernelConfig) -> list[KernelSource]:
    """What a kernel of a supported request loads for dense operands; nothing where the configuration does not fit.

    Raises:
        BackendError: when the text is not a configuration.
    """
    chosen, arch = parse_config(request, config.text), _architecture(request)
    return [] if validity.reasons(chosen, arch, problem_of(request)) else needed_sources(request, chosen, arch)


def _architecture(request: KernelRequest) -> Architecture:
    arch = architecture_of(request.compute_capability)
    if arch is None:
        raise BackendError(f"backend cutlass does not know compute capability {request.compute_capability!r}")
    return arch
