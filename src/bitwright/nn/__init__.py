"""Quantized operators: QModules, the records of what each operator is, and the registry that joins them."""

from bitwright.nn.activations import (
    QuantCELU,
    QuantELU,
    QuantGELU,
    QuantHardsigmoid,
    QuantHardswish,
    QuantHardtanh,
    QuantLeakyReLU,
    QuantLogSoftmax,
    QuantMish,
    QuantPReLU,
    QuantReLU,
    QuantReLU6,
    QuantSELU,
    QuantSigmoid,
    QuantSiLU,
    QuantSoftmax,
    QuantSoftplus,
    QuantTanh,
)
from bitwright.nn.arithmetic import QuantAdd, QuantCat, QuantMatMul, QuantMul
from bitwright.nn.attention import QuantMultiheadAttention
from bitwright.nn.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from bitwright.nn.descriptors import pop_quant_desc_in_kwargs
from bitwright.nn.embedding import QuantEmbedding
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.linear import QuantLinear
from bitwright.nn.mixins import QuantInputMixin, QuantMixin
from bitwright.nn.norms import (
    QuantBatchNorm1d,
    QuantBatchNorm2d,
    QuantBatchNorm3d,
    QuantGroupNorm,
    QuantInstanceNorm1d,
    QuantInstanceNorm2d,
    QuantInstanceNorm3d,
    QuantLayerNorm,
)
from bitwright.nn.operators import OPERATORS, Operator, register_operator, unregister_operator
from bitwright.nn.opr import QuantOpr
from bitwright.nn.placed import PlacedQuantizer
from bitwright.nn.pooling import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)
from bitwright.nn.quantized_input import QuantizedInput
from bitwright.nn.recurrent import QuantGRU, QuantLSTM, QuantLSTMCell
from bitwright.nn.registry import QMODULES, is_builtin, list_qmodules, register_qmodule, unregister_qmodule
from bitwright.registry import import_all

import_all(__name__, __path__)
# The names above are for type checkers. A QModule in a new file here is found without being named.
globals().update({cls.__name__: cls for cls in QMODULES.values() if is_builtin(cls)})
