"""Operators that only move values: reshapes, selections, repetitions, padding."""

import operator as py

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitwright.nn.operators.base import Operator, Source, argument, register_operator

PADS_WITH_OWN_VALUES = tuple(
    getattr(nn, f"{kind}Pad{d}d") for kind in ("Reflection", "Replication", "Circular") for d in (1, 2, 3)
)
_PADS_WITH_A_NUMBER = tuple(getattr(nn, f"{kind}Pad{d}d") for kind in ("Constant", "Zero") for d in (1, 2, 3))


def _interpolates_nearest(node: fx.Node, module: nn.Module | None) -> bool:
    return argument(node, module, 3, "mode", "nearest") in ("nearest", "nearest-exact")


def _pads_with_known_values(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, PADS_WITH_OWN_VALUES):
        return True
    mode = "constant" if module is not None else argument(node, module, 2, "mode", "constant")
    # Minus infinity occurs before a max-pool, which never selects it.
    return mode != "constant" or argument(node, module, 3, "value") in (None, 0, 0.0, float("-inf"))


def cast_float(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast floats to another precision, or to their own."""
    return x.to(dtype)


# The result holds every value of the input exactly once.
_REARRANGEMENTS: dict[str, tuple[Source, ...]] = {
    "flatten": (nn.Flatten, torch.flatten, torch.ravel, "flatten", "ravel"),
    "unflatten": (nn.Unflatten, torch.unflatten, "unflatten"),
    "reshape": (torch.reshape, "reshape", "view", "reshape_as", "view_as"),
    "permute": (torch.permute, "permute"),
    "transpose": (
        *(torch.transpose, torch.swapaxes, torch.swapdims, torch.t),
        *("transpose", "swapaxes", "swapdims", "t"),
    ),
    "movedim": (torch.movedim, torch.moveaxis, "movedim"),
    "squeeze": (torch.squeeze, "squeeze"),
    "unsqueeze": (torch.unsqueeze, "unsqueeze"),
    "pixel_shuffle": (nn.PixelShuffle, nn.PixelUnshuffle, F.pixel_shuffle, F.pixel_unshuffle),
    "channel_shuffle": (nn.ChannelShuffle, F.channel_shuffle),
}
_SELECTIONS: dict[str, tuple[Source, ...]] = {
    "expand": ("expand", "expand_as", torch.broadcast_to, "broadcast_to"),
    "repeat": (torch.tile, torch.repeat_interleave, "repeat", "tile", "repeat_interleave"),
    "split": (torch.split, torch.tensor_split, "split", "tensor_split"),
    "chunk": (torch.chunk, "chunk"),
    "unbind": (torch.unbind, "unbind"),
    "getitem": (py.getitem,),
    "narrow": (torch.narrow, torch.select, torch.index_select, "narrow", "select", "index_select"),
}
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout),
)

for _name, _sources in _REARRANGEMENTS.items():
    register_operator(Operator(_name, _sources, carries=True, rearranges=True))
for _name, _sources in _SELECTIONS.items():
    register_operator(Operator(_name, _sources, carries=True))
for _name, _sources in {
    "roll": (torch.roll, torch.flip, "roll", "flip"),
    "contiguous": ("contiguous", "clone", torch.clone, "detach"),
    "cast": (cast_float,),
}.items():
    register_operator(Operator(_name, _sources, carries=True, rearranges=True, same_shape=True))
register_operator(
    Operator("identity", (nn.Identity,), carries=True, rearranges=True, same_shape=True, homogeneous=True)
)
register_operator(Operator("dropout", _DROPOUTS, carries=True, same_shape=True, homogeneous=True))
register_operator(Operator("interpolate", (nn.Upsample, F.interpolate, F.upsample), carries=_interpolates_nearest))
register_operator(
    Operator("pad", (*_PADS_WITH_A_NUMBER, *PADS_WITH_OWN_VALUES, F.pad), carries=_pads_with_known_values)
)
