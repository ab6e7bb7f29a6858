"""Levels that are not evenly spaced: files hold tables of them, and give what the simulation gives."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ExportError
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.exporting.parts import TableQuantizer, TableTensor, as_integers, deployed
from bitwright.methods import METHODS, Method, register_method
from bitwright.quantizer import QuantDescriptor, TensorQuantizer

OPERATORS_OF_TABLES = {"Gather", "Where", "GreaterOrEqual"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.fc(self.deep(x).relu().mean((2, 3)))


def calibrated(spec, method, x, **options):
    quantizer = TensorQuantizer(spec, method=method, method_options=options)
    quantizer.observe()
    quantizer(x)
    quantizer.compute_qparams()
    quantizer.quantize()
    return quantizer


CASES = [
    ("int8 symmetric tensor", "nnie"),
    ("int8 symmetric channel:1", "nnie"),
    ("uint5 symmetric tensor", "nnie"),
    ("int4 symmetric tensor", "apot"),
    ("int7 symmetric channel:-1", "apot"),
    ("uint8 symmetric channel:0", "apot"),
]


@pytest.mark.parametrize(("spec", "method"), CASES)
def test_a_table_is_the_kernel(spec, method):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 500) * torch.tensor([0.1, 1.0, 30.0])[:, None, None]
    quantizer = calibrated(spec, method, x)
    part = deployed(quantizer)
    assert isinstance(part, TableQuantizer)
    count = part.levels.shape[-1]
    assert count in (len(METHODS.get(method)(quantizer.spec).levels()), 256)
    with torch.no_grad():
        assert torch.equal(part(x), quantizer(x))
        assert torch.equal(part(x * 1e9), quantizer(x * 1e9))
        assert torch.equal(quantizer.values(quantizer.integers(x)), quantizer(x))
        if part.axis is None:  # at the bounds, one bit above and one bit below
            for end in (-torch.inf, torch.inf):
                near = torch.cat([part.bounds, torch.nextafter(part.bounds, torch.tensor(end))])
                assert torch.equal(part(near), quantizer(near))
            reached = quantizer(part.bounds)
            assert torch.equal(reached, part.levels[1:])
            below = quantizer(torch.nextafter(part.bounds, torch.tensor(-torch.inf)))
            assert torch.equal(below, part.levels[:-1])


@pytest.mark.parametrize("spec", ["int8 symmetric tensor", "int3 symmetric channel:0", "int4 symmetric group:8"])
@pytest.mark.parametrize("method", ["nnie", "apot", "dorefa"])
def test_a_constant_is_the_kernel(spec, method):
    torch.manual_seed(0)
    weight = torch.randn(6, 3, 16)
    quantizer = calibrated(spec, method, weight)
    stored = as_integers(weight, quantizer)
    assert isinstance(stored, TableTensor)
    assert stored.places.dtype == torch.uint8
    with torch.no_grad():
        assert torch.equal(stored(), quantizer(weight))


def prepared(recipe, x):
    torch.manual_seed(0)
    net = Net().eval()
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2)
    model = bw.prepare(net, x, recipe=recipe)
    bw.calibrate(model, [x])
    return model


FILES = {
    "nnie": {"backend": "nnie"},
    "apot": {
        "backend": "virtual",
        "weight": {"spec": "int4 symmetric channel:0", "method": "apot"},
        "activation": {"spec": "uint4 symmetric", "method": "apot"},
    },
    "apot weights": {"backend": "onnxruntime", "weight": {"spec": "int5 symmetric channel:0", "method": "apot"}},
    "dorefa": {"backend": "qdq", "weight": {"spec": "int4 symmetric channel:0", "method": "dorefa"}},
    "channels": {
        "backend": "virtual",
        "weight": {"spec": "int8 symmetric", "method": "nnie"},
        "activation": {"spec": "int8 symmetric channel:1", "method": "nnie"},
    },
}


@pytest.mark.parametrize("name", FILES)
def test_files_give_what_was_simulated(name, tmp_path):
    torch.manual_seed(1)
    x = torch.randn(8, 3, 12, 12)
    if name == "apot":
        x = x.abs()
    model = prepared(FILES[name], x)
    file = bw.export(model, tmp_path / "m.onnx", format="onnx")
    proof = bw.verify(model, file, [x, x * 0.7], latency=False)
    assert proof.ok, proof
    largest = [check.largest for runtime in proof.runtimes.values() for check in runtime.tensors]
    if name in ("nnie", "apot", "channels"):
        assert set(largest) == {0}
    session = onnxruntime.InferenceSession(str(file))  # default settings, and another batch size
    got = session.run(None, {"x": x[:3].numpy()})[0]
    with torch.no_grad():
        expected = model(x[:3]).numpy()
    assert (
        np.abs(got - expected).max()
        <= (1e-5 if name in ("nnie", "apot", "channels") else 0.05) * np.abs(expected).max()
    )
    proto = onnx.load(file)
    places = [i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.UINT8 and len(i.dims) > 1]
    assert len(places) == 3  # a byte for each weight, and not its value besides
    assert not [
        i
        for i in proto.graph.initializer
        if i.data_type == onnx.TensorProto.FLOAT and len(i.dims) > 1 and max(i.dims[1:]) > 1
    ]


def test_the_float_twin_has_no_tables(tmp_path):
    torch.manual_seed(1)
    x = torch.randn(8, 3, 12, 12)
    model = prepared(FILES["nnie"], x)
    file = bw.export(model, tmp_path / "m.onnx", format="onnx")
    twin = OnnxFile.read(file.path).float_twin()
    kinds = Counter(node.op_type for node in twin.proto.graph.node)
    assert not OPERATORS_OF_TABLES & set(kinds)
    got = onnxruntime.InferenceSession(twin.proto.SerializeToString()).run(None, {"x": x.numpy()})[0]
    for quantizer in bw.quantizer.quantizers(model).values():
        if "weight" not in quantizer.label:
            quantizer.disable()
    with torch.no_grad():
        np.testing.assert_allclose(got, model(x).numpy(), atol=1e-5)


def test_learned_ends_that_are_not_even(tmp_path):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.quantizer = TensorQuantizer(QuantDescriptor(5, learn_amax=True))

        def forward(self, x):
            return self.quantizer(x) * 2

    x = torch.randn(50)
    model = bw.prepare(Learned().eval(), x, "qdq")
    bw.calibrate(model, [x])
    model.get_submodule("quantizer").clip.clip_value_max.data.mul_(0.33)
    file = bw.export(model, tmp_path / "m.onnx")
    got = onnxruntime.InferenceSession(str(file)).run(None, {"x": x.numpy()})[0]
    with torch.no_grad():
        assert np.array_equal(got, model(x).numpy())
    assert got.max() < 0.4 * float(x.max()) * 2
    assert bw.verify(model, file, [x], latency=False).ok


@pytest.fixture
def own_method():
    @register_method("Thirds")
    class Thirds(Method):
        """Rounds to -1, 0, 1/3 and 1 times what was calibrated."""

        uniform = False

        def forward(self, x, scale, zero_point):
            v = x / (scale * self.spec.qmax)
            level = torch.where(v < -0.5, -1.0, torch.where(v > 0.6, 1.0, torch.where(v > 0.1, 1 / 3, 0.0)))
            return level * (scale * self.spec.qmax)

    yield Thirds
    METHODS.unregister("Thirds")


def test_a_users_method(own_method):
    torch.manual_seed(0)
    x = torch.randn(100)
    quantizer = calibrated("int4 symmetric", "Thirds", x)
    with pytest.raises(
        ExportError, match=r"\(Thirds\) has no uniform grid, and no table: .* write levels\(\) and unit"
    ):
        deployed(quantizer)
    own_method.levels = lambda self: torch.tensor([-1.0, 0.0, 1 / 3, 1.0])
    own_method.unit = lambda self, scale, zero_point: scale * self.spec.qmax
    part = deployed(quantizer)
    assert torch.equal(part(x), quantizer(x))
    assert len(part.bounds) == 3


@pytest.mark.parametrize("name", FILES)
def test_openvino_computes_tables_too(name, tmp_path):
    torch.manual_seed(1)
    x = torch.randn(8, 3, 12, 12)
    x = x.abs() if name == "apot" else x
    recipe = FILES[name] | ({"backend": "openvino"} if name == "dorefa" else {})  # qdq's files have no guards for it
    model = prepared(recipe, x)
    file = bw.export(model, tmp_path / "m.xml", format="openvino")
    proof = bw.verify(model, file, [x, x * 0.7], latency=False, limits={"violations": None})
    assert proof.ok, proof
    assert list(proof.runtimes) == ["openvino"]
    assert {check.largest for check in proof.runtimes["openvino"].tensors} <= {0, 1}


def test_what_has_no_place_for_tables_says_so(tmp_path):
    x = torch.randn(2, 3, 12, 12)
    model = prepared(FILES["nnie"], x)
    with pytest.raises(
        ExportError, match="holds indices into a table of values, which a file of ranges cannot express"
    ):
        bw.export(model, tmp_path / "m.onnx", format="tensorrt-ranges")
    for format, why in (("qoperator", "integer operators multiply"), ("torch", "a torch program has")):
        with pytest.raises(ExportError, match=rf"conv.weight has a table of values, and {why} .*: export with 'onnx'"):
            bw.export(model, tmp_path / "m", format=format)
    assert list(tmp_path.iterdir()) == []
    grouped = calibrated("int4 symmetric group:8", "apot", torch.randn(4, 16))
    with pytest.raises(ExportError, match="has a table of values for each group"):
        deployed(grouped)
    exact = bw.simulate(model, "onnxruntime")
    assert not exact.exact
    assert exact.inexact["fc"]
