"""What the runtimes' own quantizers make of a network, to race against: those that are installed.

pip install --target FOLDER --no-deps nncf pydot pyparsing tabulate scikit-learn joblib threadpoolctl psutil torchao
PYTHONPATH=FOLDER python -m benchmarks.deploy
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quant_pre_process, quantize_static

from bitwright.exporting.onnx.file import OnnxFile
from bitwright.torch_internals import frozen_weights
from bitwright.verification import RUNTIMES
from bitwright.verification.runtimes.base import Session

Feeds = dict[str, np.ndarray]


class Reader(CalibrationDataReader):
    """Feeds onnxruntime's calibration."""

    def __init__(self, feeds: Feeds) -> None:
        self._items: Iterator[Feeds] = iter([feeds])

    def get_next(self) -> Feeds | None:
        """The next batch, or None."""
        return next(self._items, None)


def onnxruntime_rival(float_file: Path, feeds: Feeds) -> Session:
    """``quantize_static``: u8 activations, s8 per-channel weights of 7 bits, the best it can do on any x86 CPU."""
    ready, target = float_file.with_name("ready.onnx"), float_file.with_name("rival.onnx")
    quant_pre_process(str(float_file), str(ready), skip_symbolic_shape=True)
    quantize_static(
        str(ready),
        str(target),
        Reader(feeds),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    file = OnnxFile(target, onnx.load(str(target)), None)
    return RUNTIMES.get("onnxruntime")().session(file, threads=1)


def openvino_rival(float_file: Path, feeds: Feeds, *, transformer: bool) -> Session:
    """NNCF's ``quantize`` with its defaults, run in float32 where it is not quantized, as ours is."""
    import nncf
    import openvino

    nncf.set_log_level(40)
    kind: Any = nncf.ModelType.TRANSFORMER if transformer else None
    model: Any = nncf.quantize(openvino.Core().read_model(float_file), nncf.Dataset([feeds]), model_type=kind)
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()

    def run(feeds: Any) -> Any:  # noqa: ANN401
        found = request.infer(dict(feeds))
        return {port.get_any_name(): value for port, value in found.items()}

    return run


def inductor_rival(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Torchao's PT2E with its quantizer for x86, compiled with frozen weights."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    free = ({0: torch.export.Dim("batch", min=1, max=64)},)
    # The quantizer finds two calls of one ReLU in what dynamo captures only, and else refuses them.
    program = torch.export.export(model, (batch,), dynamic_shapes=free, strict=True).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(program, quantizer)
    prepared(batch)
    compiled = torch.compile(convert_pt2e(prepared))

    def run(given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), frozen_weights(lambda graph: None):  # compiled in the first call
            return compiled(given)

    return run
