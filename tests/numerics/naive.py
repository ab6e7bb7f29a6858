"""Quantize–dequantize as a naive loop, and arguments to compare it with."""

import numpy as np
import torch

FORMATS = [f"int{b}" for b in range(2, 17)] + [f"uint{b}" for b in range(1, 17)]


def place_of(index, axis, group, ndim):
    """Which scale a value at ``index`` has."""
    if axis is None:
        return ()
    axis %= ndim
    if group is None:
        return (index[axis],)
    return tuple(i // group if d == axis else i for d, i in enumerate(index))


def naive(x, scale, zero_point, qmin, qmax, axis=None, group=None):
    """The definition, value by value in numpy: integers and what they stand for."""
    wide = np.float64 if x.dtype == torch.float64 else np.float32
    values = x.detach().to(torch.float64 if wide is np.float64 else torch.float32).numpy()
    q, y = np.empty(values.shape, np.int64), np.empty(values.shape, wide)
    for index in np.ndindex(values.shape):
        place = place_of(index, axis, group, values.ndim)
        s, z = wide(scale.numpy()[place]), int(zero_point.numpy()[place])
        q[index] = min(max(int(np.rint(values[index] / s)) + z, qmin), qmax)
        y[index] = wide(q[index] - z) * s
    return torch.from_numpy(q), torch.from_numpy(y).to(x.dtype)


def params_for(spec, shape, reach=3.0):
    """Scales that let some values saturate, and zero points anywhere in range."""
    size = spec.param_shape(shape)
    scale = (0.5 + torch.rand(size)) * reach / (spec.qmax - spec.qmin)
    zero = torch.zeros(size, dtype=torch.int32)
    if not spec.symmetric:
        zero = torch.randint(spec.qmin, spec.qmax + 1, size, dtype=torch.int32)
    return scale, zero


def arguments(spec, shape, reach=3.0):
    grain = spec.granularity
    return (
        *params_for(spec, shape, reach),
        spec.qmin,
        spec.qmax,
        getattr(grain, "axis", None),
        getattr(grain, "size", None),
    )


GRAINS = {
    "tensor": (4, 6),
    "channel:0": (4, 3, 2, 2),
    "channel:1": (2, 5, 3),
    "channel:-1": (3, 4),
    "group:2:-1": (3, 8),
    "group:3:0": (6, 4),
    "group:4:1": (2, 8, 3),
}
