"""Schedules: graph rewrites, one file each, in stage *simplify* (before QModules) or *fuse* (after)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bitwright.graph.model import CapturedModel
from bitwright.registry import Registry

Stage = Literal["simplify", "fuse"]
Rewrite = Callable[[CapturedModel], list[str]]


@dataclass(frozen=True)
class Schedule:
    """A rewrite with its name and stage; it returns one line for each thing it did or declined to do."""

    name: str
    stage: Stage
    rewrite: Rewrite


SCHEDULES: Registry[Schedule] = Registry("schedule")


def register_schedule(name: str, stage: Stage, *, override: bool = False) -> Callable[[Rewrite], Rewrite]:
    """File a rewrite under a name; that is the whole plug-in.

    ::

        @register_schedule("remove_identity", stage="simplify")
        def remove_identity(model: CapturedModel) -> list[str]: ...

    It changes the graph and returns one line for each thing it did or declined to do.
    """

    def decorate(rewrite: Rewrite) -> Rewrite:
        SCHEDULES.register(name, override=override)(Schedule(name, stage, rewrite))
        return rewrite

    return decorate


def run_stage(model: CapturedModel, stage: Stage) -> list[str]:
    """Run every schedule of a stage; the model's code is made anew by the caller, once."""
    notes: list[str] = []
    for name in SCHEDULES.names():
        schedule = SCHEDULES.get(name)
        if schedule.stage == stage:
            notes += [f"{name}: {line}" for line in schedule.rewrite(model)]
    return notes
