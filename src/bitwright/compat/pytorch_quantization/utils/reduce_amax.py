"""The largest magnitude along axes."""

from bitwright.quantizer.calibrators import reduce_amax

__all__ = ["reduce_amax"]
