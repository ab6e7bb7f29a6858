"""save: a prepared model as a folder of plain files."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.correction.limits import limits_in
from bitwright.distributed import TIMEOUT, from_first_rank
from bitwright.errors import SaveError
from bitwright.graph.model import CapturedModel, users_class
from bitwright.graph.rewriting.answers import answers_of
from bitwright.nn.fold import BY_BATCH, FROZEN
from bitwright.preparation import ledger_of
from bitwright.preparation.ledger import Ledger
from bitwright.quantizer import QuantDescriptor, quantizers
from bitwright.saving.backend_data import to_data
from bitwright.saving.example import Unknown, describe, tensors_of
from bitwright.saving.folder import atomic_folder, check_folder
from bitwright.saving.manifest import EXAMPLE, FILES, FORMAT, MANIFEST, RECIPE, TENSORS, Manifest, file_digest, versions
from bitwright.saving.quantizer_record import QuantizerRecord
from bitwright.saving.structure import code_of, structure
from bitwright.saving.tensors import check_plain, lie_channels_last, named_tensors, quantizer_tensors


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    example: bool = False,
    source: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Path:
    """Write a prepared model as a folder from which :func:`load` rebuilds the same model.

    The folder has ``model.safetensors`` (weights, ranges, and what methods and observers have learned and seen),
    ``recipe.yaml`` and ``bitwright.json``. It appears whole or not at all; an existing one stays until the new one is
    complete. It does not include training state, such as that of an optimizer. Under ``torchrun``, rank 0 writes while
    the others wait.

    Args:
        model: what ``prepare`` or ``swap_modules`` returned, at any point after that.
        folder: the folder to write.
        example: also store the data of the example inputs, not only their shapes, types and limits.
        source: where the model came from, for the command line: ``module:function`` by purpose.
        timeout: how long a rank waits for the others, in seconds.

    Returns:
        The folder.
    """
    from_first_rank(lambda: _save(model, check_folder(folder, FILES, MANIFEST), example, source or {}), timeout)
    return Path(folder)


def _save(model: nn.Module, target: Path, example: bool, source: Mapping[str, str]) -> bytes:
    ledger = ledger_of(model)
    inputs = ledger.arguments["example_inputs"]
    described = describe(inputs)
    own, ranges = named_tensors(model), quantizer_tensors(model)
    check_plain({**own, **ranges})
    with atomic_folder(target) as partial:
        (partial / RECIPE).write_text(ledger.recipe.to_yaml(), encoding="utf-8")
        _write(partial / TENSORS, {**own, **ranges})
        if example:
            tensors = tensors_of(inputs)
            _write(partial / EXAMPLE, {str(i): tensor for i, tensor in enumerate(tensors)})
        files = {file.name: file_digest(file) for file in sorted(partial.iterdir())}
        lines = structure(model)
        manifest = Manifest(
            format=FORMAT,
            versions=versions(),
            model=users_class(model).__qualname__,
            source=dict(source),
            swapped=ledger.swapped,
            backend=to_data(ledger.backend),
            arguments=_swap_arguments(ledger),
            concrete_args=_fixed(ledger),
            answers={n: answers_of(m) for n, m in model.named_modules() if isinstance(m, CapturedModel)},
            example=described,
            quantizers={name: QuantizerRecord.of(name, q) for name, q in quantizers(model).items()},
            structure=tuple(lines),
            code=code_of(model),
            **_modes(model),
            limits=limits_in(model),
            channels_last=tuple(lie_channels_last(own)),
            files=files,
            fingerprint=hashlib.sha256("\n".join([files[TENSORS], *lines]).encode()).hexdigest(),
        )
        (partial / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
    return b""


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, each with memory of its own."""
    known: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        plain[name] = value if whole and (place not in known or not place) else value.clone()
        known.add(place)
    save_file(plain, path)


def _fixed(ledger: Ledger) -> Any:  # noqa: ANN401
    """The arguments of forward that prepare fixed, which must be plain: they are part of the program."""
    described = describe(dict(ledger.arguments.get("concrete_args") or {}))
    for name, item in zip(described.keys, described.items, strict=True):  # pyrefly: ignore
        if item.kind != "value":
            kind = item.type if isinstance(item, Unknown) else item.kind
            raise SaveError(f"concrete_args has {name!r}, a {kind}: a folder holds only numbers, flags, texts and None")
    return described


def _swap_arguments(ledger: Ledger) -> dict[str, Any]:
    if not ledger.swapped:
        return {}
    given = {name: value for name, value in ledger.arguments.items() if name != "example_inputs"}
    return {k: v.to_yaml() if isinstance(v, QuantDescriptor) else v for k, v in given.items()}


def _modes(model: nn.Module) -> dict[str, Any]:
    """Which modules train, and which parameters."""
    modules = dict(model.named_modules())
    return {
        "training": model.training,
        "other_mode": tuple(n for n, m in modules.items() if m.training != model.training),
        "frozen_norms": tuple(n for n, m in modules.items() if FROZEN in m.__dict__),
        "batch_norms": tuple(n for n, m in modules.items() if BY_BATCH in m.__dict__),
        "fixed_parameters": tuple(n for n, p in model.named_parameters() if not p.requires_grad),
    }
