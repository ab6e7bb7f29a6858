"""BatchNorm in quantization-aware training: by batch statistics, frozen, and as deployed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.nn import QuantConv2d
from bitwright.nn.fold import NormFold
from bitwright.nn.registry import qmodule_for
from bitwright.quantizer import TensorQuantizer

FREE = ONNXRUNTIME.with_(name="free", weights={"formats": ()}, activations={"formats": ()})
QMIN, QMAX = -7, 7

LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d, (5, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d, (4, 3, 8, 8)),
    "conv2d without bias": (lambda: nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d, (4, 3, 8, 8)),
    "conv2d reflect": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d, (4, 3, 8, 8)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (4, 4, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (4, 6, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2), nn.BatchNorm3d, (3, 2, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 6, 2, stride=2), nn.BatchNorm2d, (4, 3, 4, 4)),
    "transposed groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d, (4, 4, 4, 4)),
    "linear": (lambda: nn.Linear(7, 6), nn.BatchNorm1d, (9, 7)),
}


def build(kind, dtype, affine=True, momentum=0.1, method="LearnableFakeQuantize", gain=1.0):
    """A quantized layer with a folded norm, the norm, and an input."""
    torch.manual_seed(3)
    make, norm_type, shape = LAYERS[kind]
    norm = norm_type(6, affine=affine, momentum=momentum, eps=1e-3)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.3, 2)
    if affine:
        with torch.no_grad():
            norm.weight.uniform_(0.4, 1.5).mul_(torch.tensor([1, -1, 1, 1, -1, 1]))  # γ may be negative
            norm.bias.normal_()
    source = make()
    layer = qmodule_for(type(source)).from_float(source)
    layer.input_quantizer.disable()
    layer._weight_quantizer = TensorQuantizer(f"int4 narrow channel:{layer.channel_axis}", method=method)
    layer.after = (NormFold(norm),)
    weight = layer.folded_weight()[0].detach()
    rest = [d for d in range(weight.ndim) if d != layer.channel_axis]
    layer.weight_quantizer.set_qparams(gain * weight.abs().amax(rest) / 9)  # a part of the weights is clipped
    layer.weight_quantizer.quantize()
    return layer.to(dtype).train(), bw.unfreeze_batchnorm(norm.to(dtype).train()), torch.randn(shape, dtype=dtype)


def operator(layer, x, weight, bias):
    """What the layer computes, by torch's own function."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if layer.transposed:
        function = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[weight.ndim]
        return function(
            x, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
    if layer.padding_mode != "zeros":
        x = F.pad(x, (1, 1, 1, 1), mode=layer.padding_mode)
    padding = layer.padding if layer.padding_mode == "zeros" else 0
    return function(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def per_channel(values, layer):
    """One value per output channel against the weight, written out channel by channel."""
    shape = layer.weight.shape
    if not getattr(layer, "transposed", False):
        return torch.stack([values[o].expand(shape[1:]) for o in range(shape[0])])
    first = [i // (shape[0] // layer.groups) * shape[1] for i in range(shape[0])]  # the group's first output channel
    return torch.stack([torch.stack([values[f + o].expand(shape[2:]) for o in range(shape[1])]) for f in first])


def lsq(x, scale, layer):
    """LSQ by its paper: the gradient of the step times 1/√(n·qmax), and straight through the rounding."""
    count = x.numel() / scale.numel()
    factor = (count * QMAX) ** -0.5
    step = scale * factor + (scale - scale * factor).detach()
    axis = layer.channel_axis
    step = step.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    v = (x / step).clamp(QMIN, QMAX)
    return (v + (v.round() - v).detach()) * step


def reference(layer, norm, x, scale, *, batch):
    """The output by the formulas: normalised by the batch, or folded."""
    sigma = (norm.running_var.clone() + norm.eps).sqrt()
    gamma = norm.weight if norm.weight is not None else torch.ones_like(sigma)
    beta = norm.bias if norm.bias is not None else torch.zeros_like(sigma)
    c = gamma / sigma
    quantized = lsq(layer.weight * per_channel(c, layer), scale, layer)
    if not batch:
        bias = 0 if layer.bias is None else layer.bias
        return operator(layer, x, quantized, (bias - norm.running_mean) * c + beta)
    z = operator(layer, x, quantized / per_channel(c, layer), layer.bias)
    dims = [d for d in range(z.ndim) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(z.ndim)]
    mean = z.mean(dims)
    var = ((z - mean.reshape(shape)) ** 2).mean(dims)
    normal = (z - mean.reshape(shape)) / (var + norm.eps).sqrt().reshape(shape)
    return normal * gamma.reshape(shape) + beta.reshape(shape)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_values_and_gradients_are_those_of_the_formulas(kind, batch, dtype, affine):
    layer, norm, x = build(kind, dtype, affine)
    if not batch:
        norm.eval()
    scale = layer.weight_quantizer.method.scale
    x.requires_grad_()
    wanted_of = [x, layer.weight, scale]
    if affine:
        wanted_of += [norm.weight, norm.bias]
    if layer.bias is not None:
        wanted_of.append(layer.bias)
    expected = reference(layer, norm, x, scale, batch=batch)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), wanted_of)
    output = layer(x)
    found = torch.autograd.grad((output * weights).sum(), wanted_of)
    tolerance = 1e-9 if dtype is torch.float64 else 2e-3
    assert torch.allclose(output, expected, rtol=tolerance, atol=tolerance)
    for got, right in zip(found, wanted, strict=True):
        assert got.shape == right.shape
        assert float((got - right).abs().max()) <= tolerance * max(float(right.abs().max()), 1.0)


@pytest.mark.parametrize("method", ["FixedFakeQuantize", "LSQPlusFakeQuantize", "PACTFakeQuantize", "DSQFakeQuantize"])
def test_other_methods_normalise_by_the_batch_too(method):
    layer, norm, x = build("conv2d", torch.float32, method=method)
    c = (norm.weight / (norm.running_var + norm.eps).sqrt()).reshape(-1, 1, 1, 1)
    weight = layer.weight_quantizer(layer.weight * c) / c
    expected = copy.deepcopy(norm)(operator(layer, x, weight, layer.bias))
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("kind", ["conv2d", "linear", "transposed groups"])
def test_running_statistics_move_as_the_norm_says(kind, momentum):
    layer, norm, x = build(kind, torch.float64, momentum=momentum)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    for step in (1, 2, 3):
        with torch.no_grad():
            z = operator(layer, x, *layer.unfolded())
        layer(x)
        rate = 1 / step if momentum is None else momentum
        dims = [d for d in range(z.ndim) if d != 1]
        mean = (1 - rate) * mean + rate * z.mean(dims)
        var = (1 - rate) * var + rate * z.var(dims, unbiased=True)
        assert torch.allclose(norm.running_mean, mean, rtol=1e-12)
        assert torch.allclose(norm.running_var, var, rtol=1e-12)
        assert int(norm.num_batches_tracked) == step


def test_no_step_of_training_reaches_frozen_statistics():
    layer, norm, x = build("conv2d", torch.float32)
    norm.eval()
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    layer(x).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())
    assert norm.weight.grad is not None


