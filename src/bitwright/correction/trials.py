"""Trials: move a factor along a link, find all affected ranges again, and keep it if the model's outputs improve."""

import copy
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import make_room_for_bias
from bitwright.correction.limits import Limit, fill_limits
from bitwright.correction.links import Link, find_links
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import Original, all_off, correcting
from bitwright.correction.running import calls, quantized_layers, run, tensors_in
from bitwright.errors import ConfigError
from bitwright.graph import Inputs
from bitwright.nn.weight_sites import weight_sites
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer

SWEEPS = 10  # over all links, when they move together: in a chain of layers each changes what the next should do


def find_ranges(model: nn.Module, chosen: Iterable[TensorQuantizer], data: Iterable[Inputs]) -> None:
    """Make some quantizers of activations find their ranges again on the float model, as calibration does."""
    seeing = [q for q in dict.fromkeys(chosen) if q.quantizes and q.calibratable]
    with all_off(model):
        for quantizer in seeing:
            quantizer.observer.reset()
            quantizer.observe()
        for inputs in data if seeing else ():
            run(model, inputs)
    for quantizer in seeing:
        quantizer.compute_qparams()
        quantizer.observer.reset()


class Trials:
    """Tries factors on a calibrated model, one link at a time.

    Attributes:
        error: the squared distance of the model's outputs from those in float, in units of the latter's squares.
        kept: the moves that were kept.
    """

    def __init__(
        self, model: fx.GraphModule, original: Original, batches: Iterable[Any], progress: bool | None
    ) -> None:
        self.model, self.original, self.progress = model, original, progress
        self.data: list[Inputs] = []
        self.wanted: list[list[Tensor]] = []
        for inputs in calls(model, batches, "running in float", progress):
            self.data.append(inputs)
            self.wanted.append(tensors_in(original.run(model, inputs)))
        self.power = max(sum(float(v.double().square().sum()) for batch in self.wanted for v in batch), 1e-30)
        self.sites = {site.layer: site for site in weight_sites(model)}
        self.kept: list[tuple[Link, Tensor]] = []
        self.limits: dict[Link, Limit] = {}
        self.error = self._apart()

    def links(self, done: Correction, **kinds: Any) -> list[Link]:
        """The links of the model, as :func:`find_links` finds them; those with a ReLU6 get a limit for each channel."""
        found = find_links(self.model, done, **kinds)
        for link in found:
            if link.limited is not None:
                link.limit = Limit(self.model, link.limited, link.channels, link.axis)
                self.limits[link] = link.limit
                self.original.state[link.limit.name] = link.limit.module.high.clone()
        if self.limits:
            fill_limits(self.limits.values(), lambda: [self.original.run(self.model, x) for x in self.data])
        return found

    def put_back_limits(self) -> None:
        """Remove the limits of links along which no factor moved."""
        moved = {link for link, _ in self.kept}
        for link, limit in self.limits.items():
            if limit.is_new and link not in moved:
                del self.original.state[limit.name]
                limit.put_back()

    def best_of(self, link: Link, factors: Sequence[Tensor]) -> float:
        """Try each of the factors, and keep the best if it beats no factor; return the error as a share."""
        before, best, least = self.error, None, self.error
        for factor in map(link.bounded, factors):
            state = _State(link)
            self._move(link, factor)
            found = self._apart() if link.covered else math.inf
            state.restore()
            if found < least:
                best, least = factor, found
        if best is None:
            return 1.0
        self._move(link, best)
        self.kept.append((link, best))
        self.error = least
        return least / before

    def together(self, links: Sequence[Link], factor: Callable[[Link], Tensor]) -> float:
        """Move factors along all links at once, and keep that if it is better than none; return the error as a share.

        Where many layers fail at once, mending one of them alone does not show in the model's outputs.
        """
        before, states = self.error, [_State(link) for link in links]
        moved: dict[Link, Tensor] = {}
        for _ in range(SWEEPS):
            for link in links:
                found = link.bounded(factor(link))
                link.scale(found)
                moved[link] = moved[link] * found if link in moved else found
        self._find_ranges(links)
        covered = [link for link in links if link.covered]
        after = self._apart() if len(covered) == len(links) else math.inf
        if after < before:
            self.kept += moved.items()
            self.error = after
            return after / before
        for state in states:
            state.restore()
        return self.together(covered, factor) if len(covered) < len(links) else 1.0

    def _move(self, link: Link, factor: Tensor) -> None:
        link.scale(factor)
        self._find_ranges([link])

    def _find_ranges(self, links: Sequence[Link]) -> None:
        """Find all ranges that factors along these links have changed."""
        layers = dict.fromkeys(layer for link in links for layer in link.layers)
        for layer in layers:
            self.sites[layer].find_range()
        find_ranges(self.model, [q for link in links for q in link.quantizers], self.data)
        for layer in layers:
            make_room_for_bias(layer)

    def _apart(self) -> float:
        apart = 0.0
        for inputs, wanted in zip(self.data, self.wanted, strict=True):
            for found, value in zip(tensors_in(run(self.model, inputs)), wanted, strict=True):
                apart += float((found - value).double().square().sum())
        return apart / self.power


class _State:
    """The current parameters and ranges that a link changes."""

    def __init__(self, link: Link) -> None:
        limits = [] if link.limit is None else [link.limit.module.high]
        self.parameters = [(p, p.detach().clone()) for p in (*link.parameters(), *limits)]
        touched = [*link.quantizers, *(layer.weight_quantizer for layer in link.layers)]
        self.ranges = [(q, copy.deepcopy(q.state_dict())) for q in dict.fromkeys(touched)]

    def restore(self) -> None:
        """Restore them."""
        with torch.no_grad():
            for parameter, value in self.parameters:
                parameter.copy_(value)
        for quantizer, state in self.ranges:
            quantizer.load_state_dict(state, strict=False)


def try_links(
    trials: Trials, links: Sequence[Link], factors: Callable[[Link], Sequence[Tensor]], done: Correction, what: str
) -> bool:
    """Try every link once and note the gains; return whether there was any."""
    better = False
    for link in track(links, what, show=trials.progress):
        share = trials.best_of(link, factors(link))
        if share < 1.0:
            done.changed[link.name] = share * done.changed.get(link.name, 1.0)
            better = True
    return better


@contextmanager
def trying(
    model: nn.Module, batches: Iterable[Any], done: Correction, progress: bool | None
) -> Generator[tuple[Trials, Original], None, None]:
    """Yield trials on a model; in the end, what was kept also applies to the float model that correctors aim at."""
    if not isinstance(model, fx.GraphModule):
        raise ConfigError(f"{done.step} needs the graph of the model, which could not be captured")
    quantized_layers(model, Correction(done.step))  # an error if it is not calibrated
    with correcting(model) as original:
        trials = Trials(model, original, batches, progress)
        yield trials, original
        trials.put_back_limits()
        if trials.kept:
            original.follow(model, lambda: [link.scale(factor) for link, factor in trials.kept])


def usable(factor: Tensor) -> Tensor:
    """The factor, or 1 where it is not a positive finite number."""
    return torch.where(factor.isfinite() & (factor > 0), factor, torch.ones_like(factor))
