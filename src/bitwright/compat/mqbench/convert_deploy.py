"""``convert_deploy``: write a prepared and calibrated model for its target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.compat.ends import rename_ends
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.utils.logger import logger
from bitwright.errors import ConfigError
from bitwright.exporting import export
from bitwright.preparation import ledger_of

_EXTRA = ("input_names", "output_names", "dynamic_axes")


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

    Args:
        model: a prepared and calibrated model; it is left untouched.
        backend_type: the target it was prepared for.
        input_shape_dict: for the name of each input, its shape.
        dummy_input: inputs to export with, in the place of shapes; by default those it was prepared with.
        output_path: the folder.
        model_name: the name of the file.
        deploy_to_qlinear: not taken: runtimes join Q/DQ themselves.
        extra_kwargs: ``input_names``, ``output_names``, and ``dynamic_axes``, which lets the batch size vary.

    Returns:
        The file.
    """
    target, own = BackendType.read(backend_type), ledger_of(model).backend.name
    if target.value != own:
        raise ConfigError(f"the model was prepared for {own}, not for {target}: prepare it for that target")
    unknown = [key for key in extra_kwargs if key not in _EXTRA]
    if deploy_to_qlinear or unknown:
        wrong = unknown[0] if unknown else "deploy_to_qlinear"
        raise ConfigError(f"convert_deploy does not take {wrong}; it takes {', '.join(_EXTRA)}")
    if dummy_input is None and input_shape_dict is not None:
        dummy_input = tuple(torch.rand(*shape) for shape in input_shape_dict.values())
    folder = Path(output_path)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model_name}.onnx"
    export(model, path, dummy_input, dynamic_shapes=bool(extra_kwargs.get("dynamic_axes")), format="onnx")
    names = extra_kwargs.get("input_names") or (list(input_shape_dict) if input_shape_dict else None)
    rename_ends(path, names, extra_kwargs.get("output_names"))
    logger.info("%s is written: Q/DQ, which holds all scales; there are no files besides", path)
    return path


def convert_onnx(model: nn.Module, *args: Any, **kwargs: Any) -> Path:
    """Write a model for the target it was prepared for; arguments as for ``convert_deploy``."""
    return convert_deploy(model, ledger_of(model).backend.name, *args, **kwargs)


def convert_merge_bn(model: nn.Module) -> None:
    """Do nothing: a prepared model computes with folded BatchNorms once its weights are quantized."""
    ledger_of(model)
