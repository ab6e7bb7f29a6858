"""The model and the input that the tests here share."""

import pytest
import torch
from torch import nn

from tests.compat.mqbench.nets import Net


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)
