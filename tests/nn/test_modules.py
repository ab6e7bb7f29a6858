"""Quantized modules: equal to their originals with quantizers off, close with them on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import bitwright.nn as qnn
from bitwright.errors import ConfigError
from bitwright.quantizer import Mode, QuantDescriptor, TensorQuantizer, quantizers


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if a is None or b is None:
        return a is b
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def near(a, b, tolerance):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, atol=tolerance, rtol=0)
    if a is None or b is None:
        return a is b
    return all(near(x, y, tolerance) for x, y in zip(a, b, strict=True))


def off(module):
    for quantizer in quantizers(module).values():
        quantizer.off()
    return module


def pair(name, *args, **kwargs):
    """A float module, its quantized version built by constructor with the same state, and another by from_float."""
    original = getattr(nn, name)(*args, **kwargs).eval()
    built = getattr(qnn, f"Quant{name}")(*args, **kwargs).eval()
    built.load_state_dict(original.state_dict(), strict=False)
    made = getattr(qnn, f"Quant{name}").from_float(original)
    return original, built, made


def check_off(original, built, made, *inputs, **options):
    want = original(*copy.deepcopy(inputs), **options)
    assert same(off(built)(*copy.deepcopy(inputs), **options), want)
    assert same(off(made)(*copy.deepcopy(inputs), **options), want)


SIZES = {1: (11,), 2: (9, 7), 3: (5, 6, 5)}


@settings(max_examples=60)
@given(
    d=st.sampled_from([1, 2, 3]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
)
def test_convolutions(d, kernel, stride, padding, dilation, groups, bias, mode):
    assume(padding != "same" or stride == 1)
    modules = pair(f"Conv{d}d", 4, 6, kernel, stride, padding, dilation, groups, bias, mode)
    check_off(*modules, torch.randn(2, 4, *SIZES[d]))


@settings(max_examples=40)
@given(
    d=st.sampled_from([1, 2, 3]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    output_padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
)
def test_transposed_convolutions(d, stride, padding, output_padding, dilation, groups, bias):
    assume(output_padding < max(stride, dilation))
    modules = pair(f"ConvTranspose{d}d", 4, 6, 3, stride, padding, output_padding, groups, bias, dilation)
    x = torch.randn(2, 4, *SIZES[d])
    check_off(*modules, x)
    size = [s + stride - 1 - output_padding for s in modules[0](x).shape[2:]]
    check_off(*modules, x, output_size=size)


@given(
    d=st.sampled_from([1, 2, 3]),
    kernel=st.integers(2, 3),
    stride=st.sampled_from([None, 1, 2]),
    padding=st.integers(0, 1),
    ceil=st.booleans(),
    flag=st.booleans(),
)
def test_pools(d, kernel, stride, padding, ceil, flag):
    x = torch.randn(2, 3, *SIZES[d])
    check_off(*pair(f"MaxPool{d}d", kernel, stride, padding, 1, flag, ceil), x)
    check_off(*pair(f"AvgPool{d}d", kernel, stride, padding, ceil_mode=ceil, count_include_pad=flag), x)
    check_off(*pair(f"AdaptiveAvgPool{d}d", kernel), x)


ACTIVATIONS = {
    "ReLU": [(), (True,)],
    "ReLU6": [(), (True,)],
    "LeakyReLU": [(), (0.3,), (0.3, True)],
    "PReLU": [(), (3,), (3, 0.1)],
    "ELU": [(), (0.5, True)],
    "SELU": [(), (True,)],
    "CELU": [(0.5,)],
    "SiLU": [(), (True,)],
    "Mish": [()],
    "GELU": [(), ("tanh",)],
    "Hardswish": [(), (True,)],
    "Hardsigmoid": [()],
    "Hardtanh": [(), (-0.5, 2.0)],
    "Sigmoid": [()],
    "Tanh": [()],
    "Softplus": [(2.0, 5.0)],
    "Softmax": [(1,), (-1,)],
    "LogSoftmax": [(1,)],
}


@pytest.mark.parametrize(("name", "args"), [(n, a) for n, cases in ACTIVATIONS.items() for a in cases])
def test_activations(name, args):
    original, built, made = pair(name, *args)
    x = torch.randn(2, 3, 4, 5)
    check_off(original, built, made, x)
    quantized = getattr(qnn, f"Quant{name}").from_float(original)
    want = original(quantized.input_quantizer(x))
    assert torch.equal(quantized(x.clone()), want)
    assert near(want, original(x.clone()), 0.1)


NORMS = [
    *((f"BatchNorm{d}d", (3,), o) for d in (1, 2, 3) for o in ({}, {"affine": False}, {"track_running_stats": False})),
    *((f"InstanceNorm{d}d", (3,), o) for d in (1, 2, 3) for o in ({}, {"affine": True, "track_running_stats": True})),
]


@pytest.mark.parametrize(("name", "args", "options"), NORMS)
def test_norms(name, args, options):
    modules = pair(name, *args, **options)
    check_off(*modules, torch.randn(4, 3, *SIZES[int(name[-2])]))


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}, {"eps": 0.1}])
def test_layer_norm(options):
    check_off(*pair("LayerNorm", (4, 5), **options), torch.randn(2, 3, 4, 5))


def test_group_norm():
    check_off(*pair("GroupNorm", 2, 4, affine=True), torch.randn(2, 4, 5))


def test_training_statistics_move_as_in_the_original():
    original, built, _ = pair("BatchNorm2d", 3, momentum=0.3)
    off(built).train(), original.train()
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(built(x), original(x))
    assert torch.equal(built.running_mean, original.running_mean)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_linear(bias, shape):
    check_off(*pair("Linear", 4, 5, bias), torch.randn(shape))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": 1.0}])
def test_embedding(options):
    original, built, made = pair("Embedding", 9, 4, **options)
    tokens = torch.tensor([[1, 2], [8, 0]])
    check_off(original, built, made, tokens)
    made.weight_quantizer.enable()
    made.weight_quantizer.quantize()
    rows = made.weight.detach()[tokens]
    assert torch.allclose(made(tokens), rows, atol=float(rows.abs().max()) / 127)
    assert not torch.equal(made(tokens), rows)


def test_arithmetic():
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    want = {
        "Add": ((a, b), a + b),
        "Mul": ((a, b), a * b),
        "MatMul": ((a, b.T), a @ b.T),
        "Cat": (([a, b], 1), torch.cat([a, b], 1)),
    }
    for name, (args, result) in want.items():
        module = getattr(qnn, f"Quant{name}")()
        assert near(module(*args), result, 0.15), name
        assert not torch.equal(module(*args), result), name
        assert torch.equal(off(module)(*args), result), name
    assert torch.equal(off(qnn.QuantAdd())(a, b, alpha=2), torch.add(a, b, alpha=2))
    assert torch.equal(off(qnn.QuantMul())(a, 2.0), a * 2.0)


# ------------------------------------------------------------------------------------------------ recurrent


RECURRENT = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 2),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
        "bidirectional": st.booleans(),
    }
)


def inputs_of(kind, options):
    if kind == "unbatched":
        return torch.randn(6, 4)
    x = torch.randn(3, 6, 4) if options["batch_first"] else torch.randn(6, 3, 4)
    if kind == "packed":
        return pack_padded_sequence(x, [6, 4, 2], batch_first=options["batch_first"])
    if kind == "unsorted":
        return pack_sequence([torch.randn(n, 4) for n in (2, 5, 3)], enforce_sorted=False)
    return x


def fine(module):
    """Let a module quantize so finely that it computes as the original does."""
    for quantizer in quantizers(module).values():
        quantizer.num_bits = 16
    return module


@settings(max_examples=40)
@given(
    name=st.sampled_from(["LSTM", "GRU"]),
    options=RECURRENT,
    kind=st.sampled_from(["batch", "unbatched", "packed", "unsorted"]),
    with_state=st.booleans(),
    proj=st.sampled_from([0, 3]),
)
def test_recurrent(name, options, kind, with_state, proj):
    proj = proj if name == "LSTM" else 0
    original, built, made = pair(name, 4, 5, **options, **({"proj_size": proj} if proj else {}))
    x = inputs_of(kind, options)
    state = ()
    if with_state:
        layers = options["num_layers"] * (2 if options["bidirectional"] else 1)
        batch = () if kind == "unbatched" else (3,)
        state = (torch.randn(layers, *batch, proj or 5),)
        if name == "LSTM":
            state = ((state[0], torch.randn(layers, *batch, 5)),)
    want = original(x, *state)
    got = fine(built)(x, *state)
    assert type(got[0]) is type(want[0])
    assert near(got[0].data if kind in ("packed", "unsorted") else got[0], getattr(want[0], "data", want[0]), 3e-3)
    assert near(got[1], want[1], 3e-3)
    assert not same(got[1], want[1])
    check = off(built)(x, *state), off(made)(x, *state)
    for result in check:
        assert same(result[1], want[1])
        assert torch.equal(getattr(result[0], "data", result[0]), getattr(want[0], "data", want[0]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_lstm_cell(bias, batch):
    original, built, made = pair("LSTMCell", 4, 5, bias)
    x, state = torch.randn(*batch, 4), (torch.randn(*batch, 5), torch.randn(*batch, 5))
    assert near(fine(built)(x, state), original(x, state), 1e-3)
    assert near(built(x), original(x), 1e-3)
    assert not same(built(x), original(x))
    check_off(original, built, made, x, state)


@settings(max_examples=40)
@given(
    bias=st.booleans(),
    extra=st.booleans(),
    zero=st.booleans(),
    dims=st.sampled_from([{}, {"kdim": 6, "vdim": 10}]),
    batch_first=st.booleans(),
    batched=st.booleans(),
    need_weights=st.booleans(),
    masked=st.booleans(),
)
def test_attention(bias, extra, zero, dims, batch_first, batched, need_weights, masked):
    options = {"bias": bias, "add_bias_kv": extra, "add_zero_attn": zero, "batch_first": batch_first, **dims}
    original, built, made = pair("MultiheadAttention", 8, 2, **options)
    lead = ((2, 5) if batch_first else (5, 2)) if batched else (5,)
    q, k, v = torch.randn(*lead, 8), torch.randn(*lead, dims.get("kdim", 8)), torch.randn(*lead, dims.get("vdim", 8))
    call = {"need_weights": need_weights}
    if masked:
        call["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    want = original(q, k, v, **call)
    assert near(fine(built)(q, k, v, **call), want, 3e-3)
    check_off(original, built, made, q, k, v, **call)


# ------------------------------------------------------------------------------------ gradients, descriptors


def test_gradients_are_those_of_the_written_out_formula():
    layer = qnn.QuantLinear(4, 3)
    x = torch.randn(5, 4, requires_grad=True)
    layer(x).pow(2).sum().backward()
    xq, wq = layer.input_quantizer(x).detach(), layer.weight_quantizer(layer.weight).detach()
    out = xq @ wq.T + layer.bias.detach()
    # Straight through: all values lie within the range that was found on themselves.
    assert torch.allclose(layer.weight.grad, (2 * out).T @ xq, atol=1e-4)
    assert torch.allclose(x.grad, 2 * out @ wq, atol=1e-4)
    assert torch.allclose(layer.bias.grad, (2 * out).sum(0), atol=1e-4)


def test_a_linear_layer_computes_the_formula_of_its_descriptors():
    layer = qnn.QuantLinear(4, 3, quant_desc_input=QuantDescriptor(num_bits=4), quant_desc_weight=QuantDescriptor())
    x = torch.randn(5, 4)
    step_x, step_w = x.abs().max() / 7, layer.weight.abs().max() / 127
    want = F.linear((x / step_x).round() * step_x, (layer.weight / step_w).round() * step_w, layer.bias)
    assert torch.allclose(layer(x), want, atol=1e-6)


def test_defaults_can_be_set_for_one_class():
    class Mine(qnn.QuantLinear):
        pass

    Mine.set_default_quant_desc_input(QuantDescriptor(num_bits=6))
    Mine.set_default_quant_desc_weight(QuantDescriptor(num_bits=3))
    layer = Mine(2, 2)
    assert (layer.input_quantizer.num_bits, layer.weight_quantizer.num_bits) == (6, 3)
    assert qnn.QuantLinear(2, 2).input_quantizer.num_bits == 8
    assert isinstance(layer.weight_quantizer, TensorQuantizer)
    with pytest.raises(ValueError, match="quant_desc_input must be a QuantDescriptor, not 8"):
        Mine.set_default_quant_desc_input(8)


def test_layers_of_a_recurrent_mixin_have_quantizers_each():
    lstm = qnn.QuantLSTM(2, 3, num_layers=2, bidirectional=True)
    assert len(lstm._input_quantizers) == len(lstm._weight_quantizers) == 4


def test_bad_arguments():
    with pytest.raises(
        TypeError, match="QuantConv2d has no argument 'quant_desc_inputs': did you mean 'quant_desc_input'"
    ):
        qnn.QuantConv2d(1, 1, 1, quant_desc_inputs=None)
    with pytest.raises(
        TypeError, match="QuantReLU has no argument 'quant_desc_weight': did you mean 'quant_desc_input'"
    ):
        qnn.QuantReLU(quant_desc_weight=None)
    with pytest.raises(TypeError, match="QuantLSTM has no argument 'quant_desc'"):
        qnn.QuantLSTM(2, 3, quant_desc=None)
    with pytest.raises(TypeError, match="QuantAdd has no argument 'bits': known are quant_desc_input"):
        qnn.QuantAdd(bits=3)
    with pytest.raises(TypeError, match="QuantEmbedding has no argument 'quant_desc_input'"):
        qnn.QuantEmbedding(3, 2, quant_desc_input=None)
    with pytest.raises(ValueError, match="Only fake quantization is supported inside a module: quant_desc_input"):
        qnn.QuantLinear(2, 2, quant_desc_input=QuantDescriptor(fake_quant=False))
    with pytest.raises(ConfigError, match=r"QuantConv2d.from_float takes a Conv2d module, not a Linear"):
        qnn.QuantConv2d.from_float(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="this QuantLinear is quantized already"):
        qnn.QuantLinear.from_float(qnn.QuantLinear(2, 2))


def test_a_fresh_module_quantizes_and_a_folded_one_keeps_parity():
    layer = qnn.QuantConv2d(3, 4, 3)
    assert layer.weight_quantizer.mode is Mode.QUANTIZE
    x = torch.randn(1, 3, 6, 6)
    assert not torch.equal(layer(x), nn.Conv2d.forward(layer, x))
