"""Phase: what a quantizer does with the tensors it sees."""

import enum


class Phase(enum.Flag):
    """What a quantizer does with the tensors it sees; several at once are possible.

    ``OFF`` does nothing. ``CLIP`` limits values to a learned range without rounding them. ``PAUSED`` does nothing for
    now and remembers the rest; ``HELD`` is paused by the user's hand, which calibration respects.
    """

    OFF = 0
    OBSERVE = 1
    QUANTIZE = 2
    CLIP = 4
    PAUSED = 8
    HELD = 16
