"""Training at four bits wins back what calibration alone has lost."""

import copy
import dataclasses

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import bitwright as bw
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.methods import parameter_groups

FREE = dataclasses.replace(ONNXRUNTIME, activation_formats=frozenset(), weight_formats=frozenset(), name="free")
LSQ = {
    "weight": {"spec": "int4 narrow channel:0", "method": "LearnableFakeQuantize"},
    "activation": {"spec": "uint4 affine", "method": "LearnableFakeQuantize"},
}


def block(inputs, outputs, stride=1):
    """A depthwise convolution and one across channels: weights that differ much from channel to channel."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def train(model, images, labels, epochs, lr, by_batch=False):
    """Train as a float model is trained."""
    model.train()
    if by_batch:
        bw.unfreeze_batchnorm(model)
    optimizer = torch.optim.SGD(parameter_groups(model, lr=lr, weight_decay=1e-4), momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model, images, labels):
    return float((model(images).argmax(1) == labels).float().mean())


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


@pytest.fixture(scope="module")
def net(digits):
    torch.manual_seed(1)
    stem = nn.Sequential(nn.Conv2d(1, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6())
    body = nn.Sequential(block(12, 16), block(16, 24, 2), block(24, 24), block(24, 32, 2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return train(nn.Sequential(stem, body, head), *digits[0], epochs=10, lr=0.1)


@pytest.mark.parametrize(("bits", "by_batch"), [(4, False), (3, False), (3, True)])
def test_training_wins_back_what_few_bits_cost(net, digits, bits, by_batch):
    known, unseen = digits
    with_floats = accuracy(net, *unseen)
    assert with_floats > 0.96
    recipe = {
        "weight": {"spec": f"int{bits} narrow channel:0", "method": "LearnableFakeQuantize"},
        "activation": {"spec": f"uint{bits} affine", "method": "LearnableFakeQuantize"},
    }
    model = bw.calibrate(bw.prepare(net, known[0][:64], FREE, recipe=recipe), known[0].split(300))
    calibrated = accuracy(model, *unseen)
    torch.manual_seed(1)
    trained = accuracy(train(model, *known, epochs=4, lr=0.02, by_batch=by_batch), *unseen)
    assert trained > calibrated
    if not by_batch:
        assert with_floats - trained < max(0.5 * (with_floats - calibrated), 0.015)  # the latter are nine images


def test_training_is_deterministic(net, digits):
    known, _ = digits
    model = bw.calibrate(bw.prepare(net, known[0][:64], FREE, recipe=LSQ), known[0].split(300))
    twins = []
    for _ in range(2):
        torch.manual_seed(1)
        twins.append(train(copy.deepcopy(model), known[0][:128], known[1][:128], epochs=1, lr=0.02).state_dict())
    assert all(torch.equal(twins[1][name], value) for name, value in twins[0].items())
