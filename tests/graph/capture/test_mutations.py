"""Capture: what forward puts into containers, of its arguments or its own, is put there by the graph too."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.errors import CaptureError
from bitwright.graph.differences import difference
from tests.graph.capture.capturing import Net, image, same


def update(self, d):
    d.update({"y": self.conv(d["x"])}, z=d["x"] + 1)
    return d


def update_and_read(self, d):
    d.update(y=self.conv(d["x"]))
    return d["y"] * len(d)


def set_default(self, d):
    return d.setdefault("y", self.conv(d["x"])).sum() + d.setdefault("x", 3)


def set_and_delete(self, d):
    d["y"] = self.conv(d["x"])
    del d["x"]
    return d["y"] + 1


def merge(self, d):
    d |= {"y": self.conv(d["x"])}
    return d["x"] * 2


def nested(self, d):
    d["inner"]["y"] = self.conv(d["x"])
    d["inner"]["list"].append(d["x"] - 1)
    return d["x"] * 2


def clear_and_fill(self, d):
    x = d.pop("x")
    d.clear()
    d["y"] = self.conv(x)
    return [v * 2 for v in d.values()]


def append(self, d):
    d["list"].append(self.conv(d["x"]))
    return d["list"][-1]


def insert_and_loop(self, d):
    d["list"].insert(0, self.conv(d["x"]))
    d["list"].extend([d["x"]] * 2)
    return [x * len(d["list"]) for x in d["list"]]


def add_in_place(self, d):
    d["list"] += [self.conv(d["x"])]
    d["list"].reverse()
    return d["x"]


def pop_and_replace(self, d):
    x = d["list"].pop()
    d["list"][:] = [self.conv(x), x]
    del d["list"][1]
    return x


BODIES = [
    *(update, update_and_read, set_default, set_and_delete, merge, nested, clear_and_fill, append, insert_and_loop),
    *(add_in_place, pop_and_replace),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_what_forward_puts_into_its_arguments(body):
    model = Net(body).eval()
    given = {"x": image(), "inner": {"list": []}, "list": [image()]}
    quantized = bw.prepare(model, (copy.deepcopy(given),))
    assert bw.ledger_of(quantized).islands == {}
    for _ in range(2):
        ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
        with torch.no_grad():
            assert same(quantized(ours), model(theirs))
        assert same(ours, theirs)
        assert not same(ours, given)


def write_into_an_item(self, d):
    d["x"][:, 0] = 0
    return self.conv(d["x"])


def write_into_what_was_put_there(self, d):
    y = self.conv(d["x"])
    d.update(y=y)
    d["y"].relu_()
    return y * 2


def write_into_the_original(self, d):
    y = self.conv(d["x"])
    d["list"].append(y)
    y.relu_()
    return d["list"][-1] * 2


def write_into_all(self, d):
    for value in d["list"]:
        value.mul_(3)
    d["inner"]["list"].append(self.conv(d["list"][0]))
    d["inner"]["list"][0].clamp_(0, 1)
    return d["inner"]["list"][0] + 1


def write_into_a_default(self, d):
    y = self.conv(d["x"])
    d.setdefault("y", y).neg_()
    return y * 2


WRITES = [
    *(write_into_an_item, write_into_what_was_put_there, write_into_the_original, write_into_all, write_into_a_default),
]


@pytest.mark.parametrize("body", WRITES, ids=lambda f: f.__name__)
def test_a_write_into_an_item_is_one_into_the_tensor(body):
    model = Net(body).eval()
    given = {"x": image(), "inner": {"list": []}, "list": [image()]}
    quantized = bw.prepare(model, (copy.deepcopy(given),))
    assert bw.ledger_of(quantized).islands == {}
    ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
    with torch.no_grad():
        assert same(quantized(ours), model(theirs))
    assert same(ours, theirs)
    assert not same(ours, given)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (lambda x: deque([x], maxlen=3), lambda self, d: d.append(self.conv(d[0])) or d),
        (lambda x: SimpleNamespace(x=x), lambda self, o: setattr(o, "y", self.conv(o.x)) or o),
        (lambda x: SimpleNamespace(x=x), lambda self, o: o.x[:, 0].neg_() + self.conv(o.x)[:, 0]),
    ],
)
def test_deques_and_objects_that_compare_what_they_hold(kind, body):
    model, x = Net(body).eval(), image()
    quantized = bw.prepare(model, (kind(x.clone()),))
    ours, theirs = kind(x.clone()), kind(x.clone())
    with torch.no_grad():
        assert difference(model(theirs), quantized(ours)) == ""
    assert difference(theirs, ours) == ""
    assert difference(kind(x), ours) != ""


def remember(self, x):
    self.log.append(self.conv(x))
    self.seen["last"] = x
    return self.log[-1] + 1


def start_anew(self, x):
    self.log.clear()
    self.log.append(self.conv(x))
    self.seen.setdefault("first", []).append(x)
    return self.log[0] * 2


@pytest.mark.parametrize("body", [remember, start_anew])
def test_what_forward_puts_into_its_own_containers(body):
    original = nn.Sequential(nn.Identity(), Net(body, log=[], seen={})).eval()
    quantized = bw.prepare(original, image())
    assert bw.ledger_of(quantized).islands == {}
    ours, theirs = quantized.get_submodule("1"), original[1]
    assert (ours.log, ours.seen, theirs.log, theirs.seen) == ([], {}, [], {})
    for _ in range(2):
        x = image()
        with torch.no_grad():
            assert torch.equal(quantized(x), original(x))
        assert same((ours.log, ours.seen), (theirs.log, theirs.seen))


def test_a_file_does_without_what_the_model_only_remembers(tmp_path):
    quantized = bw.calibrate(bw.prepare(Net(remember_only, log=[]).eval(), image()), [image()])
    bw.export(quantized, tmp_path / "net.onnx")
    assert bw.verify(quantized, tmp_path / "net.onnx", [image()], latency=False).ok


def remember_only(self, x):
    y = self.conv(x)
    self.log.append(y)
    return y.relu()


@pytest.mark.parametrize(
    ("body", "other", "said"),
    [
        (lambda self, d: self.conv(d["x"]) * ("mask" in d), {"mask": torch.ones(())}, "if at"),
        (lambda self, d: sum(d.values()), {"more": torch.ones(())}, "the keys at"),
        (lambda self, d: self.conv(d["x"]) if d.get("mask") is None else d["x"], {"mask": 1}, "what was read at"),
    ],
)
def test_another_key_is_refused_where_python_asked(body, other, said):
    """The graph was recorded without it, and would go the wrong way."""
    x = image()
    quantized = bw.prepare(Net(body).eval(), ({"x": x},))
    quantized({"x": x})
    with pytest.raises(CaptureError, match=f"take another path through the model than the example inputs: {said}"):
        quantized({"x": x, **other})
