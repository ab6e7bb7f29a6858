"""Weight ranges that a target's tools derive from the float model."""

import numpy as np

from bitwright.exporting.bundles.base import Contents
from bitwright.exporting.bundles.ranges import Range


def per_channel_maximum(contents: Contents, highest: int) -> list[Range]:
    """Symmetric weights: the largest magnitude of each channel over the highest integer."""
    found = []
    for place in contents.places:
        if place.kind != "weight" or place.axis is None:
            continue
        values = contents.constants[place.tensor]
        others = tuple(d for d in range(values.ndim) if d != place.axis % values.ndim)
        largest = np.abs(values).max(axis=others).astype(np.float64)
        scale = np.where(largest > 0, largest / highest, 1).astype(np.float32)
        found.append(Range(place, scale, np.zeros(scale.shape, np.int64), place.lowest, place.highest))
    return found


def whole_tensor_limits(contents: Contents) -> list[Range]:
    """Affine weights: from the least to the largest value of the tensor, zero among them."""
    found = []
    for place in contents.places:
        if place.kind != "weight":
            continue
        values = contents.constants[place.tensor].astype(np.float64)
        low, high = min(values.min(), 0.0), max(values.max(), 0.0)
        steps = place.highest - place.lowest
        scale = (high - low) / steps if high > low else 1.0
        point = np.asarray(place.lowest - np.rint(low / scale), np.int64)
        found.append(Range(place, np.asarray(scale, np.float32), point, place.lowest, place.highest))
    return found
