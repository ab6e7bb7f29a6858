"""The accuracy benchmark: its uneven net computes what the even one with ReLU does, and collapses where it should."""

import torch
from torch import nn

import bitwright as bw
from benchmarks.accuracy.bench import with_ranges
from benchmarks.accuracy.nets import InvertedResidual, make_uneven
from bitwright.quantizer import quantizers


def blocks():
    torch.manual_seed(0)
    net = nn.Sequential(InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2))
    for _ in range(3):
        net.train()(torch.randn(16, 8, 8, 8))
    return net.eval()


def test_an_uneven_net_computes_the_same_from_channels_of_other_sizes():
    x, even = torch.randn(4, 8, 8, 8), blocks()
    for block in even:
        block.body[2] = block.body[5] = nn.ReLU()
    uneven = make_uneven(blocks(), seed=0)
    assert torch.equal(uneven(x), even(x))
    ratio = uneven[0].body[4].weight / even[0].body[4].weight
    assert ratio.log2().frac().abs().max() == 0
    assert ratio.max() / ratio.min() >= 256


def test_ranges_are_made_wider_and_narrower():
    x = torch.randn(4, 6)
    model = bw.calibrate(bw.prepare(nn.Sequential(nn.Linear(6, 2)).eval(), x, recipe="W4A4"), [x])
    before = [q.qparams()[0].clone() for q in quantizers(model).values()]
    with_ranges(model, 1.25)
    assert all(torch.equal(q.qparams()[0], b * 1.25) for q, b in zip(quantizers(model).values(), before, strict=True))
