"""The list of schedules: the document names every shipped one, with its stage, default, aliases and options."""

import re
from pathlib import Path

from bitwright.graph import SCHEDULES
from bitwright.graph.rewriting.order import order_schedules

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "schedules.md"


def shipped(stage):
    return [s for s in order_schedules(stage) if s.source.__module__.startswith("bitwright.graph.")]


def test_the_page_tells_all_and_nothing_else():
    text = PAGE.read_text()
    for stage in ("simplify", "fuse"):
        part = text.split(f"## {stage.title()}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)`(?: \(`(\w+)`\))? \| (on|off) \| (.*) \|$", part, re.MULTILINE)
        told = {name: (on == "on", set(re.findall(r"`(\w+): ", rest))) for name, _, on, rest in rows}
        assert told == {s.name: (s.default, set(s.options)) for s in shipped(stage)}
        assert all(SCHEDULES.get(alias).name == name for name, alias, _, _ in rows if alias)


def test_the_order():
    names = [s.name for s in shipped("simplify")]
    assert names[0] == "functionalize"
    assert names[-1] == "remove_dead_code"
    assert names.index("split_attention") < names.index("decompose_attention") < names.index("fold_shape_arithmetic")
    assert names.index("fold_shape_arithmetic") < names.index("unbind_to_select") < names.index("fold_constants")
    fuse = [s.name for s in shipped("fuse")]
    assert fuse == ["fold_batchnorm", "fold_scale", "fold_before", "disable_unnecessary_quant"]


def test_only_exact_schedules_are_on():
    inexact = {s.name for stage in ("simplify", "fuse") for s in shipped(stage) if s.default and s.tolerance}
    assert inexact == {"split_attention"}  # for the native kernel's masks
