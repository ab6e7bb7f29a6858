"""A backend as plain data. Its conditions are functions, stored by name and looked up again."""

from collections.abc import Callable, Mapping
from typing import Any

from bitwright.backends import BACKENDS, Backend
from bitwright.backends.base import validated
from bitwright.backends.rules import IN_PYTHON
from bitwright.errors import SaveError
from bitwright.registry import describe
from bitwright.spec import QuantSpec
from bitwright.validation import Strict


def to_data(value: object) -> Any:  # noqa: ANN401
    """A backend, or a part of one, as plain data for :func:`from_data`, the same in every process."""
    if isinstance(value, Strict):
        return {name: to_data(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, QuantSpec):
        return str(value)
    if callable(value):
        return describe(value)
    return list(value) if isinstance(value, tuple) else value


def from_data(data: dict[str, Any], given: Backend | None = None) -> Backend:
    """The saved backend; functions come from ``given``, or from the registered backends."""
    operators = dict(data.get("operators") or {})
    wanted: dict[str, dict[str, str]] = {rule: dict(operators.get(rule) or {}) for rule in IN_PYTHON}
    names = {name for each in wanted.values() for name in each.values()}
    known = {} if not names else _functions([given] if given is not None else BACKENDS.values())
    missing = sorted(names - set(known))
    if missing:
        raise SaveError(
            f"the backend {data.get('name')!r} has conditions written in Python, and nothing here is called "
            f"{', '.join(missing)}: import the module that registers the backend, or give load(…, backend=…)"
        )
    functions = {rule: {operator: known[name] for operator, name in each.items()} for rule, each in wanted.items()}
    return validated({**data, "operators": {**operators, **functions}}, "the backend of the saved model")


def _functions(backends: list[Backend]) -> dict[str, Callable[..., Any]]:
    rules = [getattr(backend.operators, rule) for backend in backends for rule in IN_PYTHON]
    return {describe(function): function for each in rules for function in each.values()}
