"""The switches of a described quantizer: views of its mode and of ``enabled``."""

from torch import nn

from bitwright.quantizer.mode import Mode


class Switches(nn.Module):
    """Offers the mode as single switches."""

    mode: Mode
    enabled: bool

    def _switch(self, part: Mode, on: bool) -> None:
        self.mode = self.mode | part if on else self.mode & ~part

    def enable_quant(self) -> None:
        """Quantize."""
        self._switch(Mode.QUANTIZE, True)

    def disable_quant(self) -> None:
        """Do not quantize."""
        self._switch(Mode.QUANTIZE, False)

    def disable_calib(self) -> None:
        """Do not collect tensors."""
        self._switch(Mode.OBSERVE, False)

    @property
    def quantizes(self) -> bool:
        """Whether it changes tensors now."""
        return self.enabled and bool(self.mode & (Mode.QUANTIZE | Mode.CLIP))

    @property
    def _disabled(self) -> bool:
        return not self.enabled

    @property
    def _if_quant(self) -> bool:
        return Mode.QUANTIZE in self.mode

    @property
    def _if_calib(self) -> bool:
        return Mode.OBSERVE in self.mode

    @property
    def _if_clip(self) -> bool:
        return Mode.CLIP in self.mode
