"""Fuse a few lines of tensor math into one kernel: compiled once that pays off, eager until then and where it fails.

Compilation is lazy. A function first runs eagerly; after ``WARM_UP`` elements it is compiled with dynamic
shapes, and from then on tensors above ``SMALL`` elements take the compiled kernel. Both give the same bits,
so the switch is invisible. A compiled kernel is compared with eager before its first use, and dropped if it differs.
``BITWRIGHT_COMPILE=0`` never compiles, ``BITWRIGHT_COMPILE=1`` compiles at the first call.
"""

import logging
import os
import platform
import threading
import types
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.modes import ForkableLock
from bitwright.numerics.kinds import kinds_of
from bitwright.numerics.proof import difference

_log = logging.getLogger(__name__)
WARM_UP = 500_000_000
SMALL = 1 << 14
# Keep long formulas in one loop; by default they are split into pieces that go through memory.
_ONE_LOOP: dict[str, Any] = {"realize_reads_threshold": 64, "realize_opcount_threshold": 1024}
_VECTOR_BITS = {"AVX512": 512, "AVX2": 256, "DEFAULT": 1}  # no vector is one bit wide, so such kernels are scalar
_compiling = ForkableLock(threading.Lock)
_made: list["Fused"] = []


class Fused:
    """A function of tensors that is compiled once it has done enough work to repay the compilation.

    Each layout (dimensions of size one, dtypes, whole numbers that torch.compile takes for constants, modes of torch)
    has its own kernel, so none recompiles after it was proven.

    Args:
        function: takes a tensor in canonical form and its parameters, see :mod:`bitwright.numerics.kernel_operator`.
        exact: whether eager and compiled code give the same bits for each value of ``x``; if not, the last ones may
            differ. Sums over many values may always do so.
        options: further options of the compiler (``torch._inductor.config``).
    """

    def __init__(self, function: Callable[..., Any], *, exact: bool = True, **options: object) -> None:
        self.eager = function
        self.exact = exact
        self._options = options
        self.kinds = kinds_of(function)
        self.__doc__ = function.__doc__
        self._kernels: dict[Hashable, Callable[..., Any]] = {}
        self._work = 0
        _made.append(self)

    def __call__(self, x: Tensor, *args: object) -> Any:  # noqa: ANN401
        """Apply the function to a canonical view ``x`` and its parameters."""
        if not self._worth_compiling(x):
            return self.eager(x, *args)
        layout = _layout(x, args)
        kernel = self._kernels.get(layout) or self._compiled(layout, x, args)
        if kernel is self.eager:
            return self.eager(x, *args)
        try:
            return _detached(kernel, x, *args)
        except Exception as error:
            self._kernels[layout] = self.eager
            self._warn(f"failed ({_first_line(error)})")
            return self.eager(x, *args)

    def _worth_compiling(self, x: Tensor) -> bool:
        size = x.numel()
        if size < SMALL or torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter):
            return False
        mode = os.environ.get("BITWRIGHT_COMPILE", "auto")
        if mode in ("0", "1"):
            return mode == "1"
        self._work += size
        return self._work > WARM_UP

    def _compiled(self, layout: Hashable, x: Tensor, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Compile and prove the kernel of a layout; eager if that fails, and while another thread compiles."""
        lock = _compiling.now
        if not lock.acquire(blocking=False):
            return self.eager
        try:
            if layout not in self._kernels:
                self._kernels[layout] = self._proved(x, args)
            return self._kernels[layout]
        finally:
            lock.release()

    def _proved(self, x: Tensor, args: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            kernel = _compile(self.eager, len(self._kernels), self._options)
            runs = partial(_detached, kernel), partial(_detached, self.eager)
            found = difference(*runs, (x, *args), [*self.kinds.values()], self.exact)
        except Exception as error:
            self._warn(f"could not be compiled ({_first_line(error)})")
            return self.eager
        if found is None:
            return kernel
        self._warn(
            f"was compiled for {torch.backends.cpu.get_cpu_capability()} and gives wrong results ({found}); "
            "the compiler, or a cache of kernels in TORCHINDUCTOR_CACHE_DIR, is broken"
        )
        return self.eager

    def _warn(self, what: str) -> None:
        _log.warning("%s %s; it runs eagerly, with the same results but slower", self.eager.__name__, what)


@contextmanager
def repeated(times: int) -> Generator[None, None, None]:
    """Count work done inside as if it were done ``times`` times, so that it is compiled while that still pays off."""
    before = [(fused, fused._work) for fused in _made]
    yield
    for fused, known in before:
        fused._work += (fused._work - known) * max(times - 1, 0)


def _layout(x: Tensor, args: tuple[Any, ...]) -> Hashable:
    """What a compiled kernel is valid for: torch.compile would recompile for anything else."""
    device = x.device
    return (
        x.dtype,
        device,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_num_threads(),
        *[n == 1 for n in x.shape],
        *[a.dtype if isinstance(a, Tensor) else _constant(a) for a in args],
    )


def _constant(value: object) -> Hashable:
    """The value if torch.compile treats it as a constant, else its type."""
    return type(value) if isinstance(value, int) and value not in (0, 1) else (type(value), value)


def _detached(kernel: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
    # Detached, a view does not know the tensor it is a view of: torch.compile would recompile for its strides.
    return kernel(*[a.detach() if isinstance(a, Tensor) else a for a in args])


def _compile(function: Callable[..., Any], number: int, more: dict[str, Any]) -> Callable[..., Any]:
    """Compile a copy of the function: torch.compile counts recompilations by code object.

    torch keeps compiled kernels on disk and silently loads one for another vector width, which then leaves values
    unwritten or writes past the end. The width is therefore given explicitly, which makes it part of the cache's key.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    options = _ONE_LOOP | more
    if platform.machine().lower() in ("x86_64", "amd64"):
        options["cpp.simdlen"] = _VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    return torch.compile(copy, dynamic=True, fullgraph=True, options=options)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
