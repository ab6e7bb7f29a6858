"""enable_onnx_export: inside it, ``torch.onnx.export`` writes quantizers as QuantizeLinear and DequantizeLinear."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitwright.quantizer import quantizers

OPSET = 21  # the first that knows integers of 4 and 16 bits


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """Let ``torch.onnx.export`` know quantizers for a while; torch is restored after an exception too.

    Weights are stored as integers, so the file has opset 21 or newer whatever the call asks for.
    """
    original: Any = torch.onnx.export

    def export(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, nn.Module) or not quantizers(model):
            return original(model, *args, **kwargs)
        from bitwright.exporting.deploy import deploy
        from bitwright.exporting.onnx.translate import translations

        options = {**kwargs, "dynamo": True, "opset_version": max(kwargs.get("opset_version") or OPSET, OPSET)}
        twin = deploy(model).model
        theirs = kwargs.get("custom_translation_table") or {}
        options["custom_translation_table"] = {**translations(OPSET, twin), **theirs}
        with torch.no_grad():
            return original(twin, *args, **options)

    torch.onnx.export = export  # pyrefly: ignore
    try:
        yield
    finally:
        torch.onnx.export = original
