"""SmoothQuant: move the outliers of activations into the weights that read them (Xiao et al. 2023).

    s = max |x|^α / max |w|^(1 - α)   for each channel,   x / s in the norm or layer before,   w·s in the layers after

A few channels with large values would otherwise set the one scale that all channels share.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.correction.links import Link
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import Original
from bitwright.correction.running import Layer, seeing_inputs
from bitwright.correction.trials import Trials, try_links, trying, usable
from bitwright.errors import ConfigError

FLOOR = 1e-5  # of the magnitudes that factors are computed from


def smooth(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    alpha: float | Sequence[float] = 0.5,
    progress: bool | None = None,
) -> Correction:
    """Even out the channels of activations where that lowers the error of the model's outputs.

    The source of a factor is a norm with a weight, such as a LayerNorm or one written as ``x * weight``, or a layer;
    every reader of its result takes the factor. In float the model computes the same, up to rounding. Ranges of weights
    and activations are found again, so call this before other correctors.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``. Each source takes two passes over them for each ``alpha``.
        alpha: how much of the difficulty moves to the weights, from 0 to 1; if several, the best is used at each place.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the error of the model's outputs, as a share of what it was before the factor.
    """
    tried = (alpha,) if isinstance(alpha, int | float) else tuple(alpha)
    if not tried or not all(isinstance(a, int | float) and 0 <= a <= 1 for a in tried):
        raise ConfigError(f"smooth: alpha must be a number from 0 to 1, or several, not {alpha!r}")
    done = Correction("smooth")
    with trying(model, batches, done, progress) as (trials, original):
        links = trials.links(done)
        largest = _largest(trials, original, links)
        reached = [link for link in links if link in largest]
        done.skipped |= {link.name: "no data reached it" for link in links if link not in largest}
        try_links(trials, reached, lambda link: _factors(link, largest[link], tried), done, "smoothing")
    done.skipped |= {link.name: "it would not lower the error" for link in reached if link.name not in done.changed}
    return done


def _factors(link: Link, largest: Tensor, alphas: Sequence[float]) -> list[Tensor]:
    x, w = largest.clamp(min=FLOOR), link.largest_read().clamp(min=FLOOR)
    seen = largest > 0
    return [usable(torch.where(seen, x**a / w ** (1 - a), 1.0)) for a in alphas]


def _largest(trials: Trials, original: Original, links: Sequence[Link]) -> dict[Link, Tensor]:
    """The largest magnitude of each channel that the readers of a link see in float."""
    found: dict[Link, Tensor] = {}
    of_reader = {link.readers[0].layer: link for link in links}

    def see(layer: Layer, x: Tensor) -> None:
        link = of_reader[layer]
        first = x.detach().movedim(link.axis, 0).abs()
        most = first.reshape(len(first), -1).amax(1)
        found[link] = torch.maximum(found[link], most) if link in found else most

    with seeing_inputs(of_reader, see):
        for inputs in trials.data:
            original.run(trials.model, inputs)
    return found
