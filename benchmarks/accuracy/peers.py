r"""Other packages on the benchmark's nets, each by the best of its recipes that fits; those not installed are left out.

::

    pip install --target FOLDER --no-deps brevitas==0.13.4 dependencies==2.0.1 unfoldNd aimet-torch==2.42.0 \
        torchao==0.18.0 nncf==3.4.0 nvidia-modelopt==0.47.0 torchvision==0.28.0 tqdm tabulate \
        pydot pyparsing psutil natsort regex 'bokeh<=3.6.3' holoviews hvplot pandas pytz python-dateutil six tzdata \
        param pyviz_comms panel xyzservices contourpy tornado colorcet requests urllib3 idna certifi \
        charset_normalizer omegaconf 'antlr4-python3-runtime==4.9.*' jsonschema attrs referencing rpds-py \
        jsonschema-specifications matplotlib cycler kiwisolver fonttools pillow 'huggingface_hub<1' nvidia-ml-py pulp
    PYTHONPATH=FOLDER python -m benchmarks.accuracy

With 8 bits for activations, a peer quantizes what it quantizes on its own. With fewer, inputs and weights of
convolutions and linear layers have few bits and all else stays float, as in our rows. NNCF refuses fewer than 8 bits
for convolutions, and compiles an extension first, which may take longer than the 60 seconds that it allows: set
NNCF_EXTENSION_LOAD_TIMEOUT=900. Model Optimizer's manual has only INT8 for convolutions. quanto is not
here: its run with weights of 4 bits did not end within 100 s, for a reason that was not looked into. AIMET's AdaRound
learns for ``--steps`` steps a layer, as our reconstruction does, not for the 10,000 to 15,000 that it recommends.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo.libraries import declare_torchvision_operators


class Task(NamedTuple):
    """What a peer is given.

    Attributes:
        model: the float net, a Sequential; a copy that the peer may change.
        images: for calibration.
        weight: bits of weights.
        activation: bits of activations.
        steps: of learning, for each layer.
    """

    model: nn.Sequential
    images: Tensor
    weight: int
    activation: int
    steps: int

    @property
    def few(self) -> bool:
        """Whether activations have few bits, and only those that layers read."""
        return self.activation < 8

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the first and last layer."""
        return "0", str(len(self.model) - 1)

    def batches(self) -> list[Tensor]:
        """The images in batches of 128."""
        return list(self.images.split(128))

    def run(self, model: nn.Module, _: object = None) -> None:
        """Show a model all images."""
        with torch.no_grad():
            for batch in self.batches():
                model(batch)


Make = Callable[[Task], nn.Module]
PEERS: dict[str, tuple[str, int, Make]] = {}


def peer(name: str, package: str, least: int = 2) -> Callable[[Make], Make]:
    """Register a package's recipe, for at least this many bits."""

    def register(make: Make) -> Make:
        PEERS[name] = (package, least, make)
        return make

    return register


def peers_for(task: Task) -> dict[str, Callable[[], nn.Module]]:
    """The recipes of all packages that are installed and have so few bits, by the names of their rows."""
    bits = min(task.weight, task.activation)
    fit = {name: (package, make) for name, (package, least, make) in PEERS.items() if bits >= least}
    found = {name: make for name, (package, make) in fit.items() if find_spec(package) is not None}
    copied = lambda: task._replace(model=copy.deepcopy(task.model).to(memory_format=torch.contiguous_format))  # noqa: E731
    return {name: lambda m=make: m(copied()) for name, make in found.items()}


@peer("Brevitas: GPTQ and bias correction", "brevitas")
def brevitas(task: Task) -> nn.Module:
    """Norms merged, layers equalized, least squared error for weights, GPTQ by size of inputs, bias correction."""
    from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize
    from brevitas.graph.quantize import quantize as quantize_all
    from brevitas.inject import value
    from brevitas_examples.imagenet_classification.ptq import ptq_common as recipes

    def bits(few: int) -> Any:  # noqa: ANN401
        def of(module: nn.Module) -> int:
            return 8 if isinstance(module, nn.Linear) or getattr(module, "in_channels", 0) == 1 else few

        return value(of) if task.few else few

    ready = preprocess_for_quantize(task.model, equalize_iters=20, relu6_to_relu=False)
    settings: dict[str, Any] = {"dtype": torch.float32, "bias_bit_width": 32, "weight_bit_width": bits(task.weight)}
    settings |= {"weight_param_method": "mse", "weight_scale_type": "float_scale", "weight_quant_type": "sym"}
    settings |= {"weight_quant_granularity": "per_channel", "weight_narrow_range": True, "weight_quant_format": "int"}
    settings |= {"act_quant_format": "int", "act_bit_width": bits(task.activation), "act_scale_type": "float_scale"}
    settings |= {"act_scale_computation_type": "static", "act_param_method": "mse" if task.few else "stats"}
    settings |= {"act_quant_granularity": "per_tensor", "act_quant_percentile": 99.999}
    settings |= {"act_quant_type": "asym" if task.few else "sym"}
    layers, layers_alone, activations, others = recipes.create_quant_maps(**settings)
    if task.few:
        model = layerwise_quantize(ready, compute_layer_map=layers_alone)
    else:
        maps = {"compute_layer_map": layers, "quant_act_map": activations, "quant_identity_map": others}
        model = quantize_all(ready, **maps)
    data = [(batch, None) for batch in task.batches()]
    task.run(model)  # weights find their scales at the first call
    recipes.calibrate(data, model)
    recipes.apply_gptq(data, model, act_order=True)
    recipes.apply_bias_correction(data, model)
    return model.eval()


