"""Capture: a failure of our own is an error and never an island; what torch lacks costs no more than its own patch."""

import dataclasses
import importlib
import logging
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import fx, nn

import bitwright as bw
from bitwright import torch_internals
from bitwright.errors import CaptureError, CaptureWarning, ConfigError
from bitwright.graph import capture_model
from bitwright.graph.capture import patches
from bitwright.graph.capture.tracer import ValueTracer
from tests.graph.capture.capturing import DataDependent, Net, image

PATCHED = {**patches._RUN.wraps, **patches._RECORD.wraps}


@dataclasses.dataclass
class Result:
    out: torch.Tensor


def everything(self, x):
    """Use a bit of all that capture can do."""
    batch, *_ = x.shape
    y = self.conv(x) + torch.zeros(batch, 1, 1, 1) + torch.tensor([1.0])
    if x.shape[2] > 100:
        y = y * 2
    return Result(self.by_data(y))


def model_for_all():
    return Net(everything, by_data=DataDependent()).eval()


MISSING = [
    *(("run", "_inside"), ("run", "Capture"), ("run", "CapturedModel")),
    *(("tracer", "set_value"), ("tracer", "version_of"), ("tracer", "users_line"), ("tracer", "stop_gradients")),
    *(("proxy", "call_model"), ("proxy", "value_of")),
    *(("patches", "holds_proxy"), ("nesting", "_parts"), ("objects", "dataclasses"), ("islands", "Inputs")),
    *(("copying", "_is_plain"), ("run", "difference"), ("trial_run", "_same"), ("leaves", "fnmatchcase")),
]


@pytest.mark.parametrize(("file", "name"), MISSING, ids=lambda part: part)
def test_a_name_missing_in_our_own_code_is_our_failure(monkeypatch, file, name):
    monkeypatch.delattr(importlib.import_module(f"bitwright.graph.capture.{file}"), name)
    with pytest.raises(CaptureError, match=f"capture failed in Bitwright itself at .*{file}.py:") as raised:
        capture_model(model_for_all(), image(), leaves=["by_*.single"])
    assert isinstance(raised.value.__cause__, NameError)
    assert f"name {name!r} is not defined" in str(raised.value)
    assert f"what `python -m bitwright.torch_internals` prints (torch {torch.__version__}; tried" in str(raised.value)


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (fx.Graph, "create_node", "fx/proxy.py"),
        (fx.Tracer, "get_fresh_qualname", "tracer.py"),
        (fx.GraphModule, "recompile", "model.py"),
        (ValueTracer, "_check", "tracer.py"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_name_missing_in_torch_is_our_failure(monkeypatch, owner, name, place):
    monkeypatch.delattr(owner, name)
    with pytest.raises(CaptureError, match=f"in Bitwright itself at .*{place}:.*AttributeError.*{name}"):
        capture_model(model_for_all(), image())


def test_the_way_out_of_our_failure_works(monkeypatch):
    """The error names the module to keep whole; with it as a leaf, the rest is captured."""

    class Windowed(nn.Module):
        def forward(self, x):
            return x * torch.zeros(x.shape[0], 1, 1, 1)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Windowed()).eval()
    monkeypatch.delattr("bitwright.graph.capture.patches.holds_proxy")
    with pytest.raises(CaptureError, match=r"leaves=\['1'\] keeps that module whole"):
        capture_model(model, image())
    assert capture_model(model, image(), leaves=["1"]).islands == {}


def test_our_failure_is_not_forgotten_if_the_model_catches_it(monkeypatch):
    def body(self, x):
        try:
            return self.conv(x + 1)
        except Exception:
            return self.conv(x) * 2

    monkeypatch.delattr("bitwright.graph.capture.tracer.set_value")
    with pytest.raises(CaptureError, match="capture failed in Bitwright itself"):
        capture_model(Net(body).eval(), image())


def test_what_the_model_raises_and_catches_is_its_own_business():
    def body(self, x):
        y = self.conv(x).transpose(1, 3)
        try:
            return y.view(-1)
        except RuntimeError:
            return y.reshape(-1)

    captured = capture_model(Net(body).eval(), image())
    assert captured.islands == {}


