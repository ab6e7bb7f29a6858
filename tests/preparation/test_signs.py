"""Which activations cannot be negative, and get unsigned specs on request."""

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.quantizer import quantizers
from bitwright.training import qat_recipe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.d, self.e, self.f = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.a(F.relu(self.first(x)))
        y = self.b(F.max_pool2d(x.clamp(0, 6), 2))
        z = self.c(torch.cat([torch.sigmoid(y), F.relu(y)], 1)[:, 2:6])
        z = self.d(torch.cat([F.relu(z), z], 1))
        z = self.f(torch.add(F.relu(self.e(F.relu(z) + F.relu6(y))), F.relu(y), alpha=-1))
        return self.last(F.relu(z).mean((2, 3)))


def specs(recipe):
    model = bw.prepare(Net().eval(), torch.randn(2, 4, 8, 8), recipe=recipe)
    named = dict(model.named_modules())
    return {name: str(named[name].input_quantizer.quantizer.spec) for name in ("first", *"abcdef", "last")}


def test_tensors_that_cannot_be_negative_are_unsigned():
    found = specs(qat_recipe("tqt", "W4A4"))
    signed = {name for name, spec in found.items() if spec.startswith("int")}
    assert signed == {"first", "d", "f"}
    assert found["a"].startswith("uint4 symmetric")
    assert found["last"].startswith("uint8 symmetric")


def test_only_if_that_is_wished():
    recipe = {"preset": "W4A4", "activation": "int4 symmetric"}
    assert all(spec.startswith("int") for spec in specs(recipe).values())
    wished = {"preset": "W4A4", "activation": {"spec": "uint4 affine", "nonnegative": "unsigned"}}
    assert all("affine" in spec for spec in specs(wished).values())


def test_dorefa_keeps_calibrated_ranges():
    model = bw.prepare(Net().eval(), torch.randn(2, 4, 8, 8), recipe=qat_recipe("dorefa", "W4A4"))
    bw.calibrate(model, [10 * torch.randn(8, 4, 8, 8)])
    reach = [q.range()[1].max() for name, q in quantizers(model).items() if "weight" not in name]
    assert max(reach) > 2  # and not 1, DoReFa's own
