"""Example inputs as a call, and by the names of forward's arguments."""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwright.errors import shortened
from bitwright.graph.capture.failures import boundary, call_model
from bitwright.graph.capture.nesting import tensors_in


@dataclass
class Inputs:
    """Example inputs as a call: positional and keyword arguments."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: object) -> "Inputs":
        """Read a tensor, a tuple or list of arguments, or a dict of keyword arguments."""
        if isinstance(example, Inputs):
            return example
        if isinstance(example, Mapping):
            return cls((), dict(example))
        if isinstance(example, tuple | list):
            return cls(tuple(example))
        return cls((example,))

    def copied(self) -> "Inputs":
        """A copy for a model that may write into its inputs; tensors with a history keep it."""
        values = (self.args, self.kwargs)
        memo: dict[int, Any] = {id(tensor): tensor.clone() for tensor in tensors_in(values)}
        return Inputs(*copy.deepcopy(values, memo))

    def run(self, model: Callable[..., Any]) -> Any:
        """Call a model on a copy of these inputs."""
        given = self.copied()
        return model(*given.args, **given.kwargs)

    def in_order(self, model: nn.Module) -> "Inputs":
        """This call with its keyword arguments in the order of ``model.forward``, as exporters list them."""
        named = list(bind_inputs(model, self.args, self.kwargs))
        return Inputs(self.args, {name: self.kwargs[name] for name in named if name in self.kwargs})

    def with_values(self, model: nn.Module, values: Mapping[str, Any]) -> "Inputs":
        """This call with arguments of ``model.forward`` set or replaced by name."""
        names = list(inspect.signature(model.forward).parameters)
        args = tuple(values.get(name, given) for name, given in zip(names, self.args, strict=False))
        args += self.args[len(args) :]
        rest = {n: v for n, v in values.items() if n not in names[: len(args)]}
        return Inputs(args, {**self.kwargs, **rest})

    def without(self, model: nn.Module, names: Collection[str]) -> "Inputs":
        """This call without some of the arguments of ``model.forward``."""
        known = list(inspect.signature(model.forward).parameters)
        args = [value for i, value in enumerate(self.args) if i >= len(known) or known[i] not in names]
        return Inputs(tuple(args), {n: v for n, v in self.kwargs.items() if n not in names})

    def __str__(self) -> str:
        parts = [_describe(a) for a in self.args] + [f"{k}={_describe(v)}" for k, v in self.kwargs.items()]
        return "(" + ", ".join(parts) + ")"


def bind_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the example inputs as ``model.forward`` does; of ``*args``, the first is called ``args_0``."""
    return bind_to(inspect.signature(model.forward), args, kwargs)


def bind_to(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name arguments by a signature."""
    bound = call_model(signature.bind, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}_{i}": v for i, v in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def by_parameter(model: nn.Module, inputs: Inputs, values: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to the arguments that ``bind_inputs`` names, by the parameters of forward.

    What belongs to ``*args`` becomes a tuple, what belongs to ``**kwargs`` a dict.
    """
    signature = inspect.signature(model.forward)
    found: dict[str, Any] = {}
    for name, value in call_model(signature.bind, *inputs.args, **inputs.kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found[name] = tuple(values[f"{name}_{i}"] for i in range(len(value)))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found[name] = {key: values[key] for key in value}
        else:
            found[name] = values[name]
    return found


def flat_inputs(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors of a call in the order that exporters list them; one inside ``x[1]["a"]`` is named ``x_1_a``."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{name}_{key}", item)
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                add(f"{name}_{i}", item)

    for name, value in bind_inputs(model, inputs.args, inputs.kwargs).items():
        add(name, value)
    return found


def caller(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that calls a forward with named values, laid out as ``args`` and ``kwargs`` are."""
    names = list(bind_inputs(model, args, kwargs))
    positional, keyword = names[: len(args)], names[len(args) :]

    @boundary
    def call(forward: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        return forward(*(values[n] for n in positional), **{n: values[n] for n in keyword})

    return call


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a NumPy array, not a tensor, of {value.dtype}{list(value.shape)}"
    return type(value).__name__ if isinstance(value, Mapping | tuple | list) else shortened(repr(value), 60)