@pytest.mark.parametrize("kind", LAYERS)
def test_by_the_statistics_of_the_batch_itself_both_ways_are_one(kind):
    layer, norm, x = build(kind, torch.float64, momentum=1.0)
    weight, bias = layer.unfolded()
    z = operator(layer, x, weight, bias)
    dims = [d for d in range(z.ndim) if d != 1]
    expected = layer(x)  # with momentum 1 the running statistics become the batch's, except for the unbiased variance
    count = z.numel() // z.shape[1]
    norm.running_var.mul_((count - 1) / count)
    assert torch.allclose(norm.running_mean, z.mean(dims))
    shape = [-1 if d == 1 else 1 for d in range(z.ndim)]
    c = (norm.weight / (norm.running_var + norm.eps).sqrt()).reshape(shape)
    folded = (z - norm.running_mean.reshape(shape)) * c + norm.bias.reshape(shape)
    assert torch.allclose(expected, folded, atol=1e-10)


def test_a_multiplier_of_zero_gives_numbers():
    layer, norm, x = build("conv2d", torch.float32)
    with torch.no_grad():
        norm.weight[2] = 0
    output = layer(x)
    output.square().sum().backward()
    assert torch.allclose(output[:, 2], norm.bias[2].expand_as(output[:, 2]))
    assert all(bool(torch.isfinite(p.grad).all()) for p in (layer.weight, norm.weight, norm.bias))


# ------------------------------------------------------------------------------------------------ whole models


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.late = nn.BatchNorm2d(8)  # after a sum: folded into a convolution of its own
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(self.late(x + self.body(x))).mean((2, 3)))


def prepared(calibrated=True, method="LearnableFakeQuantize", **more):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(6, 3, 8, 8)
    recipe = {
        "weight": {"spec": "int4 narrow channel:0", "method": method},
        "activation": {"spec": "uint4 affine", "method": method},
        **more,
    }
    model = bw.prepare(net.eval(), x, FREE, recipe=recipe)
    return (bw.calibrate(model, [x]) if calibrated else model), net, x


def statistics(model):
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k or "tracked" in k}


def moved(model, x):
    """Which norms move their statistics in a step of training."""
    before = statistics(model)
    model(x).sum().backward()
    return {k.rpartition(".")[0] for k, v in statistics(model).items() if not torch.equal(v, before[k])}


