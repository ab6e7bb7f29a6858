"""GPTQ: round a weight column by column, compensating errors in the columns that follow (Frantar et al. 2023).

With G = Σ x·xᵀ of the layer's inputs, H = G + damping · mean(diag G), and U the upper Cholesky factor of H⁻¹, for each
column j, the ones with the largest diagonal first:

    q_j = nearest level of w_j,   e = (w_j - q_j) / U_jj,   w_k -= e·U_jk  for all k > j

Scales do not change. A row keeps its nearest levels if these have the smaller error. The result is stored as the
layer's weight, which then lies on the grid.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.correction.grams import Gram, collected, fit_layers
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import correcting
from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import weight_sites
from bitwright.numerics.views import broadcast
from bitwright.quantizer import TensorQuantizer

BLOCK = 128  # columns whose errors are passed to the rest together
MOST_DAMPING = 1e4  # a matrix that is still not positive definite holds NaN


def gptq(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    damping: float = 0.01,
    act_order: bool = True,
    passes: int = 16,
    progress: bool | None = None,
) -> Correction:
    """Round the weights of linear layers and convolutions, even grouped ones, for the least error of their results.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``, to be read several times: a list or a data loader.
        damping: share of the mean diagonal to add to the diagonal; it is raised where that is not enough.
        act_order: round columns of large inputs first.
        passes: over the data, at most one for each layer. Each pass serves some layers, and runs with all layers of
            earlier passes rounded.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the squared error of each layer's result, as a share of that of nearest rounding.
    """
    if not damping > 0:
        raise ConfigError(f"damping must be above 0, not {damping}")
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"gptq: passes must be a whole number of at least 1, not {passes!r}")
    done = Correction("gptq")
    names = {layer: name for name, layer in fit_layers(model, done).items()}
    sites = {site.layer: site for site in weight_sites(model)}
    with correcting(model):
        for layer, gram in collected(model, names, batches, progress, passes):
            weight = layer.folded_weight()[0].detach()
            rounded, share = round_weight(weight, layer.weight_quantizer, gram, damping, act_order)
            sites[layer].replace(rounded)
            done.changed[names[layer]] = share
    done.skipped |= {name: "no data reached it" for name in names.values() if name not in done.changed}
    return done


def round_weight(
    weight: Tensor, quantizer: TensorQuantizer, gram: Gram, damping: float, act_order: bool
) -> tuple[Tensor, float]:
    """The weight on its grid, and its error as a share of that of nearest rounding."""
    spec, method = quantizer.spec, quantizer.method
    params = (broadcast(p, weight, method.axis, method.group).expand_as(weight) for p in quantizer.qparams())
    scale, zero_point = (gram.matrix(p).double() for p in params)

    def nearest(values: Tensor, at: Any) -> Tensor:  # noqa: ANN401
        q = (torch.round(values / scale[at]) + zero_point[at]).clamp(spec.qmin, spec.qmax)
        return (q - zero_point[at]) * scale[at]

    original = gram.matrix(weight).double()
    plain = nearest(original, ...)
    found = _by_columns(original, gram.total, nearest, damping, act_order)
    errors = [gram.error(each - original) for each in (plain, found)]
    better = (errors[1] < errors[0]).unsqueeze(2)
    result = torch.where(better, found, plain).reshape(weight.shape).to(weight.dtype)
    return result, float(torch.minimum(*errors).sum() / errors[0].sum().clamp(min=1e-300))


def _by_columns(original: Tensor, gram: Tensor, nearest: Any, damping: float, act_order: bool) -> Tensor:  # noqa: ANN401
    """Round (groups, rows, columns) column by column."""
    groups, rows, columns = original.shape
    diagonal = gram.diagonal(dim1=1, dim2=2)
    order = diagonal.argsort(dim=1, descending=True, stable=True)
    order = order if act_order else torch.arange(columns, device=gram.device).expand(groups, -1)
    at = torch.arange(groups, device=gram.device)[:, None]
    factor = _factor(gram[at[:, :, None], order[:, :, None], order[:, None, :]], damping)
    rest = original.gather(2, order[:, None].expand_as(original)).clone()
    rounded = torch.empty_like(original)
    group, row = at[:, :, None], torch.arange(rows, device=gram.device)[None, :, None]
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = rest.new_empty(groups, rows, last - first)
        for j in range(first, last):
            place = (group, row, order[:, None, j : j + 1])
            level = nearest(rest[:, :, j : j + 1], place)
            rounded[place] = level
            errors[:, :, j - first] = (rest[:, :, j] - level[:, :, 0]) / factor[:, j, j, None]
            rest[:, :, j + 1 : last] -= errors[:, :, j - first, None] * factor[:, None, j, j + 1 : last]
        rest[:, :, last:] -= errors @ factor[:, first:last, last:]
    return rounded


def _factor(gram: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped matrices; columns that are always zero are separate."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    one = torch.where(mean > 0, mean, 1.0)
    while damping < MOST_DAMPING:
        damped = gram + torch.diag_embed(torch.where(diagonal > 0, damping * one, one))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed.any()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed.any()):
                return upper
        damping *= 10
    raise ConfigError("the inputs of a layer hold NaN or infinity: their Gram matrix has no Cholesky factor")
