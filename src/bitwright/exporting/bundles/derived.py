"""Ranges of weights that a target's tools find themselves in the float model."""

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