def test_off_it_trains_exactly_as_the_float_model():
    model, net, x = prepared(calibrated=False)
    for parts in (model.train(), net.train()):
        parts(x).square().sum().backward()
    assert torch.equal(model(x), net(x))
    for name, parameter in net.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in statistics(model).items())


ALL = {"stem.1", "body.1", "late"}


def test_folded_norms_are_frozen_until_they_are_told():
    model, _, x = prepared()
    assert moved(model.train(), x) == set()
    assert bw.unfreeze_batchnorm(model) is model
    assert moved(model, x) == ALL
    assert moved(model.eval(), x) == set()


def test_norms_that_are_not_folded_move():
    model, _, x = prepared(schedules={"norm_to_convolution": False})
    assert moved(model.train(), x) == {"late"}


def test_freezing_holds_in_training_mode():
    model, _, x = prepared()
    bw.unfreeze_batchnorm(model.train())
    assert bw.freeze_batchnorm(model) is model
    assert moved(model, x) == set()
    assert moved(model.train(), x) == set()  # train() does not thaw it
    assert bw.unfreeze_batchnorm(model) is model
    assert moved(model, x) == ALL
    assert moved(model.eval(), x) == set()


def test_a_part_is_frozen_by_the_layer_or_by_the_norm():
    model, _, x = prepared()
    bw.unfreeze_batchnorm(model.train())
    bw.freeze_batchnorm(model.get_submodule("stem.0"))  # its norm is next to it
    assert moved(model, x) == {"body.1", "late"}
    bw.freeze_batchnorm(model.get_submodule("body.1"))
    assert moved(model, x) == {"late"}
    bw.unfreeze_batchnorm(model.get_submodule("stem"))
    assert moved(model, x) == {"stem.1", "late"}


def test_what_the_user_puts_into_eval_mode_stays_there():
    model, _, x = prepared()
    bw.unfreeze_batchnorm(model.train()).get_submodule("body.1").eval()
    assert moved(model, x) == {"stem.1", "late"}
    bw.unfreeze_batchnorm(model)  # it was not frozen by us
    assert moved(model, x) == {"stem.1", "late"}


def test_freezing_twice_and_thawing_once():
    model, _, x = prepared()
    bw.freeze_batchnorm(bw.freeze_batchnorm(model.train()))
    bw.unfreeze_batchnorm(model)
    assert moved(model, x) == ALL


def test_a_copy_is_frozen_on_its_own():
    model, _, x = prepared()
    twin = copy.deepcopy(bw.freeze_batchnorm(model.train()))
    bw.unfreeze_batchnorm(model)
    assert moved(twin, x) == set()
    assert moved(bw.unfreeze_batchnorm(twin.train()), x) == ALL


@pytest.mark.parametrize("frozen", [True, False])
def test_evaluation_after_training_is_the_deployed_form(frozen):
    model, _, x = prepared()
    model.train()
    if not frozen:
        bw.unfreeze_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    model.eval()
    layer = model.get_submodule("body.0")
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    model(x)
    (given, out) = seen[0]
    weight, bias = layer.folded_weight()
    quantizer = layer.weight_quantizer
    scale = quantizer.qparams()[0].reshape(-1, 1, 1, 1)
    step = layer.bias_scale()
    expected = F.conv2d(given, quantizer.integers(weight) * scale, (bias / step).round() * step, padding=1)
    assert torch.allclose(out, expected, atol=1e-5)


def test_a_frozen_step_computes_what_is_deployed_except_for_the_rounding_of_the_bias():
    model, _, x = prepared()
    expected = model.get_submodule("stem.0")(x)
    found = model.train().get_submodule("stem.0")(x)
    step = model.get_submodule("stem.0").bias_scale()
    assert bool(((found - expected).abs() <= 0.5 * step.reshape(-1, 1, 1) + 1e-6).all())


def test_a_checkpoint_brings_statistics_and_steps_back():
    model, _, x = prepared()
    bw.unfreeze_batchnorm(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
    again, _, _ = prepared(calibrated=False)
    bw.unfreeze_batchnorm(again).load_state_dict(model.state_dict())
    for mode in (False, True):
        assert torch.equal(model.train(mode)(x), again.train(mode)(x))
    assert set(model.state_dict()) == set(bw.freeze_batchnorm(model).state_dict())


@pytest.mark.parametrize("frozen", [True, False])
def test_every_parameter_gets_a_gradient(frozen):
    """As DistributedDataParallel needs it."""
    model, _, x = prepared()
    model.train()
    if not frozen:
        bw.unfreeze_batchnorm(model)
    model(x).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_a_layer_without_a_norm_is_left_alone():
    layer = QuantConv2d(3, 4, 1)
    assert bw.freeze_batchnorm(layer) is layer
    assert bw.unfreeze_batchnorm(layer) is layer
