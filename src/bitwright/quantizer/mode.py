"""Mode: what a quantizer does with the tensors it sees."""

import enum


class Mode(enum.Flag):
    """What a quantizer does with the tensors it sees; it can observe and quantize at once.

    ``OFF`` does nothing. ``CLIP`` limits values to a learned range without rounding them.
    """

    OFF = 0
    OBSERVE = 1
    QUANTIZE = 2
    CLIP = 4
