"""The tensors of a model by name, separate from those of its quantizers, and how to restore saved ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitwright.errors import SaveError
from bitwright.mapped_weights import same_bits
from bitwright.quantizer import quantizers
from bitwright.quantizer.state import ABOUT

SEEN = "observer:"  # prefix of the names of what an observer has seen
_SHOWN = 5  # names that a message lists


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain attributes of every module but quantizers; a tensor of several names has one."""
    inside = tuple(f"{name}." for name in quantizers(model))
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for path, module in model.named_modules():
        if f"{path}.".startswith(inside):
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()):
            if isinstance(value, Tensor) and id(value) not in known:
                known.add(id(value))
                found[f"{path}.{name}" if path else name] = value
    return found


def quantizer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of every quantizer: ranges, what methods have learned, and what observers have seen."""
    found: dict[str, Tensor] = {}
    for name, quantizer in quantizers(model).items():
        found |= {f"{name}.{key}": value for key, value in quantizer.state_dict().items() if key != ABOUT}
        if quantizer.observer.batches:
            found |= {f"{name}.{SEEN}{key}": value for key, value in quantizer.observer.state_tensors().items()}
    return found


def why_not(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Why saved tensors do not match a model's."""
    problems = [
        *_listed("the folder lacks", [n for n in wanted if n not in saved]),
        *_listed("the model has no", [n for n in saved if n not in wanted]),
    ]
    for name in (n for n in wanted if n in saved):
        was, now = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (saved[name], wanted[name]))
        if was != now:
            problems.append(f"{name} was {was} and is now {now}")
    return problems


def _listed(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what} {', '.join(names[:_SHOWN])}{more}"] if names else []


def put(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor], channels_last: list[str]) -> None:
    """Set the values and memory layout of a model's tensors, in place."""
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in channels_last:
                kind = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
                tensor.data = tensor.detach().to(memory_format=kind)
            if not same_bits(tensor, saved[name]):  # a mapped weight that is as saved stays mapped
                tensor.detach().copy_(saved[name])


def lie_channels_last(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of channels-last tensors, for which a convolution computes differently."""
    kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [
        name
        for name, t in tensors.items()
        if t.ndim in kinds and not t.is_contiguous() and t.is_contiguous(memory_format=kinds[t.ndim])
    ]


def check_plain(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that safetensors cannot hold."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise SaveError(f"{name} is {tensor.dtype} in the layout {tensor.layout}: a folder holds dense tensors")
        if tensor.device.type == "meta":
            raise SaveError(f"{name} is on the meta device: it has no values to save")
