"""Schedules: what a user writes in a file of their own, registered, ordered, switched and run by prepare."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.graph import (
    InputMatchingType,
    InputMatchType,
    MatcherNode,
    MatchingNode,
    ReplacePatternBase,
    ReplaceStrategy,
    register_schedule,
)
from bitwright.nn import QuantConv2d, QuantOpr, register_qmodule
from bitwright.nn.mixins import QuantInputMixin
from bitwright.nn.registry import unregister_qmodule

pytestmark = pytest.mark.usefixtures("own_plugins")


class Cats(nn.Module):
    """Two concatenations in a row, on the same axis and on another."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        y = self.conv(x)
        same = torch.cat([torch.cat([y, F.relu(y)], 1), y, y], 1)
        other = torch.cat([torch.cat([y, y], 1), torch.cat([y, y], 1)], 2)
        return same, self.head(other)


def dim_of(node):
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)


def merge_cats(joint):
    @register_schedule("merge_cats", stage="simplify")
    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return [
                MatcherNode(
                    name="cat1",
                    inputs=[None],
                    op_type=[torch.cat],
                    checker=lambda node, module: module is torch.cat and dim_of(node) == 1,
                    input_match_type=InputMatchType.SUBSET,
                ),
                MatcherNode(
                    name="cat2",
                    inputs=["cat1"],
                    op_type=[torch.cat],
                    input_match_type=InputMatchType.SUBSET,
                ),
            ]

        def make_joint_checkers(self):
            return [(("cat1", "cat2"), joint)]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            first, second = nodes_dict["cat1"], nodes_dict["cat2"]
            assert modules_dict["cat1"] is torch.cat
            parts = []
            for part in second.args[0]:
                parts += first.args[0] if part is first else [part]
            with model.graph.inserting_after(second):
                return model.graph.create_node(
                    op="call_function", target=torch.cat, args=(parts, dim_of(second)), name=f"merged_{transform_idx}"
                )


def test_the_simplify_stage_with_a_joint_checker_and_subset():
    seen = []

    def joint(cat1, cat2, modules):
        seen.append(modules)
        return dim_of(cat1) == dim_of(cat2)

    merge_cats(joint)
    net, x = Cats().eval(), torch.randn(2, 3, 4, 4)
    model = bw.prepare(net, x, debug=True)
    assert all(s == {"cat1": torch.cat, "cat2": torch.cat} for s in seen)
    cats = [n for n in model.graph.nodes if n.target is torch.cat]
    assert sorted(len(n.args[0]) for n in cats) == [2, 2, 2, 4]
    assert "merge_cats: replaced cat_1" in bw.ledger_of(model).notes
    with torch.no_grad():
        for got, expected in zip(model(x), net(x), strict=True):
            assert torch.equal(got, expected)
    off = bw.prepare(net, x, recipe={"schedules": {"merge_cats": False}})
    assert sorted(len(n.args[0]) for n in off.graph.nodes if n.target is torch.cat) == [2, 2, 2, 2, 3]


def test_the_fuse_stage_makes_a_qmodule_in_the_place_of_two():
    """A user's own fusion: a convolution and what changes its sign become one, whose weight has the other sign."""

    class Negated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.head(torch.neg(self.conv(x)))

    @register_schedule("fold_sign", stage="fuse", after=["fold_batchnorm"], tolerance=1e-5)
    class ReplacePattern(ReplacePatternBase):
        done = "folded"

        def make_nodes(self):
            return [
                MatchingNode("conv", [None], [QuantConv2d], input_match_type=InputMatchingType.ALL),
                MatchingNode("neg", ["conv"], [torch.neg, "neg"], lambda node, module: node.op == "call_function"),
            ]

        def make_matching_strategy(self):
            return ReplaceStrategy.APPLY_REPEAT

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            module = copy.deepcopy(modules_dict["conv"])
            with torch.no_grad():
                module.weight.neg_()
                module.bias.neg_()
            name = f"negated_conv_{transform_idx}"
            model.add_module(name, module)
            with model.graph.inserting_after(nodes_dict["neg"]):
                new = model.graph.call_module(name, nodes_dict["conv"].args)
            return {"neg": new}

    net, x = Negated().eval(), torch.randn(2, 3, 5, 5)
    model = bw.prepare(net, x, debug=True)
    ledger = bw.ledger_of(model)
    assert "fold_sign: folded neg" in ledger.notes
    entries = {e.name: e for e in ledger.entries}
    assert entries["negated_conv_0"].verdict.value == "integer"
    assert entries["negated_conv_0"].weight.startswith("int")
    assert entries["conv"].reason == entries["neg"].reason == "replaced by negated_conv_0"
    assert [str(n.target) for n in model.graph.nodes if n.op == "call_module" and "quantizer" not in str(n.target)] == [
        "negated_conv_0",
        "head",
    ]
    with torch.no_grad():
        assert torch.allclose(model(x), net(x), atol=1e-6)
        bw.calibrate(model, [x])
        assert not torch.equal(model(x), net(x))
        assert torch.allclose(model(x), net(x), atol=0.2)


