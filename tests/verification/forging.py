"""Forge exported files: change one thing and give the file checksums that fit."""

import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from bitwright.exporting.bundles.base import BUNDLE
from bitwright.exporting.onnx.seal import write_sealed
from bitwright.exporting.torch_program.file import _digest

Forgery = Callable[[random.Random], str]  # changes the file, and says what it did; empty if it found nothing to change


def _stored(model: onnx.ModelProto, chosen: random.Random, *kinds: int) -> onnx.TensorProto | None:
    found = [i for i in model.graph.initializer if not kinds or i.data_type in kinds]
    return chosen.choice(found) if found else None


def _put(tensor: onnx.TensorProto, values: np.ndarray) -> str:
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return tensor.name


def flip_bit(model: onnx.ModelProto, chosen: random.Random) -> str:
    tensor = _stored(model, chosen)
    if tensor is None or not tensor.raw_data:
        return ""
    data = bytearray(tensor.raw_data)
    data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    tensor.raw_data = bytes(data)
    return tensor.name


def step_in_bias(model: onnx.ModelProto, chosen: random.Random) -> str:
    tensor = _stored(model, chosen, onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return "" if tensor is None or not tensor.raw_data else _step(tensor, chosen)


def step_in_zero_point(model: onnx.ModelProto, chosen: random.Random) -> str:
    kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16)
    tensor = _stored(model, chosen, *kinds)
    return "" if tensor is None or not tensor.raw_data else _step(tensor, chosen)


def _step(tensor: onnx.TensorProto, chosen: random.Random) -> str:
    values = numpy_helper.to_array(tensor).copy()
    place, info = chosen.randrange(values.size), np.iinfo(values.dtype)
    up = values.flat[place] < info.max and (chosen.random() < 0.5 or values.flat[place] == info.min)
    values.flat[place] += np.asarray(1 if up else -1).astype(values.dtype)
    return _put(tensor, values)


def larger_scale(model: onnx.ModelProto, chosen: random.Random) -> str:
    tensor = _stored(model, chosen, onnx.TensorProto.FLOAT)
    if tensor is None:
        return ""
    values = numpy_helper.to_array(tensor).copy()
    place = chosen.randrange(values.size) if values.size else 0
    if not values.size or not np.isfinite(values.flat[place]) or values.flat[place] == 0:
        return ""
    with np.errstate(over="ignore"):
        values.flat[place] *= np.float32(1.01)
    return _put(tensor, values)


def other_attribute(model: onnx.ModelProto, chosen: random.Random) -> str:
    found = [(n, a) for n in model.graph.node for a in n.attribute if a.type in (1, 2, 3, 7)]
    if not found:
        return ""
    node, attribute = chosen.choice(found)
    if attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = attribute.f * 2 + 1
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i += 1
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s += b"_"
    elif attribute.ints:
        place = chosen.randrange(len(attribute.ints))
        attribute.ints[place] += 1
    return f"{node.name}.{attribute.name}"


def other_input(model: onnx.ModelProto, chosen: random.Random) -> str:
    graph = model.graph
    place = chosen.randrange(len(graph.node))
    node = graph.node[place]
    made = [name for n in graph.node[:place] for name in n.output] + [i.name for i in graph.initializer]
    which = chosen.randrange(len(node.input)) if node.input else None
    others = [] if which is None else [name for name in made if name != node.input[which]]
    if not others or which is None:
        return ""
    if len(set(node.input)) > 1 and chosen.random() < 0.3:
        node.input[:] = list(reversed(node.input))
    else:
        node.input[which] = chosen.choice(others)
    return node.name


def without_node(model: onnx.ModelProto, chosen: random.Random) -> str:
    graph = model.graph
    node = graph.node[chosen.randrange(len(graph.node))]
    source = next(iter(node.input), "")
    if not source or any(o.name in node.output for o in graph.output):
        return ""
    for other in graph.node:
        for i, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[i] = source
    name = node.name
    graph.node.remove(node)
    return name


ON_GRAPHS: dict[str, Callable[[onnx.ModelProto, random.Random], str]] = {
    "bit": flip_bit,
    "bias": step_in_bias,
    "zero point": step_in_zero_point,
    "scale": larger_scale,
    "attribute": other_attribute,
    "input": other_input,
    "node": without_node,
}


