"""Distillation: the float model teaches the quantized one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.correction.reference import Original, original_of
from bitwright.errors import ConfigError


class Distillation:
    """The distance between a model's predictions and those of its float version, before it was corrected or trained.

    loss = T²·KL(softmax(teacher / T) ‖ softmax(student / T)), averaged over rows

    Args:
        model: a prepared model with its float weights; a copy of it, or ``teacher``, is the teacher.
        temperature: T; more than 1 makes small probabilities count more.
        teacher: another model that returns logits for the same inputs.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0, teacher: nn.Module | None = None) -> None:
        if not temperature > 0:
            raise ConfigError(f"the temperature of distillation must be a positive number, not {temperature!r}")
        self.temperature, known = temperature, original_of(model)
        self.teacher = (Original(model) if known is None else known).twin(model) if teacher is None else teacher
        self.teacher.eval()
        if teacher is None:
            self.teacher.requires_grad_(False)

    def __call__(self, prediction: Tensor, *args: object, **kwargs: object) -> Tensor:
        """The loss of a prediction for these inputs of the model."""
        with torch.no_grad():
            wanted = self.teacher(*args, **kwargs)
        if not all(isinstance(x, Tensor) and x.ndim for x in (prediction, wanted)):
            kinds = " and the teacher ".join(
                f"a {type(x).__name__ if getattr(x, 'ndim', True) else 'number'}" for x in (prediction, wanted)
            )
            raise ConfigError(
                f"distillation compares one tensor of logits, but the model returns {kinds}: train without distill, or "
                "wrap both such that they return the logits"
            )
        t = self.temperature
        student, master = ((x / t).reshape(-1, x.shape[-1]).log_softmax(-1) for x in (prediction, wanted))
        return F.kl_div(student, master, reduction="batchmean", log_target=True) * t * t
