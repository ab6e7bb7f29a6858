"""ReplacePatternBase: what a schedule's author writes: a pattern and its replacement."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import fx, nn

from bitwright.graph.match.node import MatcherNode
from bitwright.graph.names import container, free_name, node_name

Nodes = dict[str, fx.Node]
Called = dict[str, Any]
Replacement = fx.Node | Sequence[fx.Node | None]


class ReplaceStrategy(Enum):
    """Which of the matches are rewritten, and whether the graph is searched again afterwards.

    ========================  ============================================================  ========
    name                      rewritten after one search                                    repeated
    ========================  ============================================================  ========
    APPLY_NOINTERSECT         all matches that share no node with one before                no
    APPLY_NOINTERSECT_REPEAT  the same                                                      yes
    APPLY_INTERSECT           all matches that still hold when their turn comes             no
    APPLY_ONE                 the first match                                               no
    APPLY_ONE_REPEAT          one after the other, each on the graph that the last one left    yes
    ========================  ============================================================  ========

    ``APPLY_ONCE``, ``APPLY_REPEAT`` and ``APPLY_INTERSECT_REPEAT`` are other names of the last two. The very same
    nodes are never rewritten twice.
    """

    APPLY_NOINTERSECT_REPEAT = "apply_nointersect_repeat"
    APPLY_NOINTERSECT = "apply_nointersect"
    APPLY_INTERSECT = "apply_intersect"
    APPLY_ONE_REPEAT = "apply_one_repeat"
    APPLY_ONE = "apply_one"
    APPLY_INTERSECT_REPEAT = "apply_one_repeat"
    APPLY_REPEAT = "apply_one_repeat"
    APPLY_ONCE = "apply_one"

    @property
    def repeats(self) -> bool:
        """Whether the graph is searched again after it was rewritten."""
        return self.value.endswith("repeat")

    @property
    def intersects(self) -> bool:
        """Whether matches found together may share nodes."""
        return self not in (ReplaceStrategy.APPLY_NOINTERSECT, ReplaceStrategy.APPLY_NOINTERSECT_REPEAT)


class ReplacePatternBase:
    """A rewrite: subclass it, define what to match and what replaces it, and register the class.

    ::

        @register_schedule("hardswish", stage="simplify")
        class ReplacePattern(ReplacePatternBase):
            def make_ops(self):
                return [MatcherNode("act", inputs=[None], op_type=[nn.SiLU])]

            def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
                ...
                return new_node

    Options are keyword arguments of ``__init__`` with defaults (a dataclass will do); the recipe sets them by name.
    Each run on each model gets a new instance, so an instance may keep state.
    """

    done = "replaced"
    """The word for what this does, in its notes: "folded" gives "not folded: bn1, …"."""

    strategy = ReplaceStrategy.APPLY_NOINTERSECT_REPEAT
    """Which matches are rewritten, unless ``make_matching_strategy`` says so."""

    _notes: list[str]

    def begin(self, model: fx.GraphModule) -> None:
        """Look at the whole model before anything else is called, for checkers that need to know it."""

    def make_ops(self) -> Sequence[MatcherNode]:
        """The nodes of the pattern."""
        raise NotImplementedError(f"{type(self).__qualname__} must say in make_ops() what it matches")

    def make_nodes(self) -> Sequence[MatcherNode]:
        """The later name of ``make_ops``; either may be overridden."""
        return self.make_ops()

    def make_matching_strategy(self) -> ReplaceStrategy:
        """Which matches are rewritten."""
        return self.strategy

    def make_joint_checkers(self) -> Sequence[tuple[Sequence[str], Any]]:
        """Conditions on several nodes: ``(names, function)``, called with the nodes and ``modules`` by node name."""
        return []

    def get_new_graph(
        self,
        nodes_dict: dict[str, fx.Node],
        modules_dict: dict[str, Any],
        model: fx.GraphModule,
        transform_idx: int,
        /,
    ) -> "Replacement | Mapping[str, Replacement] | None":
        """Build the replacement of one match; new nodes go after the matched ones unless placed elsewhere.

        Args:
            nodes_dict: the matched nodes by their names in the pattern.
            modules_dict: likewise the modules, functions or parameters.
            model: the model, whose ``graph`` holds the nodes and to which modules can be added.
            transform_idx: 0 for the first match in this model, 1 for the next, …: for names of new modules.

        Returns:
            The anchor's replacement: a node or, for a call that returns several values, a tuple of nodes (None where
            nothing reads a value). For several anchors, a dict of these by anchor name. None if something was
            changed in place instead.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must say in get_new_graph() what takes the place")

    def finish(self, model: fx.GraphModule) -> None:
        """Finish what concerns all matches together, after each was rewritten."""

    def note(self, text: str) -> None:
        """Add a line to the notes, instead of the usual one about the nodes replaced."""
        self._notes.append(text)

    def near_miss(self, node: fx.Node, reason: str) -> None:
        """Note why a node was left unchanged."""
        self._notes.append(f"not {self.done}: {node_name(node)}, {reason}")

    def add_module(self, model: nn.Module, name: str, module: nn.Module) -> str:
        """Set ``module`` in ``model`` under the dotted name, or a free one like it; return it, for a node's target."""
        *path, last = name.split(".")
        parent = container(model, path)
        free = free_name(parent, last)
        parent.add_module(free, module)
        return ".".join((*path, free))

    def apply(self, model: fx.GraphModule) -> bool:
        """Rewrite a model with only this pattern; return whether anything changed."""
        from bitwright.graph.rewriting.rewrite import rewrite

        modified = rewrite(self, model, type(self).__qualname__).modified
        if modified:
            model.recompile()
        return modified
