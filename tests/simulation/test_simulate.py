"""simulate: whole nets give the bits of onnxruntime in every quantized tensor, and say what they do not know."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwright as bw
from bitwright.errors import ConfigError, ExportError
from bitwright.exporting.parts import DeployedQuantizer
from bitwright.simulation import SIMULATED_RUNTIMES, Arithmetic, Grid, register_arithmetic
from bitwright.simulation.arithmetic import IntegerOperator


class Residual(nn.Module):
    """Sums, concatenations, pools of all kinds, a gate, moves, and linear layers on rows and on matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.body, self.skip = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 8, 1)
        self.smaller, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1)
        self.depthwise, self.gate = nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.Conv2d(16, 16, 1)
        self.kernel = nn.Parameter(torch.randn(16, 4, 1, 1) / 4)
        self.rows, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.skip(F.leaky_relu(self.body(x), 0.1)))
        x = torch.cat(
            [
                self.smaller(x),
                self.mean(x),
            ],
            1,
        )
        x = F.relu6(self.depthwise(x))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = F.conv2d(x, self.kernel, groups=4)
        x = F.interpolate(x, scale_factor=2).flatten(2).transpose(1, 2)
        return self.head(F.relu(self.rows(x)).mean(1))


class Sequences(nn.Module):
    """A one-dimensional convolution twice, pools, products of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.again = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.pool, self.head = nn.AvgPool1d(2), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.start(x)))
        x = self.pool(torch.relu(self.again(x)))
        return self.head((x @ x.transpose(1, 2)).clamp(min=0))


class Volumes(nn.Module):
    """Three-dimensional convolutions and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.depthwise = nn.Conv3d(2, 6, 3, padding=1), nn.Conv3d(6, 6, 3, 2, 1, groups=6)
        self.pool, self.head = nn.AvgPool3d(2, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(torch.relu(self.start(x)), 2)
        x = self.pool(torch.relu(self.depthwise(x)))
        return self.head(F.adaptive_avg_pool3d(x, 1).flatten(1))


def calibrated(net: nn.Module, *shape: int, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean), nn.init.uniform_(module.running_var, 0.5, 2)
    model = bw.prepare(net.eval(), torch.randn(*shape), "onnxruntime", **options)
    bw.calibrate(model, [torch.randn(*shape) for _ in range(2)])
    return model


def integers_of(simulated: Any, x: Tensor) -> tuple[Tensor, dict[str, np.ndarray]]:
    """What the simulation returns, and the integers of every quantizer by the name of its node."""
    found: dict[str, np.ndarray] = {}

    def note(name: str, grid: Grid) -> Any:
        return lambda module, args, out: found.update({name: grid.quantize(out).numpy().astype(np.uint8)})

    handles = []
    for name, module in simulated.named_modules():
        grid = module.output if isinstance(module, IntegerOperator) else Grid.of(module)
        if grid is not None and isinstance(module, IntegerOperator | DeployedQuantizer):
            handles.append(module.register_forward_hook(note(name.rpartition(".")[2], grid)))
    out = simulated(x)
    for handle in handles:
        handle.remove()
    return out, found


def watched(path: Path, x: Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The first output of a file in onnxruntime, and the integers of every QuantizeLinear that reads no constant."""
    model = onnx.load(path)
    wanted = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in wanted)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    names = [o.name for o in session.get_outputs()]
    tensors = dict(zip(names, result, strict=True))
    return result[0], {name.partition("/")[0]: tensors[name] for name in wanted}


NETS = {
    "residual": (Residual, (4, 3, 16, 16), {}),
    "sequences": (Sequences, (3, 4, 24), {}),
    "volumes": (Volumes, (2, 2, 8, 8, 8), {}),
    "signed activations": (Residual, (4, 3, 16, 16), {"activation": "int8 affine tensor"}),
    "one scale per weight": (Residual, (4, 3, 16, 16), {"weight": "int7 symmetric narrow tensor"}),
}


@pytest.mark.parametrize("name", NETS)
def test_every_quantized_tensor_has_the_bits_of_onnxruntime(name: str, tmp_path: Path) -> None:
    kind, shape, options = NETS[name]
    torch.manual_seed(0)
    model = calibrated(kind(), *shape, **options)
    simulated = bw.simulate(model, "onnxruntime")
    bw.export(model, tmp_path / "m.onnx")
    for seed in range(3):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        out, ours = integers_of(simulated, x)
        result, theirs = watched(tmp_path / "m.onnx", x)
        theirs = {name: q for name, q in theirs.items() if ".quantizers." not in name}  # repeats one, after padding
        assert set(theirs) <= set(ours)
        for tensor, integers in theirs.items():
            np.testing.assert_array_equal(ours[tensor], integers, err_msg=tensor)
        plain = bw.run_file(tmp_path / "m.onnx")(x)
        assert torch.equal(torch.from_numpy(result), plain)  # watching changed nothing
        assert torch.equal(out, plain)


def test_what_is_exact_and_what_is_not_is_listed() -> None:
    torch.manual_seed(0)
    simulated = bw.simulate(calibrated(Residual(), 4, 3, 16, 16))
    assert simulated.exact["stem"] == "conv"
    assert {simulated.exact[name] for name in ("rows", "head")} == {"linear"}
    kernels = {"conv", "linear", "add", "mul", "cat", "average_pool", "global_average_pool", "leaky_relu"}
    assert set(simulated.exact.values()) == kernels
    assert simulated.inexact.keys() == {"sigmoid", "mean_1"}
    assert simulated.inexact["sigmoid"] == "onnxruntime computes it in float, or with a kernel that is not known here"
    assert simulated.assumptions == []
    assert "onnxruntime: 14 operators exact, 2 in float" in repr(simulated)


def test_reasons_why_the_runtime_computes_in_float() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2, dilation=2)
            self.pool = nn.AvgPool2d(2, ceil_mode=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.up(torch.relu(self.conv(x))) * 2.5)

    simulated = bw.simulate(calibrated(Odd(), 2, 3, 9, 9, weight="int8 symmetric narrow channel:0"))
    assert list(simulated.exact) == ["conv"]
    assert "in ceil_mode" in simulated.inexact["pool"]
    assert simulated.inexact["up"] == "onnxruntime has no integer transposed convolution"
    assert ["without VNNI" in assumption for assumption in simulated.assumptions] == [True]


def test_the_model_is_left_as_it_was_and_evaluated_while_it_trains() -> None:
    torch.manual_seed(0)
    rule = {"method": "LearnableFakeQuantize"}
    model = calibrated(Sequences(), 3, 4, 24, recipe={"weight": rule, "activation": rule})
    before = copy.deepcopy(model.state_dict())
    simulated = bw.simulate(model.train())
    assert model.training
    assert not simulated.train().training
    x = torch.randn(3, 4, 24)
    gap = (simulated(x) - model.eval()(x)).abs().max()
    assert gap <= 0.05 * model(x).abs().max()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if isinstance(v, Tensor))
    assert not simulated(x).requires_grad


def test_refusals() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(ConfigError, match=r"unknown runtime to simulate 'onnxrutime'.*onnxruntime"):
        bw.simulate(calibrated(net, 1, 3, 4, 4), "onnxrutime")
    with pytest.raises(ExportError, match="calibrate the model first"):
        bw.simulate(bw.prepare(net, torch.randn(1, 3, 4, 4), "onnxruntime"))


def test_a_model_without_a_graph_is_inexact() -> None:
    model = bw.swap_modules(nn.Sequential(nn.Linear(3, 4)))
    bw.calibrate(model, [torch.randn(2, 3)])
    assert "not in a graph" in bw.simulate(model).inexact["0"]


def test_another_runtime_is_a_table_of_functions() -> None:
    demo = register_arithmetic(Arithmetic("demo"))
    try:

        @demo.kernel("linear", result_free=True)
        def zero(operation: Any, x: Any) -> Tensor:
            return x.values[..., :2] * 0

        model = calibrated(nn.Sequential(nn.Linear(3, 2)), 5, 3)
        simulated = bw.simulate(model, "demo")
        assert simulated.exact == {"0": "zero"}
        assert torch.equal(simulated(torch.randn(5, 3)), torch.zeros(5, 2))
    finally:
        SIMULATED_RUNTIMES.unregister("demo")
