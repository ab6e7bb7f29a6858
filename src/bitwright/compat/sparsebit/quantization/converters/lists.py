"""The lists of schedules of a stage: they show what is registered, and register what is appended."""

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, overload

from bitwright.errors import ConfigError
from bitwright.graph import SCHEDULES, register_schedule
from bitwright.graph.rewriting.order import order_schedules
from bitwright.graph.rewriting.schedule import Stage


class ScheduleList(Sequence[str]):
    """The names of a stage's schedules in the order in which they run.

    ``append("my_fusion")`` imports the module of that name, wherever Python finds it, and registers the class
    ``ReplacePattern`` in it. A config then has the switch ``SCHEDULE.MY_FUSION``.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage: Stage = stage

    def _names(self) -> list[str]:
        return [schedule.name for schedule in order_schedules(self.stage)]

    def append(self, schedule: str | ModuleType) -> None:
        """Register the ``ReplacePattern`` of a module."""
        module = self._find(schedule) if isinstance(schedule, str) else schedule
        pattern = getattr(module, "ReplacePattern", None)
        if pattern is None:
            raise ConfigError(f"the module {module.__name__} has no class ReplacePattern, which says what is replaced")
        name = module.__name__.rpartition(".")[2]
        register_schedule(name, stage=self.stage, override=name in SCHEDULES)(pattern)

    def extend(self, schedules: Any) -> None:
        """Register several."""
        for schedule in schedules:
            self.append(schedule)

    def insert(self, index: int, schedule: str | ModuleType) -> None:
        """Register one; its place follows from what it declares, not from ``index``."""
        self.append(schedule)

    def __iadd__(self, schedules: object) -> "ScheduleList":
        self.extend(schedules)
        return self

    def __len__(self) -> int:
        return len(self._names())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._names()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __repr__(self) -> str:
        return repr(self._names())

    @staticmethod
    def _find(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ConfigError(
                f"there is no module {name!r} to take ReplacePattern from: put {name}.py where Python finds it, or "
                "decorate the class with register_schedule"
            ) from error
