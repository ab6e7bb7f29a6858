"""The order of schedules: by their declared ``before`` and ``after``, and otherwise by name."""

import graphlib
from collections.abc import Mapping
from typing import Literal

from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.graph.rewriting.schedule import SCHEDULES, Schedule, Stage
from bitwright.graph.rewriting.sort import in_order
from bitwright.graph.walks import reached_from


def order_schedules(stage: Stage) -> list[Schedule]:
    """The schedules of a stage, each after those it names, and otherwise by name."""
    mine = {name: SCHEDULES.get(name) for name in SCHEDULES.names() if SCHEDULES.get(name).stage == stage}
    earlier = {name: _named(mine[name], "after", mine) for name in sorted(mine)}
    for schedule in mine.values():
        for later in _named(schedule, "before", mine):
            earlier[later].add(schedule.name)
    _add_globs(mine, earlier)
    try:
        return [mine[name] for name in in_order(earlier)]
    except graphlib.CycleError as error:
        circle = " after ".join(map(repr, reversed(error.args[1])))
        raise ConfigError(f"schedules of stage {stage!r} wait for each other: {circle}") from error


def _named(schedule: Schedule, word: Literal["after", "before"], mine: Mapping[str, Schedule]) -> set[str]:
    """The schedules of the same stage that one must run after or before; the other stage's must be consistent."""
    wished = [name for name in getattr(schedule, word) if name != "*"]
    for name in wished:
        if name not in SCHEDULES:
            raise UnknownNameError(
                f"the schedule {schedule.name!r} must run {word} the unknown schedule {name!r}"
                f"{suggest(name, SCHEDULES.names())}"
            )
    names = {SCHEDULES.get(name).name for name in wished}
    strangers = sorted(names - mine.keys())
    if strangers and (schedule.stage, word) in (("simplify", "after"), ("fuse", "before")):
        other = "fuse" if schedule.stage == "simplify" else "simplify"
        raise ConfigError(
            f"the schedule {schedule.name!r} of stage {schedule.stage!r} cannot run {word} {strangers[0]!r} "
            f"of {other!r}"
        )
    return names & mine.keys()


def _add_globs(mine: Mapping[str, Schedule], earlier: dict[str, set[str]]) -> None:
    """Place those that want to be first or last accordingly, unless others want to be before or after them."""
    for name, schedule in mine.items():
        if "*" in schedule.before:
            ahead = _all_before(name, earlier)
            for other in mine.keys() - ahead - {name}:
                if "*" not in mine[other].before:
                    earlier[other].add(name)
        if "*" in schedule.after:
            behind = {other for other in mine if name in _all_before(other, earlier)}
            earlier[name] |= {o for o in mine.keys() - behind - {name} if "*" not in mine[o].after}


def _all_before(name: str, earlier: Mapping[str, set[str]]) -> set[str]:
    return set(reached_from(name, earlier.__getitem__)) - {name}
