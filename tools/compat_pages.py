"""Write the table of each older toolkit's public names into its page: works, differs (how), or refused (what instead).

Every name is imported; one that is neither there nor refused is an error. ``--check`` changes nothing and fails if a
page is not up to date.
"""

import functools
import importlib
import sys
from pathlib import Path

from bitwright.compat.refused import RefusedNameError

PAGES = Path(__file__).parent.parent / "docs" / "how-to"
BEGIN, END = "<!-- names: written by tools/compat_pages.py -->", "<!-- end of names -->"

_LAYERS = (
    "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Linear LSTM LSTMCell MaxPool1d "
    "MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d "
    "AdaptiveAvgPool3d InstanceNorm1d InstanceNorm2d InstanceNorm3d"
)
_FUSED = (
    "LinearBn1d ConvBn2d ConvBnReLU2d ConvReLU2d ConvFreezebn2d ConvFreezebnReLU2d ConvTransposeBn2d "
    "ConvTransposeReLU2d ConvTransposeBnReLU2d ConvTransposeFreezebn2d ConvTransposeFreezebnReLU2d"
)

# The public names of each toolkit by the module that its documentation, examples and tests import them from.
NAMES = {
    "pytorch_quantization": {
        "": "calib cuda_ext enable_onnx_export nn optim quant_modules tensor_quant utils __version__",
        "calib": "HistogramCalibrator MaxCalibrator calibrate_weights",
        "calib.calibrator": "_Calibrator",
        "calib.histogram": "HistogramCalibrator calibrate_weights",
        "calib.max": "MaxCalibrator",
        "cuda_ext": "fake_tensor_quant fake_tensor_quant_ fake_tensor_quant_with_axis fake_e4m3fy",
        "nn": f"Clip TensorQuantizer {_LAYERS} " + " ".join(f"Quant{name}" for name in _LAYERS.split()),
        "nn.functional": "clip",
        "nn.modules._utils": "QuantInputMixin QuantMixin pop_quant_desc_in_kwargs",
        "nn.modules.clip": "Clip",
        "nn.modules.quant_conv": "QuantConv1d QuantConv2d QuantConv3d QuantConvTranspose1d QuantConvTranspose2d "
        "QuantConvTranspose3d",
        "nn.modules.quant_instancenorm": "QuantInstanceNorm1d QuantInstanceNorm2d QuantInstanceNorm3d",
        "nn.modules.quant_linear": "Linear QuantLinear",
        "nn.modules.quant_pooling": "QuantMaxPool2d QuantAvgPool2d QuantAdaptiveAvgPool2d",
        "nn.modules.quant_rnn": "QuantLSTM QuantLSTMCell LSTM LSTMCell",
        "nn.modules.tensor_quantizer": "TensorQuantizer enable_onnx_export",
        "optim.helper": "match_parameters group_parameters freeze_parameters quant_weight_inplace",
        "quant_modules": "initialize deactivate enable_onnx_export QuantModuleReplacementHelper",
        "tensor_quant": "QuantDescriptor ScaledQuantDescriptor tensor_quant fake_tensor_quant legacy_fake_tensor_quant "
        "fake_affine_tensor_quant scaled_e4m3 QUANT_DESC_8BIT_PER_TENSOR QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR "
        "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL "
        "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW "
        "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL "
        "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
        "utils": "quant_logging reduce_amax",
        "utils.quant_logging": "reset_logger_handler",
    },
    "mqbench": {
        "prepare_by_platform": "prepare_by_platform prepare_qat_fx_by_platform BackendType",
        "prepare_qat_fx_by_platform": "prepare_qat_fx_by_platform BackendType",
        "convert_deploy": "convert_deploy convert_merge_bn convert_onnx",
        "convert_onnx": "convert_onnx",
        "advanced_ptq": "ptq_reconstruction",
        "ptq_reconstruction": "ptq_reconstruction",
        "adaround": "adaround",
        "deploy": "remove_fakequantize_and_collect_params remove_fakequantize_and_collect_params_nnie "
        "replace_fakequantize_and_collect_params_openvino ONNXQLinearPass ONNXQNNPass",
        "utils.state": "enable_calibration enable_calibration_woquantization enable_calibration_quantization "
        "enable_quantization disable_all enable_all",
        "utils.logger": "logger set_log_level disable_logging",
        "utils.profiling": "profiling",
        "utils.hook": "DataSaverHook StopForwardException PerChannelLoadHook",
        "utils.hooks": "DataSaverHook StopForwardException",
        "utils": "deepcopy_graphmodule deepcopy_mixedmodule is_symmetric_quant pot_quantization sync_tensor "
        "topology_order",
        "utils.utils": "deepcopy_graphmodule deepcopy_mixedmodule getitem2node pot_quantization sync_tensor "
        "topology_order",
        "utils.registry": "register_model_quantizer register_deploy_function register_convert_function "
        "register_weight_equalization_function",
        "observer": "ObserverBase MinMaxObserver EMAMinMaxObserver MinMaxFloorObserver EMAMinMaxFloorObserver "
        "PoTModeObserver EMAQuantileObserver ClipStdObserver LSQObserver LSQPlusObserver MSEObserver EMAMSEObserver",
        "fake_quantize": "QuantizeBase FixedFakeQuantize LearnableFakeQuantize NNIEFakeQuantize DoReFaFakeQuantize "
        "DSQFakeQuantize PACTFakeQuantize TqtFakeQuantize AdaRoundFakeQuantize QDropFakeQuantize",
        "fake_quantize.quantize_base": "QuantizeBase",
        "fake_quantize.fixed": "FixedFakeQuantize",
        "fake_quantize.lsq": "LearnableFakeQuantize",
        "fake_quantize.nnie": "NNIEFakeQuantize",
        "fake_quantize.dorefa": "DoReFaFakeQuantize",
        "fake_quantize.dsq": "DSQFakeQuantize",
        "fake_quantize.pact": "PACTFakeQuantize",
        "fake_quantize.tqt": "TqtFakeQuantize",
        "fake_quantize.adaround_quantizer": "AdaRoundFakeQuantize",
        "fake_quantize.qdrop_quantizer": "QDropFakeQuantize",
        "scheme": "QuantizeScheme",
        "fuser_method_mappings": "fuse_linear_bn fuse_conv_bn fuse_conv_bn_relu fuse_deconv_bn fuse_deconv_bn_relu "
        "ConvBNReLUFusion",
        "nn": "FrozenBatchNorm1d FrozenBatchNorm2d FrozenBatchNorm3d",
        "nn.qat": "Conv2d ConvTranspose2d Embedding Linear",
        "nn.intrinsic": _FUSED,
        "nn.intrinsic.qat": _FUSED,
        "custom_quantizer": "ModelQuantizer AcademicQuantizer TotalINTQuantizer VitisQuantizer OPENVINOQuantizer",
        "mix_precision.mix_precision": "mixprecision_profiling ILP_bit_selection mp_model_size",
        "weight_equalization": "convert_weight_equalization",
    },
    "sparsebit": {
        "quantization": "QuantModel parse_qconfig",
        "quantization.quant_model": "QuantModel",
        "quantization.quant_config": "_C parse_qconfig",
        "quantization.common": "Backend Granularity QuantTarget get_backend get_qscheme",
        "quantization.observers": "register_observer BaseObserver Observer MinMaxObserver MSEObserver "
        "PercentileObserver MovingAverageObserver KLHistogramObserver ACIQObserver Granularity",
        "quantization.observers.base": "BaseObserver DataCache Granularity Observer",
        "quantization.observers.minmax": "MinMaxObserver",
        "quantization.observers.mse": "MSEObserver",
        "quantization.observers.percentile": "PercentileObserver",
        "quantization.observers.moving_average": "MovingAverageObserver",
        "quantization.observers.kl_histogram": "KLHistogramObserver",
        "quantization.observers.aciq": "ACIQObserver",
        "quantization.quantizers": "register_quantizer Quantizer Uniform LSQ LSQ_plus DoReFa PACT AdaRound",
        "quantization.quantizers.base": "Quantizer",
        "quantization.quantizers.uniform": "Uniform",
        "quantization.quantizers.lsq": "LSQ",
        "quantization.quantizers.lsq_plus": "LSQ_plus",
        "quantization.quantizers.dorefa": "DoReFa",
        "quantization.quantizers.pact": "PACT",
        "quantization.quantizers.adaround": "AdaRound",
        "quantization.quantizers.quant_descriptor": "QuantDescriptor",
        "quantization.quantizers.quant_tensor": "STE torch_fake_quant ort_fake_quant trt_fake_quant",
        "quantization.modules": "register_qmodule QMODULE_MAP QuantOpr MultipleInputsQuantOpr",
        "quantization.modules.base": "QuantOpr MultipleInputsQuantOpr",
        "quantization.modules.activations": "QReLU QReLU6 QLeakyReLU QSiLU QMish QHardSigmoid QSigmoid QGELU QTanh "
        "QSoftmax",
        "quantization.modules.conv": "QConv2d QConvTranspose2d",
        "quantization.modules.embedding": "QEmbedding",
        "quantization.modules.linear": "QLinear",
        "quantization.modules.math": "QAdd QMul QMatmul QSubtract QDivide QMean QFloorDiv",
        "quantization.modules.matmul": "MatMul QMatmul",
        "quantization.modules.normalization": "QBatchNorm1d QBatchNorm2d QLayerNorm",
        "quantization.modules.pool": "QAvgPool2d QAdaptiveAvgPool2d QMaxPool2d MaxPool2d",
        "quantization.modules.python_builtins": "QGetItem QGetAttr QEqual",
        "quantization.modules.resize": "QUpsample QInterpolate",
        "quantization.modules.shape": "Concat Flatten Reshape Expand Transpose Permute Split Size Expand_as",
        "quantization.modules.unary": "QIdentity QDropout Dropout Contiguous Clone Detach Where",
        "quantization.modules.torchvision_ops": "StochasticDepth",
        "quantization.converters": "MatcherNode MatchingNode InputMatchType InputMatchingType ReplacePatternBase "
        "ReplaceStrategy",
        "quantization.converters.base": "MatcherNode InputMatchType ReplacePatternBase ReplaceStrategy",
        "quantization.converters.prune": "PruneGraph",
        "quantization.converters.utils.subgraph_matching": "SubgraphMatcher",
        "quantization.converters.utils.subgraph_matching_node": "MatchingNode InputMatchingType",
        "quantization.converters.utils.subgraph_matching_replace_pattern": "ReplacePatternBase ReplaceStrategy",
        "quantization.converters.simplifiers.lists": "fuse_list lists",
        "quantization.converters.fuse_operations.lists": "fuse_list lists",
        "quantization.tools.errors_profiler": "QuantizationErrorProfiler",
        "sparse": "SparseModel parse_sconfig",
    },
    "quantrans": {
        "": "build_mtransformer build_quanlayer QUANTRANSFORMERS QUANLAYERS Basemtransformer mTransformerV2 "
        "QuanTransformer Config ConfigDict Qmodes",
        "builder": "QUANTRANSFORMERS build_mtransformer",
        "quantops": "LSQConv2d LSQLinear LSQPlusConv2d LSQPlusLinear LSQDPlusConv2d ABQATConv2d DSQConv DSQConvV2 "
        "DSQLinear DRFConv DRFLinear APOTQuantConv2d APOTQuantLinear EightBitQuantConv EightBitQuantLinear",
        "quantops.builder": "QUANLAYERS build_quanlayer",
        "utils.tools": "dict_merge",
    },
}

