"""BoundedMSEObserver: the least error with a bound on bias, against the written-out cost of every candidate."""

import pytest
import torch

from bitwright.errors import ConfigError
from bitwright.observers import OBSERVERS
from bitwright.spec import QuantSpec


def observed(name, spec, x):
    observer = OBSERVERS.get(name)(QuantSpec.parse(spec))
    observer(x)
    scale, zero_point = (p.reshape(-1, 1) for p in observer.qparams())
    spec = observer.spec
    q = ((x / scale).round() + zero_point).clamp(spec.qmin, spec.qmax)
    return (q - zero_point) * scale


def cost(x, q):
    e = (q - x).double()
    return e.square().sum(1) + 32 * (e * x).sum(1).square() / x.double().square().sum(1) + e.sum(1).square()


@pytest.mark.parametrize(
    "spec", ["int4 symmetric narrow channel:0", "int2 symmetric channel:0", "uint3 affine channel:0"]
)
@pytest.mark.parametrize("size", [9, 300])
def test_no_part_of_the_range_costs_less(spec, size):
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    found = cost(x, observed("bounded_mse", spec, x))
    for part in torch.linspace(1, 0.2, 81):
        ends = x.amin(1) * part, x.amax(1) * part
        minmax = OBSERVERS.get("minmax")(QuantSpec.parse(spec))
        minmax(torch.stack(ends, 1))
        scale, zero_point = (p.reshape(-1, 1) for p in minmax.qparams())
        low, high = minmax.spec.qmin, minmax.spec.qmax
        q = (((x / scale).round() + zero_point).clamp(low, high) - zero_point) * scale
        assert (found <= cost(x, q) * (1 + 1e-4)).all()


def test_the_gain_is_kept_where_the_least_error_loses_it():
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    losses = []
    for name in ("mse", "bounded_mse"):
        q = observed(name, "int3 symmetric narrow channel:0", x)
        losses.append(float(1 - (q * x).sum() / x.square().sum()))
    assert losses[0] > 0.02
    assert abs(losses[1]) < 0.5 * losses[0]


def test_floating_numbers_are_refused():
    with pytest.raises(ConfigError, match="BoundedMSEObserver needs integers"):
        OBSERVERS.get("bounded_mse")(QuantSpec.parse("e4m3"))


def test_least_error_loses_as_much_gain_as_it_has_error_and_the_bound_does_not():
    x = torch.randn(8, 600, generator=torch.Generator().manual_seed(0)).double()
    spec = "int4 symmetric narrow channel:0"
    losses = {}
    for name in ("mse", "bounded_mse"):
        e = observed(name, spec, x.float()).double() - x
        losses[name] = -(e * x).sum(), e.square().sum()
    loss, error = losses["mse"]
    assert float(loss) == pytest.approx(float(error), rel=0.05)
    bounded, more = losses["bounded_mse"]
    assert abs(float(bounded)) < 0.5 * float(loss)
    assert float(error) <= float(more) < 1.3 * float(error)
