"""Ranges: show data to every quantizer of a prepared model, then fix its range."""

import copy
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from bitwright.distributed import TIMEOUT, all_ranks, job_name
from bitwright.errors import CalibrationError
from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.bias import INT32_MAX
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.placed import PlacedQuantizer
from bitwright.nn.weight_sites import weight_sites
from bitwright.observer_state import ObservingProgress, join
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.signals import DelayedSignals

_log = logging.getLogger(__name__)


@torch.inference_mode(False)  # its results outlive it, and may be trained
def fix_ranges(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    uneven: bool = False,
    timeout: float = TIMEOUT,
) -> nn.Module:
    """What ``bw.calibrate`` does before it corrects; see there."""
    count = len(ledger_of(model).example.args)

    def observe(seeing: dict[str, TensorQuantizer]) -> int:
        shown = track(as_batches(batches), "calibrating", show=progress)
        return _observe(model, shown, seeing, count, checkpoint)

    return calibrate_by(observe, model, uneven=uneven, timeout=timeout)


def _enabled_quantizers(model: nn.Module) -> list[TensorQuantizer]:
    everything = quantizers(model).values()
    if not everything:
        raise CalibrationError(
            "the model has no quantizer: nothing in it runs in integers; `bitwright inspect` says why"
        )
    found = [q for q in everything if q.enabled]
    if not found:
        raise CalibrationError(f"all {len(everything)} quantizers of the model are disabled; enable() some of them")
    return found


def calibrate_by(
    observe: Callable[[dict[str, TensorQuantizer]], int], model: nn.Module, *, uneven: bool, timeout: float
) -> nn.Module:
    """Calibrate a model; ``observe`` shows all batches to quantizers, given by name, and returns their number."""
    found = _enabled_quantizers(model)
    with _unchanged_if_it_fails(found), all_ranks(timeout) as ranks:
        with torch.no_grad(), eval_mode(model), ranks.together(CalibrationError):
            seeing = _observe_weights(model, found)
            for quantizer in seeing.values():
                quantizer.observe()
            number = observe(seeing)
            if not number:
                raise CalibrationError("the calibration data is empty: it yielded no batch")
        join(ranks, model, seeing, number, uneven=uneven)
        unseen = _unseen(model, set(seeing.values()))
        seen = [quantizer for quantizer in found if quantizer not in unseen]
        for quantizer in seen:
            quantizer.compute_qparams()
        for quantizer in seen:
            quantizer.quantize()
        _leave_float(model, unseen)
        for site in weight_sites(model):
            make_room_for_bias(site.layer)
    _say_what_is_untrained(model, found)
    return model


def _say_what_is_untrained(model: nn.Module, found: list[TensorQuantizer]) -> None:
    """Log, and note in the ledger, what was asked for that calibration alone does not do."""
    for note in untaught_notes(found):
        add_note(model, note)


def add_note(model: nn.Module, note: str) -> None:
    """Log a warning, and note it in the ledger."""
    _log.warning(note)
    notes = ledger_of(model).notes
    notes += [note] if note not in notes else []


def untaught_notes(found: Iterable[TensorQuantizer]) -> dict[str, str]:
    """What to say of quantizers that ``bw.reconstruct`` has yet to teach, and the method of it that each note names."""
    untaught: dict[str, list[TensorQuantizer]] = {}
    for quantizer in found:
        if quantizer.method.reconstruction:
            untaught.setdefault(quantizer.method_name, []).append(quantizer)
    notes: dict[str, str] = {}
    for name, asked in untaught.items():
        first, method = asked[0].label or "tensor", asked[0].method.reconstruction
        note = (
            f"{name} was chosen for {len(asked)} tensors (the first is {first}), but calibration alone rounds them to "
            f"nearest: bw.reconstruct(model, batches, method={method!r}) learns the rounding"
        )
        notes[note] = method
    return notes


@contextmanager
def _unchanged_if_it_fails(found: list[TensorQuantizer]) -> Generator[None, None, None]:
    """Restore the state of quantizers after an error; reset observers in any case."""
    before = [copy.deepcopy(q.state_dict()) for q in found]
    try:
        yield
    except BaseException:
        with DelayedSignals():
            for quantizer, state in zip(found, before, strict=True):
                quantizer.load_state_dict(state, strict=False)  # a method may have created Parameters meanwhile
        raise
    finally:
        with DelayedSignals():
            for quantizer in found:
                quantizer.observer.reset()


def as_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """The data as batches; a single tensor or dict, though iterable, is one batch."""
    if isinstance(batches, torch.Tensor | Mapping):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise CalibrationError(
            f"the data must be an iterable of batches, such as a list or a DataLoader, not {batches!r}"
        )
    return batches