def forged_onnx(path: Path, chosen: random.Random) -> str:
    """Change the graph, or a number in a file of ranges beside it."""
    model = onnx.load(path)
    note = next((e for e in model.metadata_props if e.key == BUNDLE), None)
    if note is not None and chosen.random() < 0.4:
        done = _forged_ranges(path, note, chosen)
    else:
        kind = chosen.choice(list(ON_GRAPHS))
        done = ON_GRAPHS[kind](model, chosen)
        done = done and f"{kind} of {done}"
    write_sealed(model, path)
    return done


def _forged_ranges(path: Path, note: onnx.StringStringEntryProto, chosen: random.Random) -> str:
    data = json.loads(note.value)
    suffix = chosen.choice(list(data["checksums"]))
    beside = path.with_suffix(suffix)
    text = beside.read_text()
    numbers = list(re.finditer(r"(?<![\w.\"])-?\d+(\.\d+)?(e-?\d+)?(?![\w.\"])", text))
    if not numbers:
        return ""
    found = chosen.choice(numbers)
    value = float(found[0])
    new = repr(value * 1.01 or 0.01) if "." in found[0] else str(int(value) + 1)
    beside.write_text(text[: found.start()] + new + text[found.end() :])
    data["checksums"][suffix] = hashlib.sha256(beside.read_bytes()).hexdigest()
    note.value = json.dumps(data, separators=(",", ":"))
    return f"{suffix}: {found[0]} to {new}"


def forged_ir(path: Path, chosen: random.Random) -> str:
    """Change a number of an OpenVINO graph, or a bit of its tensors of numbers; OpenVINO crashes on bad shapes."""
    xml, tensors = path.read_bytes(), bytearray(path.with_suffix(".bin").read_bytes())
    xml, done = xml[: xml.rindex(b"\n<!-- bitwright")], ""
    if chosen.random() < 0.5:
        places = re.findall(rb'element_type="(?:f32|u8|i8|i32)" shape="[^"]*" offset="(\d+)" size="(\d+)"', xml)
        start, size = map(int, chosen.choice(places))
        place = start + chosen.randrange(size)
        tensors[place] ^= 1 << chosen.randrange(8)
        path.with_suffix(".bin").write_bytes(bytes(tensors))
        done = f"bit in byte {place}"
    else:
        attributes = rb'(strides|dilations|pads_begin|levels|axis|offset|transpose_b|from-layer|kernel)="'
        found = chosen.choice(list(re.finditer(attributes + rb'([^"]+)"', xml)))
        words = {b"true": b"false", b"false": b"true"}
        new = words.get(found[2]) or re.sub(rb"\d+", lambda n: str(int(n[0]) + 1).encode(), found[2], count=1)
        done = f"{found[0].decode()} to {new.decode()}" if new != found[2] else ""
        xml = xml[: found.start(2)] + new + xml[found.end(2) :]
    seal = hashlib.sha256(xml + bytes(tensors)).hexdigest()
    path.write_bytes(xml + f"\n<!-- bitwright {seal} -->\n".encode())
    return done


def forged_program(path: Path, chosen: random.Random) -> str:
    """Change a number in the nodes of a program, or a bit of its tensors."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    tensors = [name for name in members if re.search(r"(weights|constants)/\w+_\d+$", name) and members[name]]
    if chosen.random() < 0.5 and tensors:
        victim = chosen.choice(tensors)
        data = bytearray(members[victim])
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        members[victim], done = bytes(data), victim
    else:
        victim = next(name for name in members if name.endswith("models/model.json"))
        program = json.loads(members[victim])
        done = _forged_node(chosen.choice(program["graph_module"]["graph"]["nodes"]), chosen)
        members[victim] = json.dumps(program).encode()
    seal = next(name for name in members if name.endswith("bitwright.checksum"))
    members[seal] = _digest(zipfile.ZipFile(io.BytesIO(_packed(members)))).encode()
    path.write_bytes(_packed(members))
    return done


def _forged_node(node: dict, chosen: random.Random) -> str:
    for given in chosen.sample(node["inputs"], len(node["inputs"])):
        for kind in ("as_int", "as_float", "as_ints"):
            if kind in given["arg"]:
                value = given["arg"][kind]
                other = [v + 1 for v in value] if isinstance(value, list) else value + 1
                given["arg"][kind] = value * 1.01 if kind == "as_float" and value else other
                return f"{node['target']}.{given['name']}"
    return ""


def _packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


FORGED = {".onnx": forged_onnx, ".xml": forged_ir, ".pt2": forged_program}
