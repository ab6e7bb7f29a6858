"""A stage: run its schedules with the recipe's settings, and check each of them in debug mode."""

from collections.abc import Callable, Mapping
from typing import Any

from bitwright.errors import ConfigError, ScheduleError
from bitwright.graph.differences import difference
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.options import check_options
from bitwright.graph.rewriting.order import order_schedules
from bitwright.graph.rewriting.rewrite import PassResult
from bitwright.graph.rewriting.schedule import Schedule, Stage, find_schedule
from bitwright.modes import random_numbers_kept

Switches = Mapping[str, bool | Mapping[str, Any]]


def run_stage(
    model: CapturedModel,
    stage: Stage,
    switches: Switches | None = None,
    *,
    check: Callable[[], Any] | None = None,
) -> list[PassResult]:
    """Run the schedules of a stage; the caller recompiles the model, once.

    ``switches`` says by name whether a schedule runs, or its options. ``check`` computes the model's outputs from its
    current graph; with it, a schedule that changes them is an error.
    """
    results: list[PassResult] = []
    chosen, index, is_stale = read_switches(switches or {}), GraphIndex(model), False
    with random_numbers_kept():  # schedules may draw random numbers when they compute shapes
        expected = check() if check is not None else None
        for schedule in order_schedules(stage):
            settings = chosen.get(schedule.name, {} if schedule.default else None)
            if settings is None:
                continue
            if is_stale and isinstance(schedule.source, type):
                index.update()
                is_stale = False
            results.append(schedule.run(model, settings, index))
            is_stale |= bool(results[-1].applied) or not isinstance(schedule.source, type)
            if check is not None:
                outputs = check()
                _compare(schedule, expected, outputs, results)
                expected = outputs
    return results


def read_switches(switches: Switches) -> dict[str, dict[str, Any] | None]:
    """The options of the schedules that a recipe names (None for one switched off); raises on an unknown name."""
    chosen: dict[str, dict[str, Any] | None] = {}
    for name, wish in switches.items():
        schedule = find_schedule(name)
        if schedule.name in chosen:
            raise ConfigError(f"the schedule {schedule.name!r} is named twice, the second time as {name!r}")
        if wish is None or isinstance(wish, bool):
            chosen[schedule.name] = {} if wish else None
        elif isinstance(wish, Mapping):
            chosen[schedule.name] = check_options(schedule.name, schedule.options, wish)
        else:
            raise ConfigError(f"the schedule {name!r} must be set to true, false or a mapping of options, not {wish!r}")
    return chosen


def _compare(schedule: Schedule, expected: object, outputs: object, results: list[PassResult]) -> None:
    told = difference(expected, outputs, schedule.tolerance)
    if told:
        before = ", ".join(r.name for r in results[:-1]) or "none"
        raise ScheduleError(
            f"the schedule {schedule.name!r} of stage {schedule.stage!r} changes what the model computes: {told}; "
            f"it did: {'; '.join(results[-1].notes) or 'nothing noted'}; schedules before it: {before}"
        )
