"""Quantized operators: QModules, operator records, and the registry that connects them."""

from typing import TYPE_CHECKING

from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantInputMixin, QuantMixin, pop_quant_desc_in_kwargs
from bitwright.nn.operators import OPERATORS, Operator, register_operator, unregister_operator
from bitwright.nn.opr import QuantOpr
from bitwright.nn.placed import PlacedQuantizer
from bitwright.nn.quantized_input import QuantizedInput
from bitwright.nn.registry import QMODULES, is_builtin, list_qmodules, register_qmodule, unregister_qmodule
from bitwright.registry import import_all

if TYPE_CHECKING:
    from bitwright.nn.arithmetic import *
    from bitwright.nn.attention import *
    from bitwright.nn.conv import *
    from bitwright.nn.embedding import *
    from bitwright.nn.functional import *
    from bitwright.nn.linear import *
    from bitwright.nn.quantized_input import *
    from bitwright.nn.recurrent import *

import_all(__name__, __path__)  # noqa: F405
globals().update({cls.__name__: cls for cls in QMODULES.values() if is_builtin(cls)})  # also those of new files
