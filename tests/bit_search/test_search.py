"""search_bits and sensitivity: against brute force, and the model afterwards is what the recipe makes."""

import copy
from itertools import product

import pytest
import torch

import bitwright as bw
from bitwright.bit_search.damage import Damage
from bitwright.bit_search.layers import layers_of
from bitwright.bit_search.solve import choose
from bitwright.errors import ConfigError
from bitwright.preparation import ledger_of
from bitwright.quantizer import Mode, quantizers
from tests.reconstruction.nets import calibrated

RECIPE = {"backend": "virtual", "weight": "int8 channel:0", "activation": "uint8 affine"}


def best_of_all(costs, limits):
    def total(table, options):
        return sum(row[i] for row, i in zip(table, options, strict=True))

    fitting = [
        options
        for options in product(*(range(len(row)) for row in costs))
        if all(total(table, options) <= limit for _, table, limit in limits)
    ]
    return min(total(costs, options) for options in fitting)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    source = torch.Generator().manual_seed(seed)

    def table(scale):
        return (torch.rand(6, 3, generator=source) * scale).tolist()

    costs, limits = table(1e-5), [("size", table(1e6), 2.5e6), ("operations", table(1e9), 4e9)]
    chosen = choose(costs, limits)
    assert all(sum(row[i] for row, i in zip(t, chosen, strict=True)) <= limit * (1 + 1e-9) for _, t, limit in limits)
    found = sum(row[i] for row, i in zip(costs, chosen, strict=True))
    assert found == pytest.approx(best_of_all(costs, limits), rel=1e-6)


def test_the_search_finds_what_brute_force_finds():
    model, batches = calibrated("residual", RECIPE)
    layers = layers_of(model, ledger_of(model).example)
    bits, limit = (2, 4, 8), sum(layer.size(4) for layer in layers) * 1.1
    damages = []
    for layer in layers:
        row = []
        for b in bits:
            other, data = calibrated("residual", {**RECIPE, "rules": [{"match": layer.name, "weight": {"bits": b}}]})
            row.append(Damage(other, data, "kl").of([dict(sites(other))[layer.name]]))
        damages.append(row)
    sizes = [[float(layer.size(b)) for b in bits] for layer in layers]
    result = bw.search_bits(model, batches, {"size": limit}, bits=bits)
    assert result.size <= limit
    assert result.damage == pytest.approx(best_of_all(damages, [("size", sizes, limit)]), rel=1e-4)
    assert set(result.bits.values()) <= set(bits)
    assert str(result).count("\n") == len(layers) + 1


def sites(model):
    from bitwright.nn.weight_sites import weight_sites

    return [(site.name, site.quantizer) for site in weight_sites(model)]


def test_the_recipe_makes_the_model_that_was_found():
    model, batches = calibrated("residual", RECIPE)
    result = bw.search_bits(model, batches, {"bit_operations": 4e6}, bits=(2, 4, 8, 32))
    assert result.bit_operations <= 4e6
    again, _ = calibrated("residual", bw.Recipe.parse(result.recipe.to_dict()))
    assert torch.equal(model(*batches[0]), again(*batches[0]))


def test_layers_to_skip_for_a_wished_damage():
    model, batches = calibrated("residual", {**RECIPE, "weight": "int3 channel:0"})
    whole = Damage(model, batches, "mse").of([q for _, q in sites(model)])
    result = bw.search_bits(model, batches, {"damage": whole / 4}, bits=(3, 32), metric="mse")
    assert set(result.bits.values()) == {3, 32}
    assert result.damage <= whole / 4
    assert {name for name, q in sites(model) if not q.enabled} == {n for n, b in result.bits.items() if b == 32}


@pytest.mark.parametrize("metric", ["kl", "mse", "sqnr", lambda model: 1.0])
def test_sensitivity_leaves_the_model_as_it_was(metric):
    model, batches = calibrated("residual")
    state = copy.deepcopy(model.state_dict())
    result = bw.sensitivity(model, batches, metric, cumulative=True)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert [layer.name for layer in result.layers][:2] == ["0", "2.conv1"]
    assert result.worst()[0].alone == max(layer.alone for layer in result.layers)
    assert str(result).count("\n") == len(result.layers)


def test_the_damage_is_that_of_one_layer_alone_and_of_all_in_the_end():
    model, batches = calibrated("residual")
    result = bw.sensitivity(model, batches, "mse", cumulative=True)
    with torch.no_grad():
        all_on = [model(*b) for b in batches]
        modes = {q: q.mode for q in quantizers(model).values()}
        for q in modes:
            q.mode = Mode.OFF
        exact = [model(*b) for b in batches]
        q = dict(sites(model))["3.conv2"]
        q.mode = Mode.QUANTIZE
        model.get_submodule("3.conv2").input_quantizer.quantizer.mode = Mode.QUANTIZE
        one_on = [model(*b) for b in batches]

    def gap(found):
        pairs = zip(found, exact, strict=True)
        return sum(float((f - e).square().mean() / e.square().mean()) for f, e in pairs) / len(exact)

    assert result.layers[-1].cumulative == pytest.approx(gap(all_on), rel=1e-4)
    alone = next(layer.alone for layer in result.layers if layer.name == "3.conv2")
    assert alone == pytest.approx(gap(one_on), rel=1e-4)


