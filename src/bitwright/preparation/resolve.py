"""Resolve the user's request into one recipe for one backend, refused in advance if the backend cannot do it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bitwright.backends import BACKENDS, Backend, find_backend
from bitwright.cpu import adds_in_32_bits
from bitwright.errors import ConfigError
from bitwright.graph import read_switches
from bitwright.preparation.operator_recipe import make_quantizer, operator_recipe
from bitwright.recipe import Recipe, Rule, TensorRecipe, with_bits

AUTO = "auto"  # weights in as many bits as are safe on this CPU, or on the one named after a colon


def _by_arguments(skip: Iterable[str], **specs: str | None) -> Recipe:
    """What the arguments of ``prepare`` ask for, as a recipe."""
    skips = [{"match": match, "skip": True} for match in ([skip] if isinstance(skip, str) else skip)]
    return Recipe.parse({"rules": skips, **{kind: spec for kind, spec in specs.items() if spec is not None}})


def resolve_recipe(
    backend: str | Path | Backend | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    weight: str | None = None,
    activation: str | None = None,
    skip: Iterable[str] = (),
    *,
    allow_float: bool = False,
) -> tuple[Recipe, Backend]:
    """Put the arguments of ``prepare`` into one recipe, find its backend, and check one against the other."""
    given = Recipe.parse(recipe if recipe is not None else {})
    source = backend if backend is not None else given.backend
    target = find_backend(source)
    if weight is not None and weight.partition(":")[0] == AUTO:
        weight = _widest(target, weight.partition(":")[2])
    asked = _by_arguments(skip, weight=weight, activation=activation)
    named = isinstance(source, Backend) or target.name in BACKENDS
    changes = {
        "rules": (*given.rules, *asked.rules),
        "allow_float": given.allow_float or allow_float,
        "weight": asked.weight.over(given.weight),
        "activation": asked.activation.over(given.activation),
        "backend": target.name if named else str(source),
    }
    whole = given.model_copy(update=changes)
    check_recipe(whole, target)
    read_switches(whole.schedules)
    return whole, target


def _widest(backend: Backend, cpu: str) -> str | None:
    """The weights of a backend in as many bits as are safe on a CPU, or None for its default."""
    spec, used = backend.weights.spec, backend.weights.used_bits
    if spec is None or spec.bits not in used.values():
        raise ConfigError(
            f"weight='{AUTO}' is for backends whose weights depend on the CPU, unlike {backend.name}; name a spec"
        )
    most = max(bits for bits, those in used.items() if those == spec.bits)
    return str(with_bits(spec, most)) if adds_in_32_bits(cpu) else None


def check_recipe(recipe: Recipe, backend: Backend) -> None:
    """Refuse what the backend could not run, and names of observers and methods that do not exist."""
    if missing := _left_open(recipe, backend):
        raise ConfigError(
            f"the backend {backend.name} leaves the specs to you: give {' and '.join(missing)} "
            "('int4 channel:0', 'uint4', or 'float'), or a preset such as 'W4A4'"
        )
    for rule in (None, *recipe.rules):
        _check_rule(rule, recipe, backend)


def _check_rule(rule: Rule | None, recipe: Recipe, backend: Backend) -> None:
    asked = operator_recipe(rule, recipe, backend)
    for kind in ("weight", "input", "output"):
        tensor: TensorRecipe = getattr(asked, kind)
        spec = tensor.quant_spec
        if spec is None or (rule is not None and rule.asked(kind).empty):
            continue
        problem = backend.why_not("weights" if kind == "weight" else "activations", spec)
        if problem and not recipe.allow_float:
            raise ConfigError(f"{'the recipe' if rule is None else f'the rule {rule.match!r}'}: {problem}")
        make_quantizer(tensor, spec, "")


def _left_open(recipe: Recipe, backend: Backend) -> list[str]:
    kinds = {"weight": (backend.weights, recipe.weight), "activation": (backend.activations, recipe.activation)}
    return [k for k, (rules, own) in kinds.items() if rules.spec is None and own.spec is None and own.bits is None]
