"""inductor: torch's compiler, which fuses torch's quantizers into oneDNN's integer kernels on x86 CPUs."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from bitwright.errors import MissingExtraError
from bitwright.graph.facts import noted_by_torch
from bitwright.verification.runtimes.base import Arrays, Executed, Runtime, Session, register_runtime

_MOVEMENTS = {
    *("view", "reshape", "permute", "transpose", "expand", "clone", "slice", "select", "cat", "squeeze", "unsqueeze"),
    *("inductor_force_stride_order", "split", "getitem", "full", "constant_pad_nd", "as_strided"),
}
_LAYERS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul")


@register_runtime("inductor")
class Inductor(Runtime):
    """``torch.compile`` with frozen weights; it needs a C++ compiler."""

    name = "inductor"
    package = "torch"
    isolated = True
    formats: ClassVar[tuple[str, ...]] = ("torch",)
    settings: Mapping[str, str] = {"freezing": "True"}

    def __init__(self) -> None:
        if not self.available():
            raise MissingExtraError(
                "inductor needs a C++ compiler to run a program: g++, clang++, or the one that CXX names"
            )
        self._compiled: dict[str, _Compiled] = {}

    @classmethod
    def available(cls) -> bool:
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)

    @property
    def version(self) -> str:
        import torch

        return torch.__version__.partition("+")[0]

    def session(self, file: object, threads: int = 0, *, as_is: bool = False) -> Session:
        """Load a file, which is compiled on its first run."""
        import torch

        compiled = self._of(file)

        def run(feeds: Mapping[str, np.ndarray]) -> Arrays:
            if threads:
                torch.set_num_threads(threads)
            return compiled(feeds)

        return run

    def executed(self, file: object, feeds: Mapping[str, np.ndarray]) -> list[Executed]:
        """The operators left after inductor's fusion; it does not time them one by one."""
        compiled = self._of(file)
        compiled(feeds)
        return compiled.executed()

    def _of(self, file: Any) -> "_Compiled":  # noqa: ANN401
        parts = file.shipped()
        key = hashlib.sha256(b"".join(parts.values())).hexdigest()
        if key not in self._compiled:
            self._compiled[key] = _Compiled(parts["model.pt2"], json.loads(parts["how.json"]), list(file.outputs))
        return self._compiled[key]


class _Compiled:
    """A compiled program, and its graph after inductor."""

    def __init__(self, content: bytes, how: dict[str, Any], outputs: list[str]) -> None:
        import torch

        from bitwright.exporting.torch_program.file import load_program

        self.module = load_program(content).module()
        self.outputs, self.left = outputs, []
        if how["float"]:
            _leave_out_quantizers(self.module)
        _give_out(self.module, how["watch"])
        self.compiled = torch.compile(self.module)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        import torch

        from bitwright.torch_internals import frozen_weights

        given = [torch.from_numpy(np.array(value)) for value in feeds.values()]
        with torch.no_grad(), frozen_weights(self._note):
            results = self.compiled(*given)
        return {name: value.numpy() for name, value in zip(self.outputs, results, strict=True)}

    def _note(self, graph: Any) -> None:  # noqa: ANN401
        self.left = [n for n in graph.nodes if n.op == "call_function"]

    def executed(self) -> list[Executed]:
        """The program's remaining operators."""
        return [self._executed(node) for node in self.left]

    def _executed(self, node: Any) -> Executed:  # noqa: ANN401
        target = node.target
        joined = node.name.startswith(("qconv", "qlinear"))
        kind = node.name.partition("_")[0] if joined else str(getattr(target, "__name__", target)).partition(".")[0]
        if joined:
            return Executed(kind, "compute", True, self._sources(node))
        if "quantize_per" in kind:
            return Executed(kind, "conversion", False, (node.name,))
        if kind in _MOVEMENTS:
            return Executed(kind, "movement", False, ())
        value = noted_by_torch(node, "val")
        index = not getattr(value, "is_floating_point", lambda: False)()
        return Executed(kind, "index" if index else "compute", False, self._sources(node))

    def _sources(self, node: Any) -> tuple[str, ...]:  # noqa: ANN401
        """The program's operators that one of inductor's covers: those of its module, or before its quantizer."""
        from bitwright.exporting.torch_program.build import kind_of, module_of

        same = [n for n in self.module.graph.nodes if n.op == "call_function" and module_of(n) == module_of(node)]
        own = [n for n in same if kind_of(n) not in ("QuantizeLinear", "DequantizeLinear")]
        found = own or same[:1]
        while found and not own:  # a layer fused with the quantizer of its result
            before = found[-1].all_input_nodes[:1]
            if not before or before[0].op != "call_function" or kind_of(before[0]) == "DequantizeLinear":
                break
            found.append(before[0])
            if kind_of(before[0]) in _LAYERS:
                break
        return tuple(n.name for n in found)


def _give_out(module: Any, names: list[str]) -> None:  # noqa: ANN401
    """Make a module take and return tensors one by one, and also return some of its graph."""
    from torch.fx.graph import CodeGen

    nodes = {n.name: n for n in module.graph.nodes}
    output = next(iter(reversed(module.graph.nodes)))
    output.args = ((*output.args[0], *(nodes[name] for name in names)),)
    module.graph.set_codegen(CodeGen())
    module.validate_inputs = False  # else it refuses arguments that are not nested and named as in the example
    module.recompile()


def _leave_out_quantizers(module: Any) -> None:  # noqa: ANN401
    """Make readers of a tensor's dequantized integers read the tensor itself, and store weights in float."""
    from bitwright.exporting.torch_program.build import kind_of

    graph = module.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and kind_of(n) == "DequantizeLinear"]:
        source = node.args[0]
        if source.op == "call_function":
            node.replace_all_uses_with(source.args[0])
            continue
        given = [_value(module, a) for a in node.args]
        name = f"{node.name}_values"
        module.register_buffer(name, node.target(*given).contiguous())
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr(name))
    graph.eliminate_dead_code()
    module.recompile()


def _value(module: object, item: object) -> Any:  # noqa: ANN401
    from torch import fx

    if not isinstance(item, fx.Node):
        return item
    value = module
    for part in str(item.target).split("."):
        value = getattr(value, part)
    return value
