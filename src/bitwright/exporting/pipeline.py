"""export: write a prepared and calibrated model as the file that the target reads."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.distributed import TIMEOUT, from_first_rank
from bitwright.errors import ConfigError, ExportError
from bitwright.exporting.deploy import Deployment, deploy, float_twin
from bitwright.exporting.formats import FORMATS, ExportFormat, ExportOptions, LoadedFile
from bitwright.exporting.making import Making
from bitwright.exporting.precision import in_float32, inputs_in, precision_of
from bitwright.exporting.record import ExportedFile, ExportRecord, checksums_of, data_path, remember
from bitwright.files import check_output
from bitwright.graph import Inputs
from bitwright.preparation import ledger_of


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    format: str | None = None,
    dynamic_shapes: Any = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    model_name: str | None = None,
    external_data: bool | None = None,
    pack_weights: bool = False,
    store_half: bool = False,
    quantized: bool = True,
    overwrite: bool = True,
    timeout: float = TIMEOUT,
) -> ExportedFile:
    """Write a prepared and calibrated model as a file; under ``torchrun``, rank 0 writes while the others wait.

    Files compute in float32 and integers. A model in half or double precision is written as its float32 twin, whose
    inputs and outputs are float32, too.

    Args:
        model: the model; it is left untouched.
        path: the file to write, whole or not at all.
        example_inputs: inputs to export with; those given to ``prepare`` by default.
        format: how to write it (see ``bitwright.exporting.FORMATS``); by default, what the backend's target reads, with
            the path's suffix if it reads several.
        dynamic_shapes: which input sizes stay free in the file. True leaves free what the model does not fix, and logs
            why if it fixes the batch size; False fixes all. Or pass shapes as for ``torch.export``, where a name can
            stand for a ``Dim``: ``{"x": {0: "batch", 2: "height"}}``. The file has these names.
        input_names: names of the file's inputs, in order; by default those of the model's arguments.
        output_names: names of the file's outputs, in order; by default those of the model's results.
        opset_version: of ONNX; by default the lowest that can express the model.
        model_name: name of the model in the file; by default the name of its class.
        external_data: store large tensors in ``<path>.data``; by default only if the file would exceed 2 GB.
        pack_weights: store weights of at most 4 bits in 4 bits (ONNX's INT4 and UINT4), not in bytes, for readers that
            have such kernels; onnxruntime's CPU provider computes such layers in float.
        store_half: store constants that stay float in float16 or bfloat16 where one of them holds every value exactly,
            as it does with a model in half precision. The file gets smaller and computes the same.
        quantized: write integers; False writes the float model, for comparison.
        overwrite: whether an existing file may be replaced.
        timeout: how long a rank waits for the others, in seconds.

    Returns:
        The file: a path, with a map from the model's quantizers and nodes to the file's tensors and operators, and the
        model's fingerprint. The file contains both, for ``verify``.
    """
    ledger = ledger_of(model)
    writer = FORMATS.get(format or _format_for(Path(path), ledger.backend.formats))()
    inputs = Inputs.of(example_inputs) if example_inputs is not None else ledger.example
    if precision_of(model) is not torch.float32:
        model, inputs = in_float32(model), inputs_in(inputs)
    files = writer.files(Path(path))
    _check_name(writer, Path(path))
    unsigned = ledger.backend.activations.write_unsigned
    names = (input_names, output_names, opset_version, model_name)
    options = ExportOptions(dynamic_shapes, unsigned, *names, external_data, pack_weights, store_half)
    writer.check(model, inputs, options)

    def write() -> bytes:
        for file in [*files, *([data_path(files[0])] if external_data else [])]:
            check_output(file, overwrite=overwrite)
        try:
            record = writer.write(_deployed(model, writer, quantized), inputs, Path(path), options)
        except ExportError as error:
            raise ExportError(f"{error}{_as_written(model)}") from error
        return json.dumps([record.to_json(), checksums_of(_written(files, record))]).encode()

    text, checksums = json.loads(from_first_rank(write, timeout))
    record = ExportRecord.from_json(text)
    return remember(ExportedFile(files[0], record, _written(files, record), tuple(checksums)))


def export_again(model: nn.Module, file: LoadedFile, record: ExportRecord, folder: Path) -> LoadedFile:
    """Write into a folder what ``export`` would write now in the way of a file's record, and read it."""
    making, ledger, writer = Making.noted_in(record), ledger_of(model), FORMATS.get(record.format)()
    inputs = making.inputs_like(model, inputs_in(ledger.example))
    options = making.options_for(unsigned=ledger.backend.activations.write_unsigned)
    target = folder / file.path.name
    writer.write(_deployed(model, writer, record.quantized), inputs, target, options)
    return writer.read(target)


def _format_for(path: Path, formats: Sequence[str]) -> str:
    """The first of a target's formats whose files end like this one, or else its first."""
    fitting = set(_ending_like(path))
    return next((name for name in formats if name in fitting), next(iter(formats), "onnx"))


def _ending_like(path: Path) -> list[str]:
    """The formats whose files end like this one; none for a name without an ending."""
    return [name for name in FORMATS if path.suffix and FORMATS.get(name).suffix == path.suffix]


def _check_name(writer: ExportFormat, path: Path) -> None:
    """Refuse names that ``verify`` would take for files of another format."""
    owners = _ending_like(path)
    if owners and writer.name not in owners:
        raise ConfigError(
            f"{path.name!r} ends like files of the format {owners[0]!r}, not of {writer.name!r}, which end in "
            f"{writer.suffix!r}: give the file another name, or pass format={owners[0]!r}"
        )


def _deployed(model: nn.Module, writer: ExportFormat, quantized: bool) -> Deployment:
    return deploy(model, clean=writer.clean) if quantized else float_twin(model)


def _written(files: list[Path], record: ExportRecord) -> tuple[Path, ...]:
    """The files of an export, including the one with large tensors, if there is one."""
    return (*files, *([data_path(files[0])] if record.external else []))


def _as_written(model: nn.Module) -> str:
    """List the modules that run as written: their Python, or TorchScript, is the likely cause of a refusal."""
    ledger = ledger_of(model)
    scripts = [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripts:
        return f". {scripts[0]!r} is a TorchScript module, which no file can hold: put the nn.Module in its place"
    shown = [f"{name or 'the model'} ({reason})" for name, reason in ledger.islands.items()]
    if not shown:
        return ""
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return (
        f". These run as written, and a file holds no Python: {', '.join(shown[:3])}{more}. Write them without "
        "decisions by data, or export the parts before and after them"
    )
