"""The picture of a graph: nothing missing, nothing overlapping, edges downwards, and large graphs by module."""

import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.graph.sketch import NodeSketch, sketch
from bitwright.preparation import Verdict
from bitwright.reporting.graph import draw, pictures

EVIL = "<b>\"&'</svg>"


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 2, 1)
        self.norm, self.up = nn.BatchNorm2d(4), nn.Upsample(scale_factor=2)

    def forward(self, x):
        wide = torch.relu(self.norm(self.first(x)))
        deep = torch.erf(self.second(nn.functional.max_pool2d(wide, 2)))
        batch = x.size(0)
        return self.last(torch.cat([self.up(deep), wide], 1)).reshape(batch, -1), deep


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))) for _ in range(12)
        )

    def forward(self, x):
        for stage in self.stages:
            x = stage(x) + x
        return x


class Boxes:
    """What a picture shows, read from its SVG."""

    def __init__(self, svg):
        root = ElementTree.fromstring(str(svg))
        self.size = float(root.get("width")), float(root.get("height"))
        self.title = root.find("title").text
        self.edges = [e.get("d") for e in root.findall("path")]
        self.groups = root.findall("g")
        self.labels = [g.find("text").text for g in self.groups]
        self.roles = {label: g.get("class") for label, g in zip(self.labels, self.groups, strict=True)}
        self.rects = [[float(g.find("rect").get(k)) for k in ("x", "y", "width", "height")] for g in self.groups]
        self.titles = {label: g.find("title").text for label, g in zip(self.labels, self.groups, strict=True)}

    def check(self):
        for x, y, width, height in self.rects:
            assert x >= 0
            assert y >= 0
            assert x + width <= self.size[0]
            assert y + height <= self.size[1]
        for (x1, y1, w1, _), (x2, y2, w2, _) in itertools.combinations(self.rects, 2):
            assert y1 != y2 or x1 + w1 < x2 or x2 + w2 < x1, "two boxes overlap"
        for path in self.edges:
            heights = [float(y) for y in re.findall(r"[\dM] ?-?[\d.]+ (-?[\d.]+)", path)]
            assert heights == sorted(heights), "an edge goes upwards"


def prepared(net, *shape):
    return bw.prepare(net.eval(), torch.randn(*shape))


def test_before_and_after():
    model = prepared(UNet(), 2, 3, 4, 4)
    (picture,) = pictures(model, bw.ledger_of(model))
    assert picture.title == "The whole model"
    before, after = Boxes(picture.before), Boxes(picture.after)
    before.check()
    after.check()
    names = ["x", "first", "norm", "relu", "max_pool2d", "second", "erf", "up", "cat", "last", "reshape", "output"]
    assert before.labels == names
    assert {n for n in names if "gone" in before.roles[n]} == {"norm"}
    operators = [n for n in names if n != "norm"]
    assert [n for n in after.labels if "int" not in n] == operators
    roles = {n: after.roles[n].removeprefix("operator ") for n in operators}
    assert roles["first"] == roles["cat"] == "integer"
    assert roles["relu"] == "fused"
    assert roles["max_pool2d"] == roles["up"] == "carried"
    assert roles["erf"] == "float"
    assert (roles["x"], roles["output"]) == ("input", "output")
    assert after.labels.count("uint8") == sum(s.role == "quantizer" for s in sketch(model))
    assert after.titles["first"] == "first QuantConv2d"
    assert after.titles["uint8"].endswith("uint8 affine tensor")


def test_every_edge_is_drawn_and_avoids_other_boxes():
    spots = [NodeSketch("a", "a", "", "", "input", ())]
    spots += [NodeSketch(n, n, "neg", "", "operator", (p,)) for p, n in zip("abc", "bcd", strict=True)]
    spots.append(NodeSketch("e", "e", "add", "", "operator", ("d", "a")))
    drawn = Boxes(draw(spots, {}))
    drawn.check()
    assert len(drawn.edges) == 3 + 2 + 3  # the long one bends at each of three layers
    straight = [box[0] for box in drawn.rects]
    assert len(set(straight)) == 1
    long = [float(x) for d in drawn.edges for x in re.findall(r"M(-?[\d.]+) ", d) if float(x) > straight[0] + 190]
    assert len(long) == 6


def test_a_large_graph_is_drawn_by_modules():
    model = prepared(Deep(), 2, 4)
    (picture,) = pictures(model, bw.ledger_of(model))
    after = Boxes(picture.after)
    after.check()
    assert len(sketch(model)) > 200
    assert len(after.labels) <= 120
    modules = [label for label in after.labels if after.roles[label] == "module"]
    assert modules[:2] == ["stages.0.0 · 2", "stages.0.1 · 2"]
    assert after.titles["stages.0.1 · 2"] == "stages.0.1: 2 operators, 1 integer, 1 fused"
    first = next(g for g in after.groups if g.find("text").text == "stages.0.1 · 2")
    strips = {r.get("class"): float(r.get("width")) for r in first.findall("rect")[1:]}
    assert strips == {"integer": 95.0, "fused": 95.0}


def test_a_graph_without_modules_stays_a_graph_of_nodes():
    spots = [NodeSketch("n0", "n0", "", "", "input", ())]
    spots += [NodeSketch(f"n{i}", f"n{i}", "neg", "", "operator", (f"n{i - 1}",)) for i in range(1, 200)]
    assert len(Boxes(draw(spots, {})).labels) == 200


def test_names_cannot_escape_into_the_page():
    spot = NodeSketch("a", EVIL * 3, EVIL, EVIL, "operator", ())
    drawn = Boxes(draw([spot], {"a": Verdict.FLOAT}, title=EVIL))
    assert drawn.title == EVIL
    assert drawn.labels == ["…" + (EVIL * 3)[-26:]]
    assert drawn.titles[drawn.labels[0]] == f"{EVIL * 3} {EVIL}"


def test_nothing_at_all():
    assert Boxes(draw([], {})).labels == []


@pytest.mark.parametrize("known", [True, False])
def test_every_graph_of_a_model_with_an_island_has_a_picture(known):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
            self.tail = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())

        def forward(self, x):
            return self.tail(self.body(x)) if float(x.sum()) != 1.5 else x

    model = prepared(Branch(), 1, 3, 2, 2)
    ledger = bw.ledger_of(model)
    if not known:
        ledger.before = {}
    made = pictures(model, ledger)
    assert [p.title for p in made] == ["body", "tail"]
    assert all((p.before is not None) is known for p in made)
    assert Boxes(made[1].after).roles["0"] == "operator integer"
