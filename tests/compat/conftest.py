"""The model and the input that the tests of MQBench's and Sparsebit's names share."""

import importlib

import pytest
import torch
from torch import nn


@pytest.fixture
def model(request):
    """The ``Net`` of the folder's ``nets``, with BatchNorms that have seen something."""
    torch.manual_seed(0)
    made = importlib.import_module(f"{request.module.__package__}.nets").Net().eval()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8)
