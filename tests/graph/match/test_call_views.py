"""Checkers that ask a function for the settings of its call, as they would ask a module."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.errors import ScheduleError
from bitwright.graph.match import Matcher, MatcherNode, Pattern
from bitwright.graph.match.index import GraphIndex


class Net(nn.Module):
    def forward(self, a, b):
        return torch.cat([torch.cat([a, b], dim=1), torch.cat([a, b], 1)]), torch.cat([a, b]), F.softmax(a, 1), a.sum(1)


def found(pattern):
    model = fx.symbolic_trace(Net())
    return [[node.name for node in match.nodes.values()] for match in Matcher(pattern).find(GraphIndex(model))]


def pattern(op, checker, **more):
    return Pattern([MatcherNode("one", None, [op], checker=checker)], **more)


def test_arguments_of_calls_are_attributes():
    assert found(pattern(torch.cat, lambda concat_node, module: module.dim == 1)) == [["cat"], ["cat_1"]]
    assert found(pattern(torch.cat, lambda concat_node, module: module.dim == 0)) == [["cat_2"], ["cat_3"]]
    assert found(pattern(F.softmax, lambda node, module: module.dim == 1 and module.dtype is None)) == [["softmax"]]
    assert found(pattern(torch.Tensor.sum, lambda node, module: module.dim == 1)) == [["sum_1"]]
    assert found(pattern(torch.cat, lambda node, module: module is torch.cat)) != []


def test_joint_checkers_too():
    nodes = [
        MatcherNode("cat1", None, [torch.cat]),
        MatcherNode("cat2", ["cat1", None], [torch.cat]),
    ]
    joint = (("cat1", "cat2"), lambda cat1, cat2, modules: modules["cat1"].dim == modules["cat2"].dim + 1)
    assert found(Pattern(nodes, [joint])) == [["cat", "cat_2"]]


def test_what_a_call_does_not_have_is_said():
    with pytest.raises(ScheduleError, match=r"the checker of 'one', at .*cat.* has no argument 'axes'"):
        found(pattern(torch.cat, lambda node, module: module.axes == 1))
