"""A model whose preparation waits for its first call: for toolkits that asked for no example inputs.

Until then it is a copy of the float model, of its class, with its names and attributes. On the first call it prepares
itself with the call's arguments as example inputs; it stays the same object with the same Parameters, so an optimizer
made before goes on with them.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from bitwright.graph import Inputs
from bitwright.preparation.ledger import WAITING

Finish = Callable[[nn.Module, Inputs], nn.Module]


@dataclass
class _Plan:
    finish: Finish
    origin: type[nn.Module]
    then: list[Callable[[nn.Module], None]] = field(default_factory=list)


class _Pending(nn.Module):
    """Mixed before the class of a float model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare with these inputs, and run."""
        complete(self, Inputs(args, kwargs))
        return self.forward(*args, **kwargs)


def postpone(model: nn.Module, finish: Finish) -> nn.Module:
    """A copy of ``model`` that becomes what ``finish(model, inputs)`` makes of it, once it is called."""
    waiting = copy.deepcopy(model)
    origin = type(waiting)
    waiting.__dict__[WAITING] = _Plan(finish, origin)
    waiting.__class__ = type(origin.__name__, (_Pending, origin), {"__module__": origin.__module__})
    return waiting


def is_pending(model: nn.Module) -> bool:
    """Whether a model still waits for its first call."""
    return isinstance(model, _Pending)


def when_prepared(model: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Do something with a prepared model: now, or as soon as it is prepared."""
    if is_pending(model):
        model.__dict__[WAITING].then.append(action)
    else:
        action(model)


def complete(model: nn.Module, inputs: Inputs) -> None:
    """Prepare a waiting model in place; if that is refused, it goes on waiting."""
    plan, waiting = model.__dict__.pop(WAITING), type(model)
    model.__class__ = plan.origin
    try:
        made = plan.finish(model, inputs)
    except BaseException:
        model.__class__ = waiting
        model.__dict__[WAITING] = plan
        raise
    _take_parameters(made, model)
    model.__dict__.clear()
    model.__dict__.update(made.__dict__)
    model.__class__ = type(made)
    if isinstance(model, fx.GraphModule):
        model.graph.owning_module = model
    for action in plan.then:
        action(model)


def keep_modes(made: nn.Module, origin: nn.Module) -> None:
    """Put the modules of a prepared model into the modes of the one it was made from."""
    modes = {path: module.training for path, module in origin.named_modules()}
    for path, module in made.named_modules():
        module.training = modes.get(path, origin.training)


def _take_parameters(made: nn.Module, origin: nn.Module) -> None:
    """Give a prepared model the very Parameters of the one it was made from, but for those that were changed."""
    modules = dict(made.named_modules(remove_duplicate=False))
    for path, module in origin.named_modules(remove_duplicate=False):
        twin = modules.get(path)
        for name, value in module._parameters.items():
            present = twin._parameters.get(name) if twin is not None else None
            if twin is not None and value is not None and present is not None and torch.equal(present, value):
                twin._parameters[name] = value
