"""What targets demand of files: every constraint finds a file that breaks it, and names the place and the remedy."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS, find_backend
from bitwright.errors import UnknownNameError
from bitwright.exporting import ExportedTensor, ExportRecord, Fingerprint
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import CONSTRAINTS, Finding, Proof, View, register_constraint
from bitwright.verification.constraints import constraints_of
from bitwright.verification.limits import Limits
from bitwright.verification.pipeline import add_violations

Model = onnx.ModelProto
TARGETS = {name: BACKENDS.get(name) for name in BACKENDS if BACKENDS.get(name).constraints}


class Draft:
    """A Q/DQ file of a residual block: Conv, Conv, Add with the input, Concat with the sum, Gemm, by hand.

    Args:
        kind: the type of weights and computed tensors.
        point: their zero point.
        residual: whether the second Conv's result is quantized before the sum.
        bias: whether biases are int32.
    """

    def __init__(self, kind: str = "int8", point: int = 0, residual: bool = True, bias: bool = True) -> None:
        self.kind, self.scale, self.point, self.bias = kind, 0.25, point, bias
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        x = self.quantize("x")
        first = self.layer("Conv", "c1", x, (32, 32, 3, 3))
        second = self.layer("Conv", "c2", self.quantize(first), (32, 32, 3, 3))
        second = self.quantize(second) if residual else second
        total = self.quantize(self.add("Add", "sum", [second, x]))
        joined = self.quantize(self.add("Concat", "cat", [total, x], axis=1))
        pooled = self.quantize(self.add("GlobalAveragePool", "pool", [joined]))
        flat = self.add("Flatten", "flat", [pooled])
        result = self.layer("Gemm", "fc", self.quantize(flat), (16, 64))
        self.result = self.quantize(result, "y")

    def constant(self, name: str, values: object, kind: int) -> str:
        self.constants[name] = helper.make_tensor(name, kind, np.shape(values), np.ravel(values).tolist())
        return name

    def add(self, kind: str, name: str, inputs: list[str], **settings: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **settings))
        return name

    def parameters(self, name: str, scale: float, kind: str) -> list[str]:
        made = self.constant(f"{name}.scale", np.float32(scale), TensorProto.FLOAT)
        return [made, self.constant(f"{name}.zero_point", np.int64(self.point), getattr(TensorProto, kind.upper()))]

    def quantize(self, name: str, result: str = "") -> str:
        parts = self.parameters(name, self.scale, self.kind)
        integers = self.add("QuantizeLinear", f"{name}.integers", [name, *parts])
        return self.add("DequantizeLinear", result or f"{name}.read", [integers, *parts])

    def layer(self, kind: str, name: str, x: str, shape: tuple[int, ...]) -> str:
        low = 0 if self.kind.startswith("u") else -8
        integers = np.random.default_rng(0).integers(low, low + 16, shape)
        self.constant(f"{name}.weight.integers", integers, getattr(TensorProto, self.kind.upper()))
        parts = self.parameters(f"{name}.weight", self.scale / 4, self.kind)
        weight = self.add("DequantizeLinear", f"{name}.weight", [f"{name}.weight.integers", *parts])
        settings = {"pads": [1, 1, 1, 1]} if kind == "Conv" else {"transB": 1}
        return self.add(kind, name, [x, weight, self.bias_of(name, shape[0])], **settings)

    def bias_of(self, name: str, count: int) -> str:
        if not self.bias:
            return self.constant(f"{name}.bias", np.zeros(count, np.float32), TensorProto.FLOAT)
        self.constant(f"{name}.bias.integers", np.arange(count), TensorProto.INT32)
        step = self.constant(f"{name}.bias.scale", np.float32(self.scale * self.scale / 4), TensorProto.FLOAT)
        return self.add("DequantizeLinear", f"{name}.bias", [f"{name}.bias.integers", step])

    def model(self) -> Model:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32, 8, 8])
        y = helper.make_tensor_value_info(self.result, TensorProto.FLOAT, ["n", 16])
        graph = helper.make_graph(self.nodes, "draft", [x], [y], list(self.constants.values()))
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        onnx.checker.check_model(made, full_check=True)
        return made


def store(model: Model, name: str, values: object, kind: int) -> None:
    """Replace a constant."""
    (found,) = [i for i in model.graph.initializer if i.name == name]
    found.CopyFrom(helper.make_tensor(name, kind, np.shape(values), np.ravel(values).tolist()))


def scale(model: Model, tensor: str, value: object) -> None:
    store(model, f"{tensor}.scale", np.asarray(value, np.float32), TensorProto.FLOAT)


def point(model: Model, tensor: str, value: object, kind: str) -> None:
    store(model, f"{tensor}.zero_point", value, getattr(TensorProto, kind.upper()))


def retype(model: Model, tensor: str, kind: str) -> None:
    """Let a computed tensor have another type."""
    point(model, tensor, 0, kind)


def retype_weight(model: Model, layer: str, kind: str) -> None:
    (found,) = [i for i in model.graph.initializer if i.name == f"{layer}.weight.integers"]
    values = np.clip(numpy_helper.to_array(found).astype(np.int64), 0, 7)
    store(model, found.name, values, getattr(TensorProto, kind.upper()))
    point(model, f"{layer}.weight", 0, kind)


def set_axis(model: Model, tensor: str, axis: int, count: int, kind: str, block: int = 0) -> None:
    """Give a tensor scales along an axis."""
    for node in model.graph.node:
        if f"{tensor}.scale" in node.input:
            settings = {"axis": axis, "block_size": block} if block else {"axis": axis}
            node.attribute.extend(helper.make_attribute(k, v) for k, v in settings.items())
    shape = (32, count, 3, 3) if block else (count,)
    scale(model, tensor, np.full(shape, 0.25))
    point(model, tensor, np.zeros(shape, np.int64), kind)


def unquantize(model: Model, reader: str, position: int, float_tensor: str) -> None:
    """Let an operator read a tensor in float."""
    (node,) = [n for n in model.graph.node if n.name == reader]
    node.input[position] = float_tensor


def float_bias(model: Model, layer: str) -> None:
    """Let a layer have a bias in float."""
    (maker,) = [n for n in model.graph.node if n.name == f"{layer}.bias"]
    model.graph.node.remove(maker)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(32, np.float32), f"{layer}.bias"))


def node(model: Model, name: str) -> onnx.NodeProto:
    (found,) = [n for n in model.graph.node if n.name == name]
    return found


def rename(model: Model, old: str, new: str) -> None:
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = new if name == old else name


SIGNED, BYTES = {"kind": "int8"}, {"kind": "uint8", "point": 3}
GOOD = {  # by target: the format, and a file that keeps its constraints
    "tensorrt": ("onnx", {**SIGNED, "residual": False, "bias": False}),
    "tensorrt_nlp": ("onnx", {**SIGNED, "residual": False, "bias": False}),
    "vitis": ("vitis", SIGNED),
    "snpe": ("qualcomm-0.6.1", BYTES),
    "pplcuda": ("ppl", BYTES),
    "pplw8a16": ("ppl", BYTES),
    "tengine_u8": ("tengine", BYTES),
    "stpu": ("stpu", SIGNED),
    "nnie": ("nnie", {}),
    "onnx_qnn": ("onnx", BYTES),
}


FOUR_BITS = ExportedTensor("q", 0, "x", "activation", "uint4 affine tensor", "x.integers")
RECORDS = {"qualcomm-zero": ExportRecord("onnx", "Net", True, Fingerprint("", "", ""), tensors=(FOUR_BITS,))}


def violations(
    target: str, model: Model, format: str = "", advice: bool = False, record: ExportRecord | None = None
) -> list[tuple[str, str]]:
    """The constraints of a target that a model breaks, each with the place."""
    view = View(model, record or (tables()[1] if target == "nnie" else None), format or GOOD[target][0])
    found = []
    for constraint in constraints_of(TARGETS[target]):
        if constraint.advice == advice:
            found += [(constraint.name, finding.where) for finding in constraint.check(view)]
    return found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c2(self.c1(x))


@functools.cache
def tables() -> tuple[bytes, ExportRecord]:
    """A file of tables, with its record."""
    x = torch.randn(2, 4, 5, 5)
    model = bw.calibrate(bw.prepare(Two().eval(), x, backend="nnie"), [x], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        file = OnnxFile.read(bw.export(model, Path(folder) / "m.onnx", format="onnx").path)
    assert file.record is not None
    return file.proto.SerializeToString(), file.record


def change_levels(model: Model, of: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    (found,) = [i for i in model.graph.initializer if i.name.endswith(".levels") and of in i.name]
    found.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(found)), found.name))


def good(target: str) -> Model:
    if target == "nnie":
        return Model.FromString(tables()[0])
    model = Draft(**GOOD[target][1]).model()
    for i in list(model.graph.initializer) if target == "pplw8a16" else ():
        if i.name.endswith(".zero_point") and ".weight" not in i.name:
            retype(model, i.name.removesuffix(".zero_point"), "uint16")
    return model


@pytest.mark.parametrize("target", TARGETS)
def test_good_file_keeps_what_its_target_demands(target: str) -> None:
    assert violations(target, good(target)) == []


# By constraint: the target, what breaks it, where it is found, and the format if it is another.
BROKEN: dict[str, tuple[str, Callable[[Model], None], str, str]] = {
    "tensorrt-symmetric": ("tensorrt", lambda m: point(m, "c1", 3, "int8"), "c1", ""),
    "tensorrt-types": ("tensorrt", lambda m: retype(m, "sum", "int16"), "sum", ""),
    "tensorrt-scales": ("tensorrt", lambda m: set_axis(m, "c1.weight", 1, 32, "int8"), "c1.weight", ""),
    "tensorrt-blocks": ("tensorrt", lambda m: set_axis(m, "c1.weight", 1, 16, "int8", 2), "c1.weight", ""),
    "tensorrt-opset": ("tensorrt", lambda m: setattr(m.opset_import[0], "version", 12), "x", ""),
    "tensorrt-layers": ("tensorrt", lambda m: unquantize(m, "c2", 0, "c1"), "c2 (Conv)", ""),
    "tensorrt-residual": ("tensorrt", lambda m: m.CopyFrom(Draft(**SIGNED).model()), "sum (Add)", ""),
    "tensorrt-bias": ("tensorrt", lambda m: m.CopyFrom(Draft(**SIGNED, residual=False).model()), "c1.bias", ""),
    "vitis-symmetric": ("vitis", lambda m: point(m, "c2", -1, "int8"), "c2", ""),
    "vitis-types": ("vitis", lambda m: retype(m, "cat", "int16"), "cat", ""),
    "vitis-scales": ("vitis", lambda m: set_axis(m, "c2.weight", 0, 32, "int8"), "c2.weight", ""),
    "vitis-power-of-two": ("vitis", lambda m: scale(m, "pool", 0.3), "pool", ""),
    "vitis-shift": ("vitis", lambda m: scale(m, "c1", 2.0**-14), "c1 (Conv)", ""),
    "qualcomm-bits": ("snpe", lambda m: retype_weight(m, "c1", "uint2"), "c1.weight", ""),
    "qualcomm-scales": ("snpe", lambda m: set_axis(m, "sum", 1, 32, "uint8"), "sum", ""),
    "qualcomm-zero": ("snpe", lambda m: point(m, "x", 99, "uint8"), "x", ""),
    "qualcomm-bias": ("snpe", lambda m: float_bias(m, "c2"), "c2 (Conv)", "qualcomm-2.0.0"),
    "qualcomm-gaps": ("snpe", lambda m: unquantize(m, "c2", 0, "c1"), "c2 (Conv)", ""),
    "ppl-scales": ("pplcuda", lambda m: set_axis(m, "c1.weight", 2, 3, "uint8"), "c1.weight", ""),
    "ppl-weights": ("pplcuda", lambda m: retype_weight(m, "fc", "uint4"), "fc.weight", ""),
    "pplcuda-activations": ("pplcuda", lambda m: retype(m, "c1", "uint16"), "c1", ""),
    "pplw8a16-activations": ("pplw8a16", lambda m: retype(m, "c1", "uint8"), "c1", ""),
    "tengine-types": ("tengine_u8", lambda m: retype(m, "c1", "int8"), "c1", ""),
    "tengine-scales": ("tengine_u8", lambda m: set_axis(m, "c1.weight", 0, 32, "uint8"), "c1.weight", ""),
    "tengine-names": ("tengine_u8", lambda m: rename(m, "cat", "my cat"), "my cat", ""),
    "tengine-outputs": ("tengine_u8", lambda m: setattr(m.graph.output[0], "name", "fc"), "fc", ""),
    "stpu-symmetric": ("stpu", lambda m: point(m, "c1", 1, "int8"), "c1", ""),
    "stpu-types": ("stpu", lambda m: retype(m, "c1", "int16"), "c1", ""),
    "stpu-scales": ("stpu", lambda m: scale(m, "c1", -0.5), "c1", ""),
    "stpu-concat": ("stpu", lambda m: scale(m, "sum", 0.5), "cat (Concat)", ""),
    "stpu-sigmoid": ("stpu", lambda m: setattr(node(m, "pool"), "op_type", "Sigmoid"), "pool (Sigmoid)", ""),
    "nnie-levels": ("nnie", lambda m: change_levels(m, "c1.weight", lambda v: v * np.abs(v) ** 0.3), "c1.weight", ""),
    "nnie-scales": ("nnie", lambda m: change_levels(m, "c1.weight", lambda v: v[:16]), "c1.weight", ""),
    "qlinear-types": ("onnx_qnn", lambda m: retype(m, "c1", "uint16"), "c1", ""),
    "qlinear-scales": ("onnx_qnn", lambda m: set_axis(m, "c2.weight", 1, 32, "uint8"), "c2.weight", ""),
    "qlinear-bias": ("onnx_qnn", lambda m: scale(m, "c1.bias", 0.3), "c1 (Conv)", ""),
    "qlinear-results": ("onnx_qnn", lambda m: unquantize(m, "c2.integers", 0, "c1.read"), "c2 (Conv)", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_found_by_the_constraint_that_it_breaks(name: str) -> None:
    target, breaks, where, format = BROKEN[name]
    model = good(target)
    breaks(model)
    assert (name, where) in violations(target, model, format, record=RECORDS.get(name))


ADVICE: dict[str, tuple[str, Callable[[Model], None], str]] = {
    "tensorrt-shapes": ("tensorrt", lambda m: shrink(m, "c1"), "c1 (Conv)"),
    "nnie-entries": ("nnie", lambda m: setattr(node(m, "c2.stored.kept"), "op_type", "Relu"), "c1"),
    "vitis-operands": ("vitis", lambda m: float_bias(m, "c1"), "c1 (Conv)"),
}


def shrink(model: Model, layer: str) -> None:
    """Let a layer have few channels."""
    store(model, f"{layer}.weight.integers", np.zeros((5, 4, 3, 3), np.int64), TensorProto.INT8)


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_told_where_it_applies(name: str) -> None:
    target, changes, where = ADVICE[name]
    model = good(target)
    assert (name, where) not in violations(target, model, advice=True)
    changes(model)
    assert (name, where) in violations(target, model, advice=True)


def test_every_constraint_is_shown_to_find_something() -> None:
    assert {*BROKEN, *ADVICE} == {c.name for target in TARGETS.values() for c in constraints_of(target)}
    assert {*BROKEN, *ADVICE} == set(CONSTRAINTS)
    assert all(CONSTRAINTS.get(name).text and CONSTRAINTS.get(name).source for name in CONSTRAINTS)
    assert set(ADVICE) == {name for name in CONSTRAINTS if CONSTRAINTS.get(name).advice}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.other = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.norm(self.body(x)) + self.other(x)


def quantized(backend: str, **wishes: object) -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(2, 8, 6, 6)
    return bw.calibrate(bw.prepare(Net().eval(), x, backend=backend, **wishes), [x], progress=False), x


def proven(model: nn.Module, x: torch.Tensor, folder: Path, **more: object) -> Proof:
    return bw.verify(model, bw.export(model, folder / "m.onnx"), [x], latency=False, progress=False, **more)


def test_sum_of_convolutions_has_one_quantized_branch_for_tensorrt(tmp_path: Path) -> None:
    model, x = quantized("tensorrt")
    (total,) = [n for n in model.graph.nodes if n.name == "add"]
    assert [n.name for n in total.args] == ["body", "other_quantized"]
    proof = proven(model, x, tmp_path)
    assert proof.ok, proof
    assert set(proof.constraints) == {n for n in CONSTRAINTS if n.startswith("tensorrt-")}
    assert {v.constraint for v in proof.violations} == {"tensorrt-shapes"}  # advice, which does not fail a proof
    assert (
        "8 of the 8 constraints published for tensorrt are kept; this leaves unproven the kernels of tensorrt"
        in str(proof)
    )


def test_violation_spoils_the_proof_and_is_told(tmp_path: Path) -> None:
    rule = {"match": "body", "output": "int8 symmetric narrow tensor"}
    model, x = quantized("tensorrt", recipe={"rules": [rule]})
    proof = proven(model, x, tmp_path)
    (broken,) = [v for v in proof.violations if not v.advice]
    assert (proof.ok, broken.constraint, broken.where) == (False, "tensorrt-residual", "add (Add)")
    assert "leave that result float: a rule for the layer with output: float" in str(proof)
    assert proof.to_dict()["violations"][0]["fix"] == broken.fix
    allowed = proven(model, x, tmp_path, limits={"violations": None})
    assert (allowed.ok, allowed.violations) == (True, proof.violations)
    assert f"VIOLATED: {broken}" in str(allowed)
    four = dict.fromkeys(("largest", "uncompared", "output_local", "output_steps", "weights", "changes"))
    for limits in (None, four):
        unjudged = proven(model, x, tmp_path, limits=limits)
        assert (unjudged.ok, unjudged.missed, unjudged.violations) == (None, [], proof.violations)
    page = bw.report(model, proof, tmp_path / "report.html").read_text()
    assert "What tensorrt demands of files" in page
    assert "which stops TensorRT from fusing the two" in page


def test_own_constraint_is_one_function(tmp_path: Path, own_plugins: None) -> None:
    @register_constraint("small-kernels", source="us")
    def small(view: View) -> list[Finding]:
        """Kernels have a single value."""
        kernels = {view.named(n): view.shapes[n.input[1]][2:] for n in view.operators("Conv")}
        return [Finding(name, f"has a kernel of {k}", "use 1 x 1") for name, k in kernels.items() if k != [1, 1]]

    mine = find_backend("qdq").with_(name="mine", constraints=("small-*",))
    model, x = quantized(mine)
    proof = proven(model, x, tmp_path)
    assert proof.constraints == {"small-kernels": "Kernels have a single value."}
    assert [v.where for v in proof.violations] == ["stem (Conv)", "body (Conv)", "other (Conv)"]
    assert proof.missed == ["small-kernels: stem (Conv), body (Conv), other (Conv) has a kernel of [3, 3]; use 1 x 1"]
    unknown = quantized(find_backend("qdq").with_(name="other", constraints=("tensorrt-symetric",)))
    with pytest.raises(UnknownNameError, match="'tensorrt-symetric': did you mean 'tensorrt-symmetric'"):
        proven(*unknown, tmp_path)


def test_what_cannot_be_checked_is_not_proven() -> None:
    unread = SimpleNamespace(format="other", record=None, with_quantizers=lambda: None)
    judged, unjudged = Proof("file", 1, 1, limits=Limits()), Proof("file", 1, 1, limits=Limits(violations=None))
    for proof in (judged, unjudged):
        add_violations(proof, find_backend("tensorrt"), unread)
    words = "not checked because other is not ONNX: what tensorrt demands of files"
    assert (judged.ok, judged.missed) == (False, [words])
    assert (unjudged.missed, unjudged.notes) == ([], [words])
