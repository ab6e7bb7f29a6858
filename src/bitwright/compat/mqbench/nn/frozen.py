"""BatchNorms that keep using their running statistics in training."""

from typing import Any

from torch import nn


class _Frozen(nn.Module):
    def train(self, mode: bool = True) -> Any:
        """Stay in eval mode."""
        return super().train(False)


def _frozen(norm: type[nn.Module]) -> Any:
    about = {"__module__": __name__, "__doc__": f"{norm.__name__} with fixed statistics."}
    return type(f"Frozen{norm.__name__}", (_Frozen, norm), about)


_TWINS: dict[type[nn.Module], Any] = {norm: _frozen(norm) for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}
FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d = _TWINS.values()


def freeze_norms(model: nn.Module) -> None:
    """Make the BatchNorms of a model keep their statistics, whatever ``train()`` says."""
    for module in model.modules():
        twin = _TWINS.get(type(module))
        if twin is not None:
            module.__class__ = twin
            module.train()
