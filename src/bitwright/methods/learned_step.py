"""LSQ as one autograd node, which training calls instead of the method's chain of small operators.

Values and gradients are those of :class:`LearnableFakeQuantize`; see there for the formulas. With a ``divisor`` c, one
value per scale, the tensor that is quantized is x·c and the result is divided by c again,

    y = quantize(x·c; s) / c = quantize(x; s / c)

as needed by a layer whose BatchNorm multiplies its output by c (see :mod:`bitwright.nn.norm`): neither x·c nor its
quantized values are ever created. A negative c mirrors the grid.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwright.methods.base import Method
from bitwright.methods.clipped import TINY
from bitwright.methods.learnable import LearnableFakeQuantize
from bitwright.numerics import Fused, PerScale, PerValue, total
from bitwright.numerics.views import canonical
from bitwright.torch_internals import is_traced

LARGE = 1 << 16
"""Fewer values than these stay in the cache: operator by operator is faster than the call of a compiled kernel."""


def learned_step(method: Method, x: Tensor, divisor: Tensor | None = None) -> Tensor | None:
    """Quantize and dequantize ``x`` by LSQ with gradients, or return None where the method itself must do it.

    The method does it if it is not LSQ (or a subclass of it), before it has started, for half precision and groups,
    without gradients, and in ``torch.compile`` and export, which see one operator.
    """
    if type(method) is not LearnableFakeQuantize or not torch.is_grad_enabled() or is_traced(x):
        return None
    scale, zero_point = method._parameters["scale"], method._parameters.get("zero_point")
    if scale is None or method.group is not None or (zero_point is None and not method.spec.symmetric):
        return None
    if not _fits(x, scale, divisor):
        return None
    return _LearnedStep.apply(x, scale, zero_point, divisor, _Grid.of(method, x, scale))


def _fits(x: Tensor, scale: Tensor, divisor: Tensor | None) -> bool:
    if divisor is not None and divisor.shape != scale.shape:
        return False
    return x.dtype is torch.float32 and scale.dtype is torch.float32 and x.numel() > 0


class _Grid(NamedTuple):
    qmin: int
    qmax: int
    axis: int | None
    factor: float

    @classmethod
    def of(cls, method: LearnableFakeQuantize, x: Tensor, scale: Tensor) -> "_Grid":
        factor = method.gradient_factor(x, scale) if method.use_grad_scaling else 1.0
        axis = None if method.axis is None else method.axis % x.ndim
        return cls(method.spec.qmin, method.spec.qmax, axis, factor)

    def shaped(self, x: Tensor, *params: Tensor | None) -> list[Any]:
        """Parameters with one value per step, to broadcast against ``x``; then the ends."""
        shape = () if self.axis is None else [-1 if d == self.axis else 1 for d in range(x.ndim)]
        return [*(p if p is None else p.reshape(shape) for p in params), self.qmin, self.qmax]

    def whole(self, zero_point: Tensor | None) -> Tensor | None:
        """The zero point as the integer that is stored."""
        return None if zero_point is None else zero_point.round().clamp_(self.qmin, self.qmax)


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        divisor: Tensor | None,
        grid: _Grid,
    ) -> Tensor:
        step = scale.abs().add_(TINY)
        if divisor is not None:
            step.div_(divisor)
        ctx.grid, ctx.taken = grid, None
        ctx.save_for_backward(x, scale, zero_point, divisor, step)
        return _values(x, step, zero_point, grid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, scale, zero_point, divisor, step = _saved(ctx)
        ctx.taken = None
        grid: _Grid = ctx.grid
        grad_x, per_step, outside = _gradients(x, grads[0], step, grid.whole(zero_point), grid)
        grad_zero_point = None if outside is None else outside.mul_(step).mul_(-grid.factor)
        grad_divisor = None
        if divisor is not None:  # the step is s / c
            per_step.div_(divisor)
            grad_divisor = per_step.mul(step).neg_()
        return grad_x, per_step.mul_(grid.factor).mul_(scale.sgn()), grad_zero_point, grad_divisor, None


def _saved(ctx: Any) -> Any:  # noqa: ANN401
    """What the node saved; read once, because ``torch.utils.checkpoint`` recomputes it and hands it out only once."""
    if ctx.taken is None:
        ctx.taken = ctx.saved_tensors
    return ctx.taken


def _gradients(
    x: Tensor, grad: Tensor, step: Tensor, zero_point: Tensor | None, grid: _Grid
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of x, and for each step Σ g·(y / step - v inside) and Σ g outside."""
    if x.numel() < LARGE:
        s, z, *ends = grid.shaped(x, step, zero_point)
        v = torch.div(x, s)
        # One vectorised operator for: g where qmin <= v + z <= qmax, else 0.
        grad_x = torch.ops.aten.hardtanh_backward(grad, v if z is None else v + z, *_just_outside(*ends))
        dims = [d for d in range(x.ndim) if d != grid.axis]
        return grad_x, _part(v, grad, grad_x, z, *ends).sum(dims), None if z is None else (grad - grad_x).sum(dims)
    view = canonical(x, grid.axis, None)
    if grad.stride() != x.stride():
        grad = torch.empty_like(x).copy_(grad)
    values = canonical(grad, grid.axis, None).values
    if zero_point is None:
        grad_x, per_step = _sums(view.values, values, view.params(step), grid.qmin, grid.qmax)
        return view.restore(grad_x), per_step, None
    params = view.params(step), view.params(zero_point)
    grad_x, per_step, outside = _affine_sums(view.values, values, *params, grid.qmin, grid.qmax)
    return view.restore(grad_x), per_step, outside


