"""The largest magnitude along axes."""

from bitwright.numerics.amax import reduce_amax

__all__ = ["reduce_amax"]
