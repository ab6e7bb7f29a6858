"""Capture: the user's class, hooks, copies and checkpoints, and that nothing else is touched."""

import copy

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import ConfigError
from bitwright.graph import capture_model
from bitwright.nn import QuantLinear
from bitwright.quantizer import quantizers
from tests.graph.capture.capturing import DataDependent, Net, image, prepared, same


class Talkative(nn.Module):
    kind = "talkative"

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.width, self.config = 3, {"layers": 1}

    def forward(self, x):
        return self.fc(x)

    def twice(self, x):
        return self(self(x))

    @property
    def size(self):
        return self.fc.weight.numel()


def test_methods_and_attributes_of_the_class_still_answer():
    model, x = Talkative().eval(), torch.randn(2, 3)
    quantized = prepared(model, x)
    assert (quantized.width, quantized.config, quantized.kind, quantized.size) == (3, {"layers": 1}, "talkative", 9)
    assert torch.equal(quantized.twice(x), model.twice(x))
    bw.calibrate(quantized, [x, model(x).detach()])
    assert torch.equal(quantized.twice(x), quantized(quantized(x)))
    assert copy.deepcopy(quantized).config == {"layers": 1}
    with pytest.raises(AttributeError, match="object has no attribute 'thrice'"):
        _ = quantized.thrice


def test_hooks_of_the_model_itself():
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    x = torch.randn(4, 3)
    quantized = prepared(model, torch.randn(2, 3), x)
    assert torch.equal(copy.deepcopy(quantized)(x), model(x))


def test_a_model_is_prepared_once():
    quantized = bw.prepare(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(ConfigError, match="this model is prepared already; prepare the float model it was made from"):
        bw.prepare(quantized, torch.randn(1, 3))


def test_the_original_is_left_untouched():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)).train()
    model[0].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    x = image()
    given = x.clone()
    quantized = bw.prepare(model, x)
    assert same(dict(model.state_dict()), dict(before))
    assert all(m.training for m in model.modules())
    assert not any(m.training for m in quantized.modules())
    assert type(model[0]) is nn.Conv2d
    assert model[2].inplace
    assert len(model[0]._forward_hooks) == len(quantized.get_submodule("0")._forward_hooks) == 1
    assert not any(len(m._forward_pre_hooks) for m in [*model.modules(), *quantized.modules()])
    assert torch.equal(x, given)
    with torch.no_grad():
        quantized.get_submodule("0").weight.zero_()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not quantized.state_dict().keys() - before.keys() - {k for k in quantized.state_dict() if "quantizer" in k}


def test_torch_is_restored_even_after_an_error():
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__
    makers = {name: getattr(torch, name) for name in ("zeros", "arange", "tensor", "ones", "full")}

    def body(self, x):
        if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor:
            raise KeyboardInterrupt
        return self.conv(x)

    with pytest.raises(KeyboardInterrupt):
        bw.prepare(Net(body), image())
    bw.prepare(Net(lambda self, x: self.conv(x) * x.sum().item()), image())
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is getattribute
    assert all(getattr(torch, name) is maker for name, maker in makers.items())


