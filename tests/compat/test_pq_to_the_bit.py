"""pytorch-quantization's numbers to the last bit, against its formula written out in numpy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization import quant_modules
from bitwright.compat.pytorch_quantization.nn.modules import _utils
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor

SHAPE = (3, 4, 50)


def old_values(x, amax, bits=8, unsigned=False, narrow=False):
    """One rounding at a time: in double for doubles, else in float32."""
    kind = np.float64 if x.dtype == torch.double else np.float32
    bound = np.float32(2 ** (bits - 1 + unsigned) - 1)
    lowest = 0 if unsigned else -bound if narrow else -bound - 1
    with np.errstate(divide="ignore"):
        scale = (bound / amax.double().numpy() if kind is np.float64 else bound / amax.float().numpy()).astype(kind)
    dead = amax.float().numpy() <= 2.0**-24
    values = x.detach().to(torch.double if kind is np.float64 else torch.float32).numpy()
    q = np.clip(np.rint(values * np.where(dead, 0, scale).astype(kind)), lowest, bound)
    return torch.from_numpy(np.asarray(q / np.where(dead, 1, scale).astype(kind), kind)).to(x.dtype)


def largest(x, axis):
    kept = [] if axis is None else [a % x.ndim for a in ([axis] if isinstance(axis, int) else axis)]
    return x.abs().amax([d for d in range(x.ndim) if d not in kept], keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2)])
def test_every_kind_of_quantizer_gives_the_old_bits(dtype, axis):
    torch.manual_seed(0)
    for number, (bits, unsigned, narrow) in enumerate(
        [(8, False, False), (8, False, True), (8, True, False), (4, False, False), (5, True, True), (12, False, True)]
    ):
        x = (torch.randn(SHAPE, dtype=torch.double) * 3).to(dtype)
        x = x.abs() if unsigned else x
        x[0] *= 0 if number % 2 else 1  # an amax of zero
        quantizer = quant_nn.TensorQuantizer(QuantDescriptor(bits, axis=axis, unsigned=unsigned, narrow_range=narrow))
        assert torch.equal(quantizer(x), old_values(x, largest(x, axis), bits, unsigned, narrow))  # its own range
        amax = largest(x, axis) * 0.7
        quantizer.amax = amax
        assert torch.equal(quantizer(x), old_values(x, amax, bits, unsigned, narrow))
        quantizer.scale_amax = 0.5
        assert torch.equal(
            quantizer(x), old_values(x, amax.float() * 0.5 if x.itemsize < 4 else amax * 0.5, bits, unsigned, narrow)
        )


def test_these_bits_are_not_those_of_a_file():
    """The tests here can fail: Bitwright's own quantizer divides by the step, as ONNX does."""
    torch.manual_seed(0)
    x, amax = torch.randn(10_000), torch.tensor(1.7)
    old, new = (kind(QuantDescriptor(amax=1.7))(x) for kind in (quant_nn.TensorQuantizer, bw.TensorQuantizer))
    assert torch.equal(old, old_values(x, amax))
    assert bool((old != new).any())
    assert torch.allclose(old, new, rtol=1e-6)


@pytest.mark.parametrize("axis", [None, 1])
def test_gradients_pass_up_to_amax(axis):
    torch.manual_seed(0)
    x, weights = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    amax = largest(x.detach(), axis) * 0.5
    x.data[0, :, 0] = amax.expand(1, 4, 1)[0, :, 0]  # the end itself
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(axis=axis))
    quantizer.amax = amax
    (quantizer(x) * weights).sum().backward()
    assert torch.equal(x.grad, torch.where(x.abs() <= amax, weights, 0.0))


def test_learned_ends_and_integers():
    torch.manual_seed(0)
    x = torch.randn(200) * 2
    learned = quant_nn.TensorQuantizer(QuantDescriptor(5, amax=1.5, learn_amax=True))
    learned.init_learn_amax()
    learned.clip.clip_value_max.data.fill_(0.9)
    assert torch.equal(learned(x), old_values(x.clamp(-1.5, 0.9), torch.tensor(1.5), 5))
    integers = quant_nn.TensorQuantizer(QuantDescriptor(fake_quant=False, amax=1.5))
    scale = np.float32(127) / np.float32(1.5)
    assert torch.equal(integers(x), torch.from_numpy(np.clip(np.rint(x.numpy() * scale), -127, 127)))
    assert integers.scale == torch.tensor(scale)


def test_fp8_multiplies_too():
    torch.manual_seed(0)
    x, amax = torch.randn(500) * 2, torch.tensor(1.7)
    scale = 448.0 / amax
    expected = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    assert torch.equal(quant_nn.TensorQuantizer(QuantDescriptor((4, 3), amax=1.7))(x), expected)


class OwnConv(nn.Conv2d, _utils.QuantMixin):
    """A user's module, as the tutorial on custom modules writes it."""

    def __init__(self, *args, **kwargs):
        descriptors = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith("quant_desc")}
        super().__init__(*args, **kwargs)
        self.init_quantizer(*_utils.pop_quant_desc_in_kwargs(type(self), **descriptors))

    def forward(self, x):
        return F.conv2d(self._input_quantizer(x), self._weight_quantizer(self.weight), self.bias)


@pytest.mark.parametrize("kind", ["initialized", "by hand", "own class"])
def test_layers_compute_with_the_old_bits(kind):
    torch.manual_seed(0)
    if kind == "initialized":
        with quant_modules.initialize():
            layer = nn.Conv2d(3, 8, 3)
    else:
        layer = (OwnConv if kind == "own class" else quant_nn.Conv2d)(3, 8, 3)
    assert isinstance(layer, _utils.QuantMixin | nn.Conv2d)
    x = torch.randn(2, 3, 9, 9)
    inputs, weight = old_values(x, x.abs().amax()), old_values(layer.weight, largest(layer.weight.detach(), 0))
    assert torch.equal(layer(x), F.conv2d(inputs, weight, layer.bias))
