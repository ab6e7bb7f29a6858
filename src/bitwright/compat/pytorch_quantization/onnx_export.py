"""enable_onnx_export: inside it, ``torch.onnx.export`` writes quantizers as QuantizeLinear and DequantizeLinear."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import nn

from bitwright.errors import CalibrationError
from bitwright.graph import Inputs
from bitwright.quantizer import quantizers

_log = logging.getLogger(__name__)
_KNOWS = "knows_quantizers"  # on a torch.onnx.export that does
_GONE = ("enable_onnx_checker", "use_external_data_format", "example_outputs", "strip_doc_string")  # from torch itself


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """Let ``torch.onnx.export`` know quantizers for a while; torch is restored after an exception too.

    Weights are stored as integers in the one file that the call names. Its opset is at least the lowest that can say
    what the model does, 18 for integers of 8 bits. A model in bfloat16 is written in float32. Arguments that older
    exporters of torch had, such as ``enable_onnx_checker``, have no effect.
    """
    if getattr(torch.onnx.export, _KNOWS, False):
        yield
        return
    original: Any = torch.onnx.export

    def export(model: Any, args: Any = (), f: Any = None, **kwargs: Any) -> Any:
        for name in _GONE:
            kwargs.pop(name, None)
        if not isinstance(model, nn.Module) or not quantizers(model):
            return original(model, args, f, **kwargs)
        from bitwright.exporting.deploy import deploy
        from bitwright.exporting.formats.onnx import write_unsigned
        from bitwright.exporting.onnx.opset import RICH, lowest_opset
        from bitwright.exporting.onnx.quiet import quiet_exporter
        from bitwright.exporting.onnx.translate import translations
        from bitwright.exporting.precision import inputs_in

        if any(p.dtype == torch.bfloat16 for p in model.parameters()):
            _log.warning("the file computes in float32: onnxruntime has no bfloat16 on CPUs")
            model, args = copy.deepcopy(model).float(), inputs_in(Inputs((args,))).args[0]
        _refuse_unknown_ranges(model)
        twin = deploy(model).model
        opset = max(kwargs.get("opset_version") or 0, lowest_opset(twin))
        table = {**translations(opset, twin), **(kwargs.get("custom_translation_table") or {})}
        ours = {"dynamo": True, "opset_version": opset, "verbose": False, "custom_translation_table": table}
        with torch.no_grad(), quiet_exporter():
            program = original(twin, args, **{**kwargs, **ours})
        if opset >= RICH:
            write_unsigned(program.model)
        _save(program, f, kwargs.get("external_data", False))
        return program

    setattr(export, _KNOWS, True)
    torch.onnx.export = export  # pyrefly: ignore
    try:
        yield
    finally:
        torch.onnx.export = original


def _refuse_unknown_ranges(model: nn.Module) -> None:
    """A file has fixed ranges: refuse quantizers that find theirs in each tensor."""
    lost = [name for name, q in quantizers(model).items() if q.quantizes and not q.calibrated]
    if lost:
        shown = f"{', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}"
        raise CalibrationError(
            f"{shown} have no range that a file could hold: calibrate (enable_calib, run the model, load_calib_amax), "
            "set amax, or disable() them"
        )


def _save(program: Any, file: Any, external_data: bool) -> None:
    """Write a program to a path or an open file; None writes nothing."""
    if isinstance(file, str | PathLike):
        program.save(file, external_data=external_data)
    elif file is not None:
        import onnx

        onnx.save(program.model_proto, file)