_RECORDS = (
    "math.QSubtract math.QDivide math.QMean python_builtins.QGetItem resize.QUpsample resize.QInterpolate "
    "shape.Flatten shape.Reshape shape.Expand shape.Transpose shape.Permute shape.Split unary.QIdentity "
    "unary.QDropout unary.Dropout unary.Contiguous"
)

# What works, but not in every way as it did.
DIFFERS = {
    "pytorch_quantization.nn.TensorQuantizer": "half precision gives the values of a GPU on CPUs too; "
    "`use_fb_fake_quant` changes what `torch.onnx.export` does, and no values",
    "pytorch_quantization.tensor_quant.QuantDescriptor": "also takes E5M2, (5, 2); bits that no format has are refused "
    "when a quantizer is made",
    "pytorch_quantization.enable_onnx_export": "torch's newer exporter writes the file; weights are stored as integers",
    "pytorch_quantization.calib.HistogramCalibrator": "beyond 32,768 bins, as after a tiny first batch, "
    "pairs are joined; `torch_hist` makes no difference",
    "pytorch_quantization.nn.Clip": "an end that learns may be a tensor of one number",
    "pytorch_quantization.nn.functional.clip": "an end that learns and is not one number is refused at "
    "the call, not in backward",
    "pytorch_quantization.optim.helper.group_parameters": "a parameter belongs to the first group that matches",
    "mqbench.convert_deploy.convert_deploy": "writes Q/DQ, and the float model with its ranges under the old names, in "
    "the vendors' own formats where they differ from MQBench's; for OPENVINO and ONNX_QNN Q/DQ only, for NNIE "
    "tables of values in its place, beside NNIE parameters; `deploy_to_qlinear` is refused",
    "mqbench.convert_deploy.convert_merge_bn": "does nothing: BatchNorms are folded while weights are quantized",
    "mqbench.advanced_ptq.ptq_reconstruction": "strengths and learning rates are Bitwright's own; excluded nodes are "
    "refused",
    "mqbench.utils.profiling.profiling": "also returns the cosines; `module_list` is refused",
    "mqbench.fake_quantize.DoReFaFakeQuantize": "clips activations to [0, 1], as the paper does",
    "mqbench.observer.ObserverBase": "your own are written as in docs/how-to/custom-observer.md",
    "mqbench.fake_quantize.QuantizeBase": "the quantizers of a prepared model; your own methods are written as in "
    "docs/how-to/custom-method.md",
    "mqbench.observer.ClipStdObserver": "clips to the mean ± 2.6 deviations, as documented; the old one widened",
    "mqbench.fake_quantize.TqtFakeQuantize": "learns its threshold, as the paper does",
    "sparsebit.quantization.QuantModel": "`extra_info` notes bits in the metadata of nodes: the file stays valid",
    **{
        f"sparsebit.quantization.modules.{name}": "the record of an operator, for patterns: it stays a function"
        for name in _RECORDS.split()
    },
    "sparsebit.quantization.observers.MinMaxObserver": "symmetric scales are amax / qmax; the old ones were "
    "2 amax / (qmax - qmin)",
    **{
        f"sparsebit.quantization.{path}": "a class that overrides `calc_qparams` or the like, which would not be "
        "called, is refused"
        for path in ("quantizers.register_quantizer", "observers.register_observer")
    },
    "sparsebit.quantization.observers.KLHistogramObserver": "looks at the data; the old one gave a fixed share",
    "quantrans.mTransformerV2": "refuses layers that it cannot replace, before it changes any",
    "quantrans.quantops.EightBitQuantConv": "takes the largest magnitude; the old one took the largest value",
    "quantrans.quantops.EightBitQuantLinear": "takes the largest magnitude; the old one took the largest value",
}
_FILES = {"pytorch_quantization": "from-pytorch-quantization", "quantrans": "from-quantrans"}


