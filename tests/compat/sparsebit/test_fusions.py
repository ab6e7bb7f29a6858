"""Custom fusions in Sparsebit's words: both generations of names, both stages, checkers that ask a call for its dim."""

import importlib
import sys
from typing import ClassVar

import pytest
import torch
from bitwright.compat.sparsebit.quantization.converters.base import (
    InputMatchingType,
    InputMatchType,
    MatcherNode,
    MatchingNode,
    ReplacePatternBase,
    ReplaceStrategy,
)
from torch import nn

from bitwright.compat.sparsebit.quantization import QuantModel, parse_qconfig
from bitwright.compat.sparsebit.quantization.converters import fuse_operations, register_schedule, simplifiers
from bitwright.compat.sparsebit.quantization.modules import Concat, Flatten
from bitwright.compat.sparsebit.quantization.quant_config import _C
from bitwright.errors import BitwrightError, ConfigError
from bitwright.graph import SCHEDULES
from tests.compat.sparsebit.nets import YAML

pytestmark = pytest.mark.usefixtures("own_plugins")


class Nested(nn.Module):
    """Two pairs of concats along the channels, one in the other, and a third that differs in its dims."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(12, 5, 1)

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        wide = torch.cat([torch.cat([a, b], dim=1), a], 1), torch.cat([torch.cat([b, a], 1), b], dim=1)
        return self.head(wide[0]) - self.head(wide[1]), torch.cat([torch.cat([a, b], 2), torch.cat([b, a], 2)], dim=1)


def merged(nodes_dict, model, transform_idx):
    first, anchor = nodes_dict["cat1"], nodes_dict["cat2"]
    tensors = [t for n in anchor.args[0] for t in (first.args[0] if n is first else [n])]
    with model.graph.inserting_after(anchor):
        return model.graph.create_node(
            op="call_function", target=torch.cat, args=(tensors, 1), name=f"merged_{transform_idx}"
        )


class Older(ReplacePatternBase):
    joint, strategy, op = False, ReplaceStrategy.APPLY_REPEAT, torch.cat

    def make_ops(self):
        checker = None if self.joint else lambda concat_node, module: module.dim == 1
        kinds = {"op_type": [self.op], "checker": checker, "input_match_type": InputMatchType.ALL}
        return [
            MatcherNode(name="cat1", inputs=[None, None], **kinds),
            MatcherNode(name="cat2", inputs=["cat1", None], **kinds),
        ]

    def make_matching_strategy(self):
        return self.strategy

    def make_joint_checkers(self):
        same = (("cat1", "cat2"), lambda cat1, cat2, modules: modules["cat1"].dim == modules["cat2"].dim)
        return [same] if self.joint else []

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        return merged(nodes_dict, model, transform_idx)


class Newer(Older):
    def make_nodes(self):
        checker = None if self.joint else lambda concat_node, module: module.dim == 1
        kinds = {"op_type": [self.op], "checker": checker, "input_match_type": InputMatchingType.ALL}
        return [
            MatchingNode("cat1", inputs=[None, None], **kinds),
            MatchingNode("cat2", inputs=["cat1", None], **kinds),
        ]

    def make_ops(self):
        raise AssertionError("the later generation says make_nodes")

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        return {"cat2": merged(nodes_dict, model, transform_idx)}


@pytest.mark.parametrize("stage", ["simplify", "fuse"])
@pytest.mark.parametrize("base", [Older, Newer])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("strategy", "op"), [(ReplaceStrategy.APPLY_REPEAT, torch.cat), (ReplaceStrategy.APPLY_ONCE, Concat)]
)
def test_checkers_of_concats(stage, base, joint, strategy, op):
    made = type("ReplacePattern", (base,), {"joint": joint, "strategy": strategy, "op": op})
    register_schedule("merge_concats", stage=stage, default=False)(made)
    torch.manual_seed(0)
    net, x = Nested().eval(), torch.randn(2, 3, 4, 4)
    qmodel = QuantModel(net, parse_qconfig(YAML.replace("SCHEDULE:", "SCHEDULE:\n  MERGE_CONCATS: True")))
    want = net(x)
    assert all(torch.equal(*pair) for pair in zip(qmodel(x), want, strict=True))
    calls = [node for node in qmodel.model.graph.nodes if node.target is torch.cat]
    # Both pairs become one concat of three, or the first of them; those of different dims stay.
    lengths = sorted(len(node.args[0]) for node in calls)
    assert lengths == ([2, 2, 2, 3, 3] if strategy is ReplaceStrategy.APPLY_REPEAT else [2, 2, 2, 2, 2, 3])
    qmodel.prepare_calibration()
    qmodel(x)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert 0 < float((qmodel(x)[0] - want[0]).detach().abs().max()) < 0.1


def test_a_function_that_moves_values_is_matched_by_its_old_name():
    register_schedule("find_flat", stage="fuse")(
        type("ReplacePattern", (_Finds,), {"make_ops": lambda self: [MatcherNode("flat", [None], [Flatten])]})
    )
    made = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 2)).eval()
    _Finds.found = []
    QuantModel(made, parse_qconfig(YAML), torch.randn(1, 3, 4, 4))
    assert [type(module) for module in _Finds.found] == [nn.Flatten]


class _Finds(ReplacePatternBase):
    found: ClassVar[list] = []

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        _Finds.found += modules_dict.values()


FILE = """
import torch
from bitwright.compat.sparsebit.quantization.converters.base import MatcherNode, ReplacePatternBase

class ReplacePattern(ReplacePatternBase):
    def make_ops(self):
        return [MatcherNode("act", [None], [torch.relu])]

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        with model.graph.inserting_after(nodes_dict["act"]):
            return model.graph.call_function(torch.sigmoid, nodes_dict["act"].args)
"""


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return torch.relu(self.conv(x))


@pytest.mark.parametrize("package", [simplifiers, fuse_operations])
def test_a_file_named_in_the_list_runs_as_its_switch_says(package, tmp_path, monkeypatch):
    (tmp_path / "relu_to_sigmoid.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = list(package.lists.fuse_list)
    package.lists.fuse_list.append("relu_to_sigmoid")
    try:
        assert set(package.lists.fuse_list) - set(before) == {"relu_to_sigmoid"}
        net, x = Activated().eval(), torch.randn(1, 3, 4, 4)
        _C.SCHEDULE.RELU_TO_SIGMOID = True  # the default of every config from now on
        assert torch.equal(QuantModel(net, parse_qconfig(YAML), x)(x), torch.sigmoid(net.conv(x)))
        off = parse_qconfig(YAML.replace("SCHEDULE:", "SCHEDULE:\n  RELU_TO_SIGMOID: False"))
        assert torch.equal(QuantModel(net, off, x)(x), net(x))
    finally:
        sys.modules.pop("relu_to_sigmoid")
        SCHEDULES.unregister("relu_to_sigmoid")
        del _C.SCHEDULE["RELU_TO_SIGMOID"]


def test_mistakes_in_lists_are_told():
    with pytest.raises(
        ConfigError, match=r"no module 'fuse_nothing' to take ReplacePattern from: put fuse_nothing\.py"
    ):
        simplifiers.lists.lists.append("fuse_nothing")
    with pytest.raises(ConfigError, match="json has no class ReplacePattern"):
        simplifiers.lists.lists += ["json"]
    monkey = parse_qconfig(YAML)
    monkey.SCHEDULE.FUSE_NOTHING = True
    with pytest.raises(BitwrightError, match=r"unknown schedule .fuse_nothing.|FUSE_NOTHING"):
        QuantModel(Activated(), monkey, torch.randn(1, 3, 4, 4))
