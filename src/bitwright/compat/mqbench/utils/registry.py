"""MQBench's registries: Bitwright has one way to add a target, an operator or a format."""

from bitwright.compat.refused import refuse

__getattr__ = refuse(
    __name__,
    {
        "register_model_quantizer": "write a backend and register_backend() it (docs/how-to/custom-backend.md)",
        "register_deploy_function": "write a format and register it (bitwright.exporting.formats.base.register_format)",
        "register_convert_function": "BatchNorms are folded by themselves; for other modules write a schedule",
        "register_weight_equalization_function": "one scale per output channel makes it needless",
        "BACKEND_DEPLOY_FUNCTION": "see bitwright.exporting.FORMATS",
        "DEFAULT_MODEL_QUANTIZER": "see bitwright.backends.BACKENDS",
        "FUSED_MODULE_CONVERT_FUNCTION": "BatchNorms are folded by themselves",
    },
)
