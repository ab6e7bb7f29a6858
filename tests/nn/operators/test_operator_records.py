"""Records of operators: their traits, their registry, and which module computes what."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import bitwright as bw
from bitwright.errors import ConfigError, UnknownNameError
from bitwright.nn import OPERATORS, Operator, register_operator, unregister_operator
from bitwright.nn.operators import operator_of, operator_of_module, operator_of_source


def call(function, *args, **kwargs):
    """The node of one call, with its first argument a tensor."""
    graph = fx.Graph()
    return graph.call_function(function, (graph.placeholder("x"), *args), kwargs)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_and_channel_axes_are_those_of_the_layer(rank):
    for kind in ("Conv", "ConvTranspose"):
        layer = getattr(nn, f"{kind}{rank}d")(2, 3, 1)
        operator = operator_of_module(layer)
        out = layer(torch.randn(1, 2, *[4] * rank))
        assert operator.rank == rank
        assert out.shape[operator.channel_axis] == 3
        assert layer.weight.shape[operator.weight_axis] == 3
    assert {OPERATORS.get(n).rank for n in OPERATORS.names(f"*_pool{rank}d")} == {rank}


def test_a_linear_layer_has_its_channels_last():
    operator = operator_of_source(F.linear)
    assert nn.Linear(4, 3)(torch.randn(1, 7, 4)).shape[operator.channel_axis] == 3
    assert operator.weight
    assert operator.weight_axis == 0


@pytest.mark.parametrize("name", OPERATORS)
def test_traits_are_true_of_the_modules(name):
    """What a record says holds for its modules on random values."""
    operator = OPERATORS.get(name)
    classes = [s for s in operator.sources if isinstance(s, type) and issubclass(s, nn.Module)]
    for cls in classes if not operator.weight and name != "embedding" else ():
        module, x = _built(cls)
        if module is None:
            continue
        y = module(x)
        if operator.same_shape or operator.activation:
            assert y.shape == x.shape
        if operator.activation:
            assert torch.allclose(module(x.flip(-1)), y.flip(-1))
        if operator.homogeneous:
            factor = torch.rand(4).reshape(-1, *[1] * (x.ndim - 2)) + 0.5
            assert torch.allclose(module(x * factor), y * factor, atol=1e-6)
        if (limits := operator.limits_of(None, module)) is not None:
            assert torch.equal(y, x.clamp(*limits))
        if operator.carries_scale(None, module):
            assert set(y.flatten().tolist()) <= {*x.flatten().tolist(), 0.0}
        if operator.rearranges:
            assert torch.equal(y.flatten().sort().values, x.flatten().sort().values)


ARGUMENTS = {
    **{"Unflatten": (1, (2, 2)), "PixelShuffle": (2,), "PixelUnshuffle": (3,), "ChannelShuffle": (2,)},
    **{"LayerNorm": (6,), "RMSNorm": (6,), "GroupNorm": (2, 4), "BatchNorm": (4,), "InstanceNorm": (4,)},
    **{"Softmax": (-1,), "LogSoftmax": (-1,), "Upsample": (None, 2), "ConstantPad": (1, 0.0), "AttentionProduct": None},
    "ChannelLimit": (torch.tensor([0.1, 0.5, 1.0, 2.0]).reshape(4, 1, 1),),
    **dict.fromkeys(("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool"), (2,)),
    **dict.fromkeys(("ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad"), (1,)),
}


def _built(cls):
    """A module of a class and an input for it; no module where it takes three inputs."""
    name = cls.__name__
    rank = int(name[-2]) if name.endswith("d") and name[-2].isdigit() else 2
    arguments = ARGUMENTS.get(name.removesuffix(f"{rank}d"), ())
    return None if arguments is None else cls(*arguments).eval(), torch.randn(2, 4, *[6] * rank)


@pytest.mark.parametrize(
    ("node", "limits"),
    [
        (call(F.relu), (0.0, None)),
        (call(F.relu6), (0.0, 6.0)),
        (call(F.hardtanh), (-1.0, 1.0)),
        (call(F.hardtanh, -2.0, max_val=3.0), (-2.0, 3.0)),
        (call(torch.clamp, 0, 4), (0, 4)),
        (call(torch.clamp, max=4), (None, 4)),
        (call(torch.clip, min=-1), (-1, None)),
    ],
)
def test_limits_of_a_call(node, limits):
    assert operator_of(node, {}).limits_of(node, None) == limits
    x = torch.randn(100) * 5
    assert torch.equal(node.target(x, *node.args[1:], **node.kwargs), x.clamp(*limits))


def test_a_clamp_by_a_tensor_has_no_known_limits():
    node = call(torch.clamp)
    node.kwargs = {"min": node.graph.placeholder("low")}
    assert operator_of(node, {}).limits_of(node, None) is None


def test_limits_of_a_module():
    operator = operator_of_module(nn.Hardtanh(-3, 2))
    assert operator.limits_of(None, nn.Hardtanh(-3, 2)) == (-3, 2)


@pytest.mark.parametrize(
    ("node", "carries"),
    [
        (call(F.interpolate, scale_factor=2), True),
        (call(F.interpolate, None, 2, "bilinear"), False),
        (call(F.pad, (1, 1)), True),
        (call(F.pad, (1, 1), "constant", 0.5), False),
        (call(F.pad, (1, 1), value=float("-inf")), True),
        (call(F.pad, (1, 1), "reflect"), True),
        (call(F.max_pool2d, 2), True),
        (call(F.max_pool2d, 2, return_indices=True), False),
        (call(F.avg_pool2d, 2), False),
    ],
)
def test_whether_a_call_carries_its_scale(node, carries):
    assert operator_of(node, {}).carries_scale(node, None) is carries


@pytest.mark.parametrize(("size", "whole"), [(1, True), ((1, 1), True), ((None, 1), False), (2, False)])
def test_whether_a_pool_averages_whole_planes(size, whole):
    node = call(F.adaptive_avg_pool2d, size)
    operator = operator_of(node, {})
    assert operator.averages_planes_of(node, None) is whole
    assert operator.averages_planes_of(None, nn.AdaptiveAvgPool2d(size)) is whole
    assert operator_of_source(F.avg_pool2d).averages_planes_of(node, None) is False


def test_operators_can_be_listed_and_mistyped():
    assert OPERATORS.names("conv?d") == ["conv1d", "conv2d", "conv3d"]
    with pytest.raises(UnknownNameError, match="unknown operator 'relu5': did you mean 'relu'"):
        OPERATORS.get("relu5")


def squared_relu(x):
    return F.relu(x) ** 2


def test_an_operator_of_ones_own():
    register_operator(Operator("squared_relu", (squared_relu,), elementwise=True))
    try:
        assert operator_of_source(squared_relu).activation
        with pytest.raises(ConfigError, match=r"operator 'other': .*squared_relu already belongs to the operator 'squ"):
            register_operator(Operator("other", (squared_relu,)))
        with pytest.raises(ConfigError, match="operator 'squared_relu' is registered twice"):
            register_operator(Operator("squared_relu", ()))
    finally:
        unregister_operator("squared_relu")
    assert operator_of_source(squared_relu) is None
    assert "squared_relu" not in OPERATORS


def test_an_operator_that_takes_a_source_over_gives_it_back():
    register_operator(Operator("my_gelu", (F.gelu,)), override=True)
    assert operator_of_source(F.gelu).name == "my_gelu"
    unregister_operator("my_gelu")
    assert operator_of_source(F.gelu).name == "gelu"


class SameReLU(nn.ReLU):
    """Computes what its parent computes."""


class DoubleReLU(nn.ReLU):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_subclass_with_its_own_forward_is_another_operator():
    assert operator_of_module(SameReLU()).name == "relu"
    assert operator_of_module(DoubleReLU()) is None
    assert operator_of_module(bw.swap_modules(nn.Conv2d(3, 4, 1), include="")) is None  # it quantizes its input


def test_a_leaf_that_changes_its_parents_forward_is_exported(tmp_path):
    """It was taken for a ReLU, which the quantizer after it makes redundant, and left out of the file."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), DoubleReLU(), nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(4, 3, 5, 5)
    model = bw.prepare(net, x, recipe={"leaves": ["1"]})
    bw.calibrate(model, [x])
    file = tmp_path / "net.onnx"
    bw.export(model, file)
    assert torch.allclose(torch.as_tensor(bw.run_file(file)(x)), model(x), atol=0.05)


def test_every_operator_has_a_case():
    subjects = ("activations", "arithmetic", "layers", "moves", "norms", "pooling")
    modules = [import_module(f"tests.nn.operators.test_operator_{subject}") for subject in subjects]
    covered = {case.operator for module in modules for case in module.CASES.values()}
    # Indices go into embeddings. A mask is added only where attention was split, and a schedule names casts.
    elsewhere = {"embedding", "add_mask", "cast"}
    assert set(OPERATORS) == covered | elsewhere
