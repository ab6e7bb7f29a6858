"""Fingerprint: a digest of everything in a deployed model that decides its numbers."""

import contextlib
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.exporting.modules import qualified_name
from bitwright.exporting.parts import Part
from bitwright.graph import CapturedModel
from bitwright.graph.names import attribute_of

_SHOWN = 12  # digits shown to people


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a deployed model, separate for parts that may change independently.

    Attributes:
        structure: graphs, classes and settings of modules, specs of quantizers.
        weights: parameters and buffers, integers where they are stored as such.
        scales: scales and zero points.
    """

    structure: str
    weights: str
    scales: str

    @property
    def short(self) -> str:
        """A few digits by which people can tell models apart."""
        return hashlib.sha256(f"{self.structure}{self.weights}{self.scales}".encode()).hexdigest()[:_SHOWN]

    def differences(self, other: "Fingerprint") -> list[str]:
        """The parts in which two fingerprints differ."""
        return [part for part in ("structure", "weights", "scales") if getattr(self, part) != getattr(other, part)]


def fingerprint(model: nn.Module) -> Fingerprint:
    """The fingerprint of a deployed model."""
    digests = _Digests()
    digests.add_module("", model)
    return Fingerprint(*(d.hexdigest() for d in (digests.structure, digests.weights, digests.scales)))


class _Digests:
    def __init__(self) -> None:
        self.structure, self.weights, self.scales = (hashlib.sha256() for _ in range(3))

    def add_module(self, name: str, module: nn.Module) -> None:
        settings = ""
        with contextlib.suppress(Exception):  # the user's own extra_repr
            settings = "" if isinstance(module, fx.GraphModule) else module.extra_repr()
        self._note("module", name, module.__class__.__qualname__, settings)
        if isinstance(module, CapturedModel):  # only what its graph reads decides its numbers
            self._add_graph(name, module)
            return
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                _add_tensor(self.weights, f"{name}.{key}", tensor)
        for key, tensor in module.constants().items() if isinstance(module, Part) else ():
            _add_tensor(self.weights if key == "integers" else self.scales, f"{name}.{key}", tensor)
        for key, child in module._modules.items():
            if child is not None:
                self.add_module(f"{name}.{key}", child)

    def _add_graph(self, prefix: str, model: CapturedModel) -> None:
        done: set[str] = set()
        for node in model.graph.nodes:
            target = qualified_name(node.target) if callable(node.target) else str(node.target)
            self._note(node.name, node.op, target, text_of(node.args), text_of(node.kwargs))
            if node.op not in ("call_module", "get_attr") or target in done:
                continue
            done.add(target)
            if node.op == "call_module":
                self.add_module(f"{prefix}.{target}", model.get_submodule(target))
            elif isinstance(value := attribute_of(model, target), Tensor):
                _add_tensor(self.weights, f"{prefix}.{target}", value)

    def _note(self, *parts: str) -> None:
        self.structure.update("\0".join((*parts, "\n")).encode())


def _add_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def text_of(item: object) -> str:
    """Arguments of a call as text, the same in every process."""
    if isinstance(item, fx.Node):
        return f"%{item.name}"
    if isinstance(item, tuple | list):
        return f"({', '.join(map(text_of, item))})"
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}: {text_of(value)}' for key, value in item.items())}}}"
    if isinstance(item, slice):
        return f"slice{text_of((item.start, item.stop, item.step))}"
    if isinstance(item, Tensor):
        return f"tensor {tuple(item.shape)} {item.dtype} {hashlib.sha256(item.cpu().numpy().tobytes()).hexdigest()}"
    plain = isinstance(item, int | float | complex | str | bytes | type(None) | torch.dtype | torch.device)
    return repr(item) if plain else qualified_name(item) if callable(item) else type(item).__qualname__
