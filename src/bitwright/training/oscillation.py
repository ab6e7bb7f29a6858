"""Oscillations: weights that jump back and forth between two integers, and how to calm them (Nagel et al., ICML 2022).

A weight oscillates at a step if its integer changes against the direction of its last change. The share of such steps
is a moving average f. A weight whose f passes a threshold is frozen at the integer where it was most of the time.
Dampening pulls weights to the middle of their cells: the loss gets λ·Σ (quantize(w) - w)², the first term fixed, w
clipped to the range.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import WeightSite, weight_sites
from bitwright.numerics.views import broadcast


@dataclass(eq=False)
class _Track:
    site: WeightSite
    integers: Tensor  # at the last step
    direction: Tensor  # of the last change
    share: Tensor  # f
    average: Tensor  # of the integers
    frozen: Tensor
    value: Tensor  # where frozen


class Oscillations:
    """Watches a model's weights with few bits.

    ::

        watch = Oscillations(model, threshold=0.02)
        loss = criterion(model(x), y) + 1e-4 * watch.dampening()
        loss.backward(); optimizer.step(); watch.step()

    Args:
        model: a calibrated model.
        threshold: weights that oscillate more often are frozen; None freezes none.
        momentum: of the averages; 1 / momentum steps are looked back on. Keep the threshold above it.
        most_bits: weights with more bits are left alone.
    """

    def __init__(
        self, model: nn.Module, threshold: float | None = None, momentum: float = 0.01, most_bits: int = 4
    ) -> None:
        if not 0.0 < momentum <= 1.0:
            raise ConfigError(f"the momentum of oscillations must be a number above 0 and up to 1, not {momentum!r}")
        if threshold is not None and threshold <= momentum:
            raise ConfigError(
                f"a threshold of {threshold} freezes a weight at its first oscillation: it must be above the momentum "
                f"of {momentum}"
            )
        self.threshold, self.momentum = threshold, momentum
        fits = [s for s in weight_sites(model) if s.quantizer.quantizes and s.plain]
        self._tracks = [self._begin(s) for s in fits if s.quantizer.spec.bits <= most_bits and s.quantizer.uniform]

    @torch.no_grad()
    def _begin(self, site: WeightSite) -> _Track:
        integers = _integers(site)
        zeros = torch.zeros_like(integers)
        never = torch.zeros_like(integers, dtype=torch.bool)
        return _Track(site, integers, zeros, zeros.clone(), integers.clone(), never, zeros.clone())

    @property
    def oscillating(self) -> float:
        """The share of weights that oscillate more often than a tenth of the steps in the averaging window."""
        return _part([t.share > 0.1 * max(self.momentum, 0.05) for t in self._tracks])

    @property
    def frozen(self) -> float:
        """The share of weights that are frozen."""
        return _part([t.frozen for t in self._tracks])

    @torch.no_grad()
    def step(self) -> None:
        """Look at the weights after a step of the optimizer, freeze those that oscillate, and hold the frozen ones."""
        for track in self._tracks:
            now = _integers(track.site)
            change = torch.sign(now - track.integers)
            turned = (change != 0) & (change == -track.direction)
            track.share.lerp_(turned.to(now.dtype), self.momentum)
            track.average.lerp_(now, self.momentum)
            track.direction = torch.where(change != 0, change, track.direction)
            track.integers = now
            if self.threshold is not None:
                self._freeze(track, self.threshold)

    def _freeze(self, track: _Track, threshold: float) -> None:
        late = (track.share > threshold) & ~track.frozen
        track.value = torch.where(late, track.average.round(), track.value)
        track.frozen |= late
        if bool(track.frozen.any()):
            site = track.site
            scale, zero_point = _params(site)
            site.replace(torch.where(track.frozen, (track.value - zero_point) * scale, site.weight()))
            track.integers = torch.where(track.frozen, track.value, track.integers)

    def dampening(self) -> Tensor:
        """Σ (quantize(w) - clip(w))² over all watched weights, with gradients."""
        total = torch.zeros(())
        for track in self._tracks:
            site, spec = track.site, track.site.quantizer.spec
            weight = site.weight()
            scale, zero_point = _params(site)
            with torch.no_grad():
                middle = site.quantizer.fake_quantize(weight)
            low, high = (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale
            total = total.to(weight.device) + (middle - weight.clamp(low, high)).square().sum()
        return total


def _integers(site: WeightSite) -> Tensor:
    return site.quantizer.integers(site.weight().detach()).float()


def _params(site: WeightSite) -> tuple[Tensor, Tensor]:
    quantizer, weight = site.quantizer, site.weight()
    method = quantizer.method
    scale, zero_point = (broadcast(p.detach(), weight, method.axis, method.group) for p in quantizer.qparams())
    return scale, zero_point


def _part(masks: list[Tensor]) -> float:
    count = sum(mask.numel() for mask in masks)
    return sum(int(mask.sum()) for mask in masks) / count if count else 0.0
