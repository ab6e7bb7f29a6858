"""Trained models on real digits: what the file answers is what was simulated, for every method of `qat_recipe`."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.training import qat_recipe

ort = pytest.importorskip("onnxruntime")
datasets = pytest.importorskip("sklearn.datasets")


def _layer(inputs, outputs, stride):
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


@pytest.fixture(scope="module")
def digits():
    """A net of two convolutions that was trained briefly, batches to train with, and images to test with."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*_layer(1, 16, 1), *_layer(16, 32, 2), *_layer(32, 32, 1), *pool, nn.Linear(32, 10))
    order = torch.randperm(len(labels))
    batches = [(images[i], labels[i]) for i in order[:1200].split(60)]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval(), batches, images[order[1200:]], labels[order[1200:]]


def trained(digits, recipe):
    net, batches, *_ = digits
    model = bw.calibrate(bw.prepare(net, batches[0][0], recipe=recipe), [x for x, _ in batches[:4]])
    bw.train(model, batches, F.cross_entropy, lr=0.02, batch_statistics=True)
    return model


CASES = [
    *((word, "W4A4") for word in ("lsq", "lsq+", "pact", "dorefa", "dsq", "tqt", "apot")),
    *((word, "W4A8") for word in ("lsq", "pact", "tqt")),
]


@pytest.mark.parametrize(("word", "preset"), CASES)
def test_the_file_is_as_accurate_as_the_simulation(digits, tmp_path, word, preset):
    *_, images, labels = digits
    model = trained(digits, qat_recipe(word, preset))
    path = tmp_path / "model.onnx"
    bw.export(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        simulated = model(images).numpy()
    first, second = np.sort(simulated, 1)[:, :-3:-1].T
    decided = first - second > 0.05  # two steps of the file's output: rounding cannot change the answer
    assert decided.mean() > 0.95
    answers, right = (logits[decided].argmax(1) for logits in (found, simulated)), labels.numpy()[decided]
    accuracies = [100 * float((answer == right).mean()) for answer in answers]
    assert accuracies[1] > 90
    assert abs(accuracies[0] - accuracies[1]) <= 0.05
    assert np.abs(found - simulated).mean() < 0.01 * np.abs(simulated).mean()
