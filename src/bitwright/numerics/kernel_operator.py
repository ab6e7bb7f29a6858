"""Differentiable operators from two kernels: values forward, all gradients backward, keeping only the inputs.

A kernel is a few lines of tensor math on ``x`` in canonical form, (values,) or (outer, channel, inner), and on its
parameters. Annotations say how a parameter of the operator reaches the kernel:

    PerScale        one for each scale: shaped to broadcast against ``x``, in the precision of the arithmetic
    PerValue        one for each value: in the form of ``x``
    anything else   unchanged

The kernel of the gradients has the gradient of the result, ``grad``, as its first parameter after ``x``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bitwright.numerics.fused import Fused
from bitwright.numerics.kinds import Kind, PerScale, PerValue
from bitwright.numerics.views import Canonical, canonical

LIBRARY = torch.library.Library("bitwright", "FRAGMENT")
_SCHEMA_TYPES: dict[Kind, str] = {int: "int", bool: "bool", float: "float", str: "str"}


def kernel_operator(name: str, values: Fused, gradients: Fused | None, learned: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """Register ``bitwright::name`` and its gradient ``name_backward``, and return the operator.

    In export, ``torch.compile`` and autograd the operator is one node. Its signature is

        name(x, *learned, *the other parameters of the kernels, factor=1.0, axis=None, group=None)

    with ``factor`` only where something is learned for each scale: it multiplies those gradients.

    Args:
        name: name of the operator.
        values: ``values(x, …)`` computes the result, in the shape and dtype of ``x``.
        gradients: ``gradients(x, grad, …)`` computes the gradient of ``x``, then of each of ``learned``, as a tuple or
            a single tensor; None passes the gradient on.
        learned: names of parameters that get a gradient; one that no kernel takes has one value per scale.
    """
    made = _Operator(values, gradients, learned)
    LIBRARY.define(f"{name}(Tensor x, {made.schema}) -> Tensor")
    LIBRARY.define(f"{name}_backward(Tensor grad, Tensor x, {made.schema}) -> Tensor[]")
    LIBRARY.impl(name, made.forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", made.backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitwright::{name}", lambda x, *_: torch.empty_like(x), lib=LIBRARY)
    torch.library.register_fake(f"bitwright::{name}_backward", made.fake_backward, lib=LIBRARY)
    backward = getattr(torch.ops.bitwright, f"{name}_backward")

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        tensors = iter(ctx.saved_tensors)
        x, *args = (next(tensors) if rest is None else rest[0] for rest in ctx.rest)
        return (*backward(grad, x, *args), *(None,) * (len(args) - len(learned)))

    torch.library.register_autograd(f"bitwright::{name}", differentiate, setup_context=_keep, lib=LIBRARY)
    return getattr(torch.ops.bitwright, name)


def apply_kernel(kernel: Fused, x: Tensor, *params: object, axis: int | None, group: int | None) -> Tensor:
    """Apply a kernel to ``x`` and its parameters, without a gradient."""
    if not x.numel():
        return x.clone()
    x = x.detach()
    at = canonical(x, axis, group)
    return at.restore(kernel(at.values, *_arranged(at, x, zip(kernel.kinds.values(), params, strict=True))))


class _Operator:
    """The two functions behind an operator, which take and return tensors in the user's shape."""

    def __init__(self, values: Fused, gradients: Fused | None, learned: tuple[str, ...]) -> None:
        self.values, self.gradients = values, gradients
        back = {name: kind for name, kind in gradients.kinds.items() if name != "grad"} if gradients else {}
        kinds = dict.fromkeys(learned, PerScale) | values.kinds | back
        places = {name: place for place, name in enumerate(kinds)}
        self.for_values = [(kind, places[name]) for name, kind in values.kinds.items()]
        self.for_gradients = [(kind, places[name]) for name, kind in back.items()]
        self.learned = [kinds[name] for name in learned]
        self.factor = len(kinds)  # its place, if it is there
        self.defaults = (1.0, None, None) if PerScale in self.learned else (None, None)
        self.count = len(kinds) + len(self.defaults)
        tail = ("float factor=1.0", "int? axis=None", "int? group=None")[-len(self.defaults) :]
        self.schema = ", ".join(
            [*(f"{_SCHEMA_TYPES.get(kind, 'Tensor')} {name}" for name, kind in kinds.items()), *tail]
        )

    def forward(self, x: Tensor, *args: object) -> Tensor:
        if not x.numel():
            return x.clone()
        args = self.complete(args)
        at = canonical(x, args[-2], args[-1])
        return at.restore(self.values(at.values, *_arranged(at, x, ((kind, args[i]) for kind, i in self.for_values))))

    def backward(self, grad: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
        if self.gradients is None or not x.numel():
            return [grad.clone(), *(torch.zeros_like(p) for p in args[: len(self.learned)])]
        args = self.complete(args)
        at = canonical(x, args[-2], args[-1])
        params = _arranged(at, x, ((kind, args[i]) for kind, i in self.for_gradients))
        found = self.gradients(at.values, at.like(grad, x), *params)
        grad_x, *parts = found if isinstance(found, tuple) else (found,)
        results = [at.restore(grad_x)]
        for kind, part, param in zip(self.learned, parts, args, strict=False):
            single = kind is PerValue
            results.append(at.restore(part) if single else at.gradient(part, param).mul_(args[self.factor]))
        return results

    def fake_backward(self, grad: Tensor, x: Tensor, *args: Any) -> list[Tensor]:
        learned = args[: len(self.learned)]
        return [torch.empty_like(x, dtype=grad.dtype), *(torch.empty_like(p) for p in learned)]

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add the defaults: torch leaves out arguments that equal them."""
        missing = self.count - len(args)
        return (*args, *self.defaults[-missing:]) if missing else args


def _arranged(at: Canonical, x: Tensor, params: Iterable[tuple[Kind, Any]]) -> list[Any]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    arranged = []
    for kind, param in params:
        if kind is PerScale:
            shaped = at.params(param)
            arranged.append(shaped if shaped.dtype is dtype else shaped.to(dtype))
        else:
            arranged.append(at.like(param, x) if kind is PerValue else param)
    return arranged


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
    ctx.rest = [None if isinstance(a, Tensor) else (a,) for a in inputs]
