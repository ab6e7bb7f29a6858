"""Capture: objects of the user's classes, as inputs, as results, and in files."""

import dataclasses
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.graph import capture_model
from tests.graph.capture.capturing import prepared, same


class Cache:
    """Keys of every layer, in the way of a cache for attention."""

    def __init__(self):
        self.keys, self.name = [], "cache"

    def update(self, index, keys):
        if index == len(self.keys):
            self.keys.append(keys)
        else:
            self.keys[index] = torch.cat([self.keys[index], keys], 1)
        return self.keys[index]

    def length(self):
        return self.keys[0].shape[1] if self.keys else 0


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    size: int = 0
    cache: Cache | None = None


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        places = torch.arange(cache.length(), cache.length() + x.shape[1])
        x = x + places[:, None]
        for i, layer in enumerate(self.layers):
            keys = cache.update(i, layer(x))
            x = x + keys.mean(1, keepdim=True)
        return Result(x, x.shape[1], cache)


def test_an_object_made_in_forward_is_a_result():
    model = Decoder().eval()
    quantized = prepared_object(model)
    for shape in ((2, 3, 4), (3, 5, 4)):
        x = torch.randn(*shape)
        with torch.no_grad():
            got, expected = quantized(x), model(x)
        assert type(got.cache) is Cache
        assert (got.size, got.cache.name) == (shape[1], "cache")
        assert same(got.cache.keys, expected.cache.keys)
        assert torch.equal(got.logits, expected.logits)


def prepared_object(model, **more):
    quantized = bw.prepare(model, {"x": torch.randn(2, 3, 4), **more})
    assert bw.ledger_of(quantized).islands == {}
    return quantized


def test_an_object_as_input_grows_from_call_to_call():
    model = Decoder().eval()
    quantized = prepared_object(model, cache=Cache())
    ours, theirs = Cache(), Cache()
    with torch.no_grad():
        for length in (4, 1, 2):
            x = torch.randn(2, length, 4)
            assert torch.equal(quantized(x, cache=ours).logits, model(x, cache=theirs).logits)
            assert ours.length() == theirs.length()
    assert ours.length() == 7


@pytest.mark.parametrize("kind", [OrderedDict, lambda **items: defaultdict(list, items)])
def test_subclasses_of_dict(kind):
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return kind(out=self.fc(x), more=(x, {"sum": x.sum()}))

    quantized = prepared(Makes(), torch.randn(2, 3), torch.randn(4, 3))
    made = quantized(torch.randn(2, 3))
    assert type(made) is type(kind())
    assert getattr(made, "default_factory", None) is getattr(kind(), "default_factory", None)


def test_an_object_handed_to_an_island_stays_one_object():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, cache):
            keys = cache.update(0, self.fc(x))
            return keys if float(keys.sum()) > -1e9 else x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.picky = nn.Linear(4, 4), Picky()

        def forward(self, x):
            cache = Cache()
            cache.update(0, self.first(x))
            return self.picky(x, cache), cache.keys[0]

    model = Outer().eval()
    captured = capture_model(model, torch.randn(2, 3, 4)).model
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        assert same(captured(x), model(x))


def test_results_that_are_objects_are_exported_as_their_tensors(tmp_path):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x)
            return Result(y, x.shape[-1], {"more": (y.relu(), None)})

    quantized = bw.prepare(Small(), torch.randn(2, 3))
    bw.calibrate(quantized, [torch.randn(16, 3)])
    file = bw.export(quantized, tmp_path / "small.onnx")
    batch = torch.randn(4, 3)
    proof = bw.verify(quantized, file, [batch], runtimes=["onnxruntime"], latency=False)
    assert proof.runtimes["onnxruntime"].equal == 1.0
    assert type(quantized(batch)) is Result
    assert quantized(batch).size == 3
