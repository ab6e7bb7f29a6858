"""Containers of layers that MQBench fuses: float modules that run one after the other."""

from torch import nn

from bitwright.compat.refused import refuse

NAMES = (
    *("LinearBn1d", "ConvBn2d", "ConvBnReLU2d", "ConvReLU2d", "ConvFreezebn2d", "ConvFreezebnReLU2d"),
    *("ConvTransposeBn2d", "ConvTransposeReLU2d", "ConvTransposeBnReLU2d"),
    *("ConvTransposeFreezebn2d", "ConvTransposeFreezebnReLU2d"),
)


def _container(name: str) -> type[nn.Sequential]:
    made = type(name, (nn.Sequential,), {"__module__": __name__, "__doc__": "Its layers, one after the other."})
    return made  # pyrefly: ignore


globals().update({name: _container(name) for name in NAMES})
__getattr__ = refuse(__name__, {})
