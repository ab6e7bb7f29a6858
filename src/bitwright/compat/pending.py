"""Models prepared without example inputs, for toolkits that need none.

Inputs are searched for, and the model is prepared with them right away, with its quantizers, Parameters and graph. If
its first call takes another path than these inputs did, it is prepared again with that call's inputs, as the same
object with the same Parameters. If no inputs are found, it waits for its first call as a copy of the float model, and
refuses anything that would not hold afterwards: an optimizer (even one for parts of it, which that call finds), a
quantized checkpoint, its graph.
"""

import copy
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn

from bitwright.compat.example import find_inputs
from bitwright.errors import CaptureError, ConfigError
from bitwright.graph import Inputs
from bitwright.graph.inputs import flat_inputs
from bitwright.modes import eval_mode, random_numbers_kept
from bitwright.preparation import ledger_of
from bitwright.preparation.ledger import WAITING
from bitwright.quantizer import quantizers

Finish = Callable[[nn.Module, Inputs], nn.Module]
Action = Callable[[nn.Module], None]


class _FirstCall:
    """Replaces the ``forward`` of a model, prepared with found inputs or waiting, until its first call."""

    def __init__(self, model: nn.Module, origin: nn.Module, finish: Finish, found: Inputs | None) -> None:
        self.model, self.origin, self.finish, self.found = model, origin, finish, found
        self.then: list[Action] = []
        self.__signature__ = inspect.signature(origin.forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return type(self.model).forward(self.model, *args, **kwargs)
        self.settle(Inputs(args, kwargs))
        return self.model.forward(*args, **kwargs)

    def settle(self, inputs: Inputs) -> None:
        """Prepare the model with ``inputs``, unless it already is; if that is refused, it does not change."""
        model, waiting = self.model, isinstance(self.model, _Pending)
        if not waiting:
            model.__dict__.pop("forward")
            if self.found is not None and _alike(model, self.found, inputs) and _takes(model, inputs):
                return
        origin = self.origin
        if waiting:
            origin = model
            model.__class__ = type(self.origin)
            del model.__dict__[WAITING]
        else:
            own = {name: value for name, value in model.state_dict().items() if name in self.origin.state_dict()}
            origin.load_state_dict(own)
        try:
            made = self.finish(origin, inputs)
            self.check(origin, made, inputs)
        except BaseException:
            _attach(model, self)
            raise
        _become(model, made)
        for action in self.then:
            action(model)

    def check(self, origin: nn.Module, made: nn.Module, inputs: Inputs) -> None:
        """Refuse what an optimizer would lose; a model that is prepared again keeps its state."""
        if origin is self.model:
            _check_optimizers(origin, made)
            return
        _check_parameters(self.model, made, inputs)
        made.load_state_dict(self.model.state_dict())
        keep_modes(made, self.model)


class _Pending(nn.Module):
    """Mixed before the class of a float model that waits for its first call."""

    def __refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"this {type(self).__name__} is prepared at its first call, and has {what} only then: run it once, "
            "or pass example_inputs when preparing it"
        )

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.__dict__[WAITING](*args, **kwargs)

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Refuse: an optimizer would not train what the quantizers learn."""
        self.__refuse("all its Parameters")

    @property
    def graph(self) -> fx.Graph:
        self.__refuse("a graph")

    @property
    def code(self) -> str:
        self.__refuse("code")

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of the float model; one with quantizers is refused."""
        if any(name not in self.state_dict() for name in state_dict):
            self.__refuse("quantizers to load into")
        return super().load_state_dict(state_dict, *args, **kwargs)


def postpone(model: nn.Module, finish: Finish) -> nn.Module:
    """Prepare a copy of ``model`` with ``finish(model, inputs)``, with found inputs or at its first call."""
    inputs = find_inputs(model)
    if inputs is not None:
        made, origin = finish(model, inputs), copy.deepcopy(model)
        _attach(made, _FirstCall(made, origin, finish, inputs))
        return made
    waiting = copy.deepcopy(model)
    _attach(waiting, _FirstCall(waiting, model, finish, None))
    return waiting


def is_pending(model: nn.Module) -> bool:
    """Whether a model has no quantizers before its first call."""
    return isinstance(model, _Pending)


