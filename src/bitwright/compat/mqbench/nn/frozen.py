"""BatchNorms that go on using their running statistics when the model is trained."""

from typing import Any

from torch import nn


class _Frozen(nn.Module):
    def train(self, mode: bool = True) -> Any:
        """Stay in eval mode."""
        return super().train(False)


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """BatchNorm1d with fixed statistics."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """BatchNorm2d with fixed statistics."""


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    """BatchNorm3d with fixed statistics."""


_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
}


def freeze_norms(model: nn.Module) -> None:
    """Make the BatchNorms of a model go on with their statistics, whatever ``train()`` says."""
    for module in model.modules():
        twin = _TWINS.get(type(module))
        if twin is not None:
            module.__class__ = twin
            module.train()
