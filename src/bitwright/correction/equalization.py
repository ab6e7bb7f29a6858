"""Cross-layer equalization where it helps: give channels one range on both sides (Nagel et al. 2019).

    s = √(r₁ / r₂),   w₁ / s,   w₂·s      r₁, r₂: the largest weight of each channel in the source and in its readers

If the source is a BatchNorm that is kept apart, γ and β are divided, and r₁ = 3·|γ| + |β|, which results rarely exceed.

The schedule ``cross_layer_equalization`` equalizes all pairs before anything is measured. This corrector works on
the calibrated model. It tries all links at once, then each alone whose channels differ widely, and keeps what brings
the outputs closer to float. Past a ReLU6, factors are bounded by what its channels reach (:mod:`limits`).
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bitwright.correction.links import Link
from bitwright.correction.outcome import Correction
from bitwright.correction.running import first_samples
from bitwright.correction.trials import try_links, trying, usable
from bitwright.errors import ConfigError
from bitwright.nn.fold import NORMS

_DIFFER_LITTLE = "its channels differ little"


def equalize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    rounds: int = 2,
    samples: int = 128,
    spread: float = 2.0,
    progress: bool | None = None,
) -> Correction:
    """Equalize the ranges of channels across layers, only where it lowers the error of the model's outputs.

    It moves factors between float parameters (in float the model computes the same, up to rounding), and finds the
    ranges of the layers and of the tensors between them again, so call it before other correctors. A ReLU6 between two
    layers gets a limit for each channel; quantizers imply these limits, so files need none.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``. Each pair of layers that is tried alone takes two passes over them.
        rounds: how often pairs are tried alone; in a chain of layers, one benefits from changes to the next.
        samples: how many samples are enough to compare outputs; batches after these are not read.
        spread: ratio of the largest and the smallest factor of a pair, below which it is not tried alone.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the error of the model's outputs, as a share of what it was before the pair;
        pairs that moved together have equal parts in what that changed.
    """
    if rounds < 1 or samples < 1:
        raise ConfigError(f"equalize: rounds and samples must be 1 or more, not {rounds} and {samples}")
    done = Correction("equalize")
    with trying(model, first_samples(batches, samples), done, progress) as (trials, _):
        links = trials.links(done, norms=NORMS, products=False)
        share = trials.together(links, lambda link: _factors(link)[0])
        moved = [link for link, _ in trials.kept]
        done.changed |= {link.name: share ** (1 / len(moved)) for link in moved}
        for _ in range(rounds):
            wide = [link for link in links if _apart(link) >= spread]
            if not try_links(trials, wide, _factors, done, "equalizing"):
                break
    for link in (each for each in links if each.name not in done.changed):
        done.skipped[link.name] = _DIFFER_LITTLE if _apart(link) < spread else "it would not lower the error"
    return done


def _factors(link: Link) -> list[Tensor]:
    """The factors that make the ranges on both sides equal."""
    first, second = link.largest()
    return [usable((first / second).sqrt())]


def _apart(link: Link) -> float:
    """The largest factor of a link in units of its smallest."""
    factor = _factors(link)[0]
    return float(factor.amax() / factor.amin())
