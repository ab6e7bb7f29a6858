"""A script for pytorch-quantization as its README and tutorial write one: calibrate, train, export, run the file."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bitwright.compat.pytorch_quantization import calib, quant_modules
from bitwright.compat.pytorch_quantization import nn as quant_nn
from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.residual_quantizer = quant_nn.TensorQuantizer(quant_nn.QuantConv2d.default_quant_desc_input)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, 2)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = (self.conv2(x) + self.residual_quantizer(x)).relu()
        return self.fc(self.pool(x).flatten(1))


def data_loader():
    """Stripes, upright or lying."""
    torch.manual_seed(1)
    images = torch.randn(96, 1, 8, 8) * 0.5
    labels = torch.arange(96) % 2
    images[labels == 0, :, ::2] += 1
    images[labels == 1, :, :, ::2] += 1
    return DataLoader(TensorDataset(images, labels), batch_size=16)


def collect_stats(model, loader, num_batches):
    """Feed data to the network and collect statistics."""
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.disable_quant()
                module.enable_calib()
            else:
                module.disable()
    for i, (image, _) in enumerate(loader):
        model(image)
        if i >= num_batches:
            break
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.enable_quant()
                module.disable_calib()
            else:
                module.enable()


def compute_amax(model, **kwargs):
    """Load calibration results."""
    for _, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer) and module._calibrator is not None:
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax()
            else:
                module.load_calib_amax(**kwargs)


def train(model, loader, epochs):
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    losses = []
    for _ in range(epochs):
        for image, target in loader:
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    return losses


@pytest.fixture
def built():
    quant_modules.initialize()
    quant_nn.QuantConv2d.set_default_quant_desc_input(QuantDescriptor(num_bits=8, calib_method="histogram"))
    # x86 CPUs without VNNI saturate with weights of 8 bits.
    quant_nn.QuantConv2d.set_default_quant_desc_weight(QuantDescriptor(num_bits=7, axis=0))
    quant_nn.QuantLinear.set_default_quant_desc_weight(QuantDescriptor(num_bits=7, axis=0))
    torch.manual_seed(0)
    yield Net()
    quant_modules.deactivate()
    del quant_nn.QuantConv2d.default_quant_desc_input
    del quant_nn.QuantConv2d.default_quant_desc_weight, quant_nn.QuantLinear.default_quant_desc_weight


def test_calibrate_train_export_run(built, tmp_path):
    model, loader = built.eval(), data_loader()
    with torch.no_grad():
        collect_stats(model, loader, num_batches=2)
        compute_amax(model, method="percentile", percentile=99.9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, loader, epochs=4)
    assert np.mean(losses[-6:]) < 0.5 * np.mean(losses[:3])
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())

    dummy_input, path = next(iter(loader))[0], str(tmp_path / "quant.onnx")
    with quant_modules.enable_onnx_export():
        torch.onnx.export(model, dummy_input, path, verbose=False, opset_version=13, input_names=["x"])
    session = onnxruntime.InferenceSession(path)
    images = torch.cat([image for image, _ in loader])[16:32]  # not those it was exported with
    got, expected = session.run(None, {"x": images.numpy()})[0], model(images).detach().numpy()
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()
    labels = torch.cat([label for _, label in loader])[16:32].numpy()
    assert (got.argmax(1) == labels).mean() > 0.9

    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    integers = [value for value in stored.values() if value.dtype == np.int8 and value.ndim > 1]
    assert len(integers) == 3
    for layer in (model.conv1, model.conv2, model.fc):
        weight, scale = layer.weight.detach().numpy(), np.float32(63) / layer.weight_quantizer.amax.numpy()
        expected = np.clip(np.rint(weight * scale), -64, 63)  # what it was trained with
        assert any(q.shape == expected.shape and np.array_equal(q, expected) for q in integers)