@cache
def _just_outside(qmin: int, qmax: int) -> tuple[float, float]:
    ends, away = torch.tensor([qmin, qmax], dtype=torch.float32), torch.tensor([-torch.inf, torch.inf])
    low, high = torch.nextafter(ends, away).tolist()
    return low, high


def _part(v: Tensor, grad: Tensor, grad_x: Tensor, z: Tensor | None, qmin: int, qmax: int) -> Tensor:
    return _steps(v.round(), z, qmin, qmax).mul_(grad).addcmul_(grad_x, v, value=-1)


def _steps(nearest: Tensor, z: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Whole steps, limited to the grid."""
    if z is None:
        return nearest.clamp_(qmin, qmax)
    return nearest.add_(z).clamp_(qmin, qmax).sub_(z)


@Fused
def _forward(x: Tensor, step: PerScale, z: PerScale | None, qmin: int, qmax: int) -> Tensor:
    return _steps(torch.div(x, step).round_(), z, qmin, qmax).mul_(step)


@Fused
def _sums(x: Tensor, grad: PerValue, step: PerScale, qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    v = torch.div(x, step)
    grad_x = torch.where((v < qmin) | (v > qmax), 0.0, grad)
    return grad_x, total(_part(v, grad, grad_x, None, qmin, qmax))


@Fused
def _affine_sums(
    x: Tensor, grad: PerValue, step: PerScale, z: PerScale, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor]:
    v = torch.div(x, step)
    grad_x = torch.where((v + z < qmin) | (v + z > qmax), 0.0, grad)
    return grad_x, total(_part(v, grad, grad_x, z, qmin, qmax)), total(grad - grad_x)


def recompute_quantized() -> AbstractContextManager[Any]:
    """Make autograd keep instructions to recompute large tensors quantized in this context, not the tensors.

    The quantizer keeps its input for its own gradient. Its result would be a second tensor of that size, kept by the
    layer that multiplies it. Recomputing it from the input in the backward pass costs one read of memory, and a
    training step needs no more memory than in float.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Any:  # noqa: ANN401
    node = tensor.grad_fn
    return node if tensor.numel() >= LARGE and getattr(node, "_forward_cls", None) is _LearnedStep else tensor


def _unpack(kept: Any) -> Tensor:  # noqa: ANN401
    if isinstance(kept, Tensor):
        return kept
    x, _, zero_point, _, step = _saved(kept)
    with torch.no_grad():
        return _values(x, step, zero_point, kept.grid)


def _values(x: Tensor, step: Tensor, zero_point: Tensor | None, grid: _Grid) -> Tensor:
    whole = grid.whole(zero_point)
    if x.numel() < LARGE:
        return _forward.eager(x, *grid.shaped(x, step, whole))
    view = canonical(x, grid.axis, None)
    params = (p if p is None else view.params(p) for p in (step, whole))
    return view.restore(_forward(view.values, *params, grid.qmin, grid.qmax))
