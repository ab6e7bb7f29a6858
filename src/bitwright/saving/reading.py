"""load: rebuild the model in a folder from its float model."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bitwright.backends import Backend, find_backend
from bitwright.correction.limits import restore_limits
from bitwright.errors import BitwrightError, ConfigError, SaveError, SaveWarning, shortened
from bitwright.graph.capture.failures import frames_to_user
from bitwright.graph.model import users_class
from bitwright.mapped_weights import map_weights
from bitwright.module_swap import swap_modules
from bitwright.nn.norm import freeze_batchnorm, unfreeze_batchnorm
from bitwright.preparation.pipeline import prepare_resolved
from bitwright.quantizer import QuantDescriptor, quantizers
from bitwright.recipe import Recipe
from bitwright.saving.backend_data import from_data
from bitwright.saving.example import TensorLike, describe, make
from bitwright.saving.manifest import EXAMPLE, MANIFEST, RECIPE, TENSORS, Manifest, file_digest, read_manifest, versions
from bitwright.saving.structure import code_of, differences, structure
from bitwright.saving.tensors import named_tensors, put, why_not
from bitwright.validation import shown

_TRIES = 10  # attempts to read a folder that others keep replacing
_DESCRIPTORS = ("quant_desc_input", "quant_desc_weight")


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    *,
    example_inputs: Any = None,  # noqa: ANN401
    backend: str | Path | Backend | None = None,
) -> nn.Module:
    """Rebuild the model that :func:`save` wrote; it computes the same, bit for bit, on the same machine.

    The float model is prepared again, with inputs of the shapes and types of the example inputs, and then receives the
    saved weights, ranges and modes. A model that differs from the saved one is refused with the first difference. A
    :class:`~bitwright.errors.SaveWarning` tells of code or packages that have changed.

    Args:
        folder: what ``save`` wrote.
        model: the float model, with any weights, or a function that builds it. It is left untouched. A model on the
            meta device gets weights mapped from the folder's file, which take no memory until they are used.
        example_inputs: inputs to capture the model with, of the saved shapes and types; needed only if the model does
            not take made-up numbers within the limits of the saved ones.
        backend: the target, if its conditions are functions that no registered backend has.
    """
    try:
        path = Path(folder)
    except TypeError as error:
        raise SaveError(f"the folder of a saved model must be a path, not {shown(folder)}") from error
    files = _whole(path)
    manifest = files.manifest
    original = _with_weights(model if isinstance(model, nn.Module) else _built(model), path / TENSORS)
    with _readable(path):
        inputs = _example(files, example_inputs)
        target = from_data(manifest.backend, None if backend is None else find_backend(backend))
        made = (_swapped if manifest.swapped else _prepared)(files, original, inputs, target)
        restore_limits(made, manifest.limits, files.tensors)
        _restore(made, manifest, files.tensors, path)
    _warn(made, manifest)
    return made


class _Files(NamedTuple):
    """The contents of a folder's files."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    recipe: Recipe
    example: dict[str, Tensor]


def _whole(folder: Path) -> _Files:
    """Read all files, and again if another process replaced the folder meanwhile."""
    for _ in range(_TRIES):
        mark = _mark(folder)
        try:
            found = _files(folder)
        except SaveError:
            if _mark(folder) == mark:
                raise
        else:
            if _mark(folder) == mark:
                return found
    raise SaveError(f"{str(folder)[:200]!r} was replaced {_TRIES} times while it was read")


def _mark(folder: Path) -> tuple[int, int, int] | None:
    """What distinguishes a folder from its replacement."""
    try:
        found = (folder / MANIFEST).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _files(folder: Path) -> _Files:
    manifest = read_manifest(folder)
    _check_files(folder, manifest)
    example = _read(folder / EXAMPLE) if EXAMPLE in manifest.files else {}
    return _Files(manifest, _read(folder / TENSORS), _recipe(folder), example)


