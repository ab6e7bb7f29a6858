"""``convert_deploy``: write a prepared and calibrated model for its target."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.compat.file_options import shapes_of
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.utils.logger import logger
from bitwright.errors import ConfigError, ExportError
from bitwright.exporting import export
from bitwright.files import atomic_write
from bitwright.graph import Inputs
from bitwright.preparation import ledger_of

_EXTRA = ("input_names", "output_names", "dynamic_axes")
_CLEAN, _RANGES = "_deploy_model", "_clip_ranges.json"
# For each target with a file of ranges: Bitwright's format, and how MQBench calls the float model and the ranges.
_BUNDLES = {
    "tensorrt": ("tensorrt-ranges", _CLEAN, _RANGES),
    "snpe": ("qualcomm-0.6.1", _CLEAN, _RANGES),
    "pplw8a16": ("ppl", _CLEAN, _RANGES),
    "pplcuda": ("ppl", _CLEAN, _RANGES),
    "vitis": ("vitis", _CLEAN, _RANGES),
    "nnie": ("nnie", _CLEAN, "_gfpq_param_dict.json"),
    "tengine_u8": ("tengine", "_for_tengine", "_for_tengine.scale"),
    "stpu": ("stpu", "_for_stpu", "_stpu_minmax.json"),
}


def convert_deploy(
    model: nn.Module,
    backend_type: BackendType | str,
    input_shape_dict: Mapping[str, Any] | None = None,
    dummy_input: Any = None,
    output_path: str | Path = "./",
    model_name: str = "mqbench_qmodel",
    deploy_to_qlinear: bool = False,
    **extra_kwargs: Any,
) -> Path:
    """Write ``<output_path>/<model_name>.onnx``, with QuantizeLinear and DequantizeLinear.

    For Tensorrt, SNPE, PPL, Vitis, NNIE, Tengine and STPU the float model and its ranges are written, too, as
    ``<model_name>_deploy_model.onnx`` and ``<model_name>_clip_ranges.json`` (NNIE's ranges as
    ``_gfpq_param_dict.json``; ``_for_tengine.onnx`` and ``_for_tengine.scale``, ``_for_stpu.onnx`` and
    ``_stpu_minmax.json``). A format that cannot hold the model's ranges
    is left out, and a warning says why.

    Args:
        model: a prepared and calibrated model; it is left untouched.
        backend_type: the target it was prepared for.
        input_shape_dict: the shape of each input by name.
        dummy_input: inputs to export with, instead of shapes; by default those it was prepared with.
        output_path: the folder.
        model_name: the name of the file.
        deploy_to_qlinear: not supported: runtimes fuse Q/DQ themselves.
        extra_kwargs: ``input_names``, ``output_names``, and ``dynamic_axes``, as for ``torch.onnx.export``.

    Returns:
        The file with QuantizeLinear and DequantizeLinear, which has all scales.
    """
    target, own = BackendType.read(backend_type), ledger_of(model).backend.name
    if target.value != own:
        raise ConfigError(f"the model was prepared for {own}, not for {target}: prepare it for that target")
    wrong = [*(key for key in extra_kwargs if key not in _EXTRA), *["deploy_to_qlinear"] * bool(deploy_to_qlinear)]
    if wrong:
        raise ConfigError(f"convert_deploy does not take {wrong[0]}; it takes {', '.join(_EXTRA)}")
    shapes = dict(input_shape_dict or {})
    if dummy_input is None and shapes:
        dummy_input = tuple(torch.rand(*shape) for shape in shapes.values())
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model_name}.onnx"
    names = extra_kwargs.get("input_names") or list(shapes) or None
    inputs = None if dummy_input is None else _call(model, dummy_input)
    options = {
        "input_names": names,
        "output_names": extra_kwargs.get("output_names"),
        "dynamic_shapes": shapes_of(model, inputs or ledger_of(model).example, extra_kwargs.get("dynamic_axes"), names),
    }
    export(model, path, inputs, format="onnx", **options)
    logger.info("%s is written", path)
    if target.value in _BUNDLES:
        _write_bundle(model, folder / model_name, inputs, options, *_BUNDLES[target.value])
    return path


def _call(model: nn.Module, given: object) -> Inputs:
    """``dummy_input`` as ``torch.onnx.export`` took it: a dict at the end is of keywords if forward has them."""
    *args, last = given if isinstance(given, tuple) else (given,)
    if isinstance(last, dict) and last.keys() <= inspect.signature(model.forward).parameters.keys():
        return Inputs(tuple(args), last)
    return Inputs((*args, last))


def _write_bundle(
    model: nn.Module, stem: Path, inputs: object, options: dict[str, Any], format: str, clean: str, ranges: str
) -> None:
    """Write the float model and the ranges, these under MQBench's name besides the format's own."""
    target = stem.with_name(f"{stem.name}{clean}.onnx")
    try:
        written = export(model, target, inputs, format=format, **options)
    except ExportError as error:
        logger.warning("%s is not written: %s", target, error)
        return
    named = stem.with_name(f"{stem.name}{ranges}")
    beside = written.files[-1]
    if named != beside:
        with atomic_write(named) as part:
            part.write_bytes(beside.read_bytes())
    logger.info("%s and %s are written", target, named)


def convert_onnx(model: nn.Module, *args: Any, **kwargs: Any) -> Path:
    """Write a model for the target it was prepared for; arguments as for ``convert_deploy``."""
    return convert_deploy(model, ledger_of(model).backend.name, *args, **kwargs)


def convert_merge_bn(model: nn.Module) -> None:
    """Do nothing, because a prepared model computes with folded BatchNorms once its weights are quantized."""
    ledger_of(model)
