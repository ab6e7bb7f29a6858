"""The layers by name: each a kind of quantizing and an operator."""

from bitwright.compat.quantrans.quantops import kinds as _kinds
from bitwright.compat.quantrans.quantops.layer import qat_layer as _layer
from bitwright.nn.conv import QuantConv2d as _Conv2d
from bitwright.nn.linear import QuantLinear as _Linear

LSQConv2d = _layer("LSQConv2d", _kinds.LSQ, _Conv2d)
LSQLinear = _layer("LSQLinear", _kinds.LSQ, _Linear)
LSQPlusConv2d = _layer("LSQPlusConv2d", _kinds.LSQ_PLUS, _Conv2d)
LSQPlusLinear = _layer("LSQPlusLinear", _kinds.LSQ_PLUS, _Linear)
LSQDPlusConv2d = _layer("LSQDPlusConv2d", _kinds.LSQD_PLUS, _Conv2d)
ABQATConv2d = _layer("ABQATConv2d", _kinds.LSQD_PLUS, _Conv2d)
DSQConv = _layer("DSQConv", _kinds.DSQ, _Conv2d)
DSQConvV2 = _layer("DSQConvV2", _kinds.DSQ, _Conv2d)
DSQLinear = _layer("DSQLinear", _kinds.DSQ, _Linear)
DRFConv = _layer("DRFConv", _kinds.DOREFA, _Conv2d)
DRFLinear = _layer("DRFLinear", _kinds.DOREFA, _Linear)
APOTQuantConv2d = _layer("APOTQuantConv2d", _kinds.APOT, _Conv2d)
APOTQuantLinear = _layer("APOTQuantLinear", _kinds.APOT, _Linear)
EightBitQuantConv = _layer("EightBitQuantConv", _kinds.EIGHT_BIT, _Conv2d)
EightBitQuantLinear = _layer("EightBitQuantLinear", _kinds.EIGHT_BIT, _Linear)
