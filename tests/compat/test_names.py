"""Small helpers by their old names: what each of them does, and what those that are gone say."""

import importlib
import logging

import pytest
import torch
from torch import nn

from bitwright.compat.mqbench import fuser_method_mappings as fuse
from bitwright.compat.mqbench import nn as mqbench_nn
from bitwright.compat.mqbench import utils
from bitwright.compat.mqbench.fake_quantize import quantize_base
from bitwright.compat.mqbench.nn import intrinsic
from bitwright.compat.mqbench.prepare_by_platform import prepare_by_platform, prepare_qat_fx_by_platform
from bitwright.compat.mqbench.scheme import QuantizeScheme
from bitwright.compat.mqbench.utils import hook, hooks
from bitwright.compat.mqbench.utils.logger import disable_logging, logger, set_log_level
from bitwright.compat.pytorch_quantization import tensor_quant
from bitwright.compat.pytorch_quantization.nn.modules import quant_instancenorm
from bitwright.compat.refused import RefusedNameError
from bitwright.compat.sparsebit.quantization import common, modules
from bitwright.compat.sparsebit.quantization.quantizers import quant_descriptor, quant_tensor
from bitwright.spec import QuantSpec


def test_powers_of_two_and_their_gradient():
    x = torch.tensor([0.3, 1.0, 5.9, 6.0], requires_grad=True)
    rounded = utils.pot_quantization(x)
    assert rounded.tolist() == [0.25, 1.0, 8.0, 8.0]
    rounded.sum().backward()
    assert x.grad.tolist() == [1.0] * 4
    assert utils.pot_quantization(x, "floor").tolist() == [0.25, 1.0, 4.0, 4.0]


def test_copies_order_and_schemes():
    made = prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), "Tensorrt")
    for copied in (utils.deepcopy_graphmodule(made), utils.deepcopy_mixedmodule(made, ["0"])):
        assert copied is not made
        assert list(copied.state_dict()) == list(made.state_dict())
    places = utils.topology_order(made)
    assert list(places.values()) == list(range(len(made.graph.nodes)))
    assert places[next(iter(made.graph.nodes))] == 0
    assert utils.is_symmetric_quant("int8")
    assert not utils.is_symmetric_quant("uint8 affine")
    assert torch.equal(utils.sync_tensor(torch.ones(2)), torch.ones(2))
    assert prepare_qat_fx_by_platform is prepare_by_platform
    assert all(isinstance(q, quantize_base.QuantizeBase) for q in made.modules() if hasattr(q, "observer"))
    scheme = QuantizeScheme(symmetry=True, per_channel=True, bit=4, symmetric_range=True, p=2.4)
    assert (scheme.quant_min, scheme.quant_max, scheme.kwargs) == (-7, 7, {"p": 2.4})
    assert str(QuantizeScheme(symmetry=False)) == "uint8 affine tensor"


@pytest.mark.parametrize("where", [hook, hooks])
def test_a_hook_keeps_what_a_layer_reads_and_gives(where):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    saver = where.DataSaverHook(store_input=True, store_output=True, stop_forward=True)
    handle = model[0].register_forward_hook(saver)
    x = torch.randn(4, 3)
    with pytest.raises(where.StopForwardException, match="catch this around"):
        model(x)
    assert torch.equal(saver.input_store[0], x)
    assert torch.equal(saver.output_store, x @ model[0].weight.T + model[0].bias)
    handle.remove()
    assert model(x).shape == (4, 2)


def test_the_logger_can_be_turned_down_and_off(caplog):
    try:
        set_log_level(logging.ERROR)
        logger.warning("quiet")
        set_log_level("WARNING")
        logger.warning("loud")
        disable_logging()
        logger.warning("off")
    finally:
        logger.disabled = False
        logger.setLevel(logging.NOTSET)
    assert [record.message for record in caplog.records] == ["loud"]


