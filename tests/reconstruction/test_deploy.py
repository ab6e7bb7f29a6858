"""Reconstructed and trained models are deployed as simulated, and save and load."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.demo import load_digits
from bitwright.training import qat_recipe
from tests.reconstruction.nets import Inverted, Residual, calibrated, residual_net
from tests.reconstruction.test_reconstruct import FEW, same, weights


@pytest.fixture(scope="module")
def digits():
    """A small net that reads digits, with the data."""
    torch.manual_seed(0)
    images, labels, test, wanted = load_digits()
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), Residual(8), Inverted(8, 12)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10)),
    )
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for batch in torch.randperm(len(images)).repeat(3).split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
    return net.eval(), images[:256], labels[:256], test, wanted


def deployed_as_simulated(model, images, test, wanted, folder):
    file = folder / "model.onnx"
    bw.export(model, file)
    proof = bw.verify(model, file, [images[:64]], latency=False)
    assert proof.ok, proof.missed
    assert (proof.runtimes["onnxruntime"].largest or 0) <= 1
    with torch.no_grad():
        simulated, deployed = (float((f(test).argmax(1) == wanted).float().mean()) for f in (model, bw.run_file(file)))
    assert abs(simulated - deployed) <= 0.0005
    return simulated


def test_a_reconstructed_model_is_deployed_as_simulated(digits, tmp_path):
    net, images, _, test, wanted = digits
    model = bw.calibrate(bw.prepare(net, images[:8], recipe="W4A8"), images.split(64))
    result = bw.reconstruct(model, images.split(64), "qdrop", steps=60, lr=0.05)
    assert any(unit.kept for unit in result.units)
    assert deployed_as_simulated(model, images, test, wanted, tmp_path) > 0.7


def test_a_trained_model_is_deployed_as_simulated(digits, tmp_path):
    net, images, labels, test, wanted = digits
    model = bw.calibrate(bw.prepare(net, images[:8], recipe=qat_recipe("lsq", "W4A8")), images.split(64))
    data = list(zip(images.split(32), labels.split(32), strict=True))
    result = bw.train(model, data, F.cross_entropy, epochs=3)
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert deployed_as_simulated(model, images, test, wanted, tmp_path) > 0.7


def test_a_reconstructed_model_is_saved_and_loaded(tmp_path):
    model, batches = calibrated("residual")
    bw.reconstruct(model, batches, **FEW)
    bw.save(model, tmp_path / "saved")
    loaded = bw.load(tmp_path / "saved", residual_net().eval())
    assert same(weights(loaded), weights(model))
    assert torch.equal(loaded(*batches[0]), model(*batches[0]))
