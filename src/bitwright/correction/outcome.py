"""Correction: what a corrector did, layer by layer."""

from dataclasses import dataclass, field


@dataclass
class Correction:
    """What a corrector did.

    Attributes:
        step: the name of the corrector.
        changed: by layer, how much it changed, in the unit that the corrector documents.
        skipped: by layer, why it was left alone.
    """

    step: str
    changed: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.changed)
        lines = [f"{self.step}: {count} layer{'s' * (count != 1)} changed, {len(self.skipped)} left alone"]
        return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in self.skipped.items())])

    __repr__ = __str__


class Corrections(list[Correction]):
    """What several correctors did, one after the other; ``print`` says it in words."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no corrector ran"

    __repr__ = __str__
