"""An OpenVINO IR that was read: its record, its tensors, and its FP32 twin; and the seal that finds every change."""

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino import passes

from bitwright.errors import ExportError, VerifyError, useful_line
from bitwright.exporting.formats.base import FileNode, LoadedFile
from bitwright.exporting.openvino_contents import ir_contents
from bitwright.exporting.record import ExportRecord
from bitwright.files import atomic_write, scratch_folder

OWNER, RECORD, ORIGIN = "bitwright", "record", "origin"  # in the IR's rt_info: what was written, and what it is made of
_SEAL = re.compile(rb"\n<!-- bitwright ([0-9a-f]{64}) -->\n\Z")
_BEFORE_RELU = {"Add", "Convolution", "GroupConvolution", "ConvolutionBackpropData", "MatMul", "Multiply"}
_PRODUCTS = {"Convolution": 1, "GroupConvolution": 2, "ConvolutionBackpropData": 1, "GroupConvolutionBackpropData": 2}


def bin_path(path: Path) -> Path:
    """The file beside an IR's graph that holds its tensors."""
    return path.with_suffix(".bin")


def write_sealed(model: Any, path: Path) -> None:
    """Write the tensors and the graph, whole or not at all; the graph ends with a checksum of both."""
    xml, tensors = _serialized(model).values()
    seal = f"\n<!-- bitwright {hashlib.sha256(xml + tensors).hexdigest()} -->\n"
    with atomic_write(path) as graph, atomic_write(bin_path(path)) as beside:
        beside.write_bytes(tensors)
        graph.write_bytes(xml + seal.encode())


def read_sealed(path: Path) -> Any:
    """The model, if it is as it was written, or is not Bitwright's."""
    if not path.is_file():
        raise VerifyError(f"there is no file {str(path)!r}; export the model first")
    if not bin_path(path).is_file():
        raise VerifyError(f"{str(bin_path(path))!r} is missing: {path.name} is incomplete without its tensors")
    xml, tensors = path.read_bytes(), bin_path(path).read_bytes()
    found = _SEAL.search(xml)
    intact = found is not None and hashlib.sha256(xml[: found.start()] + tensors).hexdigest().encode() == found[1]
    if not intact and (found is not None or f"<{OWNER}>".encode() in xml):
        raise VerifyError(f"{str(path)!r} cannot be trusted: it was changed after Bitwright wrote it; export again")
    try:
        return ov.Core().read_model(xml, tensors)
    except Exception as error:
        raise VerifyError(f"{str(path)!r} is not an OpenVINO IR: {useful_line(error)}") from error


def _serialized(model: Any) -> dict[str, bytes]:
    with scratch_folder(tempfile.gettempdir()) as folder:
        try:
            ov.save_model(model, folder / "model.xml", compress_to_fp16=False)
        except RuntimeError as error:
            raise ExportError(f"OpenVINO cannot write into {str(folder.parent)!r}: {error}; is it full?") from error
        return {name: (folder / name).read_bytes() for name in ("model.xml", "model.bin")}


