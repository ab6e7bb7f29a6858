"""Demand: which tensors must be quantized, how, for which users, and which of them share a scale."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from bitwright.backends import Backend
from bitwright.graph.facts import copy_facts, facts, shape_of, user_name
from bitwright.graph.names import add_internal, module_of
from bitwright.graph.walks import first_input
from bitwright.nn.layer import QuantLayer
from bitwright.preparation.decisions import Decision, Decisions, Verdict
from bitwright.preparation.float_tensors import is_float
from bitwright.preparation.operator_recipe import make_quantizer, needed_spec
from bitwright.preparation.region import Region
from bitwright.preparation.signs import never_negative
from bitwright.recipe import TensorRecipe
from bitwright.spec import NumberFormat, PerTensor, QuantSpec

Key = tuple[fx.Node, str]  # a tensor, and how it is quantized


@dataclass
class Edge:
    """A tensor that an operator reads.

    Attributes:
        user: the operator.
        tensor: the tensor it reads.
        source: the node that produces the tensor's values.
        carrier: the first node that moves the values on from there, if any.
        recipe: how to quantize them, or that they stay float.
        key: the request that serves it, once settled; None if they stay float.
    """

    user: fx.Node
    tensor: fx.Node
    source: fx.Node
    carrier: fx.Node | None
    recipe: TensorRecipe
    key: Key | None = None


@dataclass
class _Request:
    recipe: TensorRecipe
    users: set[fx.Node] = field(default_factory=set)


class Demand:
    """Collects requests, merging equal requests for one tensor.

    If both ends of an edge have a rule, the reader's comes first, then the producer's, then the recipe.
    """

    def __init__(self, decisions: Decisions, by_hand: set[fx.Node], backend: Backend) -> None:
        self.decisions, self.backend = decisions, backend
        self.by_hand = by_hand
        self.edges: list[Edge] = []
        self.floating: dict[fx.Node, set[fx.Node]] = defaultdict(set)  # readers of a tensor that want it float
        self.divided: set[fx.Node] = set()  # operators that move values whose readers want them quantized differently
        self.requests: dict[Key, _Request] = {}
        self.of_tensor: dict[fx.Node, list[Key]] = defaultdict(list)
        self.parent: dict[Key, Key] = {}
        self._texts: dict[int, str] = {}

    def walk(self, tensor: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Go back from a tensor over operators that only move values, to the node that produces the values."""
        start, first_user = tensor, None
        while (decision := self.decisions.get(tensor)) is not None and decision.verdict is Verdict.CARRIED:
            before = first_input(tensor)
            if before is None or facts(before).written:
                break
            tensor, first_user = before, tensor
        return (tensor, first_user) if is_float(tensor) else (start, None)

    def input(self, user: fx.Node, tensor: fx.Node, decision: Decision) -> Edge:
        source, carrier = self.walk(tensor)
        recipe = decision.recipe.input
        producer = self._producer(source)
        if producer is not None and not decision.insists("input"):
            recipe = producer.recipe.output
        edge = Edge(user, tensor, source, carrier, recipe)
        self.edges.append(edge)
        if recipe.floating:
            self.floating[tensor].add(user)
        return edge

    def settle(self) -> None:
        """Turn edges into requests: at the producer of the values, or after what moves them if readers disagree."""
        self.divided = self._find_divided()
        for edge in self.edges:
            carrier = None if edge.carrier in self.divided else edge.carrier
            if edge.source in self.by_hand and edge.carrier is carrier:
                edge.key = (edge.source, "")
            elif not edge.recipe.floating:
                edge.key = (edge.source if carrier else edge.tensor, self._text(edge.recipe))
                self._ask(edge.key, edge.recipe).users.add(carrier or edge.user)

    def _find_divided(self) -> set[fx.Node]:
        asked: dict[fx.Node, set[str]] = defaultdict(set)
        for edge in self.edges:
            if edge.carrier is not None:
                asked[edge.carrier].add(self._text(edge.recipe))
        return {carrier for carrier, texts in asked.items() if len(texts) > 1}

    def output(self, tensor: fx.Node, recipe: TensorRecipe) -> Key:
        """Request that a result be quantized for all its users."""
        key = (tensor, self._text(recipe))
        self._ask(key, recipe).users.update(tensor.users)
        return key

    def first_request(self, tensor: fx.Node) -> list[Key]:
        """The request that serves all users of a tensor that have none of their own, if any."""
        return [(tensor, "")] if tensor in self.by_hand else self.of_tensor.get(tensor, [])[:1]

    def _producer(self, tensor: fx.Node) -> Decision | None:
        """The producer of a tensor, if its rule says how to quantize the result."""
        decision = self.decisions.get(tensor)
        while decision is not None and decision.verdict is Verdict.FUSED and not decision.insists("output"):
            tensor = tensor.all_input_nodes[0]
            decision = self.decisions.get(tensor)
        return decision if decision is not None and decision.insists("output") else None

    def _ask(self, key: Key, recipe: TensorRecipe) -> _Request:
        if key not in self.requests:
            self.requests[key] = _Request(recipe)
            self.of_tensor[key[0]].append(key)
            self.parent[key] = key
        return self.requests[key]

    def _text(self, recipe: TensorRecipe) -> str:
        """A recipe as text, to merge those that ask for the same; the decisions keep them alive."""
        if id(recipe) not in self._texts:
            self._texts[id(recipe)] = recipe.model_dump_json()
        return self._texts[id(recipe)]

    def find(self, key: Key) -> Key:
        """The request whose quantizer serves another."""
        while self.parent[key] != key:
            key = self.parent[key]
        return key

    @cached_property
    def served(self) -> dict[Key, list[Key]]:
        """All requests by the one whose quantizer serves them, once it is settled which share one."""
        served: dict[Key, list[Key]] = defaultdict(list)
        for key in self.parent:
            served[self.find(key)].append(key)
        return served

    def share(self, keys: list[Key]) -> None:
        """Make several requests share one quantizer."""
        roots = [self.find(k) for k in keys if k in self.parent]
        for root in roots[1:]:
            if root != roots[0]:
                self.parent[root] = roots[0]

    def share_inputs_of_repeated_modules(self, region: Region) -> None:
        """Give a module that is called several times one input quantizer, unless it tells its calls apart."""
        calls: dict[object, list[Key]] = defaultdict(list)
        for edge in self.edges:
            if edge.user.op == "call_module" and edge.key is not None and not tells_calls_apart(edge.user, region):
                calls[edge.user.target].append(edge.key)
        for inputs in calls.values():
            self.share(inputs)

    def insert(self, region: Region) -> dict[Key, str]:
        """Insert the quantizers into the graph; return the name of the one that serves each request."""
        order = {node: i for i, node in enumerate(region.model.graph.nodes)}
        names: dict[Key, str] = {(node, ""): str(node.target) for node in self.by_hand}
        for tensor, keys in sorted(self.of_tensor.items(), key=lambda item: order[item[0]]):
            readers = {key: self._readers(key, order) for key in keys}
            for key, users in readers.items():
                if not users:  # all want it in float
                    continue
                root = self.find(key)
                if root not in names:
                    wish = tensor.name if key == keys[0] else f"{tensor.name}_for_{users[0].name}"
                    names[root] = self._add_quantizer(region, root, tensor, wish)
                names[key] = names[root]
                own = names[key].rpartition(".")[2].removeprefix(tensor.name) if root == key else ""
                _insert_call(region, names[key], tensor, f"{tensor.name}{own}_quantized", users)
        return names

    def _add_quantizer(self, region: Region, root: Key, tensor: fx.Node, wish: str) -> str:
        recipe = self._in_fixed_range(root, self.requests[root].recipe)
        part = f" ({tensor.name})" if facts(tensor).part_of else ""
        label = f"output of {region.named(user_name(tensor))}{part}"
        spec = self._by_sign(root, recipe, _fitting(recipe, tensor), region)
        return add_internal(region.model, "quantizers", wish, make_quantizer(recipe, spec, label))

    def _by_sign(self, root: Key, recipe: TensorRecipe, spec: QuantSpec, region: Region) -> QuantSpec:
        """The unsigned spec, if that is wished and no tensor that shares the quantizer can be negative."""
        wished = recipe.nonnegative == "unsigned" and spec.symmetric and spec.format.signed
        if not wished or spec.format.floating:
            return spec
        unsigned = spec.with_(format=NumberFormat(f"uint{spec.bits}"))
        fits = self.backend.why_not("activations", unsigned) is None
        return unsigned if fits and all(never_negative(key[0], region.model) for key in self.served[root]) else spec

    def _in_fixed_range(self, root: Key, recipe: TensorRecipe) -> TensorRecipe:
        """A recipe with the range that the target fixes for a tensor, unless it shares its scale with others."""
        decision = self.decisions.get(root[0])
        ends = None if decision is None else self.backend.operators.ranges.get(decision.kind)
        if ends is None or len(self.served[root]) > 1:
            return recipe
        options = dict(zip(("low", "high"), ends, strict=True))
        return recipe.model_copy(update={"observer": "FixedRangeObserver", "observer_options": options})

    def _readers(self, key: Key, order: dict[fx.Node, int]) -> list[fx.Node]:
        """The readers of a quantized tensor: those that asked, and all others if an integer operator produces it."""
        tensor = key[0]
        readers = set(self.requests[key].users)
        if key == self.of_tensor[tensor][0]:
            others = {u for k in self.of_tensor[tensor][1:] for u in self.requests[k].users}
            if self._is_integer(tensor):
                readers |= {u for u in tensor.users if u not in self.divided}
            readers -= others | self.floating[tensor]
        return sorted(readers, key=lambda n: order.get(n, len(order)))

    def _is_integer(self, tensor: fx.Node) -> bool:
        decision = self.decisions.get(tensor)
        return decision is not None and decision.verdict is not Verdict.CARRIED and not decision.keeps_float_result


def tells_calls_apart(node: fx.Node, region: Region) -> bool:
    """Whether a node calls a layer that can have a separate input quantizer for each call."""
    cls = type(module_of(node, region.model))
    return issubclass(cls, QuantLayer) and cls.forward is QuantLayer.forward


def _insert_call(region: Region, quantizer: str, tensor: fx.Node, name: str, users: list[fx.Node]) -> None:
    """Make ``users`` read a tensor through a quantizer."""
    with region.model.graph.inserting_after(tensor):
        call = region.model.graph.create_node("call_module", quantizer, (tensor,), name=name)
    copy_facts(tensor, call)
    for user in users:
        user.replace_input_with(tensor, call)


def _fitting(recipe: TensorRecipe, tensor: fx.Node) -> QuantSpec:
    """The spec asked for, with one scale for a tensor that has no such axis."""
    spec, shape = needed_spec(recipe), shape_of(tensor)
    axis = getattr(spec.granularity, "axis", None)
    if axis is None or shape is None or -len(shape) <= axis < len(shape):
        return spec
    return spec.with_(granularity=PerTensor())
