"""The switches of a described quantizer: views of its one phase."""

import logging

from torch import nn

from bitwright.quantizer.phase import Phase

_log = logging.getLogger(__name__)


class Switches(nn.Module):
    """Keeps one phase in ``_state`` and offers it as switches.

    ``disable`` pauses everything and ``enable`` goes on with what was set before.
    """

    _state: Phase

    @property
    def phase(self) -> Phase:
        """What is done with tensors now."""
        return Phase.OFF if Phase.PAUSED in self._state else self._state

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase is not Phase.OFF:
            self._state = phase
        elif self.phase is not Phase.OFF:
            self._state |= Phase.PAUSED

    def _switch(self, part: Phase, on: bool) -> None:
        self._state = self._state | part if on else self._state & ~part

    def disable(self) -> None:
        """Let tensors pass untouched, also once the model is calibrated, and remember the switches."""
        self._switch(Phase.PAUSED | Phase.HELD, True)

    def enable(self) -> None:
        """Go on as before :meth:`disable`."""
        self._switch(Phase.PAUSED | Phase.HELD, False)

    def enable_quant(self) -> None:
        """Quantize."""
        self._switch(Phase.QUANTIZE, True)

    def disable_quant(self) -> None:
        """Do not quantize."""
        self._switch(Phase.QUANTIZE, False)

    def disable_calib(self) -> None:
        """Do not collect tensors."""
        self._switch(Phase.OBSERVE, False)

    @property
    def held(self) -> bool:
        """Whether it was disabled by hand."""
        return Phase.HELD in self._state

    @property
    def _disabled(self) -> bool:
        return Phase.PAUSED in self._state

    @property
    def _if_quant(self) -> bool:
        return Phase.QUANTIZE in self._state

    @property
    def _if_calib(self) -> bool:
        return Phase.OBSERVE in self._state

    @property
    def _if_clip(self) -> bool:
        return Phase.CLIP in self._state
