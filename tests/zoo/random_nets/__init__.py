"""Random nets: small graphs drawn from all operators with all their arguments, for tests that look for the unexpected.

``random_net(seed)`` gives a module and an input. The same seed always gives the same net, and its ``repr`` shows every
step, so that a failure can be read and cut down by hand. ``random_net(seed, family="tokens")`` draws steps on
sequences.

``python -m tests.zoo.random_nets 3000 3300 openvino tokens`` proves many, and names those that fail.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tests.zoo.random_nets import layers, pools, sequences, values
from tests.zoo.random_nets.builder import Builder, RandomNet

__all__ = ["FAMILIES", "RandomNet", "random_net"]

Kinds = list[tuple[Callable[[Builder], object], int]]
FAMILIES = "images", "sequences", "tokens", "half"

IMAGES: Kinds = [
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


SEQUENCES: Kinds = [
    (sequences.attention, 2),
    (sequences.written_attention, 3),
    (sequences.recurrent, 2),
    (sequences.encoder_layer, 2),
    (sequences.feed_forward, 4),
    (sequences.root_norm, 1),
    (sequences.placed, 2),
    (sequences.joined, 3),
    (sequences.convolved, 2),
    (sequences.chosen, 3),
    (layers.linear, 5),
    (layers.multiplied, 1),
    (layers.normalize, 3),
    (layers.again, 2),
    (values.activation, 3),
    (values.clamp, 1),
    (values.nothing, 1),
    (values.binary, 4),
    (values.constant, 1),
    (values.product, 1),
]


def random_net(seed: int, size: int = 8, family: str = "images") -> tuple[RandomNet, Tensor]:
    """A net of about ``size`` steps, in eval mode, and an input of two samples.

    Args:
        seed: what it is drawn with.
        size: about how many steps it has.
        family: images, images in half precision, sequences of features, or sequences of tokens.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    images = family in ("images", "half")
    b = Builder(rng, rank=rng.choice([1, 2, 2, 2, 3]) if images else 1)
    b.values.append(_input(b, family))
    if family == "tokens":
        sequences.embed(b)
    kinds, weights = zip(*(IMAGES if images else SEQUENCES), strict=True)
    for _ in range(20 * size):
        if len(b.steps) >= size:
            break
        before = len(b.layers), len(b.steps), len(b.values)
        try:
            rng.choices(kinds, weights)[0](b)
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError, AssertionError):  # it does not fit
            b.layers = dict(list(b.layers.items())[: before[0]])
            del b.steps[before[1] :], b.values[before[2] :]
    read = {r for _, _, reads in b.steps for r in reads}
    outputs = [i for i in range(1, len(b.values)) if i not in read]
    if b.flip(0.3):
        outputs = sorted({*outputs, rng.choice(range(1, len(b.values)))})
    net, x = RandomNet(b.layers, b.steps, outputs).eval(), b.values[0]
    if family == "half":
        return net.half(), x.half()
    return net, x


def _input(b: Builder, family: str) -> Tensor:
    if family == "tokens":
        return torch.randint(0, sequences.WORDS, (2, b.one_of(4, 5, 7)))
    if family == "sequences":
        return torch.randn(2, b.one_of(3, 5, 6), b.one_of(4, 8, 12))
    sides = [b.one_of(*((5, 6, 7) if b.rank == 3 else (6, 7, 8, 9))) for _ in range(b.rank)]
    return torch.randn(2, b.one_of(1, 3, 4), *sides)