class Peculiar:
    """Cannot be compared, copied or made again."""

    def __new__(cls, needed):
        return super().__new__(cls)

    def __init__(self, needed):
        self.x = needed

    def __eq__(self, other):
        raise ValueError("not comparable")

    __hash__ = None


def takes_gradients(self, x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return self.conv(x) + torch.autograd.grad(y.square().sum(), y)[0].mean()


def keys_by_size(self, x):
    return self.conv(x) + len({x.shape[0]: 1, **{x.shape[1]: 2}})


MODELS = {
    "gradients": takes_gradients,
    "missing attribute": lambda self, x: self.conv(x) if hasattr(x, "mask") else self.conv(x.nope) if x is None else x,
    "numpy": lambda self, x: self.conv(x) + torch.from_numpy(x.detach().numpy()).mean(),
    "sparse": lambda self, x: self.conv(x) + x.to_sparse().to_dense().mean(),
    "nested": lambda self, x: self.conv(x) + torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0).mean(),
    "dict of sizes": keys_by_size,
    "format": lambda self, x: self.conv(x) if f"{x.shape[0]:>5}" else x,
    "object": lambda self, x: self.conv(Peculiar(x).x),
    "no length": lambda self, x: self.conv(x) + (len(x.shape) if x.dim() else len(x.sum())),
}


@pytest.mark.filterwarnings("ignore::bitwright.errors.CaptureWarning")
@pytest.mark.parametrize("body", MODELS.values(), ids=MODELS)
def test_odd_models_are_captured_or_islands(body):
    model, x = Net(body).eval(), image()
    captured = capture_model(model, x).model
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))


def test_a_model_that_cannot_be_copied_is_told_so():
    model = Net(lambda self, x: self.conv(x), lock=threading.Lock())
    with pytest.raises(ConfigError, match=r"Net cannot be copied, and prepare works on a copy: TypeError"):
        bw.prepare(model, image())


def test_a_root_that_is_an_island_warns():
    model = Net(lambda self, x: self.conv(x) * x.sum().item()).eval()
    with pytest.warns(CaptureWarning) as caught:
        bw.prepare(model, image())
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith("Net runs as written, without a graph: Untraceable: .item() needs the data of a tensor")
    assert f"{__file__}:{model.body.__code__.co_firstlineno}" in message
    assert "move what the reason names into a submodule" in message
    assert warning.filename == __file__


def test_an_island_inside_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        quantized = bw.prepare(model_for_all(), image())
    assert list(bw.ledger_of(quantized).islands) == ["by_data"]


@pytest.mark.parametrize("path", PATCHED)
def test_each_patch_is_optional(monkeypatch, caplog, path):
    """Without one of them, a model that does not need it is captured as before, and a line in the log names it."""
    monkeypatch.setattr(patches, "find_attribute", lambda p: None if p == path else torch_internals.find_attribute(p))
    patches._say_once.cache_clear()
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU())).eval(), image()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            captured = capture_model(model, x)
    assert captured.islands == {}
    assert torch.equal(captured.model(x), model(x))
    assert [r.getMessage() for r in caplog.records if path in r.getMessage()] == [
        f"models that use {path} may not be captured: torch {torch.__version__} has no {path}"
    ]


def test_without_a_private_name_of_torch_capture_goes_on(monkeypatch, caplog):
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    patches._say_once.cache_clear()
    x = image()
    with caplog.at_level(logging.WARNING):
        captured = capture_model(model_for_all(), x)
    assert list(captured.islands) == ["by_data"]
    assert "has no torch.utils.checkpoint._checkpoint_without_reentrant_generator" in caplog.text


def test_all_patches_are_taken_back():
    before = [vars(owner)[name] for owner, name in map(torch_internals.find_attribute, PATCHED)]
    capture_model(model_for_all(), image())
    after = [vars(owner)[name] for owner, name in map(torch_internals.find_attribute, PATCHED)]
    assert all(a is b for a, b in zip(before, after, strict=True))
