"""The contents of an OpenVINO IR: its layers with the layers that they read, and the tensors that it stores."""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from bitwright.exporting.contents import Contents

_COUNTED = re.compile(r"_\d+$")  # OpenVINO numbers what it makes, on and on in one process


def ir_contents(graph: bytes, tensors: bytes, without: str) -> dict[str, str]:
    """Digests of a graph that OpenVINO has written, without one of its entries, and of its tensors."""
    net, found = ElementTree.fromstring(graph), Contents()
    for layer in (each for each in net.iter("layer") if each.get("type") != "Parameter"):
        layer.set("name", _COUNTED.sub("", layer.get("name", "")))
    read: dict[str, list[str]] = {}
    for edge in net.findall("edges/edge"):
        read.setdefault(edge.get("to-layer", ""), []).append(str(sorted(edge.items())))
    for layer in net.findall("layers/layer"):
        kind = "stored tensor" if layer.get("type") == "Const" else "operator"
        text = ElementTree.tostring(layer) + "".join(sorted(read.get(layer.get("id", ""), []))).encode()
        found.add(f"the {kind} {layer.get('name')}", text + b"".join(_stored(layer, tensors)))
    for entry in (each for each in net if each.tag not in ("layers", "edges")):
        _remove(entry, without)
        found.add(f"the {entry.tag}", ElementTree.tostring(entry))
    return found.digests


def _remove(entry: Element, tag: str) -> None:
    for parent in entry.iter():
        for child in [c for c in parent if c.tag == tag]:
            parent.remove(child)


def _stored(layer: Element, tensors: bytes) -> list[bytes]:
    """The constants of a layer and of its bodies."""
    places = [node.find("data") for node in layer.iter("layer") if node.get("type") == "Const"]
    spans = [(int(d.get("offset", 0)), int(d.get("size", 0))) for d in places if d is not None]
    return [tensors[start : start + size] for start, size in spans]
