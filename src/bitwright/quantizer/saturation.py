"""saturates: whether a quantizer makes a clamp before it superfluous."""

from bitwright.quantizer.core import TensorQuantizer


def saturates(quantizer: TensorQuantizer, limits: tuple[float | None, float | None]) -> bool:
    """Whether a quantizer's range ends within the limits, so that clamping to them changes nothing."""
    if quantizer.scale.ndim or not quantizer.uniform:
        return False
    scale, zero_point = (p.item() for p in quantizer.qparams())
    spec = quantizer.spec
    ends = zip(limits, (spec.qmin, spec.qmax), strict=True)
    lowest, highest = (end if limit is None else round(limit / scale) + zero_point for limit, end in ends)
    return lowest <= spec.qmin and highest >= spec.qmax
