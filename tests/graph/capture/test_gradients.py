"""Capture: gradients, the blocks that switch them or autocast, and errors that the user's code catches."""

import torch
import torch.utils.checkpoint
from torch import nn

import bitwright as bw
from bitwright.graph import capture_model
from tests.graph.capture.capturing import Doubled, Net, image, prepared


def test_the_gradient_of_a_custom_function_is_kept():
    model = Net(lambda self, x: Doubled.apply(self.conv(x))).eval()
    captured = capture_model(model, image()).model
    x = image().requires_grad_()
    captured(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    plain = torch.autograd.grad(model.conv(x).sum(), x)[0]
    assert torch.allclose(x.grad, 3 * plain, atol=1e-5)


def test_no_gradient_passes_a_no_grad_block():
    def body(self, x):
        with torch.no_grad():
            frozen, gate = self.conv(x).chunk(2, 1)
            frozen = frozen * 2
        return self.head(frozen + gate.sigmoid())

    model = Net(body, head=nn.Conv2d(2, 2, 1)).eval()
    quantized = prepared(model, image())
    quantized(image()).sum().backward()
    assert quantized.conv.weight.grad is None
    assert quantized.head.weight.grad is not None


def test_a_decorated_forward_and_enabled_gradients():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @torch.no_grad()
        def forward(self, x):
            with torch.enable_grad():
                live = self.fc(x)
            return self.fc(x).detach() + 1, live

    quantized = prepared(Frozen(), torch.randn(2, 3))
    frozen, live = quantized(torch.randn(2, 3))
    assert not frozen.requires_grad
    assert live.requires_grad


def test_an_autocast_block_is_an_island():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            with torch.autocast("cpu", enabled=False):
                return y.float() + 1

    model = nn.Sequential(nn.Linear(3, 3), Mixed()).eval()
    quantized = bw.prepare(model, torch.randn(2, 3))
    (reason,) = bw.ledger_of(quantized).islands.values()
    assert reason.startswith(f"Untraceable: an autocast block cannot be recorded at {__file__}:")
    x = torch.randn(5, 3)
    assert torch.equal(quantized(x), model(x))


def test_what_the_users_code_catches_is_not_forgotten():
    def body(self, x):
        try:
            scale = float(x.mean())
        except Exception:
            scale = 1.0
        return self.conv(x) * scale

    model = Net(body).eval()
    quantized = bw.prepare(model, image())
    assert list(bw.ledger_of(quantized).islands) == [""]
    x = image(3)
    assert torch.equal(quantized(x), model(x))
