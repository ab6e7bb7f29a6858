"""The user's batches stay as they are, whatever a model writes into what it is given."""

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.graph.inputs import Inputs


class Writes(nn.Module):
    """Scales its input in place, as some preprocessing does."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x.mul_(2).sub_(0.5)
        return self.last(torch.relu(self.norm(self.first(x))))


def quiet(step):
    return lambda model, batches: step(model, batches, progress=False)


def trained(model, batches):
    loader = [(batch, batch.mean((2, 3))[:, :1].expand(-1, 4)) for batch in batches]

    def gap(result, target):
        return (result.mean((2, 3)) - target).square().mean()

    bw.train(model, loader, gap, epochs=1, distill=0.5, teacher=Writes().eval(), progress=False)


STEPS = {
    "calibrate": quiet(bw.calibrate),
    "analyze": quiet(bw.analyze),
    "correct": quiet(bw.correct),
    "equalize": quiet(bw.equalize),
    "smooth": quiet(bw.smooth),
    "sensitivity": quiet(bw.sensitivity),
    "search_bits": lambda model, batches: bw.search_bits(model, batches, {"size": 400}, progress=False),
    "reconstruct": lambda model, batches: bw.reconstruct(model, batches, steps=2, progress=False),
    "blockwise": lambda model, batches: bw.reconstruct(model, batches, method="adaround", steps=2, progress=False),
    "train": trained,
}


@pytest.mark.parametrize("step", STEPS)
def test_after(step):
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 10, 10) for _ in range(2)]
    kept = [batch.clone() for batch in batches]
    model = bw.prepare(Writes().eval(), batches[0])
    bw.calibrate(model, batches, progress=False)
    STEPS[step](model, batches)
    assert all(map(torch.equal, batches, kept))


def test_a_copy_keeps_history_and_what_is_shared():
    x = torch.ones(2, requires_grad=True)
    twice = x * 2
    given = Inputs((twice, [twice]), {"y": {"z": twice}})
    copied = given.copied()
    assert copied.args[0] is copied.args[1][0] is copied.kwargs["y"]["z"]
    assert copied.args[0] is not twice
    copied.args[0].sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
