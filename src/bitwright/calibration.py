"""Calibrate: let every quantizer of a prepared model see data, then fix its range."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bitwright.errors import CalibrationError
from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.bias import INT32_MAX
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.weight_sites import weight_sites
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers


def calibrate(model: nn.Module, batches: Iterable[Any], *, progress: bool | None = None) -> nn.Module:
    """Run ``batches`` through a prepared model and quantize it.

    Args:
        model: what ``prepare`` returned.
        batches: any iterable of tensors, tuples of arguments or dicts of keyword arguments. A tuple may be
            longer than the model's inputs, as the (images, labels) of a data loader is: the rest is left out. A single
            tensor or dict is one batch.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        The same model, now quantizing. Quantizers on which ``disable()`` was called stay as they are, and so do those
        without an observer, which take the range of each tensor.
    """
    ledger = ledger_of(model)
    everything = quantizers(model)
    if not everything:
        raise CalibrationError(
            "the model has no quantizer: nothing in it runs in integers; `bitwright inspect` says why"
        )
    found = {name: q for name, q in everything.items() if q.enabled and q._calibrator is not None}
    if not found:
        raise CalibrationError(f"all {len(everything)} quantizers of the model are disabled; enable() some of them")
    before = {name: copy.deepcopy(q.state_dict()) for name, q in found.items()}
    try:
        with torch.no_grad(), eval_mode(model):
            _observe(model, batches, found, len(ledger.example.args), progress)
        for quantizer in found.values():
            quantizer.compute_qparams()
        for quantizer in found.values():
            quantizer.quantize()
        for site in weight_sites(model):
            make_room_for_bias(site.layer)
    except BaseException:
        for name, state in before.items():
            found[name].load_state_dict(state, strict=False)  # a method may have made Parameters meanwhile
        raise
    finally:
        for quantizer in found.values():
            quantizer.observer.reset()
    return model


def as_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """The data as several batches: a single tensor or dict, which could be iterated too, is one."""
    if isinstance(batches, torch.Tensor | Mapping):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise CalibrationError(
            f"the data must be batches to iterate over, such as a list or a DataLoader, not {batches!r}"
        )
    return batches


def as_inputs(batch: Any, count: int) -> Inputs:  # noqa: ANN401
    """Read a batch as a call, leaving out what a data loader adds after the ``count`` inputs of the model."""
    inputs = Inputs.of(batch)
    return Inputs(inputs.args[:count] if count else inputs.args, inputs.kwargs)


def _observe(
    model: nn.Module,
    batches: Iterable[Any],
    found: dict[str, TensorQuantizer],
    count: int,
    progress: bool | None,
) -> None:
    chosen = set(found.values())
    own = {site.quantizer: site for site in weight_sites(model) if isinstance(site.layer, QuantMixin)}
    for quantizer in chosen & own.keys():
        quantizer.observer(own[quantizer].weight())
        quantizer.off()
    seeing = {name: q for name, q in found.items() if q not in own}
    for quantizer in seeing.values():
        quantizer.observe()
    number = 0
    for number, batch in enumerate(track(as_batches(batches), "calibrating", show=progress), start=1):
        inputs = as_inputs(batch, count)
        for quantizer in seeing.values():
            quantizer.observer.batch = number
        try:
            model(*inputs.args, **inputs.kwargs)
        except CalibrationError:
            raise
        except Exception as error:
            raise CalibrationError(
                f"the model refuses calibration batch {number} {inputs}: {type(error).__name__}: {error}"
            ) from error
        _check_finite(seeing, number)
    if not number:
        raise CalibrationError("the calibration data is empty: it gave no batch")


def _check_finite(seeing: dict[str, TensorQuantizer], batch: int) -> None:
    watched = [q for q in seeing.values() if q.observer.batches]
    ends = [end.reshape(-1) for q in watched for end in q.observer.seen()]
    if not ends or bool(torch.isfinite(torch.cat(ends)).all()):
        return
    first = next(q for q in watched if not all(bool(torch.isfinite(end).all()) for end in q.observer.seen()))
    raise CalibrationError(
        f"calibration batch {batch} makes NaN or infinity in the {first.label or 'tensor'}; "
        "check the data and the model's weights"
    )


def make_room_for_bias(layer: nn.Module) -> None:
    """Raise weight scales so small that the int32 bias would overflow (channels of zeros with a bias)."""
    scale = layer.bias_scale() if isinstance(layer, QuantLayer) else None
    bias = layer.folded_weight()[1] if isinstance(layer, QuantLayer) and scale is not None else None
    if not isinstance(layer, QuantLayer) or bias is None or scale is None:
        return
    quantizer = layer.weight_quantizer
    factor = (bias.detach().abs().double() / scale.double() / (INT32_MAX // 2)).clamp(min=1.0)
    if bool((factor > 1).any()):
        reach = factor.reshape(-1, quantizer.scale.numel()).amax(0).reshape(quantizer.scale.shape)
        quantizer.set_qparams((quantizer.scale.double() * reach).float(), quantizer.zero_point)
