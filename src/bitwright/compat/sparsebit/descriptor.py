"""QuantDescriptor: what Sparsebit's observers and quantizers need to know about the grid, from a spec."""

from collections.abc import Mapping
from typing import Any

import torch

from bitwright.compat.schemes import qscheme_of
from bitwright.compat.sparsebit.defaults import LAYOUTS
from bitwright.compat.sparsebit.tensors import read_tensor
from bitwright.errors import ConfigError
from bitwright.spec import PerTensor, QuantSpec


class QuantDescriptor:
    """A spec as Sparsebit describes it: ``bit``, ``qmin``, ``qmax``, ``ch_axis``, ``is_symmetric``, …, as attributes.

    Args:
        source: a spec, or the section ``W`` or ``A`` of a config.
    """

    def __init__(self, source: QuantSpec | Mapping[str, Any]) -> None:
        if not isinstance(source, QuantSpec):
            kind = "A" if "LAYOUT" in source["OBSERVER"] else "W"
            read = read_tensor(kind, source).spec
            if not isinstance(read, QuantSpec):
                raise ConfigError(f"{kind}.QSCHEME must say how tensors are quantized, not {source['QSCHEME']!r}")
            source = read
        self.spec = source

    @property
    def bit(self) -> int:
        return self.spec.bits

    @property
    def qmin(self) -> int:
        return int(self.spec.qmin)

    @property
    def qmax(self) -> int:
        return int(self.spec.qmax)

    @property
    def qrange(self) -> tuple[int, int]:
        return self.qmin, self.qmax

    @property
    def ch_axis(self) -> int:
        """The channel axis; that of an image for a spec without one."""
        granularity = self.spec.granularity
        return LAYOUTS["NCHW"] if isinstance(granularity, PerTensor) else granularity.axis

    @property
    def is_perchannel(self) -> bool:
        """Whether each channel has a scale."""
        return not isinstance(self.spec.granularity, PerTensor)

    @property
    def is_symmetric(self) -> bool:
        """Whether zero is in the middle."""
        return self.spec.symmetric

    @property
    def scheme(self) -> torch.qscheme:
        """The scheme by torch's name."""
        return qscheme_of(self.spec)

    def __str__(self) -> str:
        return str(self.spec)
