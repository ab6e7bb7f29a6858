"""Re-estimate BatchNorms: set their mean and variance to those of the quantized layers' actual results.

Rounding changes mean and variance of a layer's result p, and the running statistics m, v are those of the float model.
With the statistics of the same batch in float and quantized, m_f, v_f and m_q, v_q,

    a² = v_q / v_f,    m' = m_q + a·(m - m_f),    v' = a²·v

which are m_q and v_q if the running statistics are those of the batch; the batch's deviation cancels out. Without a
float model to compare with, as after training, m' = m_q and v' = v_q. In one pass each result is immediately corrected
by the batch's own statistics, so later layers see what they will see later; the means of all batches are stored.

A folded BatchNorm is part of the quantized weight w·c, c = γ/√(v + eps). Its result y = p·f + d gives the statistics of
p. Weight scales of a channel follow c, so the integers do not change. If all channels share one scale, another c would
round the weight again, so only means are corrected.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitwright.calibration import make_room_for_bias
from bitwright.correction.channel_maps import NormPlace, norm_alone, norm_place, shared_norms
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import correcting
from bitwright.correction.running import Layer, calls, quantized_layers, run, seeing_outputs
from bitwright.errors import CalibrationError
from bitwright.nn.channels import channel_axis, output_channels
from bitwright.nn.fold import NORMS
from bitwright.nn.layer import QuantLayer
from bitwright.spec import PerChannel


class _Batch(NamedTuple):
    """One batch: mean and unbiased variance of the norm's input, the number of values, and the running statistics."""

    mean: Tensor
    var: Tensor
    count: int
    running_mean: Tensor
    running_var: Tensor


class _Statistics:
    """The statistics that one BatchNorm should use instead of its running ones.

    ``module`` is the quantized layer that the norm is folded into, or the norm itself.
    """

    def __init__(self, module: Layer) -> None:
        self.module = module
        self.folded = isinstance(module, QuantLayer)
        self.scales = not self.folded or _has_own_scales(module)
        self.float: list[_Batch] = []
        self.count = 0
        self.mean = self.var = torch.zeros((), dtype=torch.float64)

    def see_float(self, result: Tensor) -> None:
        """Remember the statistics of this batch in the float model, and the running ones."""
        self.float.append(self._batch(_place(self.module), result))

    def correct(self, result: Tensor) -> Tensor:
        """Add a result of the quantized model, and return what it will become."""
        place = _place(self.module)
        found, eps = self._batch(place, result), place.norm.eps
        mean, var = found.mean, found.var if self.scales else found.running_var
        if self.float:
            wanted = self.float.pop(0)
            wider = (found.var + eps) / (wanted.var + eps) if self.scales else torch.ones_like(found.var)
            mean = found.mean + wider.sqrt() * (wanted.running_mean - wanted.mean)
            var = (wanted.running_var + eps) * wider - eps if self.scales else var
        self.count += found.count
        self.mean = self.mean + (mean - self.mean) * (found.count / self.count)
        self.var = self.var + (var - self.var) * (found.count / self.count)
        # y = p·f + d becomes (p - m')·f·r + m·f + d, with r = √((v + eps) / (v' + eps)).
        ratio = ((found.running_var + eps) / (var + eps)).sqrt()
        old, new = (place.of_layer(v) * place.factor + place.shift for v in (found.running_mean, mean))
        parts = (place.of_layer(ratio), old, new, place.factor)
        ratio, old, new, factor = (self._along(v.to(result), result) for v in parts)
        return torch.where(factor != 0, (result - new) * ratio + old, result)

    def store(self) -> float:
        """Store the norm's statistics; return the largest move of a mean, in standard deviations."""
        place = _place(self.module)
        norm: Any = place.norm
        used = place.of_norm(place.factor) != 0
        mean, var = norm.running_mean.double(), norm.running_var.double()
        moved = torch.where(used, (self.mean - mean).abs() / (var + norm.eps).sqrt(), 0.0)
        new = torch.where(used, self.var, var)
        norm.running_mean.copy_(torch.where(used, self.mean, mean))
        norm.running_var.copy_(new)
        if self.folded:
            if self.scales:
                quantizer, ratio = self.module.weight_quantizer, ((var + norm.eps) / (new + norm.eps)).sqrt()
                scale, zero_point = quantizer.qparams()
                quantizer.set_qparams((scale.double() * place.of_layer(ratio)).float(), zero_point)
            make_room_for_bias(self.module)
        return float(moved.max())

    def _batch(self, place: NormPlace, result: Tensor) -> _Batch:
        values = result.movedim(self._axis(result), 0).flatten(1).double()
        if values.shape[1] < 2:
            raise CalibrationError("a batch has only one value per channel of a BatchNorm: use larger batches")
        usable = torch.where(place.factor != 0, place.factor, 1.0).double()
        mean, var = (values.mean(1) - place.shift) / usable, values.var(1) / usable.square()
        norm: Any = place.norm
        running = (norm.running_mean.double().clone(), norm.running_var.double().clone())
        return _Batch(place.of_norm(mean), place.of_norm(var), values.shape[1], *running)

    def _axis(self, result: Tensor) -> int:
        return channel_axis(self.module) % result.ndim if self.folded else 1

    def _along(self, values: Tensor, result: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (result.ndim - 1 - self._axis(result)))


