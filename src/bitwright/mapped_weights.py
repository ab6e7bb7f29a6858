"""Weights that stay in their safetensors files: mapped to memory, read on use, and released again.

A model is built on the meta device, where it takes no memory, and ``map_weights`` gives it the tensors of its files.
They are ordinary tensors, except that the system reads their memory from the file on first use, and may reclaim it at
any time. Writing into one changes a private copy, not the file.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bitwright.errors import ConfigError

_MARK = "mapped_from"  # an attribute of a tensor: its file and its name there
_ALIGNED = 64  # bytes, as torch aligns its tensors
_SHOWN = 5  # names that a message lists

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def map_weights(model: nn.Module, files: Files) -> nn.Module:
    """Give a model on the meta device its weights, without reading them into memory.

    ``prepare`` copies by mapping them again; ``calibrate_by_block`` reads each of them once. To train the model, or to
    compute with it often, load it as usual, because mapped weights may be read from disk at every call.

    Args:
        model: a model with all or some tensors on the meta device: ``with torch.device("meta"): build()``.
        files: a safetensors file, several, or a folder of them, with tensors named as in the state dict.

    Returns:
        The same model, with tensors from the files instead of those on the meta device.
    """
    where = {name: path for path in _paths(files) for name in _names(path)}
    wanted = _on_meta(model)
    names: dict[int, list[str]] = {}
    for name, tensor in wanted:
        names.setdefault(id(tensor), []).append(name)
    _refuse_lost([mine[0] for mine in names.values() if where.keys().isdisjoint(mine)])
    found: dict[int, Tensor] = {}
    for _, tensor in wanted:
        name = next(n for n in names[id(tensor)] if n in where)
        found.setdefault(id(tensor), _mapped_like(tensor, where[name], name))
    for name, tensor in wanted:
        owner, _, key = name.rpartition(".")
        _put(model.get_submodule(owner), key, found[id(tensor)])
    return model


def _refuse_lost(names: list[str]) -> None:
    if not names:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ConfigError(
        f"the weights do not have {', '.join(names[:_SHOWN])}{more}, which the model has on the meta device; build "
        "on the CPU what is not in the files (such as buffers that are not saved)"
    )


def _paths(files: Files) -> list[Path]:
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [Path(path) for path in given]
    found = [file for p in paths for file in (sorted(p.glob("*.safetensors")) if p.is_dir() else [p])]
    if not found:
        raise ConfigError(f"there is no safetensors file in {', '.join(map(str, paths))[:200]!r}")
    return found


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights {str(path)[:200]!r} cannot be read: {str(error)[:300]}") from error


def _on_meta(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a model without memory, by each of their names: parameters, buffers and plain attributes."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in (*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()):
            if isinstance(value, Tensor) and value.is_meta:
                found.append((f"{path}.{name}" if path else name, value))
    return found


def _mapped_like(tensor: Tensor, path: Path, name: str) -> Tensor:
    """The tensor of that name as a Parameter, if the one that it replaces is one."""
    value = _read(path, name)
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        was, now = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (tensor, value))
        raise ConfigError(
            f"{name} is {was} in the model and {now} in {str(path)[:200]!r}; build the model as it was saved, with "
            "model.to(dtype) where only the type differs"
        )
    return _marked(value, path, name, tensor)


def _marked(value: Tensor, path: Path, name: str, like: Tensor) -> Tensor:
    made = nn.Parameter(value, like.requires_grad) if isinstance(like, nn.Parameter) else value
    setattr(made, _MARK, (path, name))
    return made


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _put(module: nn.Module, name: str, value: Any) -> None:  # noqa: ANN401
    for state in (module._parameters, module._buffers, module.__dict__):
        if name in state:
            state[name] = value
            return


def mapped_again(tensor: Tensor) -> Tensor | None:
    """A copy of a mapped tensor that takes no memory; None if the tensor or its file has changed."""
    path, name = getattr(tensor, _MARK, (None, ""))
    if path is None:
        return None
    try:
        value = _read(path, name)
    except (OSError, SafetensorError):
        return None
    return _marked(value, path, name, tensor) if same_bits(value, tensor.detach()) else None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    if torch.equal(one, other) and not one.dtype.is_floating_point:
        return True
    views = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*views)


@contextmanager
def in_memory(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Temporarily hold mapped tensors in memory, like those of any model; writes to them are lost.

    Matrix products may depend on a matrix's alignment, which can be arbitrary in a file. The memory comes from the
    system, and all of it is returned.
    """
    before = [(tensor, tensor.data) for tensor in tensors if hasattr(tensor, _MARK)]
    starts = [0, *accumulate(-(-mapped.nbytes // _ALIGNED) * _ALIGNED for _, mapped in before)]
    block = torch.frombuffer(mmap.mmap(-1, max(starts[-1], 1)), dtype=torch.uint8)
    try:
        for (tensor, mapped), start in zip(before, starts, strict=False):
            place = block[start : start + mapped.nbytes].view(mapped.dtype).view(mapped.shape)
            tensor.data = place.copy_(mapped)
        yield
    finally:
        for tensor, mapped in before:
            tensor.data = mapped
