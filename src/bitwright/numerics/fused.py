"""One fused kernel from a few lines of tensor math: compiled once it pays, eager before and where it cannot.

Compilation is lazy. A function first runs eagerly; after ``WARM_UP`` elements it is compiled with dynamic
shapes, and from then on tensors above ``SMALL`` elements take the compiled kernel. Both give the same bits,
so the switch cannot be seen. ``BITWRIGHT_COMPILE=0`` never compiles, ``BITWRIGHT_COMPILE=1`` compiles at the
first call.
"""

import logging
import os
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
WARM_UP = 500_000_000
SMALL = 1 << 14
# Let long formulas stay in one loop, which by default are cut in pieces that go through memory.
_ONE_LOOP: dict[str, Any] = {"realize_reads_threshold": 64, "realize_opcount_threshold": 1024}


class Fused:
    """A function of tensors that is compiled when it has done enough work to repay it.

    Each layout (number of dimensions, dtypes, dimensions of size one) has a kernel of its own, so that none recompiles.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.eager = function
        self.__doc__ = function.__doc__
        self._kernels: dict[Hashable, Callable[..., Any]] = {}
        self._work = 0

    def __call__(self, x: Tensor, *args: Any) -> Any:  # noqa: ANN401
        """Apply the function to a canonical view ``x`` and its parameters."""
        if not self._worth_compiling(x.numel()):
            return self.eager(x, *args)
        tensors = [a for a in (x, *args) if isinstance(a, Tensor)]
        layout = (tuple(n == 1 for n in x.shape), *((t.dtype, t.ndim) for t in tensors), x.device.type)
        if layout not in self._kernels:
            self._kernels[layout] = _compile(self.eager, len(self._kernels))
        kernel = self._kernels[layout]
        # Detached, a view does not know the tensor it is a view of: torch.compile would recompile for its strides.
        given = [a.detach() if isinstance(a, Tensor) else a for a in (x, *args)]
        try:
            return kernel(*given)
        except Exception as error:
            if kernel is self.eager:
                raise
            self._kernels[layout] = self.eager
            _log.warning(
                "%s could not be compiled (%s: %s); it runs eagerly, with the same results but slower",
                self.eager.__name__,
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "",
            )
            return self.eager(x, *args)

    def _worth_compiling(self, size: int) -> bool:
        mode = os.environ.get("BITWRIGHT_COMPILE", "auto")
        if size < SMALL or mode == "0" or torch.compiler.is_compiling():
            return False
        if mode == "1":
            return True
        self._work += size
        return self._work > WARM_UP


def _compile(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Compile a copy of the function: torch.compile counts recompilations by code object."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(copy, dynamic=True, fullgraph=True, options=_ONE_LOOP)
