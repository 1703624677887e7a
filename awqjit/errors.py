# SPDX-License-Identifier: Apache-2.0
"""Every error and warning a user of awqjit can meet: one class per situation.

Each class keeps its arguments in ``args``, so that it survives pickling, and composes its message in
``__str__``: what was given, what was wanted, what to do next.
"""

from __future__ import annotations

import shlex
from pathlib import Path


class AwqJitWarning(UserWarning):
    """The one warning class: something runs, but not as it was asked to, and the text says why."""


class AwqJitError(Exception):
    """Base class of all errors raised on purpose by awqjit."""


class ArgumentError(AwqJitError, ValueError):
    """An argument of a public function or operator has a wrong value, shape, dtype or device."""

    def __init__(self, argument: str, got: object, wanted: str) -> None:
        super().__init__(argument, str(got), wanted)

    def __str__(self) -> str:
        argument, got, wanted = self.args
        return f"{argument}: got {got}, wanted {wanted}"


class FormatError(AwqJitError, ValueError):
    """A checkpoint is in a form that awqjit does not read. ``remedy`` says what to do about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)

    def __str__(self) -> str:
        what, remedy = self.args
        return f"{what}. {remedy}" if remedy else what


class LostScaleError(FormatError):
    """A scale of an int4 layer is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("a scale is NaN or infinite", "The checkpoint is damaged: fetch or quantize it again.")

    def __reduce__(self) -> tuple[type[LostScaleError], tuple[()]]:
        return LostScaleError, ()


class CheckpointMismatchError(AwqJitError, ValueError):
    """A checkpoint's tensors are not those of its model: names are missing or left over, or shapes differ."""

    def __init__(self, missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: tuple[str, ...]) -> None:
        super().__init__(missing, unexpected, mismatched)

    def __str__(self) -> str:
        lines = ["the checkpoint does not fit the model that its config describes"]
        for kind, names in zip(("missing", "unexpected", "of another shape"), self.args, strict=True):
            if names:
                more = f", ... ({len(names)} in all)" if len(names) > 10 else ""
                lines.append(f"{kind}: {', '.join(names[:10])}{more}")
        if self.args[2]:
            lines.append("config.json may name a quant_method, group_size or model size that is not this checkpoint's")
        return "\n".join(lines)


class ConfigError(AwqJitError, ValueError):
    """An ``AWQJIT_*`` environment variable holds a value that cannot be used."""

    def __init__(self, variable: str, got: str, wanted: str) -> None:
        super().__init__(variable, got, wanted)

    def __str__(self) -> str:
        variable, got, wanted = self.args
        return f"environment variable {variable}={got!r}: wanted {wanted}"


class MissingDependencyError(AwqJitError, ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, package: str, feature: str, install: str) -> None:
        super().__init__(package, feature, install)

    def __str__(self) -> str:
        package, feature, install = self.args
        return f"{feature} needs the package {package}, which is not installed: {install}"


class NoCompilerError(AwqJitError, RuntimeError):
    """No working C++ compiler was found. ``reasons`` holds one line per compiler that was tried."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(reasons)

    def __str__(self) -> str:
        tried = "; ".join(self.args[0]) or "nothing to try"
        return (
            f"no working C++ compiler ({tried}). Install g++ or clang++, or set AWQJIT_CXX to one, or "
            "`pip install ziglang`; `pip install numba` computes without one, more slowly"
        )


class SyclError(AwqJitError, RuntimeError):
    """SYCL's run-time library, a device or a kernel on it does not do what it should."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)

    def __str__(self) -> str:
        what, reason = self.args
        return f"{what}: {reason}"


class NumbaError(AwqJitError, RuntimeError):
    """numba is installed, and cannot be imported or cannot compile its functions here."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return f"numba does not work here: {self.args[0]}"


class TritonError(AwqJitError, RuntimeError):
    """Triton cannot be used on a device: it is not installed, fails there, or computes something else."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return f"triton does not work here: {self.args[0]}"


class CompileError(AwqJitError, RuntimeError):
    """The compiler refused a rendered kernel. The failed build is kept; the command can be run again."""

    def __init__(self, slug: str, command: tuple[str, ...], source: str, output: str) -> None:
        super().__init__(slug, command, source, output)

    @property
    def directory(self) -> Path:
        """Where the source, the log and whatever was built are kept."""
        return Path(self.args[2]).parent

    @property
    def first_error(self) -> str:
        """The first line of the compiler's output that reports an error (or the first line at all)."""
        lines = [line for line in self.args[3].splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no output")

    def __str__(self) -> str:
        slug, command, source, _ = self.args
        return (
            f"compiling the kernel {slug} failed: {self.first_error}\n"
            f"source:  {source}\ncommand: {shlex.join(command)}\nlog:     {Path(source).with_name('build.log')}"
        )


class NoCacheError(AwqJitError, OSError):
    """No directory can be written to build kernels in. ``reasons`` holds one line per directory that was tried."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(reasons)

    def __str__(self) -> str:
        return f"no directory to build kernels in: {'; '.join(self.args[0])}. Set AWQJIT_CACHE_DIR to one you can write"


class KernelMissingError(AwqJitError, RuntimeError):
    """Compiling is forbidden (``AWQJIT_JIT=0``) and no cache holds the kernel."""

    def __init__(self, slug: str, places: tuple[str, ...]) -> None:
        super().__init__(slug, places)

    def __str__(self) -> str:
        slug, places = self.args
        return (
            f"the kernel {slug} is in no cache ({', '.join(places) or 'no cache directory is usable'}) and "
            "AWQJIT_JIT=0 forbids compiling it: unset AWQJIT_JIT, or fill the cache first with awqjit.warm(model) or "
            "`awqjit cache bake`"
        )


class KernelRefusedError(AwqJitError, RuntimeError):
    """The kernel row named by ``AWQJIT_KERNEL`` does not exist or cannot run the problem."""

    def __init__(self, row: str, problem: str, reason: str) -> None:
        super().__init__(row, problem, reason)

    def __str__(self) -> str:
        row, problem, reason = self.args
        return f"AWQJIT_KERNEL={row} cannot run {problem}: {reason}"


class LaunchError(AwqJitError, RuntimeError):
    """A kernel or the thread pool reported a failure while running; the output is not usable."""

    def __init__(self, slug: str, code: int) -> None:
        super().__init__(slug, code)

    def __str__(self) -> str:
        slug, code = self.args
        return f"the kernel {slug} failed with code {code}"


class DemoWeightsError(AwqJitError, RuntimeError):
    """The demo's weights cannot be had. ``remedy`` says what to do about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)

    def __str__(self) -> str:
        what, remedy = self.args
        return f"{what}. {remedy}"