def _found(toolkit: str, module: str, name: str) -> object:
    home = importlib.import_module(".".join(part for part in ("bitwright.compat", toolkit, module) if part))
    return getattr(home, name)


@functools.cache
def _differences(toolkit: str) -> dict[int, str]:
    """How things differ, by their ids: several modules may offer the same thing."""
    paths = {path: path.removeprefix(f"{toolkit}.").rpartition(".") for path in DIFFERS if path.startswith(toolkit)}
    return {id(_found(toolkit, module, name)): DIFFERS[path] for path, (module, _, name) in paths.items()}


def verdict(toolkit: str, module: str, name: str) -> str:
    """What is to be said of a name."""
    path = ".".join(part for part in (toolkit, module, name) if part)
    try:
        thing = _found(toolkit, module, name)
    except RefusedNameError as error:
        return f"refused: {str(error).partition(': ')[2]}"
    except AttributeError as error:
        raise SystemExit(f"{path} is neither there nor refused") from error
    difference = _differences(toolkit).get(id(thing))
    return f"differs: {difference}" if difference else "works"


def table(toolkit: str) -> str:
    """The table of a toolkit's names; names of a module that fare alike are in one row."""
    lines = [BEGIN, "", f"Names under `bitwright.compat.{toolkit}`:", "", "| module | names | |", "|---|---|---|"]
    for module, names in NAMES[toolkit].items():
        rows: dict[str, list[str]] = {}
        for name in names.split():
            rows.setdefault(verdict(toolkit, module, name), []).append(f"`{name}`")
        lines += [f"| `{module or toolkit}` | {', '.join(found)} | {said} |" for said, found in rows.items()]
    return "\n".join([*lines, "", END])


def page(toolkit: str) -> tuple[Path, str]:
    """A page, and its text with the table of today."""
    path = PAGES / f"{_FILES.get(toolkit, f'from-{toolkit}')}.md"
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if begin else "\n"
    return path, f"{before.rstrip()}\n\n{table(toolkit)}{after}"


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    pages = [page(toolkit) for toolkit in NAMES]
    stale = [path.name for path, text in pages if path.read_text() != text]
    if "--check" in arguments:
        print(f"not up to date: {', '.join(stale)}" if stale else "all pages are up to date")
        return int(bool(stale))
    for path, text in pages:
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
