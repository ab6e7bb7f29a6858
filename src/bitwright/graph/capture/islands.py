"""The submodules of a module that runs as written, and the inputs that each receives."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bitwright.graph.capture.failures import call_model
from bitwright.graph.capture.trial_run import trial_run
from bitwright.graph.inputs import Inputs


def parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module; a ModuleList or ModuleDict is replaced by its members."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def is_single(module: nn.Module) -> bool:
    """Whether a module has no submodules to capture."""
    whole = isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule)
    return whole or next(module.children(), None) is None


def first_calls(
    module: nn.Module, names: list[str], inputs: Inputs | None, origin: Mapping[int, torch.Tensor]
) -> dict[str, Inputs]:
    """Run ``module`` and return, for each of its submodules ``names``, the arguments of its first call."""
    if not names or inputs is None:
        return {}
    seen: dict[str, Inputs] = {}

    def look_at(name: str) -> RemovableHandle:
        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = call_model(copy.deepcopy, Inputs(args, kwargs))

        return module.get_submodule(name).register_forward_pre_hook(look, with_kwargs=True)

    handles = [look_at(name) for name in names]
    try:
        values = call_model(copy.deepcopy, inputs)
        with trial_run(module, origin):
            call_model(module, *values.args, **values.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
