"""Activations in every form."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.operators.harness import Cases, check

CASES = Cases()
case, function = CASES.add, CASES.function

for operator, builders in {
    "relu": [nn.ReLU, lambda: nn.ReLU(inplace=True)],
    "relu6": [nn.ReLU6, lambda: nn.ReLU6(True)],
    "clamp": [nn.Hardtanh, lambda: nn.Hardtanh(-0.5, 2.0, inplace=True)],
    "leaky_relu": [nn.LeakyReLU, lambda: nn.LeakyReLU(0.3, inplace=True)],
    "prelu": [nn.PReLU, lambda: nn.PReLU(4, 0.1)],
    "elu": [nn.ELU, lambda: nn.ELU(0.5, inplace=True)],
    "selu": [nn.SELU, lambda: nn.SELU(inplace=True)],
    "celu": [nn.CELU, lambda: nn.CELU(0.5, inplace=True)],
    "silu": [nn.SiLU, lambda: nn.SiLU(inplace=True)],
    "hardswish": [nn.Hardswish, lambda: nn.Hardswish(inplace=True)],
    "hardsigmoid": [nn.Hardsigmoid, lambda: nn.Hardsigmoid(inplace=True)],
    "sigmoid": [nn.Sigmoid],
    "tanh": [nn.Tanh],
    "gelu": [nn.GELU, lambda: nn.GELU(approximate="tanh")],
    "mish": [nn.Mish, lambda: nn.Mish(inplace=True)],
    "softplus": [nn.Softplus, lambda: nn.Softplus(beta=2.0, threshold=5.0)],
    "softmax": [lambda: nn.Softmax(dim=1), lambda: nn.Softmax(-1)],
    "log_softmax": [lambda: nn.LogSoftmax(dim=1)],
}.items():
    for i, build in enumerate(builders):
        case(f"nn {operator} {i}", operator, build)

for operator, functions in {
    "relu": [
        F.relu,
        torch.relu,
        F.relu_,
        torch.relu_,
        lambda x: F.relu(x, True),
        lambda x: F.relu(x, inplace=True),
        lambda x: x.relu(),
        lambda x: x.relu_(),
    ],
    "relu6": [F.relu6, lambda x: F.relu6(x, inplace=True)],
    "clamp": [
        lambda x: torch.clamp(x, -0.5, 0.5),
        lambda x: torch.clamp(x, max=0.5),
        lambda x: torch.clip(x, min=-0.2),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x.clamp_(min=0.0),
        lambda x: F.hardtanh(x, -0.3, 0.9),
        lambda x: F.hardtanh(x, min_val=-0.3, inplace=True),
    ],
    "leaky_relu": [F.leaky_relu, lambda x: F.leaky_relu(x, 0.2, True), lambda x: F.leaky_relu_(x, 0.2)],
    "elu": [F.elu, lambda x: F.elu(x, alpha=0.7), lambda x: F.elu_(x)],
    "selu": [F.selu, torch.selu, lambda x: F.selu(x, inplace=True)],
    "celu": [F.celu, torch.celu, lambda x: F.celu(x, alpha=2.0)],
    "silu": [F.silu, lambda x: F.silu(x, inplace=True)],
    "hardswish": [F.hardswish, lambda x: F.hardswish(x, True)],
    "hardsigmoid": [F.hardsigmoid],
    "sigmoid": [F.sigmoid, torch.sigmoid, lambda x: x.sigmoid(), lambda x: x.sigmoid_()],
    "tanh": [F.tanh, torch.tanh, lambda x: x.tanh(), lambda x: x.tanh_()],
    "gelu": [F.gelu, lambda x: F.gelu(x, approximate="tanh")],
    "mish": [F.mish, lambda x: F.mish(x, inplace=True)],
    "softplus": [F.softplus],
    "softmax": [
        lambda x: F.softmax(x, 1),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.softmax(x, dim=2),
        lambda x: x.softmax(-1),
    ],
    "log_softmax": [lambda x: F.log_softmax(x, dim=1), lambda x: x.log_softmax(1)],
}.items():
    for i, f in enumerate(functions):
        function(f"F {operator} {i}", operator, lambda x, f=f: f(x))
function("F.prelu", "prelu", lambda x, w: F.prelu(x, w), weight=(4,))


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)
