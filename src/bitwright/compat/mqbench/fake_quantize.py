"""Fake quantizers by MQBench's names: the methods of a prepared model's quantizers."""

import torch
from torch import Tensor, nn

from bitwright.compat.old_paths import add_paths
from bitwright.compat.schemes import qscheme_of
from bitwright.errors import ConfigError
from bitwright.methods import METHODS
from bitwright.observers import Observer
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.spec import PerChannel


class QuantizeBase(TensorQuantizer):
    """A quantizer of a prepared model, with the attributes and switches of MQBench's."""

    def __init_subclass__(cls, **_: object) -> None:
        raise ConfigError(
            f"{cls.__name__} cannot derive from QuantizeBase, because prepare creates the quantizers: write a method "
            "as in docs/how-to/custom-method.md, and name it in the recipe"
        )

    quant_min = property(lambda self: self.spec.qmin)
    quant_max = property(lambda self: self.spec.qmax)
    bitwidth = property(lambda self: self.spec.bits)
    pot_scale = property(lambda self: self.spec.power_of_two)
    is_symmetric_quant = property(lambda self: self.spec.symmetric)
    is_per_channel = property(lambda self: isinstance(self.spec.granularity, PerChannel))
    dtype = property(lambda self: torch.qint8 if self.spec.format.signed else torch.quint8)
    qscheme = property(lambda self: qscheme_of(self.spec))

    @property
    def ch_axis(self) -> int:
        """The axis of channels with their own scales; -1 for one scale."""
        return self.spec.granularity.axis if isinstance(self.spec.granularity, PerChannel) else -1

    @property
    def activation_post_process(self) -> Observer:
        return self.observer

    @property
    def observer_enabled(self) -> Tensor:
        """1 while it observes, as a tensor; changing it changes nothing."""
        return torch.tensor([self.observes], dtype=torch.uint8)

    @property
    def fake_quant_enabled(self) -> Tensor:
        """1 while it quantizes, as a tensor; changing it changes nothing."""
        return torch.tensor([self.quantizes], dtype=torch.uint8)

    def enable_observer(self, enabled: bool = True) -> None:
        """Start observing, or stop and keep the range of what was seen."""
        if enabled:
            self.observe()
        elif self.observes:
            if self.observer.batches:
                self.compute_qparams()
            self.off()

    def disable_observer(self) -> None:
        """Stop observing, and keep the range of what was seen."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Start quantizing with the known range, or stop."""
        if enabled:
            self.disable_observer()
            self.quantize()
        elif self.quantizes:
            self.off()

    def disable_fake_quant(self) -> None:
        self.enable_fake_quant(False)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.qparams()


def as_mqbench(model: nn.Module) -> None:
    """Give the quantizers of a prepared model the attributes of MQBench's."""
    for quantizer in quantizers(model).values():
        if type(quantizer) is TensorQuantizer:
            quantizer.__class__ = QuantizeBase


_PATHS = {
    "adaround_quantizer": "AdaRoundFakeQuantize",
    "dorefa": "DoReFaFakeQuantize",
    "dsq": "DSQFakeQuantize",
    "fixed": "FixedFakeQuantize",
    "lsq": "LearnableFakeQuantize",
    "nnie": "NNIEFakeQuantize",
    "pact": "PACTFakeQuantize",
    "qdrop_quantizer": "QDropFakeQuantize",
    "tqt": "TqtFakeQuantize",
}
globals().update({name: METHODS.get(name) for name in _PATHS.values()})
add_paths(__name__, {"quantize_base": "QuantizeBase", **_PATHS})
