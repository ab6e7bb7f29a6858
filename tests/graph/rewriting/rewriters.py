"""What the tests of the engine share: small captured nets, and schedules made of their parts."""

import torch
from torch import nn

from bitwright.graph import (
    MatcherNode,
    ReplacePatternBase,
    capture_model,
)


def captured(function, x=None, **modules):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, x):
            return function(self, x)

    net, x = Net().eval(), torch.randn(2, 3) if x is None else x
    return capture_model(net, x).model, net, x


def targets(model):
    return [n.target if isinstance(n.target, str) else n.target.__name__ for n in model.graph.nodes][1:-1]


def rewriter(ops, action, strategy=None, joint=(), **members):
    """A schedule class made of its parts."""

    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return ops

        def make_joint_checkers(self):
            return joint

        def make_matching_strategy(self):
            return strategy or super().make_matching_strategy()

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            return action(self, nodes_dict, modules_dict, model, transform_idx)

    for name, value in members.items():
        setattr(ReplacePattern, name, value)
    return ReplacePattern


def chain(self, x):
    for _ in range(5):
        x = torch.relu(x)
    return x


PAIR = [MatcherNode("a", [None], [torch.relu]), MatcherNode("b", ["a"], [torch.relu])]


def merge(self, nodes, modules, model, index):
    return model.graph.call_function(torch.relu, (nodes["a"].args[0],))
