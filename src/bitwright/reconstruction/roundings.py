"""Roundings: V of all weights that learn together in one tensor, and the weights that it makes at each step.

With b the weight rounded down within the grid, and r one step of the grid, or 0 where the weight lies beyond its ends:

    w = b + r·h(V),    dV = h'(V)·(r·dw - 2β·strength·sign(u)·|u|^(β - 1)),    u = 2·h(V) - 1

which is the gradient of the loss and of ``strength`` times the regulariser Σ 1 - |u|^β; see
:mod:`bitwright.methods.adaround`. b and r are made once. A step is a few kernels on one tensor, however many layers a
unit has, and asks autograd for dw only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bitwright.methods.adaround import GAMMA, ZETA
from bitwright.numerics import wide
from bitwright.numerics.views import broadcast
from bitwright.reconstruction.learned import LearnedWeight


class Roundings:
    """The roundings of weights on one device.

    Attributes:
        rounding: V of all of them, to be trained.
    """

    def __init__(self, weights: Sequence[LearnedWeight]) -> None:
        self.weights = weights
        grids = [_grid(weight) for weight in weights]
        self._below, self._room = (torch.cat([grid[i].reshape(-1) for grid in grids]) for i in range(2))
        self._sizes = [weight.weight.numel() for weight in weights]
        self.rounding = nn.Parameter(torch.cat([w.rounding.detach().reshape(-1) for w in weights]))
        self._raw, self._slope = self.rounding.detach(), self.rounding.detach()  # of the last step

    def soften(self) -> list[Tensor]:
        """Make the weights of this step, which their quantizers give from now on, and ask for their gradients."""
        with torch.no_grad():
            part = torch.sigmoid(self.rounding)
            self._raw = part * (ZETA - GAMMA) + GAMMA
            slope = part.mul_(1.0 - part).mul_(ZETA - GAMMA)
            self._slope = torch.ops.aten.hardtanh_backward(slope, self._raw, 0.0, 1.0)  # 0 where h is 0 or 1
            values = torch.addcmul(self._below, self._room, self._raw.clamp(0.0, 1.0))
        made = []
        for weight, value in zip(self.weights, values.split(self._sizes), strict=True):
            made.append(value.view(weight.weight.shape).to(weight.weight.dtype).requires_grad_())
            weight.method.soft = made[-1]
        return made

    def pull(self, grads: Sequence[Tensor], beta: float | None, strength: float) -> None:
        """Give V its gradient from those of the weights, and from the regulariser unless ``beta`` is None."""
        with torch.no_grad():
            total = torch.cat([grad.reshape(-1).float() for grad in grads]).mul_(self._room)
            if beta is not None:
                u = self._raw.mul_(2.0).sub_(1.0).clamp_(-1.0, 1.0)
                total.add_(u.abs().pow_(beta - 1.0).copysign_(u), alpha=-2.0 * beta * strength)
            self.rounding.grad = total.mul_(self._slope)

    def decided(self) -> bool:
        """Whether every rounding was up or down at the last step."""
        return not bool(self._slope.any())

    def finish(self) -> None:
        """Leave each V to its weight."""
        for weight, part in zip(self.weights, self.rounding.detach().split(self._sizes), strict=True):
            weight.rounding.detach().copy_(part.view(weight.rounding.shape))
            weight.method.soft = None


def roundings_of(weights: Sequence[LearnedWeight]) -> list[Roundings]:
    """The roundings of all these weights, device by device."""
    devices = dict.fromkeys(w.rounding.device for w in weights)
    return [Roundings([w for w in weights if w.rounding.device == device]) for device in devices]


def _grid(learned: LearnedWeight) -> tuple[Tensor, Tensor]:
    """The weight rounded down within the grid, and by how much it can be more."""
    weight, method, spec = wide(learned.weight), learned.method, learned.quantizer.spec
    scale, zero_point = (broadcast(p, weight, method.axis, method.group) for p in learned.quantizer.qparams())
    floor, low, high = torch.floor(weight / scale), spec.qmin - zero_point, spec.qmax - zero_point
    free = (floor >= low) & (floor < high)
    below = torch.minimum(torch.maximum(floor, low), high) * scale
    return below.float(), torch.where(free, scale.expand_as(weight), 0.0).float()
