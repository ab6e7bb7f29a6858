"""Switch all quantizers of a prepared model: calibrate, quantize, or neither.

A model that waits for its first call is switched once it is prepared.
"""

from torch import nn

from bitwright.compat import stepwise
from bitwright.compat.pending import when_prepared
from bitwright.errors import UnknownNameError, suggest
from bitwright.quantizer import TensorQuantizer

_KINDS = ["fake_quant", "act_fake_quant", "weight_fake_quant"]


def enable_calibration(model: nn.Module) -> None:
    """Make all quantizers observe the data that runs through the model, without quantizing."""
    enable_calibration_woquantization(model)


def enable_calibration_woquantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Make some quantizers observe data without quantizing; the others do nothing.

    Args:
        model: a prepared model.
        quantizer_type: ``act_fake_quant``, ``weight_fake_quant``, ``fake_quant`` for both, or part of a name such as
            ``layer1_0_conv1_post_act_fake_quantizer`` or ``layer1.0.conv1.weight_fake_quant``.
    """
    when_prepared(model, lambda m: stepwise.watch(m, _only(m, quantizer_type)))


def enable_calibration_quantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Make some quantizers quantize with ranges that follow the data; the others do nothing."""
    when_prepared(model, lambda m: stepwise.follow(_only(m, quantizer_type)))


def enable_quantization(model: nn.Module, weight_cali_on: bool = False, act_cali_on: bool = False) -> None:
    """Fix the calibrated ranges, and quantize everything.

    Args:
        model: a prepared and calibrated model.
        weight_cali_on: let ranges of weights keep following the weights.
        act_cali_on: let ranges of activations keep following the data.
    """

    def switch(model: nn.Module) -> None:
        stepwise.fix_ranges(model)
        parts = stepwise.split_quantizers(model)
        for part, follows in zip(parts, (weight_cali_on, act_cali_on), strict=True):
            if follows:
                stepwise.follow(part.values())
            else:
                stepwise.quantize(model, part.values())

    when_prepared(model, switch)


def disable_all(model: nn.Module) -> None:
    """Pass all tensors through unchanged, as in the float model."""
    when_prepared(model, lambda m: stepwise.stop(stepwise.all_quantizers(m)))


def enable_all(model: nn.Module) -> None:
    """Quantize everything with ranges that follow the data."""
    enable_calibration_quantization(model)


def _only(model: nn.Module, kind: str) -> list[TensorQuantizer]:
    """The quantizers with ``kind`` in their names; all are stopped."""
    weights, activations = stepwise.split_quantizers(model)
    named = [
        *((f"{n.rpartition('.')[0]}.weight_fake_quant", q) for n, q in weights.items()),
        *((f"{n.rpartition('.')[2]}_post_act_fake_quantizer", q) for n, q in activations.items()),
    ]
    found = [quantizer for name, quantizer in named if kind in name]
    if not found:
        raise UnknownNameError(
            f"no quantizer has {kind!r} in its name{suggest(kind, [*_KINDS, *(name for name, _ in named)])}"
        )
    stepwise.stop(quantizer for _, quantizer in named)
    return found
