"""Turn a float layer into a quantized one: its constructor's arguments, then its parameters, hooks and settings."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from bitwright.compat.quantrans.quantops.builder import QUANLAYERS
from bitwright.compat.quantrans.quantops.options import operator_class
from bitwright.errors import ConfigError
from bitwright.modes import random_numbers_kept
from bitwright.torch_internals import MODULE_STATE


def quantized_twin(layer: nn.Module, quan_args: Mapping[str, Any], name: str) -> nn.Module:
    """The layer that ``quan_args`` describe, with everything from ``layer``, which is left unchanged."""
    cls = QUANLAYERS.class_of(quan_args, f"{name!r}: ")
    if parametrize.is_parametrized(layer):
        raise ConfigError(f"{name!r} has a parametrization: call remove_parametrizations() before quantizing it")
    operator = operator_class(cls)
    if not isinstance(layer, operator):
        raise ConfigError(f"{cls.__name__} is a kind of {operator.__name__}: {name!r} is a {type(layer).__name__}")
    own = constructor_arguments(layer, name)
    both = [key for key in own if key in quan_args]
    if both:
        raise ConfigError(f"{cls.__name__} takes {both[0]} from the layer {name!r}: leave it out of the config")
    given = _accepted(cls, own)
    try:
        with random_numbers_kept():  # the fresh weights are thrown away
            twin = QUANLAYERS.build({**copy.deepcopy(dict(quan_args)), **given})
    except ConfigError as error:
        raise type(error)(f"{name!r}: {error}") from error
    if given == own or not isinstance(twin, type(layer)):  # else carry over what it was not given, such as groups
        _check_shapes(layer, twin, name)
    _carry_over(layer, twin, quan_args)
    return twin


def _accepted(cls: type[nn.Module], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the constructor of a class accepts."""
    parameters = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {key: value for key, value in arguments.items() if key in parameters}


def constructor_arguments(layer: nn.Module, name: str) -> dict[str, Any]:
    """The arguments that a layer was constructed with, as far as the layer tells, including defaults."""
    found: dict[str, Any] = {}
    weight = next(layer.parameters(), None)
    for key, parameter in inspect.signature(type(layer)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if key in ("device", "dtype"):
            if weight is not None:
                found[key] = getattr(weight, key)
        elif hasattr(layer, key):
            value = getattr(layer, key)
            found[key] = value is not None if value is None or isinstance(value, torch.Tensor) else value
        elif parameter.default is parameter.empty:
            raise ConfigError(f"the {type(layer).__name__} {name!r} does not say what its argument {key!r} was")
    return found


def _check_shapes(layer: nn.Module, twin: nn.Module, name: str) -> None:
    for key, value in layer._parameters.items():
        present = twin._parameters.get(key)
        if key not in twin._parameters and not isinstance(twin, type(layer)):
            raise ConfigError(f"{type(twin).__name__} has no parameter {key!r}: that of {name!r} would be lost")
        if present is not None and value is not None and present.shape != value.shape:
            raise ConfigError(
                f"{key!r} of {type(twin).__name__} has the shape {tuple(present.shape)}, that of {name!r} "
                f"{tuple(value.shape)}: it cannot be carried over"
            )


def _carry_over(layer: nn.Module, twin: nn.Module, quan_args: Mapping[str, Any]) -> None:
    """Give ``twin`` the very parameters, buffers, children, hooks and settings of ``layer``."""
    weight = next(layer.parameters(), None)
    if weight is not None:
        twin.to(weight.device)
    for key, value in layer.__dict__.items():
        twin._parameters.pop(key, None)  # a plain tensor in the layer: a hook computes it, as weight_norm does
        mine = twin.__dict__.get(key)
        if key in MODULE_STATE or (isinstance(mine, dict) and mine):
            twin.__dict__[key] = mine | value  # pyrefly: ignore
        elif key not in quan_args:
            twin.__dict__[key] = value  # the same dicts of hooks: a handle that removes one still does
    twin.train(layer.training)