@pytest.mark.parametrize(
    ("method", "layers", "shape"),
    [
        (fuse.fuse_conv_bn, [nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)], (2, 4, 5, 5)),
        (fuse.fuse_conv_bn_relu, [nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()], (2, 4, 5)),
        (fuse.fuse_deconv_bn, [nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)], (2, 4, 5, 5)),
        (fuse.fuse_deconv_bn_relu, [nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()], (2, 4, 5, 5)),
        (fuse.fuse_linear_bn, [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, affine=False)], (3, 4)),
    ],
)
def test_fused_layers_compute_what_the_chain_does(method, layers, shape):
    norm = layers[1]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    model, x = nn.Sequential(*layers).eval(), torch.randn(shape)
    assert torch.allclose(method(*layers)(x), model(x), atol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_frozen_norms_stay_as_they_are(dim):
    norm = getattr(mqbench_nn, f"FrozenBatchNorm{dim}d")(2)
    x = torch.randn(4, 2, *[3] * dim)
    norm.eval()
    norm.train()
    assert not norm.training
    assert torch.allclose(norm(x), x / (1 + norm.eps) ** 0.5, atol=1e-6)
    assert norm.running_mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", intrinsic.NAMES)
def test_containers_of_fused_layers_run_them_in_turn(name):
    inside = [nn.Linear(3, 3), nn.ReLU()]
    x = torch.randn(2, 3)
    assert torch.equal(getattr(intrinsic, name)(*inside)(x), inside[1](inside[0](x)))
    with pytest.raises(RefusedNameError, match="write the layer and its BatchNorm as they are"):
        getattr(importlib.import_module("bitwright.compat.mqbench.nn.intrinsic.qat"), name)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_instance_norms_of_every_rank_quantize_their_input(dim):
    layer = getattr(quant_instancenorm, f"QuantInstanceNorm{dim}d")(3, affine=True)
    x = torch.randn(2, 3, *[4] * dim)
    rounded = tensor_quant.fake_tensor_quant(x, x.abs().max())
    expected = nn.functional.instance_norm(rounded, weight=layer.weight, bias=layer.bias)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("kind", ["CONV", "CONVTRANSPOSE"])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_descriptors_keep_the_output_channels(kind, dim):
    given = getattr(tensor_quant, f"QUANT_DESC_8BIT_{kind}{dim}D_WEIGHT_PER_CHANNEL")
    assert (given.num_bits, given.axis, given.unsigned) == (8, int(kind != "CONV"), False)


def test_sparsebits_functions_round_as_ste_does():
    described = quant_descriptor.QuantDescriptor(QuantSpec.parse("int4"))
    x, scale, zero = torch.tensor([-9.0, -0.26, 0.24, 0.26, 9.0]), torch.tensor(0.5), torch.tensor(0.0)
    for function in (quant_tensor.torch_fake_quant, quant_tensor.ort_fake_quant, quant_tensor.trt_fake_quant):
        assert function(x, scale, zero, described).tolist() == [-4.0, -0.5, 0.0, 0.5, 3.5]
    assert [target.name for target in common.QuantTarget] == ["WEIGHT", "FEATURE"]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *(("QReLU6", nn.ReLU6), ("QLeakyReLU", nn.LeakyReLU), ("QSiLU", nn.SiLU), ("QMish", nn.Mish)),
        *(("QSigmoid", nn.Sigmoid), ("QGELU", nn.GELU), ("QTanh", nn.Tanh), ("QHardSigmoid", nn.Hardsigmoid)),
        *(("QBatchNorm2d", nn.BatchNorm2d), ("QLayerNorm", nn.LayerNorm), ("QEmbedding", nn.Embedding)),
        *(("QAvgPool2d", nn.AvgPool2d), ("QMaxPool2d", nn.MaxPool2d), ("QBatchNorm1d", nn.BatchNorm1d)),
        *(("QMatmul", torch.matmul), ("QAdd", torch.add), ("QMul", torch.mul), ("Concat", torch.cat)),
    ],
)
def test_qmodules_are_those_that_serve_their_operators(name, source):
    assert modules.QMODULE_MAP[source] is getattr(modules, name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *(("QIdentity", nn.Identity), ("QDropout", nn.Dropout), ("QUpsample", nn.Upsample), ("QSubtract", torch.sub)),
        *(("Contiguous", "contiguous"), ("Expand", "expand"), ("Transpose", torch.transpose)),
        *(("Split", torch.split), ("QMean", torch.mean), ("Flatten", torch.flatten), ("Permute", torch.permute)),
    ],
)
def test_records_are_those_of_their_operators(name, source):
    from bitwright.nn.operators import operator_of_source

    assert getattr(modules, name) is operator_of_source(source)


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("mqbench.adaround", "adaround", "advanced_ptq.ptq_reconstruction does it"),
        ("mqbench.deploy", "ONNXQLinearPass", "write a format and register it"),
        ("mqbench.custom_quantizer", "ModelQuantizer", "write a backend"),
        ("mqbench.mix_precision.mix_precision", "mp_model_size", r"bw.search_bits chooses bits"),
        ("mqbench.weight_equalization", "convert_weight_equalization", "makes it unnecessary"),
        ("mqbench.utils.registry", "register_deploy_function", "write a format"),
        ("mqbench.utils.hook", "PerChannelLoadHook", "load scales of any number of channels"),
        ("mqbench.utils.utils", "getitem2node", "users and args"),
        ("sparsebit.quantization.modules.python_builtins", "QGetAttr", "read while the model is captured"),
        ("sparsebit.quantization.modules.math", "QFloorDiv", "match operator.floordiv"),
        ("sparsebit.quantization.modules.shape", "Expand_as", "match torch.Tensor.expand_as"),
        ("sparsebit.quantization.modules.unary", "Detach", "match torch.Tensor.detach"),
        ("sparsebit.quantization.modules.torchvision_ops", "StochasticDepth", "it stays float"),
        (
            "sparsebit.quantization.converters.utils.subgraph_matching",
            "SubgraphMatcher",
            "bitwright.graph.match.Matcher",
        ),
        ("sparsebit.sparse", "parse_sconfig", "torch.nn.utils.prune"),
    ],
)
def test_names_that_are_gone_say_what_to_use(module, name, said):
    home = importlib.import_module(f"bitwright.compat.{module}")
    with pytest.raises(RefusedNameError, match=rf"{module} has no {name}: .*{said}"):
        getattr(home, name)


@pytest.mark.parametrize(
    "path",
    [
        *("mqbench.convert_onnx.convert_onnx", "mqbench.ptq_reconstruction.ptq_reconstruction"),
        *("mqbench.fake_quantize.adaround_quantizer.AdaRoundFakeQuantize", "mqbench.observer.ObserverBase"),
        *("mqbench.fake_quantize.qdrop_quantizer.QDropFakeQuantize", "sparsebit.quantization.quant_model.QuantModel"),
        *("sparsebit.quantization.converters.utils.subgraph_matching_node.MatchingNode",),
        *("sparsebit.quantization.converters.utils.subgraph_matching_replace_pattern.ReplacePatternBase",),
        *("sparsebit.quantization.quantizers.uniform.Uniform", "sparsebit.quantization.observers.base.DataCache"),
    ],
)
def test_old_paths_lead_to_the_same_thing(path):
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"bitwright.compat.{module}"), name)
    assert found.__name__.lower().startswith(name.lower()[:5]) or name == "Uniform"