@pytest.mark.parametrize("as_function", [True, False])
def test_a_float_layer_made_in_the_fuse_stage_is_quantized_as_well(as_function):
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4, 4, 1, 1))
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return torch.square(self.conv(x)) + 0 * self.scale.sum()

    @register_schedule("square_to_conv", stage="fuse")
    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return [MatcherNode("square", [None], [torch.square])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            (x,) = nodes_dict["square"].args
            if as_function:
                weight = model.graph.get_attr("scale")
                return model.graph.call_function(F.conv2d, (x, weight), name="made")
            return model.graph.call_module(self.add_module(model, "made", nn.Conv2d(4, 4, 1)), (x,))

    net, x = Squared().eval(), torch.randn(2, 3, 4, 4)
    model = bw.prepare(net, x)
    entry = next(e for e in bw.ledger_of(model).entries if e.name == "made")
    assert entry.verdict.value == "integer"
    assert entry.weight.startswith("int")
    calls = [model.get_submodule(n.target) for n in model.graph.nodes if n.op == "call_module"]
    assert sum(isinstance(m, QuantInputMixin) for m in calls) == 2
    bw.calibrate(model, [x])
    with torch.no_grad():
        assert model(x).shape == (2, 4, 4, 4)


class Concat(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, *tensors):
        return torch.cat(tensors, self.dim)


@pytest.fixture
def qconcat():
    @register_qmodule(sources=[Concat])
    class QConcat(QuantOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self.dim = org_module.dim

        def forward(self, *tensors):
            return torch.cat([self.input_quantizer(t) for t in tensors], self.dim)

    yield QConcat
    unregister_qmodule(QConcat)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_document_as_printed(qconcat, enabled, tmp_path):
    """Seed 003, word for word where it has words: its checker, its joint checker, its way to make a node, its YAML."""

    @register_schedule("name_of_your_transformation_file", stage="fuse", default=False)
    class ReplacePattern(ReplacePatternBase):
        def make_ops(self):
            return [
                MatcherNode(
                    name="cat1",
                    inputs=[None],
                    op_type=[qconcat],
                    checker=lambda concat_node, module: module.dim == 1,
                    input_match_type=InputMatchType.SUBSET,
                ),
                MatcherNode(
                    name="cat2",
                    inputs=["cat1"],
                    op_type=[qconcat],
                    checker=lambda concat_node, module: module.dim == 1,
                    input_match_type=InputMatchType.SUBSET,
                ),
            ]

        def make_matching_strategy(self):
            return ReplaceStrategy.APPLY_NOINTERSECT_REPEAT

        def make_joint_checkers(self):
            return [(("cat1", "cat2"), lambda cat1, cat2, modules: modules["cat1"].dim == modules["cat2"].dim)]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            cat1, node_to_replace = nodes_dict["cat1"], nodes_dict["cat2"]
            inputs = [i for n in node_to_replace.args for i in (cat1.args if n is cat1 else [n])]
            new_module_name = f"merged_concat_{transform_idx}"
            model.add_module(new_module_name, copy.deepcopy(modules_dict["cat2"]))
            with model.graph.inserting_after(node_to_replace):
                new_node = model.graph.create_node(
                    op="call_module",
                    target=new_module_name,
                    args=tuple(inputs),
                    name=new_module_name,
                )
            return new_node

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(20, 2, 1)
            self.a, self.b, self.c, self.d = (Concat(d) for d in (1, 1, 1, 2))

        def forward(self, x):
            y = self.conv(x)
            wide = self.c(y, self.b(y, self.a(y, torch.relu(y))), y)
            return self.head(wide), self.d(wide, wide)

    file = tmp_path / "recipe.yaml"
    file.write_text(f"SCHEDULE:\n    NAME_OF_YOUR_TRANSFORMATION_FILE: {enabled}\n")
    net, x = Net().eval(), torch.randn(2, 3, 4, 4)
    model = bw.prepare(net, x, recipe=file, debug=True)
    called = [str(n.target) for n in model.graph.nodes if n.op == "call_module" and "quantizers" not in str(n.target)]
    inner = ["merged_concat_1"] if enabled else ["a", "b", "c"]
    assert called == ["conv", *inner, "head", "d"]
    with torch.no_grad():
        assert all(torch.equal(got, want) for got, want in zip(model(x), net(x), strict=True))
        bw.calibrate(model, [x])
        assert all(torch.allclose(got, want, atol=0.1) for got, want in zip(model(x), net(x), strict=True))
    verdicts = {e.name: e.verdict.value for e in bw.ledger_of(model).entries}
    assert verdicts[inner[-1]] == "integer"