@peer("AIMET: AdaRound", "aimet_torch")
def aimet(task: Task) -> nn.Module:
    """Norms folded, AdaRound, the ranges of least error."""
    declare_torchvision_operators()
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.common.quantsim_config.utils import get_path_for_per_channel_config
    from aimet_torch.model_preparer import prepare_model
    from aimet_torch.quantsim import QuantizationSimModel

    example, scheme = task.images[:2], QuantScheme.post_training_tf_enhanced
    model = prepare_model(task.model)
    fold_all_batch_norms(model, tuple(example.shape), dummy_input=example)
    per_channel = get_path_for_per_channel_config()
    ends = [m for m in model.modules() if isinstance(m, nn.Linear) or getattr(m, "in_channels", 0) == 1]
    wide = [(module, 8) for module in ends] if task.few else []
    with tempfile.TemporaryDirectory() as folder:
        if task.weight < 8:
            data: Any = list(task.images.split(32))
            known = AdaroundParameters(data, len(data), task.steps, forward_fn=lambda m, x: m(x))
            made = {"path": folder, "filename_prefix": "weights", "default_param_bw": task.weight}
            made |= {"param_bw_override_list": wide, "default_quant_scheme": scheme, "default_config_file": per_channel}
            model = Adaround.apply_adaround(model, example, known, **made)
        bits = {"default_output_bw": task.activation, "default_param_bw": task.weight}
        sim = QuantizationSimModel(model, example, scheme, config_file=per_channel, **bits)
        if task.few:
            _aimet_inputs(sim.model, task.activation)
        if task.weight < 8:
            sim.set_and_freeze_param_encodings(f"{folder}/weights.encodings")
    sim.compute_encodings(task.run, None)
    return sim.model.eval()


def _aimet_inputs(model: nn.Module, bits: int) -> None:
    """Quantize the inputs of layers instead of all results, those of the first and last layer to 8 bits."""
    from aimet_torch.v2.quantization.affine import QuantizeDequantize
    from aimet_torch.v2.quantization.encoding_analyzer import SqnrEncodingAnalyzer

    for module in (m for m in model.modules() if hasattr(m, "param_quantizers")):
        module.output_quantizers = nn.ModuleList([None] * len(module.output_quantizers))
        module.input_quantizers = nn.ModuleList([None] * len(module.input_quantizers))
        if isinstance(module, nn.Conv2d | nn.Linear):
            end = isinstance(module, nn.Linear) or module.in_channels == 1
            finder = SqnrEncodingAnalyzer(())
            reads = QuantizeDequantize((), 8 if end else bits, symmetric=False, encoding_analyzer=finder)
            module.input_quantizers[0] = reads
            if end:
                module.param_quantizers["weight"].bitwidth = 8


@peer("torchao: PT2E", "torchao")
def torchao(task: Task) -> nn.Module:
    """Its quantizer for x86, histograms for activations."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    def config(weight: int, activation: int) -> Any:  # noqa: ANN401
        usual = x86.get_default_x86_inductor_quantization_config()
        seen = replace(usual.input_activation, quant_max=2**activation - 1)
        reach = {"quant_min": -(2 ** (weight - 1)), "quant_max": 2 ** (weight - 1) - 1}
        weights = replace(usual.weight, **reach)
        return replace(usual, input_activation=seen, output_activation=seen, weight=weights)

    quantizer = x86.X86InductorQuantizer().set_global(config(task.weight, task.activation))
    for name in task.ends if task.few else ():
        quantizer.set_module_name_qconfig(name, config(8, 8))
    free = ({0: torch.export.Dim("batch", min=2, max=4096)},)
    program = torch.export.export(task.model, (task.images[:8],), dynamic_shapes=free, strict=True).module()
    model = prepare_pt2e(program, quantizer)
    task.run(model)
    return convert_pt2e(model)


@peer("NNCF: quantize", "nncf", least=8)
def nncf(task: Task) -> nn.Module:
    """Its ``quantize``, with the fast bias correction that is all it has for PyTorch."""
    import nncf as package

    package.set_log_level(40)
    return package.quantize(_Whole(task.model), package.Dataset(task.batches()), subset_size=len(task.batches()))


class _Whole(nn.Module):
    """A net as one child: NNCF adds children to the model, which a Sequential would call."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@peer("Model Optimizer: INT8, least error", "modelopt")
def modelopt(task: Task) -> nn.Module:
    """Its recipe for convolutions, with other bits, and the weight ranges of least error below 8."""
    import modelopt.torch.quantization as package

    config = copy.deepcopy(package.INT8_DEFAULT_CFG)
    for kind, bits, axis in (("weight", task.weight, 0), ("input", task.activation, None)):
        config["quant_cfg"].append({"quantizer_name": f"*{kind}_quantizer", "cfg": {"num_bits": bits, "axis": axis}})
        for name in task.ends if task.few else ():
            few = {"num_bits": 8, "axis": axis}
            config["quant_cfg"].append({"quantizer_name": f"{name}.{kind}_quantizer", "cfg": few})
    config["algorithm"] = {"method": "mse"} if task.weight < 8 else "max"
    return package.quantize(task.model, config, task.run)
