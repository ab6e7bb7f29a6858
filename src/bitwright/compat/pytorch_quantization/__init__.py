"""The layout of NVIDIA's ``pytorch_quantization``: change the import root, and code written for it runs here.

::

    from bitwright.compat.pytorch_quantization import nn as quant_nn
    from bitwright.compat.pytorch_quantization import calib, quant_modules
    from bitwright.compat.pytorch_quantization.tensor_quant import QuantDescriptor

Everything is Bitwright's own under the old names, on every device.
"""

from bitwright.compat.pytorch_quantization import calib, cuda_ext, nn, optim, quant_modules, tensor_quant, utils
from bitwright.compat.pytorch_quantization.onnx_export import enable_onnx_export
from bitwright.compat.pytorch_quantization.quant_modules import deactivate, initialize

__version__ = "2.2.1"  # what this follows