def when_prepared(model: nn.Module, action: Action) -> None:
    """Do something with a prepared model, or with those inside a wrapper such as DistributedDataParallel.

    It is done now, and again if a model is prepared, or prepared again, at its first call.
    """
    calls = [module.__dict__.get(WAITING) or module.__dict__.get("forward") for module in model.modules()]
    waiting = [call for call in calls if isinstance(call, _FirstCall)]
    for call in waiting:
        call.then.append(action)
    if quantizers(model) or not any(is_pending(call.model) for call in waiting):
        action(model)


def keep_modes(made: nn.Module, origin: nn.Module) -> None:
    """Copy the modes of the original model's modules to a prepared model."""
    modes = {path: module.training for path, module in origin.named_modules()}
    for path, module in made.named_modules():
        module.training = modes.get(path, origin.training)


def _attach(model: nn.Module, first: _FirstCall) -> None:
    if first.found is not None:
        model.__dict__["forward"] = first
        return
    origin = type(first.origin)
    model.__dict__[WAITING] = first
    model.__class__ = type(origin.__name__, (_Pending, origin), {"__module__": origin.__module__})


def _alike(model: nn.Module, found: Inputs, given: Inputs) -> bool:
    """Whether two calls have the same tensors, apart from their sizes."""
    try:
        kinds = [{n: (x.ndim, x.dtype) for n, x in flat_inputs(model, i).items()} for i in (found, given)]
    except TypeError:
        return False
    return kinds[0] == kinds[1]


def _takes(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the graph of a prepared model holds for ``inputs``; nothing in the model changes."""
    if not ledger_of(model).guards:
        return True
    before = [(quantizer, quantizer.enabled) for quantizer in quantizers(model).values()]
    try:
        for quantizer, _ in before:
            quantizer.enabled = False
        with torch.no_grad(), random_numbers_kept(), eval_mode(model):
            model.forward(*copy.deepcopy(inputs.args), **copy.deepcopy(inputs.kwargs))
    except CaptureError:
        return False
    finally:
        for quantizer, enabled in before:
            quantizer.enabled = enabled
    return True


def _optimizers() -> list[torch.optim.Optimizer]:
    """All living optimizers, except those in unreachable cycles."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]


def _check_optimizers(model: nn.Module, made: nn.Module) -> None:
    """Refuse optimizers for the waiting model's parts, which lack what its quantizers learn."""
    old = dict(model.named_parameters())
    new = [name for name, value in made.named_parameters() if name not in old and value.requires_grad]
    own = {id(value) for value in old.values()}
    for found in _optimizers() if new else ():
        if own.intersection(id(value) for group in getattr(found, "param_groups", ()) for value in group["params"]):
            raise ConfigError(
                f"this {type(found).__name__} was made before the model had its quantizers, and would never train "
                f"{new[0]}, …: make it after the model's first call, or pass example_inputs when preparing it"
            )


def _check_parameters(model: nn.Module, made: nn.Module, inputs: Inputs) -> None:
    """Refuse to change what an optimizer may hold."""
    known, new = (dict(m.named_parameters()) for m in (model, made))
    lost = [name for name in (*known, *new) if name not in known or name not in new]
    lost += [name for name in known if name in new and known[name].shape != new[name].shape]
    if lost:
        raise ConfigError(
            f"the inputs {inputs} lead to a different graph than those it was prepared with, and other Parameters "
            f"({lost[0]}, …), which an optimizer may hold: pass example_inputs like these when preparing it"
        )


def _become(model: nn.Module, made: nn.Module) -> None:
    """Turn a model into another one made from it, keeping its Parameters except those that changed."""
    modules = dict(made.named_modules(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        twin = modules.get(path)
        for name, value in module._parameters.items():
            present = twin._parameters.get(name) if twin is not None else None
            if twin is not None and value is not None and present is not None and torch.equal(present, value):
                twin._parameters[name] = value
    model.__dict__.clear()
    model.__dict__.update(made.__dict__)
    model.__class__ = type(made)
    if isinstance(model, fx.GraphModule):
        model.graph.owning_module = model
