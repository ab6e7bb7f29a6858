"""``extra_fuse_dict``: chains of modules that the user's own methods fuse, before the model is prepared."""

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx, nn

from bitwright.compat.keys import section
from bitwright.compat.mqbench.fuser_method_mappings import DEFAULT_METHODS, Chain, ConvBNReLUFusion, Fuse
from bitwright.errors import ConfigError
from bitwright.graph import Inputs, capture_model
from bitwright.graph.names import put_submodule, qualified

_log = logging.getLogger(__name__)
KEYS = ["additional_fuser_method_mapping", "additional_fusion_pattern", "additional_qat_module_mapping"]


def read_fusions(given: object) -> tuple[dict[Chain, Fuse], dict[type[nn.Module], type[nn.Module]]]:
    """The methods by the chain of classes that each fuses, and the quantized modules by class."""
    config = section("extra_fuse_dict", given, KEYS)
    methods, patterns, modules = (section(key, config.get(key)) for key in KEYS)
    found: dict[Chain, Fuse] = {}
    for key, method in methods.items():
        if not callable(method):
            raise ConfigError(f"{KEYS[0]}: {_names(key)} needs a function of the modules, not {method!r}")
        found[_chain(key, KEYS[0])] = method
    for key, handler in patterns.items():
        chain = tuple(reversed(_chain(key, KEYS[1])))  # patterns are written from the last operator to the first
        found[chain] = _method_of(chain, handler, {**DEFAULT_METHODS, **found})
    for source, target in modules.items():
        if not (_is_module(source) and _is_module(target)):
            raise ConfigError(f"{KEYS[2]} must map module classes to module classes, not {source!r} to {target!r}")
    return found, dict(modules)


def fuse_chains(
    model: nn.Module, inputs: Inputs, methods: Mapping[Chain, Fuse], folds_norms: bool, **capturing: Any
) -> nn.Module:
    """A copy of ``model`` with every chain of modules fused in place of the first; the others pass values on.

    ``methods`` turn a chain into one module. If the backend folds norms, Bitwright's own methods need not run.
    """
    wanted = {c: m for c, m in methods.items() if not (folds_norms and DEFAULT_METHODS.get(c) is m)}
    if not wanted:
        return model
    classes = {type(m) for m in model.modules()}.intersection(itertools.chain(*wanted))
    captured = capture_model(model, inputs, leaves=classes, **capturing)
    whole = copy.deepcopy(model)
    done: set[str] = set()
    unused = set(wanted)
    for chain, paths in _find(captured.regions, sorted(wanted, key=len, reverse=True)):
        if done.isdisjoint(paths):
            _fuse(whole, paths, wanted[chain])
            done.update(paths)
            unused.discard(chain)
    for chain in unused:
        _log.warning("extra_fuse_dict: the model has no %s, one feeding only the next: nothing is fused", _names(chain))
    return whole


def _fuse(whole: nn.Module, paths: list[str], method: Fuse) -> None:
    modules = [whole.get_submodule(path) for path in paths]
    try:
        made = method(*modules)
    except Exception as error:
        raise ConfigError(
            f"{_title(method)} cannot fuse {', '.join(paths)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{_title(method)} must return the module that {', '.join(paths)} become, not {made!r}")
    put_submodule(whole, paths[0], made.train(modules[0].training))
    for path in paths[1:]:
        put_submodule(whole, path, nn.Identity())


def _find(regions: Mapping[str, fx.GraphModule], chains: list[Chain]) -> Iterator[tuple[Chain, list[str]]]:
    """The qualified names of the modules of every chain that feed only each other."""
    for prefix, region in regions.items():
        for chain, names in _find_in(region, chains):
            yield chain, [qualified(prefix, name) for name in names]


def _find_in(region: fx.GraphModule, chains: list[Chain]) -> Iterator[tuple[Chain, list[str]]]:
    calls = Counter(str(n.target) for n in region.graph.nodes if n.op == "call_module")
    for node in region.graph.nodes:
        for chain in chains:
            nodes = _single_file(node, len(chain))
            names = [str(n.target) for n in nodes if n.op == "call_module" and calls[str(n.target)] == 1]
            if tuple(type(region.get_submodule(n)) for n in names) == chain:
                yield chain, names
                break


def _single_file(node: fx.Node, length: int) -> list[fx.Node]:
    """At most so many nodes from ``node`` on, each the only one that reads the node before it."""
    nodes = [node]
    while len(nodes) < length and len(nodes[-1].users) == 1:
        nodes.append(next(iter(nodes[-1].users)))
    return nodes


def _chain(key: object, where: str) -> Chain:
    """A key as classes in the order written; ``(A, (B, C))`` is ``(A, B, C)``."""
    flat: list[Any] = []
    for part in key if isinstance(key, tuple | list) else (key,):
        flat += _chain(part, where) if isinstance(part, tuple | list) else [part]
    if not flat or not all(map(_is_module, flat)):
        raise ConfigError(f"{where}: a key must be a tuple of module classes, not {key!r}")
    return tuple(flat)


def _method_of(chain: Chain, handler: object, methods: Mapping[Chain, Fuse]) -> Fuse:
    if isinstance(handler, type) and issubclass(handler, ConvBNReLUFusion):
        if handler.fuse is not ConvBNReLUFusion.fuse:
            return handler(methods).fuse
        if chain not in methods:
            raise ConfigError(f"{KEYS[1]}: no method fuses {_names(chain)}; give one in {KEYS[0]}, in that order")
        return methods[chain]
    if callable(handler) and not isinstance(handler, type):
        return handler
    wanted = "ConvBNReLUFusion, a class derived from it or a function"
    raise ConfigError(f"{KEYS[1]}: {_names(chain)} needs {wanted}, not {handler!r}")


def _is_module(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, nn.Module)


def _names(chain: object) -> str:
    return f"({', '.join(getattr(c, '__name__', repr(c)) for c in (chain if isinstance(chain, tuple) else (chain,)))})"


def _title(method: Fuse) -> str:
    return getattr(method, "__name__", repr(method))