class IrFile(LoadedFile):
    """An OpenVINO model in memory, whose operators go by the names of the ONNX model that it was made of."""

    format = "openvino"

    def __init__(self, path: Path, model: Any, record: ExportRecord | None, origin: dict[str, Any], size: int) -> None:
        self.path, self.model, self.record, self.size = path, model, record, size
        self.inputs, self.outputs = list(origin["inputs"]), list(origin["outputs"])
        self._origin = origin

    @classmethod
    def read(cls, path: Path) -> "IrFile":
        """Read a file; one that Bitwright wrote must be as it was written."""
        model = read_sealed(path)
        size = path.stat().st_size + bin_path(path).stat().st_size
        if not model.has_rt_info([OWNER, RECORD]):
            ends = {"inputs": model.inputs, "outputs": model.outputs}
            names = {key: [_name(port) for port in ports] for key, ports in ends.items()}
            return cls(path, model, None, {**names, "nodes": []}, size)
        try:
            record = ExportRecord.from_json(str(model.get_rt_info([OWNER, RECORD]).value))
            return cls(path, model, record, json.loads(str(model.get_rt_info([OWNER, ORIGIN]).value)), size)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise VerifyError(f"{str(path)!r} has a record that cannot be read ({error}); export again") from error

    def shipped(self) -> dict[str, bytes]:
        return _serialized(self.model)

    def batched(self) -> list[str]:
        shapes = zip(self.inputs, (port.partial_shape for port in self.model.inputs), strict=False)
        return [name for name, shape in shapes if shape.rank.is_static and len(shape) and shape[0].is_dynamic]

    def contents(self) -> dict[str, str]:
        """Digests of its layers with what they read, and of its tensors."""
        return ir_contents(*_serialized(self.model).values(), without=RECORD)

    def watching(self, tensors: Iterable[str]) -> "IrFile":
        copy = self.model.clone()
        known = _tensors(copy)
        wanted = [name for name in dict.fromkeys(tensors) if name in known and name not in self.outputs]
        copy.add_outputs(wanted)
        return self._with(copy, outputs=[*self.outputs, *wanted])

    def beginning(self, count: int) -> "IrFile":
        """A copy of what the first operators of the ONNX model became, which gives out what is read later."""
        copy = self.model.clone()
        known, nodes = _tensors(copy), self.nodes()
        read = {name for node in nodes[count:] for name in node.inputs} | set(self.outputs)
        made = [name for node in nodes[:count] for name in node.outputs if name in read and name in known]
        make: Any = ov.Model  # its stubs do not fit
        part = make([known[name] for name in made], copy.get_parameters(), "beginning")
        return self._with(part, outputs=made)

    def _with(self, model: Any, **changes: Any) -> "IrFile":
        return IrFile(self.path, model, self.record, {**self._origin, **changes}, self.size)

    def float_twin(self) -> "IrFile":
        """The same network in FP32: without quantizers, weights dequantized, with the ReLUs that quantizers imply."""
        twin = self.model.clone()
        for node in [n for n in twin.get_ordered_ops() if n.get_type_name() == "FakeQuantize"]:
            _bypass(node)
        manager = passes.Manager()
        manager.register_pass(passes.ConstantFolding())
        manager.run_passes(twin)
        size = sum(n.data.nbytes for n in twin.get_ops() if n.get_type_name() == "Constant")
        return IrFile(self.path, twin, None, self._origin, size)

    def nodes(self) -> list[FileNode]:
        return [FileNode(name, kind, tuple(i), tuple(o)) for name, kind, i, o in self._origin["nodes"]]

    def multiply_adds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, int | None]:
        """Count them by the shapes that the model has for these inputs."""
        model = self.model.clone()
        model.reshape({name: list(value.shape) for name, value in feeds.items()})
        names = {node.name for node in self.nodes()}
        counts: dict[str, int | None] = {}
        for node in model.get_ordered_ops():
            owner = node.get_friendly_name().removesuffix("/WithoutBiases")
            if owner in names and (node.get_type_name() in _PRODUCTS or node.get_type_name() == "MatMul"):
                counts[owner] = _count(node)
        return counts

    def constant(self, tensor: str) -> np.ndarray | None:
        constants = (n for n in self.model.get_ops() if n.get_type_name() == "Constant")
        found = next((n for n in constants if n.get_friendly_name() == tensor), None)
        return None if found is None else np.array(found.data)


def _name(port: Any) -> str:
    return min(port.get_names(), default=port.get_node().get_friendly_name())


def _tensors(model: Any) -> dict[str, Any]:
    """What a model computes, by the names of tensors."""
    return {name: port for node in model.get_ordered_ops() for port in node.outputs() for name in port.get_names()}


def _count(node: Any) -> int | None:
    shapes = [node.input_value(0), node.input_value(1), node.output(0)]
    if any(port.get_partial_shape().is_dynamic for port in shapes):
        return None
    x, weight, result = (list(port.get_shape()) for port in shapes)
    if node.get_type_name() == "MatMul":
        return math.prod(result) * (x[-2] if node.get_attributes()["transpose_a"] else x[-1])
    own = math.prod(weight[_PRODUCTS[node.get_type_name()] :])
    return own * math.prod(x if "Backprop" in node.get_type_name() else result)


def _bypass(quantizer: Any) -> None:
    """Make readers of a tensor's dequantized integers read the tensor itself."""
    source, low = quantizer.input_value(0), quantizer.input_value(1).get_node()
    at_zero = low.get_type_name() == "Constant" and not np.any(low.data)
    if at_zero and source.get_node().get_type_name() in _BEFORE_RELU:
        source = ops.relu(source).output(0)
    for integers in _readers(quantizer):
        for wide in _readers(integers):
            for step in _readers(wide):
                ends = [step] if step.get_type_name() == "Multiply" else _readers(step)
                for end in ends:
                    end.output(0).replace(source)


def _readers(node: Any) -> list[Any]:
    return [port.get_node() for port in node.output(0).get_target_inputs()]
