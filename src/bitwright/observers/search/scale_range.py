"""From a scale to the range it represents, for observers that find a scale and not a range."""

import torch
from torch import Tensor

from bitwright.spec import QuantSpec


def range_of_scale(scale: Tensor, lowest: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The range [(qmin - z)·scale, (qmax - z)·scale] that gives back ``scale``, and z from the lowest value seen.

    Symmetric specs have z = 0, affine ones z = qmin - round(lowest / scale) within [qmin, qmax].
    """
    if spec.symmetric:
        reach = scale * spec.qmax
        return (-reach if spec.format.signed else torch.zeros_like(reach)), reach
    safe = scale.clamp(min=torch.finfo(scale.dtype).tiny)
    zero_point = (spec.qmin - torch.round(lowest.to(scale).clamp(max=0.0) / safe)).clamp(spec.qmin, spec.qmax)
    return (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale
