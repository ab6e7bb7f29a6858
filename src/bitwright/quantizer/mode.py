"""Mode: what a quantizer does with the tensors it sees."""

import enum


class Mode(enum.Flag):
    """What a quantizer does with the tensors it sees; it can observe and quantize at once."""

    OFF = 0
    OBSERVE = 1
    QUANTIZE = 2
