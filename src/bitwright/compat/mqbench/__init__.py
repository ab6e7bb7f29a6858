"""MQBench's names: ``prepare_by_platform``, ``BackendType`` and the switches, on Bitwright's core."""

from bitwright.compat.mqbench.advanced_ptq import ptq_reconstruction
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.compat.mqbench.convert_deploy import convert_onnx
from bitwright.compat.mqbench.fuser_method_mappings import ConvBNReLUFusion, fuse_linear_bn
from bitwright.compat.mqbench.gone import GONE
from bitwright.compat.mqbench.prepare_by_platform import prepare_by_platform
from bitwright.compat.mqbench.translate import to_recipe
from bitwright.compat.mqbench.utils.state import (
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
)
from bitwright.compat.old_paths import add_paths

add_paths(__name__, {"convert_onnx": "convert_onnx", "ptq_reconstruction": "ptq_reconstruction"}, refused=GONE)
