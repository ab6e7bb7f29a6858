"""Random nets: small graphs drawn from all operators with all their arguments, for tests that look for the unexpected.

``random_net(seed)`` gives a module and an input. The same seed always gives the same net, and its ``repr`` shows every
step, so that a failure can be read and cut down by hand.

``python -m tests.zoo.random_nets 3000 3300 openvino`` proves many, and names those that fail.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.zoo.random_nets import layers, pools, values
from tests.zoo.random_nets.builder import Builder, RandomNet

__all__ = ["RandomNet", "random_net"]

KINDS: list[tuple[Callable[[Builder], None], int]] = [
    (layers.conv, 7),
    (layers.conv_norm, 5),
    (layers.functional_conv, 2),
    (layers.deconv, 2),
    (layers.functional_deconv, 1),
    (layers.linear, 3),
    (layers.multiplied, 1),
    (layers.flat_linear, 1),
    (layers.normalize, 1),
    (layers.gate, 1),
    (layers.again, 2),
    (layers.shared_weight, 1),
    (pools.max_pool, 2),
    (pools.average_pool, 2),
    (pools.adaptive_pool, 1),
    (pools.upsample, 2),
    (pools.pad, 2),
    (pools.pad_module, 1),
    (pools.shuffle_pixels, 1),
    (values.activation, 6),
    (values.clamp, 1),
    (values.nothing, 1),
    (values.binary, 4),
    (values.constant, 2),
    (values.concat, 2),
    (values.stack, 1),
    (values.move, 4),
    (values.reduce, 1),
    (values.product, 1),
]


def random_net(seed: int, size: int = 8) -> tuple[RandomNet, Tensor]:
    """A net of about ``size`` steps, in eval mode, and an input of two samples."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    b = Builder(rng, rank=rng.choice([1, 2, 2, 2, 3]))
    sides = [rng.choice([5, 6, 7] if b.rank == 3 else [6, 7, 8, 9]) for _ in range(b.rank)]
    b.values.append(torch.randn(2, rng.choice([1, 3, 4]), *sides))
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(20 * size):
        if len(b.steps) >= size:
            break
        before = len(b.layers), len(b.steps), len(b.values)
        try:
            rng.choices(kinds, weights)[0](b)
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError):  # drawn arguments that do not fit
            b.layers = dict(list(b.layers.items())[: before[0]])
            del b.steps[before[1] :], b.values[before[2] :]
    read = {r for _, _, reads in b.steps for r in reads}
    outputs = [i for i in range(1, len(b.values)) if i not in read]
    if b.flip(0.3):
        outputs = sorted({*outputs, rng.choice(range(1, len(b.values)))})
    return RandomNet(b.layers, b.steps, outputs).eval(), b.values[0]
