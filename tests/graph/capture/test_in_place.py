"""Capture: shared modules and parameters, and operations that write in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.quantizer import quantizers
from tests.graph.capture.capturing import Net, image, prepared


def test_a_module_called_twice():
    quantized = prepared(Net(lambda self, x: self.conv(x) + self.conv(x.flip(3))), image(), image(3))
    calls = [n for n in quantized.graph.nodes if n.target == "conv"]
    assert len(calls) == 2


def test_a_module_under_two_names_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = self.one
            self.three = nn.Linear(4, 4)
            self.three.weight = self.one.weight

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    model = Tied().eval()
    quantized = prepared(model, torch.randn(2, 4), torch.randn(5, 4))
    assert quantized.three.weight is quantized.one.weight
    assert quantized.two is quantized.one
    assert set(model.state_dict()) <= set(quantized.state_dict())
    quantized.load_state_dict(model.state_dict())


def add_in_place(self, x):
    out = self.conv(x)
    identity = out
    out = torch.relu_(out * 2)
    out += identity
    return out


def relu_in_place(self, x):
    out = self.conv(x)
    F.relu_(out)
    return out + 1


def method_in_place(self, x):
    out = self.conv(x)
    out.mul_(2).add_(1)
    out.clamp_(-0.5, 0.5)
    return out


def view_written(self, x):
    out = self.conv(x)
    out.view(-1).add_(1)
    return out


def view_of_view_written(self, x):
    out = self.conv(x)
    flat = out.view(-1)
    part = flat[: flat.shape[0] // 2]
    part.mul_(3)
    return out


def slice_written(self, x):
    out = self.conv(x)
    out[:, 0] = 1.0
    out[:, 1].mul_(2.0)
    return out


def slices_changed(self, x):
    out = self.conv(x)
    out[:, :2] += 1
    out[:, 2:] *= 2
    return F.relu_(out)


def slice_changed_and_read(self, x):
    out = self.conv(x)
    flat = out.view(-1)
    out[:, :2] += out[:, 2:]
    return out + flat.sum()


def base_written(self, x):
    out = self.conv(x)
    view = out[:, :2]
    out.relu_()
    return view * 2 + out[:, 2:]


def transposed_written(self, x):
    out = self.conv(x)
    out.mT.mul_(2)
    return out


def input_written(self, x):
    x.mul_(2)
    return self.conv(x)


def input_view_written(self, x):
    x[:, 0].mul_(2)
    return self.conv(x)


def shared_residual(self, x):
    out = self.conv(x)
    skip = out
    out += 1
    return out * skip


def half_in_place(self, x):
    out = self.conv(x).half()
    out.add_(torch.ones(8))
    return out


def integers_in_place(self, x):
    count = torch.zeros(x.shape[0], dtype=torch.int64)
    count += 1
    return self.conv(x) + count.view(-1, 1, 1, 1)


def keeps_no_gradient(self, x):
    out = self.conv(x)
    return out.requires_grad_(False) + out.detach_()


def filled(self, x):
    out = self.conv(x)
    out.masked_fill_(out > 0.5, 0.25)
    return out.fill_(1.0) + 2 if x.ndim == 3 else out


IN_PLACE = [
    add_in_place,
    relu_in_place,
    method_in_place,
    view_written,
    view_of_view_written,
    slice_written,
    slices_changed,
    slice_changed_and_read,
    base_written,
    transposed_written,
    input_written,
    input_view_written,
    shared_residual,
    half_in_place,
    integers_in_place,
    keeps_no_gradient,
    filled,
]


@pytest.mark.parametrize("body", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place_operations(body):
    quantized = prepared(Net(body), image(2), image(3))
    assert any(n.target == "conv" for n in quantized.graph.nodes)


@pytest.mark.parametrize("body", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place_operations_when_quantized(body):
    model = Net(body).eval()
    quantized = bw.prepare(model, image())
    x = image(4)
    assert bool(quantizers(quantized)) or body is not slices_changed
    if quantizers(quantized):
        bw.calibrate(quantized, [x.clone()])
    else:  # what is written to through a view is not quantized
        (entry,) = [e for e in bw.ledger_of(quantized).entries if e.name == "conv"]
        assert entry.reason == "it shares memory with a tensor that is written to in place"
    with torch.no_grad():
        expected, got = model(x.clone()).float(), quantized(x.clone()).float()
    noise = (expected - got).pow(2).mean()
    assert float(noise) < 0.01 * float(expected.pow(2).mean())


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_write_between_producer_and_consumer_is_not_lost(backend):
    def body(self, x):
        smooth = F.gelu(self.conv(x))  # stays float, so that only the second convolution wants it quantized
        smooth[:, 0] = 5.0
        smooth.flatten(1)[:, 5:40].mul_(-3.0)
        return self.second(F.max_pool2d(smooth, 2))

    model = Net(body, second=nn.Conv2d(4, 2, 1)).eval()
    quantized = bw.prepare(model, image(), backend)
    x = image(4)
    bw.calibrate(quantized, [x])
    with torch.no_grad():
        expected, got = model(x), quantized(x)
    assert float((expected - got).pow(2).mean()) < 0.01 * float(expected.pow(2).mean())


def test_a_residual_block_with_in_place_relu():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            identity = x
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += identity
            return self.relu(out)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), Block()).eval()
    quantized = prepared(model, image(2), image(5))
    assert not any(m.inplace for m in quantized.modules() if isinstance(m, nn.ReLU))
    assert all(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))
