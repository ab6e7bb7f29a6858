"""Where users of pytorch-quantization look for the mixins: ``bitwright.nn.modules._utils``."""

from bitwright.nn.modules import _utils

__all__ = ["_utils"]