def _place(module: Layer) -> NormPlace:
    """The position of the norm, with its current parameters."""
    place = norm_place(module) if isinstance(module, QuantLayer) else norm_alone(module)
    if place is None:
        raise CalibrationError(f"a {type(module).__name__} has no BatchNorm with running statistics")
    return place


def reestimate_norms(
    model: nn.Module, batches: Iterable[Any], *, against_float: bool = True, progress: bool | None = None
) -> Correction:
    """Set the statistics of every BatchNorm, folded or not, to those it meets in the quantized model.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``; a few hundred images, in batches of 32 or more.
        against_float: correct the running statistics by the difference between the quantized and the float model on
            the same batches; otherwise replace them by those of the batches, as after training.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the largest change of a running mean, in standard deviations.
    """
    done = Correction("reestimate_norms")
    named = _fit_modules(model, done)
    found = {module: _Statistics(module) for module in named.values()}
    with correcting(model) as original:
        for inputs in calls(model, batches, "re-estimating norms", progress):
            if against_float:
                with seeing_outputs(found, lambda module, y: found[module].see_float(y)):
                    original.run(model, inputs)
            with seeing_outputs(found, lambda module, y: found[module].correct(y)):
                run(model, inputs)
        done.changed = {name: found[module].store() for name, module in named.items() if found[module].count}
    return done


def _fit_modules(model: nn.Module, done: Correction) -> dict[str, Layer]:
    """The layers that a BatchNorm is folded into, and the unfolded BatchNorms, by name."""
    layers = quantized_layers(model, done)
    shared, fit = shared_norms(layers.values()), {}
    for name, layer in layers.items():
        place = norm_place(layer)
        if place is None:
            done.skipped[name] = "no BatchNorm is folded into it"
        elif place.norm in shared:
            done.skipped[name] = "other layers share its BatchNorm"
        else:
            fit[name] = layer
    folded = {fold.norm for layer in layers.values() for fold in (*layer.before, *layer.after)}
    alone = {name: m for name, m in model.named_modules() if isinstance(m, NORMS) and m not in folded}
    return fit | {name: m for name, m in alone.items() if m.running_mean is not None}


def _has_own_scales(layer: Layer) -> bool:
    """Whether each output channel has its own weight scale."""
    grain = layer.weight_quantizer.spec.granularity
    many = layer.weight_quantizer.qparams()[0].numel() == output_channels(layer)
    return isinstance(grain, PerChannel) and grain.axis % layer.weight.ndim == layer.channel_axis and many