def _recipe(folder: Path) -> Recipe:
    try:
        return Recipe.parse(folder / RECIPE)
    except BitwrightError as error:
        raise SaveError(f"{str(folder / RECIPE)!r} cannot be read: {error}") from error


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Report a manifest with inconsistent parts, which only a changed one has."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BitwrightError):
            raise
        text = f"{type(error).__name__}: {error}"
        raise SaveError(f"the manifest in {str(folder)!r} does not fit the model: {text:.500}") from error


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse files other than those that were saved."""
    for name, digest in manifest.files.items():
        if name not in (RECIPE, TENSORS, EXAMPLE):
            raise SaveError(f"{str(folder)!r} lists the file {name!r:.80}, which a saved model does not have")
        try:
            found = file_digest(folder / name)
        except OSError as error:
            raise SaveError(f"{str(folder / name)!r} cannot be read: {error.strerror}") from error
        if found != digest:
            raise SaveError(
                f"{str(folder / name)!r} was changed or damaged after it was saved: its digest does not fit"
            )
    for name in (RECIPE, TENSORS):
        if name not in manifest.files:
            raise SaveError(f"{str(folder)!r} is incomplete: its manifest does not list {name}")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{str(path)!r} cannot be read: {error}") from error


def _built(factory: object) -> nn.Module:
    if not callable(factory):
        raise SaveError(f"load needs the float model, or a function that builds it, not {type(factory).__name__}")
    built = factory()
    if not isinstance(built, nn.Module):
        raise SaveError(f"the function that builds the model returned a {type(built).__name__}, not a torch.nn.Module")
    return built


def _with_weights(model: nn.Module, file: Path) -> nn.Module:
    """The model or, if it is on the meta device, a copy with the saved weights, mapped from their file."""
    if not any(tensor.is_meta for tensor in named_tensors(model).values()):
        return model
    try:
        return map_weights(copy.deepcopy(model), file)
    except ConfigError as error:
        raise SaveError(
            f"the {type(model).__name__} given, on the meta device, does not match what was saved: {error}"
        ) from error


def _example(files: _Files, given: object) -> Any:  # noqa: ANN401
    """The inputs to capture with: those given, those stored, or some made up."""
    manifest, stored = files.manifest, files.example
    if given is not None:
        problem = _unlike(describe(given), manifest.example)
        if problem:
            raise SaveError(f"example_inputs are not like those of the saved model: {problem}")
        return given
    if EXAMPLE not in manifest.files:
        return make(manifest.example)
    order = iter(range(len(stored)))
    return make(manifest.example, lambda _: stored[str(next(order))])


def _unlike(given: Any, saved: Any) -> str:  # noqa: ANN401
    """How inputs differ from the saved ones, apart from their values."""
    if given.kind != saved.kind:
        return f"a {given.kind}, not a {saved.kind}"
    if isinstance(given, TensorLike):
        now, was = (f"{t.dtype}{list(t.shape)}" for t in (given, saved))
        return "" if now == was else f"{now}, not {was}"
    if given.kind in ("tuple", "list", "dict"):
        now, was = given.keys or len(given.items), saved.keys or len(saved.items)
        return next(filter(None, map(_unlike, given.items, saved.items)), "") if now == was else f"{now}, not {was}"
    return f"{given.value!r}, not {saved.value!r}" if given.kind == "value" and given != saved else ""


def _prepared(files: _Files, model: nn.Module, inputs: object, backend: Backend) -> nn.Module:
    manifest = files.manifest
    try:
        fixed = make(manifest.concrete_args) or None
        return prepare_resolved(model, inputs, files.recipe, backend, fixed, answers=manifest.answers)
    except BitwrightError as error:
        raise SaveError(
            f"the {type(model).__name__} given cannot be prepared as the saved {manifest.model} was: {error} (if it "
            "does not run with made-up inputs: load with example_inputs, or save with example=True)"
        ) from error


def _swapped(files: _Files, model: nn.Module, inputs: object, backend: Backend) -> nn.Module:
    given: dict[str, Any] = dict(files.manifest.arguments)
    for kind in _DESCRIPTORS:
        given[kind] = QuantDescriptor.from_yaml(given[kind]) if given.get(kind) else None
    given["backend"] = backend if given.get("backend") else None
    try:
        return swap_modules(model, example_inputs=inputs, **given)
    except BitwrightError as error:
        raise SaveError(f"the modules of this {type(model).__name__} cannot be swapped as before: {error}") from error


def _restore(made: nn.Module, manifest: Manifest, saved: dict[str, Tensor], folder: Path) -> None:
    """Restore tensors and modes of a rebuilt model, or say how it differs from the saved one."""
    found = quantizers(made)
    own = named_tensors(made)
    prefixes = tuple(f"{name}." for name in manifest.quantizers)
    ranges = {name: value for name, value in saved.items() if name.startswith(prefixes)}
    problems = why_not({n: t for n, t in saved.items() if n not in ranges}, own)
    odd = sorted(found.keys() ^ manifest.quantizers.keys())
    problems += [f"a quantizer at {name} is {'new' if name in found else 'missing'}" for name in odd[:1]]
    if not problems:
        put(saved, own, list(manifest.channels_last))
    parted = differences(list(manifest.structure), structure(made))
    if parted or problems:
        given = users_class(made).__name__
        raise SaveError(
            f"{str(folder)!r} holds a {manifest.model} that differs from what this {given} becomes: "
            + "; ".join([*parted, *problems[:5], *_changes(made, manifest)])
        )
    for name, record in manifest.quantizers.items():
        record.restore(name, found[name], _below(name, ranges))
    _set_modes(made, manifest)


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one module, by their names in it."""
    return {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}


def _set_modes(made: nn.Module, manifest: Manifest) -> None:
    modules = dict(made.named_modules())
    for name in manifest.batch_norms:
        unfreeze_batchnorm(modules[name])
    for name in manifest.frozen_norms:
        freeze_batchnorm(modules[name])
    for name, module in modules.items():
        module.training = manifest.training != (name in manifest.other_mode)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in manifest.fixed_parameters)


def _changes(made: nn.Module, manifest: Manifest) -> list[str]:
    """The code and the packages that changed since the model was saved."""
    code, here = code_of(made), versions()
    changed = [f"the code of {n} has changed" for n, d in manifest.code.items() if code.get(n, d) != d]
    return changed + [f"{n} was {v} and is {here[n]}" for n, v in manifest.versions.items() if here.get(n, v) != v]


def _warn(made: nn.Module, manifest: Manifest) -> None:
    changed = _changes(made, manifest)
    if changed:
        text = shortened("; ".join(changed), 1000)
        warnings.warn(
            f"the saved {manifest.model} loads, but {text}: its results may differ",
            SaveWarning,
            stacklevel=frames_to_user(),
        )
