"""Which quantizers OpenVINO does not round: what we report about an executed file, compared with what it computes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification.runtimes.base import RUNTIMES
from bitwright.verification.watching import Watcher

HEAD = """<ir_version: 10, opset_import: ["" : 21]> g (float[2,8,8,8] x) => (float[2,8,8,8] z) {
    xq = QuantizeLinear(x, xs, xz)
    xd = DequantizeLinear(xq, xs, xz)
    wd = DequantizeLinear<axis=0>(w, ws, wz)
    vd = DequantizeLinear<axis=0>(v, ws, wz)
"""
CONV = "{} = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(xd, {}d{})\n"
QUANTIZED = "{0}q = QuantizeLinear({1}, {2}, yz)\n {0} = DequantizeLinear({0}q, {2}, yz)\n"
CLIPPED = "q = Clip(c, low, high)\n"
ADDED = {
    "x": "s = Add(q, xd)\n",
    "conv": CONV.format("o0", "v", "{0}") + QUANTIZED.format("o", "o0", "os") + "s = Add(q, o)\n",
    "mul": CONV.format("o0", "v", "{0}") + QUANTIZED.format("o", "o0", "os") + "s = Mul(q, o)\n",
    "relu": CONV.format("o0", "v", "{0}") + QUANTIZED.format("o", "o0", "os") + "a = Relu(q)\n s = Add(a, o)\n",
}

LAST = {
    "quantized": QUANTIZED.format("z", "s", "ts"),
    "float": "z = Relu(s)\n",
    "read": QUANTIZED.format("t", "s", "ts") + CONV.format("z", "w", "").replace("xd", "t"),
}


def stored() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    integers = {name: rng.integers(-60, 60, (8, 8, 3, 3)).astype(np.int8) for name in ("w", "v")}
    scales = {"xs": 0.02, "ys": 0.11, "os": 0.07, "ts": 0.05, "low": -11.0, "high": 17.05}
    points = {"xz": np.uint8(120), "yz": np.uint8(100), "wz": np.zeros(8, np.int8)}
    more = {"ws": np.linspace(0.002, 0.004, 8, dtype=np.float32), "b": np.linspace(-0.6, 0.5, 8, dtype=np.float32)}
    return {**integers, **{k: np.float32(v) for k, v in scales.items()}, **points, **more}


def build(added: str, bias: str, first: str, last: str) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + CONV.format("c", "w", bias) + first + ADDED[added].format(bias) + last + "}")
    read = {name for node in model.graph.node for name in node.input}
    constants = {name: value for name, value in stored().items() if name in read}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("last", LAST)
def test_a_quantizer_is_rounded_unless_it_is_named(added: str, bias: str, last: str) -> None:
    pytest.importorskip("openvino")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8, 8, 8)).astype(np.float32)}
    rounded, unrounded = (
        OnnxFile(Path("net.onnx"), build(added, bias, first, LAST[last]), None)
        for first in (QUANTIZED.format("q", "c", "ys"), CLIPPED)
    )
    runtime, reference = RUNTIMES.get("openvino")(), RUNTIMES.get("reference")()
    found = runtime.session(rounded)(feeds)
    fused = Watcher(runtime, rounded, feeds, found, runtime.executed(rounded, feeds)).fused
    gaps = [np.abs(found["z"] - reference.session(file)(feeds)["z"]).mean() for file in (rounded, unrounded)]
    assert set(fused) <= {"qq"}
    assert gaps[bool(fused)] < 1e-4 < 1e-3 < gaps[not fused]


@pytest.mark.parametrize("added", ["conv", "relu"])
def test_what_a_sum_overwrites_is_watched(added: str) -> None:
    """The quantizer that the sum does not round comes before it in the file."""
    pytest.importorskip("openvino")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8, 8, 8)).astype(np.float32)}
    model = build(added, "", QUANTIZED.format("q", "c", "ys"), LAST["quantized"])
    file, runtime = OnnxFile(Path("net.onnx"), model, None), RUNTIMES.get("openvino")()
    watcher = Watcher(runtime, file, feeds, runtime.session(file)(feeds), runtime.executed(file, feeds))
    watch = watcher.watch(["qq", "oq", "zq"])
    assert watch.fused.keys() == {"qq"}
    assert watch.untouched == {}
    exact = RUNTIMES.get("reference")().session(file.watching(["oq"]))(feeds)["oq"]
    np.testing.assert_allclose(watch(feeds)["oq"].astype(int), exact.astype(int), atol=1)
