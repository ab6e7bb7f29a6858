"""MQBench's extra_fuse_dict, leaves and concrete arguments: what becomes of the model's structure."""

import pytest
import torch
from torch import nn

import bitwright.compat.mqbench.nn as qnn
from bitwright.compat.mqbench import (
    ConvBNReLUFusion,
    fuse_linear_bn,
    prepare_by_platform,
)
from bitwright.nn.conv import QuantConv2d
from tests.compat.mqbench.nets import (
    ACADEMIC,
    Scale,
    Scaled,
    fuse_scale,
    prepared,
    verdicts,
)


class Doubled(ConvBNReLUFusion):
    def fuse(self, conv, scale):
        return fuse_scale(fuse_scale(conv, scale), Scale(2.0))


@pytest.mark.parametrize(
    ("fuse", "factor"),
    [
        ({"additional_fuser_method_mapping": {(nn.Conv2d, Scale): fuse_scale}}, 1.0),
        ({"additional_fusion_pattern": {(Scale, nn.Conv2d): Doubled}}, 2.0),
        (
            {
                "additional_fuser_method_mapping": {(nn.Conv2d, Scale): fuse_scale},
                "additional_fusion_pattern": {(Scale, nn.Conv2d): ConvBNReLUFusion},
            },
            1.0,
        ),
        (
            {
                "additional_fusion_pattern": {
                    (nn.ReLU, (Scale, nn.Conv2d)): lambda c, s, r: nn.Sequential(fuse_scale(c, s), r)
                }
            },
            1,
        ),
    ],
)
def test_methods_of_ones_own_fuse(x, fuse, factor):
    model = Scaled().eval()
    made = prepared(model, x, extra_fuse_dict=fuse)
    assert type(made.scale) is nn.Identity
    first = made.conv[0] if isinstance(made.conv, nn.Sequential) else made.conv
    assert isinstance(first, QuantConv2d)
    assert torch.allclose(first.weight, model.conv.weight * 3 * factor)
    assert type(made.shared) is Scale  # what it reads has another user
    if factor == 1:
        assert torch.allclose(made(x), model(x), atol=1e-5)


def test_bitwrights_own_fusing_keeps_the_names_where_it_does_the_same(model, x):
    fuse = {"additional_fuser_method_mapping": {(nn.Linear, nn.BatchNorm1d): fuse_linear_bn}}
    made = prepare_by_platform(model, "Tensorrt", {"extra_fuse_dict": fuse}, example_inputs=x)
    assert set(model.state_dict()) <= set(made.state_dict())
    assert made.fc.folded_norm is made.norm
    academic = prepared(model, x, extra_fuse_dict=fuse)
    assert isinstance(academic.norm, nn.Identity)
    assert torch.allclose(academic(x), model(x), atol=1e-5)


def test_a_quantized_module_of_ones_own(model, x):
    class MyConv(QuantConv2d):
        calls = 0

        def forward(self, *args):
            type(self).calls += 1
            return super().forward(*args)

    fuse = {"additional_qat_module_mapping": {nn.Conv2d: MyConv}}
    made = prepared(model, x, extra_fuse_dict=fuse)
    made(x)
    assert type(made.layer1[0].conv1) is MyConv
    assert MyConv.calls >= 9
    assert type(prepared(model, x).layer1[0].conv1) is QuantConv2d  # for that model only
    deconv = {"additional_qat_module_mapping": {nn.ConvTranspose2d: qnn.qat.ConvTranspose2d}}
    assert isinstance(prepared(model, x, extra_fuse_dict=deconv).deconv, qnn.qat.ConvTranspose2d)


def test_leaves_and_concrete_args(x):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Conv2d(3, 3, 1)

        def forward(self, x, double=False):
            y = self.last(self.inner(x))
            return y * 2 if double else y

    model = Outer().eval()
    assert "inner.conv" in verdicts(prepared(model, x))
    for made in (
        prepared(model, x, leaf_module=[Inner]),
        prepare_by_platform(
            model,
            "Academic",
            ACADEMIC,
            custom_tracer=type("T", (), {"is_leaf_module": lambda s, m, n: n == "inner"})(),
            example_inputs=x,
        ),
    ):
        assert type(made.inner) is Inner
        assert "inner.conv" not in verdicts(made)
        assert isinstance(made.last, QuantConv2d)
        assert torch.equal(made(x), model(x))
    for key in ("concrete_args", "concrect_args"):
        made = prepared(model, x, **{key: {"double": True}})
        assert torch.equal(made(x), model(x, double=True))