def as_inputs(batch: object, count: int) -> Inputs:
    """Read a batch as a call, dropping what a data loader adds after the ``count`` inputs of the model."""
    inputs = Inputs.of(batch)
    return Inputs(inputs.args[:count] if count else inputs.args, inputs.kwargs)


def _observe(
    model: nn.Module,
    batches: Iterable[Any],
    seeing: Mapping[str, TensorQuantizer],
    count: int,
    checkpoint: str | os.PathLike[str] | None,
) -> int:
    """Show the batches to quantizers; return their number."""
    saved = None if checkpoint is None else ObservingProgress(checkpoint, job_name("calibration"), model, seeing)
    number = 0
    with saved or nullcontext():
        for number, batch in enumerate(batches, start=1):
            inputs = as_inputs(batch, count)
            if saved is not None and saved.has(inputs, number):
                continue
            with watched(seeing.values(), number):
                _run(model, inputs, number)
            if saved is not None:
                saved.keep(number)
        if saved is not None and number:
            saved.keep(number, last=True)
    return number


def _unseen(model: nn.Module, seeing: set[TensorQuantizer]) -> set[TensorQuantizer]:
    """The quantizers that no data reached, and those of the weights of their layers."""
    unseen = {quantizer for quantizer in seeing if not quantizer.observer.batches}
    if unseen == seeing:
        return set()  # there was no data at all, as the first quantizer will say
    for site in weight_sites(model) if unseen else ():
        source = getattr(site.layer, "input_quantizer", None)
        if (source.quantizer if isinstance(source, PlacedQuantizer) else source) in unseen:
            unseen.add(site.quantizer)
    return unseen


def _leave_float(model: nn.Module, unseen: set[TensorQuantizer]) -> None:
    for quantizer in unseen:
        quantizer.disable()
    if unseen:
        names = ", ".join(sorted(quantizer.label or "a tensor" for quantizer in unseen))
        note = f"calibration data never reached these, so they stay float: {names}"
        ledger_of(model).notes.append(note)
        _log.warning("%s. To quantize them, enable() them and calibrate with data that reaches them", note)


def _observe_weights(model: nn.Module, found: list[TensorQuantizer]) -> dict[str, TensorQuantizer]:
    """Show weights to their quantizers, once; return the other observing quantizers, by name."""
    for quantizer in found:
        quantizer.off()
    waiting = {q for q in found if q.calibratable}
    for site in [s for s in weight_sites(model) if s.quantizer in waiting and isinstance(s.layer, QuantMixin)]:
        site.quantizer.observer(site.weight())
        waiting.discard(site.quantizer)
    return {name: q for name, q in quantizers(model).items() if q in waiting}


def _run(model: nn.Module, inputs: Inputs, number: int) -> None:
    try:
        inputs.run(model)
    except CalibrationError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"the model refuses calibration batch {number} {inputs}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def watched(seeing: Iterable[TensorQuantizer], batch: int) -> Iterator[None]:
    """Tell observers which batch they see, and refuse one that produces infinities."""
    seeing = list(seeing)
    for quantizer in seeing:
        quantizer.observer.batch = batch
    yield
    _check_finite(seeing, batch)


def _check_finite(seeing: list[TensorQuantizer], batch: int) -> None:
    seen = {q: torch.cat([end.reshape(-1) for end in q.observer.seen()]) for q in seeing if q.observer.batches}
    if not seen or bool(torch.isfinite(torch.cat(list(seen.values()))).all()):
        return
    first = next(q for q, ends in seen.items() if not bool(torch.isfinite(ends).all()))
    raise CalibrationError(
        f"calibration batch {batch} produces NaN or infinity in the {first.label or 'tensor'}; "
        "check the data and the model's weights"
    )


def make_room_for_bias(layer: nn.Module) -> None:
    """Raise weight scales so small that the int32 bias would overflow (channels of zeros with a bias)."""
    if not isinstance(layer, QuantLayer):
        return
    scales = [s for call in range(len(layer.calls)) if (s := layer.bias_scale(call)) is not None]
    bias = layer.folded_weight()[1] if scales else None
    if bias is None:
        return
    quantizer, scale = layer.weight_quantizer, torch.stack(scales).amin(0)
    factor = (bias.detach().abs().double() / scale.double() / (INT32_MAX // 2)).clamp(min=1.0)
    if bool((factor > 1).any()):
        reach = factor.reshape(-1, quantizer.scale.numel()).amax(0).reshape(quantizer.scale.shape)
        quantizer.set_qparams((quantizer.scale.double() * reach).float(), quantizer.zero_point)
