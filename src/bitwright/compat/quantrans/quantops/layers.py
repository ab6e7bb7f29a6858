"""The layers by name: each a kind of quantizing and an operator."""

from bitwright.compat.quantrans.quantops import kinds
from bitwright.compat.quantrans.quantops.layer import qat_layer
from bitwright.nn.conv import QuantConv2d
from bitwright.nn.linear import QuantLinear

LSQConv2d = qat_layer("LSQConv2d", kinds.LSQ, QuantConv2d, __name__)
LSQLinear = qat_layer("LSQLinear", kinds.LSQ, QuantLinear, __name__)
LSQPlusConv2d = qat_layer("LSQPlusConv2d", kinds.LSQ_PLUS, QuantConv2d, __name__)
LSQPlusLinear = qat_layer("LSQPlusLinear", kinds.LSQ_PLUS, QuantLinear, __name__)
LSQDPlusConv2d = qat_layer("LSQDPlusConv2d", kinds.LSQD_PLUS, QuantConv2d, __name__)
ABQATConv2d = qat_layer("ABQATConv2d", kinds.LSQD_PLUS, QuantConv2d, __name__)
DSQConv = qat_layer("DSQConv", kinds.DSQ, QuantConv2d, __name__)
DSQConvV2 = qat_layer("DSQConvV2", kinds.DSQ, QuantConv2d, __name__)
DSQLinear = qat_layer("DSQLinear", kinds.DSQ, QuantLinear, __name__)
DRFConv = qat_layer("DRFConv", kinds.DOREFA, QuantConv2d, __name__)
DRFLinear = qat_layer("DRFLinear", kinds.DOREFA, QuantLinear, __name__)
APOTQuantConv2d = qat_layer("APOTQuantConv2d", kinds.APOT, QuantConv2d, __name__)
APOTQuantLinear = qat_layer("APOTQuantLinear", kinds.APOT, QuantLinear, __name__)
EightBitQuantConv = qat_layer("EightBitQuantConv", kinds.EIGHT_BIT, QuantConv2d, __name__)
EightBitQuantLinear = qat_layer("EightBitQuantLinear", kinds.EIGHT_BIT, QuantLinear, __name__)
