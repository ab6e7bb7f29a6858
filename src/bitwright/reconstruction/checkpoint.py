"""Checkpoints: each finished unit is a file, so that a job that was killed goes on where it was."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.files import atomic_write
from bitwright.reconstruction.learned import LearnedScale, LearnedWeight
from bitwright.reconstruction.result import UnitResult
from bitwright.reconstruction.settings import Settings


def fingerprint(model: nn.Module, settings: Settings, inputs: Iterable[object]) -> str:
    """A text that differs if the model, its recipe, the settings or the data do."""
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(str(getattr(model, "code", type(model).__name__)).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        _add(digest, value)
    for value in inputs:
        _add(digest, value)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().contiguous().cpu().flatten()
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, tuple | list):
        for item in value:
            _add(digest, item)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    else:
        digest.update(repr(value).encode())


class Checkpoint:
    """A folder with one file per unit.

    Args:
        folder: where the files are, or will be.
        mark: the fingerprint of the job.
    """

    def __init__(self, folder: str | Path, mark: str) -> None:
        self.folder, self.mark = Path(folder), mark
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"reconstruct: the checkpoint {str(folder)!r} is a file; name a folder")

    def save(self, number: int, result: UnitResult, weights: list[LearnedWeight], scales: list[LearnedScale]) -> None:
        """Store a unit, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        if result.kept:
            tensors |= {f"weight.{i}": w.ups().cpu().contiguous() for i, w in enumerate(weights)}
            tensors |= {f"scale.{i}": s.quantizer.qparams()[0].detach().cpu().clone() for i, s in enumerate(scales)}
        with atomic_write(self._path(number)) as partial:
            save_file(tensors, str(partial), {"job": self.mark, "unit": json.dumps(result.to_dict())})

    def load(self, number: int, weights: list[LearnedWeight], scales: list[LearnedScale]) -> UnitResult | None:
        """Give a unit what it has learned, if it is stored."""
        path = self._path(number)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise ConfigError(f"reconstruct: the checkpoint {str(path)!r} cannot be read: {error}") from error
        if about.get("job") != self.mark:
            raise ConfigError(
                f"reconstruct: the checkpoint {str(path)!r} is of another model, recipe, data or settings; "
                "go on with those, or name another folder"
            )
        result = UnitResult.from_dict(json.loads(about["unit"]))
        if result.kept:
            for i, weight in enumerate(weights):
                weight.round_by(tensors[f"weight.{i}"])
            for i, scale in enumerate(scales):
                scale.quantizer.set_qparams(tensors[f"scale.{i}"], scale.quantizer.qparams()[1])
        return result

    def _path(self, number: int) -> Path:
        return self.folder / f"unit-{number:04d}.safetensors"