def test_wrong_budgets_are_refused():
    model, batches = calibrated("residual", RECIPE)
    for budget, options, words in (
        ({"sizes": 1}, {}, "did you mean 'size'"),
        ({"size": 10}, {}, "the least possible is"),
        (500, {}, "mapping of limits"),
        ({"size": 1e6}, {"metric": "sqnr"}, "cannot be added up"),
        ({"size": 1e6}, {"bits": (1,)}, "from 2 to 16"),
        ({"size": 1e6}, {"metric": "kk"}, "cannot be 'kk'"),
    ):
        with pytest.raises(ConfigError, match=words):
            bw.search_bits(model, batches, budget, **options)
    bw.reconstruct(model, batches, steps=40)  # enough to learn a rounding
    with pytest.raises(ConfigError, match="search bits before that"):
        bw.search_bits(model, batches, {"size": 1e6})


def test_a_budget_of_latency_against_brute_force():
    model, batches = calibrated("residual", RECIPE)
    layers, bits = layers_of(model, ledger_of(model).example), (2, 4, 8)
    source = torch.Generator().manual_seed(5)
    table = {layer.name: dict(zip(bits, torch.rand(3, generator=source).tolist(), strict=True)) for layer in layers}
    damages = []
    for layer in layers:
        row = []
        for b in bits:
            rules = [{"match": layer.name, "weight": {"bits": b}}]
            other, data = calibrated("residual", {**RECIPE, "rules": rules})
            row.append(Damage(other, data, "kl").of([dict(sites(other))[layer.name]]))
        damages.append(row)
    rows = [[table[layer.name][b] for b in bits] for layer in layers]
    limit = sum(sorted(row)[1] for row in rows)
    result = bw.search_bits(model, batches, {"latency": limit}, bits=bits, latency=table)
    assert result.latency == pytest.approx(sum(table[name][b] for name, b in result.bits.items()))
    assert result.latency <= limit * (1 + 1e-9)
    assert result.damage == pytest.approx(best_of_all(damages, [("latency", rows, limit)]), rel=1e-4)


def test_wrong_tables_of_latency():
    model, batches = calibrated("residual", RECIPE)
    names = [layer.name for layer in layers_of(model, ledger_of(model).example)]
    good = {name: {4: 1.0, 8: 2.0} for name in names}
    wrong = [
        ({}, "has no 4 bits for '0', only none"),
        ({**good, "1": {4: 1.0}}, "names '1', which is not a layer"),
        ({**good, "0": {8: 1.0}}, "has no 4 bits for '0', only 8"),
        ({**good, "0": {4: -1.0, 8: 1.0}}, "a number of seconds, not -1.0"),
        (None, "the table latency="),
    ]
    for table, words in wrong:
        with pytest.raises(ConfigError, match=words):
            bw.search_bits(model, batches, {"latency": 5.0}, bits=(4, 8), latency=table)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("paired", ["", "damage"])
def test_pairs_against_brute_force(seed, paired):
    source = torch.Generator().manual_seed(seed)

    def table(count=5):
        return torch.rand(count, 3, generator=source).tolist()

    costs, damages = table(), table()
    pairs = [(i, i + 1, (torch.rand(3, 3, generator=source) - 0.5).tolist()) for i in range(4)]
    every = list(product(range(3), repeat=5))

    def alone(rows, options):
        return sum(row[i] for row, i in zip(rows, options, strict=True))

    def together(options):
        return sum(t[options[i]][options[j]] for i, j, t in pairs)

    if paired:
        limit = sorted(alone(damages, o) + together(o) for o in every)[60]
        best = min(alone(costs, o) for o in every if alone(damages, o) + together(o) <= limit)
        found = choose(costs, [("damage", damages, limit)], pairs, paired)
        assert alone(damages, found) + together(found) <= limit + 1e-6
        assert alone(costs, found) == pytest.approx(best, abs=1e-6)
    else:
        best = min(alone(costs, o) + together(o) for o in every if alone(damages, o) <= 2.5)
        found = choose(costs, [("size", damages, 2.5)], pairs)
        assert alone(costs, found) + together(found) == pytest.approx(best, abs=1e-6)


def test_interactions_of_neighbours_are_measured():
    model, batches = calibrated("residual", RECIPE)
    layers, bits = layers_of(model, ledger_of(model).example), (2, 8)
    limit = sum(layer.size(8) for layer in layers) - 1
    plain = bw.search_bits(copy.deepcopy(model), batches, {"size": limit}, bits=bits)
    found = bw.search_bits(model, batches, {"size": limit}, bits=bits, interactions=True)
    assert found.size <= limit
    assert found.damage != plain.damage  # neighbours do not add up exactly


class Backwards(torch.nn.Module):
    """Layers that compute in another order than that in which they are registered; one is never called."""

    def __init__(self):
        super().__init__()
        self.last, self.unused = torch.nn.Linear(6, 4), torch.nn.Linear(5, 5)
        self.middle, self.first = torch.nn.Linear(6, 6), torch.nn.Linear(8, 6)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def test_neighbours_are_layers_that_compute_one_after_the_other(monkeypatch):
    torch.manual_seed(0)
    batches = [torch.randn(16, 8)]
    model = bw.calibrate(bw.prepare(Backwards().eval(), batches[0], recipe=RECIPE), batches)
    assert [layer.name for layer in layers_of(model, ledger_of(model).example)][:3] == ["first", "middle", "last"]
    asked = []
    of = Damage.of
    monkeypatch.setattr(Damage, "of", lambda self, chosen: asked.append(tuple(chosen)) or of(self, chosen))
    bw.search_bits(model, batches, {"size": 10**6}, bits=(4, 8), interactions=True)
    names = {layer.site.quantizer: layer.name for layer in layers_of(model, ledger_of(model).example)}
    pairs = {tuple(names[q] for q in chosen) for chosen in asked if len(chosen) == 2}
    assert pairs - {pair for pair in pairs if "unused" in pair} == {("first", "middle"), ("middle", "last")}
