"""What reconstruction did, unit by unit."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bitwright.columns import in_columns


@dataclass(frozen=True)
class UnitResult:
    """What one unit gained.

    Attributes:
        name: the module or layers of the unit.
        layers: the weights that learned their rounding.
        scales: how many activations learned their scale.
        before: the error of its results with the former rounding, relative to their power; with ``prediction`` the gap
            between predictions is added at its weight.
        after: the error now; never more than before.
        kept: whether what was learned was better and is in force.
        steps: training steps.
        seconds: time taken.
    """

    name: str
    layers: tuple[str, ...]
    scales: int
    before: float
    after: float
    kept: bool
    steps: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "UnitResult":
        """Read what :meth:`to_dict` gave."""
        made = cls(**data)
        return replace(made, layers=tuple(made.layers), before=float(made.before), after=float(made.after))


@dataclass
class Reconstruction:
    """What :func:`bitwright.reconstruct` did; ``print`` shows it as a table.

    Attributes:
        method: how it learned.
        units: what each unit gained.
        before: the squared distance of the model's results from the float ones, relative to the latter's squares.
        after: the same now; it may be more although no unit's error is.
    """

    method: str
    units: list[UnitResult] = field(default_factory=list)
    before: float = math.nan
    after: float = math.nan

    @property
    def seconds(self) -> float:
        """The time that all units took."""
        return sum(unit.seconds for unit in self.units)

    def __str__(self) -> str:
        kept = sum(unit.kept for unit in self.units)
        head = f"{self.method}: {kept} of {len(self.units)} units improved in {self.seconds:.0f} s"
        rows = [
            (
                unit.name,
                str(len(unit.layers)),
                f"{unit.before:.2e}",
                f"{unit.after:.2e}",
                str(unit.steps),
                f"{unit.seconds:.1f}",
                "" if unit.kept else "(former rounding kept)",
            )
            for unit in self.units
        ]
        head += f"; error of the model's results {self.before:.2e} before, {self.after:.2e} after"
        return "\n".join([head, *in_columns(("unit", "layers", "error before", "after", "steps", "seconds", ""), rows)])

    __repr__ = __str__
