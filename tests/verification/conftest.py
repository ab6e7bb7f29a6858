"""Models that are calibrated and exported once for all tests of proofs."""

from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from tests.verification.nets import CASES, Several


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[nn.Module, Path, torch.Tensor]]:
    """Every case for every backend: the model, its file, and a batch."""
    made = {}
    folder = tmp_path_factory.mktemp("verify")
    for backend in ("onnxruntime", "openvino"):
        for name, (build, shape) in CASES.items():
            torch.manual_seed(1)
            x = torch.randn(shape)
            model = bw.calibrate(bw.prepare(build().eval(), x, backend=backend), [x])
            made[backend, name] = (model, bw.export(model, folder / f"{backend}_{name}.onnx").path, x)
    return made


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, torch.Tensor]:
    """A model with nested outputs, its file, and a batch."""
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    model = bw.calibrate(bw.prepare(Several().eval(), x), [x])
    return model, bw.export(model, tmp_path_factory.mktemp("several") / "several.onnx").path, x
