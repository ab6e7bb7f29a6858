"""Names of MQBench that have no equivalent, by the modules that had them."""

from bitwright.compat.mqbench.nn.intrinsic import NAMES

_BACKEND = "write a backend (docs/how-to/custom-backend.md), or say what is quantized in extra_quantizer_dict"
_BITS = dict.fromkeys(
    ("mixprecision_profiling", "ILP_bit_selection", "mp_model_size", "hessian_per_layer", "prepare_module"),
    "bw.sensitivity says what bits cost each layer, bw.search_bits chooses bits under a budget",
)
_FORMAT = (
    "write a format and register it (bitwright.exporting.formats.base.register_format); convert_deploy writes files"
)
GONE = {
    "adaround": {"adaround": "advanced_ptq.ptq_reconstruction does it, with pattern: layer in its config"},
    "custom_quantizer": dict.fromkeys(
        (
            *("AcademicQuantizer", "AcademicNLPQuantizer", "ModelQuantizer", "ONNXQNNQuantizer", "OPENVINOQuantizer"),
            *("TRTModelQuantizer", "TengineU8Quantizer", "TensorrtNLPQuantizer", "TotalINTQuantizer", "VitisQuantizer"),
        ),
        _BACKEND,
    ),
    "deploy": dict.fromkeys(
        (
            *("remove_fakequantize_and_collect_params", "remove_fakequantize_and_collect_params_nnie"),
            *("replace_fakequantize_and_collect_params_openvino", "ONNXQLinearPass", "ONNXQNNPass"),
        ),
        _FORMAT,
    ),
    "mix_precision": _BITS,
    "mix_precision.mix_precision": _BITS,
    "nn.intrinsic.qat": dict.fromkeys(
        NAMES, "write the layer and its BatchNorm as they are: prepare_by_platform folds one into the other"
    ),
    "utils.registry": {
        "register_model_quantizer": "write a backend and register_backend() it (docs/how-to/custom-backend.md)",
        "register_deploy_function": _FORMAT,
        "register_convert_function": "BatchNorms are folded automatically; for other modules write a schedule",
        "register_weight_equalization_function": "one scale per output channel makes it unnecessary",
        "BACKEND_DEPLOY_FUNCTION": "see bitwright.exporting.FORMATS",
        "DEFAULT_MODEL_QUANTIZER": "see bitwright.backends.BACKENDS",
        "FUSED_MODULE_CONVERT_FUNCTION": "BatchNorms are folded automatically",
    },
    "weight_equalization": dict.fromkeys(
        ("convert_weight_equalization", "weight_equalization"),
        "MQBench used it nowhere; one scale per output channel (per_channel: True) makes it unnecessary",
    ),
}
