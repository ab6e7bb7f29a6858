"""SpeedTuning: what was left float for speed, why, and what it gained."""

from dataclasses import dataclass

from bitwright.recipe import Recipe

_NAMED = 12  # operators that words name


@dataclass(frozen=True)
class LeftFloat:
    """An operator left float because that is faster.

    Attributes:
        name: the user's module, or the call in the graph.
        operator: what it computes.
        match: the selector of the rule that leaves it float.
        microseconds: its time in integers, with the conversions that only it needed.
        float_microseconds: its time in float.
    """

    name: str
    operator: str
    match: str
    microseconds: float
    float_microseconds: float


@dataclass(frozen=True)
class SpeedTuning:
    """The result of tuning for speed on this machine.

    Attributes:
        recipe: the recipe to prepare with: the given one, with the decisions.
        runtime: the runtime that executed the files, on one thread.
        float_ms: the network in float32, in milliseconds.
        before_ms: the file of the given recipe.
        after_ms: the file of ``recipe``.
        left_float: the operators that the new rules leave float.
        decomposed: whether attention computes in integers, by ``decompose_attention``.
        notes: what was tried and not kept, and why.
    """

    recipe: Recipe
    runtime: str
    float_ms: float
    before_ms: float
    after_ms: float
    left_float: tuple[LeftFloat, ...] = ()
    decomposed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """How many times faster than the file of the given recipe."""
        return self.before_ms / self.after_ms

    @property
    def speedup(self) -> float:
        """How many times faster than float."""
        return self.float_ms / self.after_ms

    def lines(self) -> list[str]:
        """The result in words."""
        changed = bool(self.left_float) or self.decomposed
        times = f"{self.before_ms:.3f} ms → {self.after_ms:.3f} ms" if changed else f"{self.after_ms:.3f} ms, unchanged"
        said = [f"tuned for speed in {self.runtime}: {times}; float {self.float_ms:.3f} ms ({self.speedup:.2f}×)"]
        if self.left_float:
            named = [
                f"{o.name} ({o.microseconds:.0f} µs, not {o.float_microseconds:.0f} µs)"
                for o in self.left_float[:_NAMED]
            ]
            more = f" and {len(self.left_float) - _NAMED} more" if len(self.left_float) > _NAMED else ""
            said.append(f"left float because integers are slower there: {', '.join(named)}{more}")
        if self.decomposed:
            said.append("attention computes in integers (decompose_attention), which is faster here")
        return [*said, *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
