"""Methods at work: training, saving, copies, half precision, checkpointing, compilation, and what they refuse."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitwright.errors import CalibrationError, ConfigError
from bitwright.methods import METHODS, clipped, parameter_groups
from bitwright.numerics.fused import SMALL
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.spec import QuantSpec

ALL = [
    "FixedFakeQuantize",
    "LearnableFakeQuantize",
    "LSQPlusFakeQuantize",
    "PACTFakeQuantize",
    "DoReFaFakeQuantize",
    "DSQFakeQuantize",
    "TqtFakeQuantize",
    "NNIEFakeQuantize",
    "APoTFakeQuantize",
    "AdaRoundFakeQuantize",
    "QDropFakeQuantize",
    "StochasticFakeQuantize",
]
LEARNED = {
    "LearnableFakeQuantize": {"scale"},
    "LSQPlusFakeQuantize": {"scale"},
    "PACTFakeQuantize": {"alpha"},
    "DSQFakeQuantize": {"upper", "alpha"},
    "TqtFakeQuantize": {"log2_threshold"},
    "APoTFakeQuantize": {"alpha"},
    "AdaRoundFakeQuantize": {"rounding"},
    "QDropFakeQuantize": {"scale"},
}
AFFINE = {
    "LearnableFakeQuantize": {"scale", "zero_point"},
    "LSQPlusFakeQuantize": {"scale", "offset"},
    "PACTFakeQuantize": {"alpha", "n_alpha"},
    "DSQFakeQuantize": {"upper", "lower", "alpha"},
}
ALIASES = ("lsq", "LSQ", "lsq+", "lsq_plus", "pact", "dorefa", "DoReFa", "dsq", "tqt", "apot", "adaround", "uniform")


def calibrated(method, spec="int4 channel:0", data=None, **options):
    quantizer = TensorQuantizer(spec, method=method, method_options=options)
    quantizer.observe()
    data = torch.randn(8, 16) if data is None else data
    quantizer(data)
    quantizer.compute_qparams()
    quantizer.quantize()
    if method == "AdaRoundFakeQuantize":
        quantizer.method.init(data, *quantizer.qparams())
    return quantizer


def test_every_method_of_the_seeds_has_its_name_and_aliases():
    assert set(ALL) <= set(METHODS.names())
    for alias in ALIASES:
        assert METHODS.get(alias).__name__ in ALL


@pytest.mark.parametrize("name", ALL)
def test_a_quantizer_with_it_gives_few_values_and_a_gradient(name):
    quantizer = calibrated(name)
    quantizer.eval()
    x = torch.randn(8, 16, requires_grad=True)
    y = quantizer(x)
    y.sum().backward()
    assert x.grad.abs().sum() > 0
    with torch.no_grad():
        assert all(len(row.unique()) <= 16 for row in quantizer(x))


@pytest.mark.parametrize("spec", ["int4 channel:0", "int4 affine channel:0"])
@pytest.mark.parametrize("name", LEARNED)
def test_training_lowers_the_loss_and_moves_what_is_learned(name, spec):
    names = LEARNED[name]
    if "affine" in spec:
        if name not in AFFINE:
            pytest.skip("has nothing more to learn for affine specs")
        names = AFFINE[name]
    x = torch.randn(8, 256) + 0.3 * ("affine" in spec)
    x[:, 0] = 12.0  # an outlier: the calibrated range is far too wide
    options = {"prob": 1.0} if name == "QDropFakeQuantize" else {}
    quantizer = calibrated(name, spec, x, **options)
    if name in ("PACTFakeQuantize", "DSQFakeQuantize"):  # too narrow: the ends learn from what they clip
        quantizer.set_qparams(quantizer.scale / 20, quantizer.zero_point)
    if name == "AdaRoundFakeQuantize":
        # Rounding cannot mend a range; let it find the best for a product.
        inputs = torch.randn(256, 32)
        target = x @ inputs

        def loss():
            return (quantizer(x) @ inputs - target).square().mean() + 0.03 * quantizer.method.regularizer(2.0)
    else:

        def loss():
            return (quantizer(x) - x)[:, 1:].square().mean()

    before = {n: p.detach().clone() for n, p in quantizer.named_parameters()}
    assert {n.rpartition(".")[2] for n in before} == names
    with torch.no_grad():
        first = float(loss())
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.05)
    for _ in range(200 if name == "AdaRoundFakeQuantize" else 60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    with torch.no_grad():
        assert float(loss()) < 0.9 * first
    for n, p in quantizer.named_parameters():
        assert p.grad is not None
        assert not torch.equal(p, before[n]), n


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("spec", ["int4 channel:0", "uint8 symmetric", "int4 group:4:1"])
def test_state_goes_into_a_fresh_quantizer(name, spec):
    one = calibrated(name, spec)
    with torch.no_grad():
        for p in one.method.parameters():
            p.mul_(1.1)
    two = TensorQuantizer(spec, method=name)
    two.load_state_dict(one.state_dict())
    x = torch.randn(8, 16)
    one.eval(), two.eval()
    with torch.no_grad():
        assert torch.equal(one(x), two(x))
    assert [torch.equal(a, b) for a, b in zip(one.qparams(), two.qparams(), strict=True)] == [True, True]
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in two.named_parameters()]


@pytest.mark.parametrize("name", [n for n in LEARNED if n != "AdaRoundFakeQuantize"])
def test_calibrating_again_keeps_the_parameters_an_optimizer_holds(name):
    quantizer = calibrated(name)
    before = dict(quantizer.named_parameters())
    values = {n: p.detach().clone() for n, p in before.items()}
    quantizer.set_qparams(quantizer.scale * 2, quantizer.zero_point)
    for n, p in quantizer.named_parameters():
        assert p is before[n]
        assert torch.equal(p, values[n]) is (name == "DSQFakeQuantize" and n.endswith(".alpha"))


@pytest.mark.parametrize("name", ALL)
def test_copies_are_independent(name):
    one = calibrated(name)
    two = copy.deepcopy(one)
    with torch.no_grad():
        for p in two.method.parameters():
            p.add_(1.0)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p + 1.0, q)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_and_autocast_compute_in_float32(name):
    data = torch.randn(8, 16).bfloat16()
    quantizer = calibrated(name, data=data.float())
    quantizer.eval()
    half = data.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = quantizer(half)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert half.grad.dtype == torch.bfloat16
    assert torch.equal(y, quantizer(data.float()).bfloat16())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in quantizer.parameters())


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_gives_the_same_gradients(name):
    quantizer = calibrated(name)
    x = torch.randn(8, 16, requires_grad=True)
    results = []
    for run in (lambda: quantizer(x), lambda: checkpoint(quantizer, x, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(run().square().sum(), [x, *quantizer.parameters()]))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("name", ALL)
def test_nothing_but_the_input_is_kept_for_the_gradient(name):
    """No byte for a value; only scales and what is learned, which are there anyway."""
    quantizer = calibrated(name, data=torch.randn(8, 1000))
    x = torch.randn(8, 1000, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        quantizer(x)
    for known in (x, *quantizer.parameters()):
        kept.pop(known.data_ptr(), None)
    assert sum(kept.values()) <= 32 * 8 + 64 * 4  # a few numbers for each of 8 channels, and the table of APoT


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("NNIEFakeQuantize", "APoTFakeQuantize")])
def test_export_sees_the_one_operator(name):
    options = {"normalize": True} if name == "DoReFaFakeQuantize" else {}
    quantizer = calibrated(name, **options)
    quantizer.eval()
    x = torch.randn(8, 16)
    program = torch.export.export(quantizer, (x,), strict=False)
    called = {str(n.target) for n in program.graph.nodes if "bitwright" in str(n.target)}
    assert called == {"bitwright.quantize_dequantize.default"}
    with torch.no_grad():
        assert torch.equal(program.module()(x), quantizer(x))


def test_compiled_training_step_equals_eager():
    layer = nn.Sequential(calibrated("lsq", "uint4", torch.rand(64, 8)), nn.Linear(8, 8))
    x = torch.rand(64, 8)
    grads = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_kernel_gives_the_eager_results(monkeypatch):
    """Bit for bit, except sums; one kernel only, because compilation takes seconds."""
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    x, g = torch.randn(2, 4, SMALL // 8), torch.randn(2, 4, SMALL // 8)
    kernel, args = clipped._gradients, (torch.full((4, 1), 0.3), torch.zeros(4, 1), -8, 7)
    ours, plain = kernel(x, g, *args), kernel.eager(x, g, *args)
    assert kernel._kernels
    assert kernel.eager not in kernel._kernels.values()
    assert torch.equal(ours[0], plain[0])
    for one, other in zip(ours[1:], plain[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_empty_tensors_pass(name):
    quantizer = calibrated(name, "int4")
    if name == "AdaRoundFakeQuantize":
        quantizer.method.init(torch.randn(0, 16), *quantizer.qparams())
    x = torch.randn(0, 16, requires_grad=True)
    y = quantizer(x)
    y.sum().backward()
    assert y.shape == (0, 16)
    assert x.grad.shape == (0, 16)


def test_parameter_groups():
    model = nn.Sequential(nn.Linear(4, 4), calibrated("lsq+", "uint8"), calibrated("FixedFakeQuantize"))
    rest, own = parameter_groups(model, lr=0.1, quantizer_lr=0.001, weight_decay=1e-4)
    assert (rest["lr"], rest["weight_decay"], len(rest["params"])) == (0.1, 1e-4, 2)
    assert (own["lr"], own["weight_decay"]) == (0.001, 0.0)
    assert {id(p) for p in own["params"]} == {id(p) for p in quantizers(model)["1"].parameters()}
    assert len(own["params"]) == 2
    torch.optim.SGD([rest, own], momentum=0.9)
    assert len(parameter_groups(nn.Linear(2, 2), lr=0.1)) == 1
    assert parameter_groups(model, lr=0.1)[1]["lr"] == 0.1
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigError, match="no Parameter of the Sequential requires a gradient"):
        parameter_groups(model, lr=0.1)


@pytest.mark.parametrize(
    ("name", "spec", "options", "message"),
    [
        (
            "lsq",
            "int4",
            {"use_grad_scaling": 1},
            "use_grad_scaling of LearnableFakeQuantize must be True or False, not 1",
        ),
        ("lsq", "int4", {"use_grad_scalin": True}, "has no option 'use_grad_scalin': did you mean 'use_grad_scaling'"),
        ("pact", "uint4", {"alpha": -1}, "alpha of PACTFakeQuantize must be a number of at least 1e-06, not -1"),
        ("dsq", "uint4", {"alpha": 0.7}, "alpha of DSQFakeQuantize must be a number from 0.01 to 0.5, not 0.7"),
        ("dsq", "uint4", {"alpha": "low"}, "must be a number from 0.01 to 0.5, not 'low'"),
        (
            "dorefa",
            "int4",
            {"role": "weights"},
            "role of DoReFaFakeQuantize cannot be 'weights': did you mean 'weight'",
        ),
        ("dorefa", "int4", {"role": "activation"}, r"clips activations to \[0, 1\]: ask for 'uint4 symmetric'"),
        ("dorefa", "uint4", {"normalize": True}, "normalize of DoReFaFakeQuantize is for weights"),
        ("tqt", "uint8", {}, "TqtFakeQuantize has no zero point: ask for 'uint8 symmetric tensor' instead of 'uint8"),
        ("apot", "int4 affine", {}, "APoTFakeQuantize has no zero point: ask for 'int4 symmetric tensor'"),
        ("apot", "int16", {}, "APoTFakeQuantize supports up to 8 bits, not int16"),
        ("nnie", "int10", {}, "NNIEFakeQuantize supports up to 8 bits, not int10"),
        ("qdrop", "uint4", {"prob": 1.5}, "prob of QDropFakeQuantize must be a number from 0 to 1, not 1.5"),
    ],
)
def test_bad_options_are_refused_with_reasons(name, spec, options, message):
    with pytest.raises(ConfigError, match=message):
        TensorQuantizer(spec, method=name, method_options=options)


def test_levels_that_are_not_evenly_spaced_have_places_in_a_table():
    x = torch.randn(8, 16)
    for name in ("APoTFakeQuantize", "NNIEFakeQuantize", "DoReFaFakeQuantize"):
        quantizer = calibrated(name)
        places = quantizer.integers(x)
        assert places.dtype == torch.uint8
        assert int(places.max()) < len(quantizer.method.levels()) <= 16
        assert torch.equal(quantizer.values(places), quantizer(x).detach())
    with pytest.raises(ConfigError, match=r"FixedFakeQuantize does not define its levels: write levels\(\) and unit"):
        METHODS.get("fixed")(QuantSpec.parse("int4")).levels()


def test_uncalibrated_is_refused():
    with pytest.raises(CalibrationError, match="has no range yet"):
        TensorQuantizer("int4", method="lsq").quantize()


def test_a_half_written_method_says_what_is_missing():
    from bitwright.methods.clipped import ClippedMethod

    method = ClippedMethod(QuantSpec.parse("int4"), True)
    with pytest.raises(NotImplementedError, match=r"ClippedMethod must define what its Parameters mean: write grid"):
        method(torch.randn(3), torch.tensor(1.0), torch.tensor(0, dtype=torch.int32))
