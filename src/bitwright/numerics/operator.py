"""Differentiable operators from two functions: values forward, all gradients backward, nothing but the input kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwright.numerics.views import Canonical, canonical, group_params

LIBRARY = torch.library.Library("bitwright", "FRAGMENT")
WHERE = "int? axis=None, int? group=None"


def define_operator(
    name: str, params: str, forward: Callable[..., Tensor], backward: Callable[..., list[Tensor]], *, learned: int
) -> Any:  # noqa: ANN401
    """Register ``bitwright::name(x, params…)`` and its gradient; return the operator.

    Both functions take and give tensors of the user's shape; an :class:`Arranged` brings them into canonical form. In
    export, ``torch.compile`` and autograd the operator is one node.

    Args:
        name: name of the operator; its gradient is ``name_backward``.
        params: schema of all arguments but ``x``.
        forward: ``forward(x, *params)``, the result in the shape, layout and dtype of ``x``.
        backward: ``backward(grad, x, *params)``, the gradients of ``x`` and of the first ``learned`` params.
        learned: how many of the params, all tensors, get a gradient.
    """
    LIBRARY.define(f"{name}(Tensor x, {params}) -> Tensor")
    LIBRARY.define(f"{name}_backward(Tensor grad, Tensor x, {params}) -> Tensor[]")
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    gradient = getattr(torch.ops.bitwright, f"{name}_backward")

    def fake(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(x)

    def fake_backward(grad: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [torch.empty_like(x, dtype=grad.dtype), *(torch.empty_like(p) for p in args[:learned])]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        x, *args = inputs
        tensors = [isinstance(a, Tensor) for a in args]
        ctx.save_for_backward(x, *(a for a, tensor in zip(args, tensors, strict=True) if tensor))
        ctx.rest = [None if isinstance(a, Tensor) else a for a in args]
        ctx.tensors = tensors

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, *saved = ctx.saved_tensors
        tensors = iter(saved)
        args = [next(tensors) if tensor else a for a, tensor in zip(ctx.rest, ctx.tensors, strict=True)]
        return (*gradient(grad, x, *args), *(None,) * (len(args) - learned))

    torch.library.register_fake(f"bitwright::{name}", fake, lib=LIBRARY)
    torch.library.register_fake(f"bitwright::{name}_backward", fake_backward, lib=LIBRARY)
    torch.library.register_autograd(f"bitwright::{name}", differentiate, setup_context=setup, lib=LIBRARY)
    return getattr(torch.ops.bitwright, name)


class Arranged(NamedTuple):
    """A tensor in canonical form, (values,) or (outer, channel, inner), with its parameters."""

    view: Canonical
    ndim: int
    axis: int | None
    group: int | None

    @classmethod
    def of(cls, x: Tensor, axis: int | None, group: int | None) -> "Arranged":
        """Arrange ``x`` for one scale, or one per channel or group along ``axis``."""
        return cls(canonical(x, axis, group), x.ndim, axis, group)

    def param(self, param: Tensor) -> Tensor:
        """Shape a parameter with one value per scale to broadcast against the values."""
        grouped = self.axis is not None and self.group is not None
        return self.view.params(group_params(param, self.axis or 0, self.ndim) if grouped else param)

    def like(self, tensor: Tensor, x: Tensor) -> Tensor:
        """The values of another ``tensor`` of the shape of ``x``, in the order of those of ``x``."""
        if tensor.stride() != x.stride():
            tensor = torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)
        return canonical(tensor, self.axis, self.group).values

    def gradient(self, total: Tensor, param: Tensor) -> Tensor:
        """Give the gradient of a parameter, one value per scale, that parameter's shape and dtype."""
        total = total.to(param.dtype)
        if self.axis is None or self.group is None:
            return total.reshape(param.shape)
        axis = self.axis % self.ndim
        order = [*(d for d in range(self.ndim) if d != axis), axis]
        inverse = sorted(range(self.ndim), key=order.__getitem__)
        return total.reshape([param.shape[d] for d in order]).permute(inverse).contiguous()


def total(values: Tensor) -> Tensor:
    """Sum canonical values over all but the channel; a processor does so in double precision, which is faster, too."""
    dtype = torch.float64 if values.device.type == "cpu" else values.dtype
    return (values.sum(dtype=dtype) if values.ndim == 1 else values.sum((0, 2), dtype=dtype)).to(values.dtype)


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, the rest as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