def test_random_numbers():
    def body(self, x):
        return self.conv(x) + torch.rand(x.shape[0], 4, 1, 1) + torch.randn_like(x)[:, :1] + torch.randn(1)

    model = Net(body).eval()
    x = image(3)
    before = torch.get_rng_state()
    quantized = bw.prepare(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(quantized(x), expected)


def test_hooks_that_forward_attaches_once_are_not_attached_again():
    """As transformers does where hidden states are asked for."""

    class Collecting(Net):
        def __init__(self):
            super().__init__(None, attached=False)

        def forward(self, x):
            seen = []
            if not self.attached:
                self.attached = True
                self.conv.register_forward_hook(lambda *given: self.seen.append(given[-1]))
            self.seen = seen
            y = self.conv(x)
            return torch.cat([y, *seen])

    model, x = Collecting().eval(), image()
    quantized = bw.prepare(model, x)
    assert not bw.ledger_of(quantized).islands
    assert torch.equal(quantized(x), model(x))
    assert len(model.conv._forward_hooks) == 1


def test_what_forward_stores_on_the_model_is_not_a_proxy():
    def body(self, x):
        self.last = self.conv(x)
        self.cache = {"x": x}
        self.count = self.count + 1
        return self.last * 2

    model = Net(body, count=torch.zeros(())).eval()
    quantized = bw.prepare(model, image())
    assert float(quantized.count) == float(model.count) == 0
    copy.deepcopy(quantized)
    assert not hasattr(model.conv, "last")


def test_plain_tensors_and_constants_are_part_of_the_model():
    class Anchored(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.offset = torch.tensor([1.0, 2.0, 3.0])
            self.register_buffer("hidden", torch.ones(3), persistent=False)

        def forward(self, x):
            return self.fc(x) * self.offset + torch.tensor([0.5, 0.25, 0.0]) + self.hidden

    model = nn.Sequential(Anchored(), Anchored())
    quantized = prepared(model, torch.randn(2, 3))
    assert set(model.state_dict()) == {k for k in quantized.state_dict() if "quantizer" not in k}
    quantized.load_state_dict(model.state_dict())
    alone = prepared(Anchored(), torch.randn(2, 3))
    assert {k for k in alone.state_dict() if "quantizer" not in k} == {"fc.weight", "fc.bias"}
    twin = copy.deepcopy(alone)
    x = torch.randn(4, 3)
    assert torch.equal(twin(x), alone(x))
    assert set(twin.state_dict()) == set(alone.state_dict())
    assert capture_model(model, torch.randn(2, 3)).islands == {}


class Headed(nn.Module):
    """A folded BatchNorm, an unused head, and an island."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.island = DataDependent()
        self.fc = nn.Linear(4, 2)
        self.unused = nn.Linear(7, 7)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.fc(self.island(self.stem(x)).mean((2, 3)) - self.mean)


def random_norms(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_copy_computes_the_same_and_is_independent(calibrated):
    model = random_norms(Headed()).eval()
    quantized = bw.prepare(model, image())
    if calibrated:
        bw.calibrate(quantized, [image()])
    twin = copy.deepcopy(quantized)
    x = image(3)
    assert torch.equal(twin(x), quantized(x))
    assert list(twin.state_dict()) == list(quantized.state_dict())
    conv = twin.get_submodule("stem.0")
    assert conv.folded_norm is twin.get_submodule("stem.1")
    assert conv.folded_norm is not quantized.get_submodule("stem.1")
    assert torch.equal(twin.unused.weight, model.unused.weight)
    shared = {id(p) for p in quantized.parameters()} & {id(p) for p in twin.parameters()}
    assert not shared
    with torch.no_grad():
        twin.get_submodule("stem.0").weight.zero_()
    assert not torch.equal(twin(x), quantized(x))
    again = copy.deepcopy(twin)
    bw.calibrate(again, [image()])
    assert bw.ledger_of(again).entries == bw.ledger_of(quantized).entries


def test_a_float_checkpoint_loads_strictly():
    source = random_norms(Headed()).eval()
    quantized = bw.prepare(Headed(), image())
    result = quantized.load_state_dict(source.state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x = image(3)
    assert torch.equal(quantized(x), source(x))


@pytest.mark.parametrize("target_calibrated", [False, True])
def test_a_prepared_checkpoint_loads_strictly(target_calibrated):
    source = bw.prepare(random_norms(Headed()).eval(), image())
    bw.calibrate(source, [image(8)])
    target = bw.prepare(Headed(), image())
    if target_calibrated:
        bw.calibrate(target, [image()])
    target.load_state_dict(source.state_dict(), strict=True)
    x = image(3)
    assert torch.equal(target(x), source(x))
    fresh = bw.prepare(Headed(), image())
    source.load_state_dict(fresh.state_dict(), strict=True)
    assert not any(q.calibrated for q in quantizers(source).values())
    assert torch.equal(source(x), fresh(x))


def test_a_graph_that_deviates_is_not_used():
    class Particular(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(x) if type(x) is torch.Tensor else self.fc(x) + 1

    model, x = nn.Sequential(nn.Linear(2, 2), Particular(), nn.ReLU()), torch.randn(3, 2)
    quantized = bw.prepare(model, x)
    assert bw.ledger_of(quantized).islands == {"": "its graph deviates from the original, first at '_2' (2)"}
    assert isinstance(quantized[1].fc, QuantLinear)
    assert torch.equal(quantized(x), model(x))
