"""The manifest, ``bitwright.json``: what a saved model is and what it was made with, checked on reading."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from bitwright import __version__
from bitwright.errors import SaveError
from bitwright.saving.example import Described
from bitwright.saving.quantizer_record import QuantizerRecord
from bitwright.validation import Strict, mistakes

MANIFEST, RECIPE, TENSORS, EXAMPLE = "bitwright.json", "recipe.yaml", "model.safetensors", "example.safetensors"
FILES = (MANIFEST, RECIPE, TENSORS, EXAMPLE)
FORMAT = 1  # of the folder
_DIGEST = "digest"
_PACKAGES = ("torch", "numpy", "safetensors")


class Manifest(Strict):
    """What a folder says about its model."""

    format: int
    """Version of the folder's layout."""
    versions: dict[str, str]
    """Bitwright, Python and the packages that the model was saved with."""
    model: str
    """The class of the float model."""
    source: dict[str, str] = Field(default_factory=dict)
    """What the command line was given: the functions that build the model, give data and evaluate."""
    swapped: bool = False
    """Whether swap_modules made the model, not prepare."""
    backend: dict[str, Any]
    """All that is known of the target."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """What swap_modules was called with."""
    concrete_args: Described
    """Arguments of forward that prepare fixed."""
    answers: dict[str, dict[str, bool]] = Field(default_factory=dict)
    """How questions that depend on weights were answered, by the path of the graph."""
    example: Described
    """Shapes, types and limits of the example inputs."""
    quantizers: dict[str, QuantizerRecord]
    """Every quantizer by its place."""
    structure: tuple[str, ...]
    """Every module and every call of every graph."""
    code: dict[str, str]
    """A digest of the source of each of the user's classes."""
    training: bool
    """Whether the model is in training mode."""
    other_mode: tuple[str, ...] = ()
    """Modules that are in the other mode."""
    frozen_norms: tuple[str, ...] = ()
    """BatchNorms that freeze_batchnorm was called on."""
    batch_norms: tuple[str, ...] = ()
    """BatchNorms that unfreeze_batchnorm was called on."""
    fixed_parameters: tuple[str, ...] = ()
    """Parameters without gradients."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Modules that limit each channel, and the nodes that call them: corrections put them there."""
    channels_last: tuple[str, ...] = ()
    """Tensors whose channels lie last in memory."""
    files: dict[str, str]
    """The SHA-256 of each file of the folder."""
    fingerprint: str
    """A digest of all that decides what the model computes."""

    def to_text(self) -> str:
        """JSON with a digest of itself."""
        data = self.model_dump(mode="json")
        return json.dumps({_DIGEST: _digest(data), **data}, indent=1, ensure_ascii=False) + "\n"


def versions() -> dict[str, str]:
    """The versions of everything that decides how a model computes."""
    return {
        "bitwright": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def _read(folder: Path, path: Path) -> Any:  # noqa: ANN401
    """The data of a manifest, as it stands there."""
    for each in (folder / name for name in FILES):
        if os.path.exists(each) and not os.path.isfile(each):  # a pipe may never end
            raise SaveError(f"{str(each)!r} cannot be read: it is not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SaveError(f"{str(folder)!r} is not a saved model: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SaveError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest, or say what is wrong with it."""
    path = folder / MANIFEST
    data = _read(folder, path)
    if not isinstance(data, Mapping) or "format" not in data:
        raise SaveError(f"{str(path)!r} is not the manifest of a saved model")
    if data["format"] != FORMAT:
        raise SaveError(
            f"{str(folder)!r} has the format {data['format']!r:.40}, and Bitwright {__version__} reads {FORMAT}: load "
            f"it with the version that saved it ({_saved_with(data)})"
        )
    given = {key: value for key, value in data.items() if key != _DIGEST}
    if data.get(_DIGEST) != _digest(given):
        raise SaveError(f"{str(path)!r} was changed or damaged after it was saved: its digest does not fit")
    try:
        return Manifest.model_validate(given)
    except ValidationError as error:
        found = mistakes(error, lambda _: list(Manifest.model_fields))
        raise SaveError(f"{str(path)!r} has {found:.800}") from error


def _saved_with(data: Mapping[str, Any]) -> str:
    found = data.get("versions")
    return f"Bitwright {found.get('bitwright', 'unknown')!s:.40}" if isinstance(found, Mapping) else "unknown"


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
