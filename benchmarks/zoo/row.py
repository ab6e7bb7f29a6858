"""Row: what was found of one family for one backend, kept as JSON and rewritten at every step."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

DONE = "done"


@dataclass
class Step:
    """What one step cost.

    Attributes:
        seconds: elapsed time.
        cpu: seconds of computing; on a busy machine, steps compare by these.
        megabytes: peak memory, over what the libraries themselves take.
    """

    seconds: float
    cpu: float
    megabytes: float


@dataclass
class Row:
    """One line of the table.

    Attributes:
        family: the family's name.
        library: where it comes from.
        kind: cnn, decoder …
        backend: the backend, whose runtime has the same name.
        step: the step under way, at which it failed, or "done".
        error: why it failed, and where.
        trace: the whole traceback.
        steps: what each step cost.
        islands: parts that were not captured, with the reason.
        sqnr: of the simulation against the float model, in decibels.
        coverage: share of operators that run in integers.
        float_operators: those that do not, with the reason.
        equal: share of quantized values equal to the simulation.
        gap: largest difference of a quantized value in steps.
        deviation: the first tensor that is off by more than one step.
        output: largest difference of an output, as a share of its range.
        proven: whether every limit was kept.
        missed: the limits that were not.
        notes: what was logged, such as a batch size that had to be fixed.
        milliseconds: computing time of the file, and of torch's float file in the same runtime.
    """

    family: str
    library: str
    kind: str
    backend: str
    step: str = "start"
    error: str = ""
    trace: str = ""
    steps: dict[str, Step] = field(default_factory=dict)
    islands: dict[str, str] = field(default_factory=dict)
    sqnr: float | None = None
    coverage: float | None = None
    float_operators: list[str] = field(default_factory=list)
    equal: float | None = None
    gap: int | None = None
    deviation: str = ""
    output: float | None = None
    proven: bool | None = None
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    milliseconds: float | None = None
    float_milliseconds: float | None = None

    @property
    def captured(self) -> bool:
        """Whether the model became a graph, with islands or without."""
        return "prepare" in self.steps and "" not in self.islands

    @property
    def exported(self) -> bool:
        """Whether there is a file."""
        return "export" in self.steps

    @property
    def speed(self) -> float | None:
        """How many times faster than torch's float file."""
        if self.milliseconds is None or self.float_milliseconds is None:
            return None
        return self.float_milliseconds / self.milliseconds

    def ratio(self, step: str, to: str) -> float | None:
        """The computing time of a step over that of another."""
        if step not in self.steps or to not in self.steps:
            return None
        return self.steps[step].cpu / self.steps[to].cpu

    def write(self, folder: Path) -> None:
        """Keep the row, whole or not at all."""
        path = row_path(folder, self.family, self.backend)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)


def row_path(folder: Path, family: str, backend: str) -> Path:
    """Where a row is kept."""
    return folder / f"{family}.{backend}.json"


def read_row(path: Path) -> Row | None:
    """Read a row, or nothing if there is none."""
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    data["steps"] = {name: Step(**step) for name, step in data["steps"].items()}
    known = {f.name for f in fields(Row)}
    return Row(**{name: value for name, value in data.items() if name in known})
