"""Schedules: graph rewrites, one file each, in stage *simplify* (before QModules) or *fuse* (after)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from bitwright.errors import BitwrightError, ConfigError, ScheduleError, UnknownNameError, suggest
from bitwright.graph.match.index import GraphIndex
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.options import Option, options_of
from bitwright.graph.rewriting.replace import ReplacePatternBase
from bitwright.graph.rewriting.rewrite import PassResult, rewrite
from bitwright.registry import Registry

Stage = Literal["simplify", "fuse"]
R = TypeVar("R", bound=Callable[..., Any])


@dataclass(frozen=True)
class Schedule:
    """A rewrite with its name, its stage and its place among the others; see :func:`register_schedule`."""

    name: str
    stage: Stage
    source: Callable[..., Any]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    default: bool = True
    tolerance: float = 0.0
    options: Mapping[str, Option] = field(default_factory=dict)

    def run(self, model: CapturedModel, settings: Mapping[str, Any], index: GraphIndex | None) -> PassResult:
        """Rewrite a model's graph; the caller recompiles it."""
        try:
            made = self.source(**settings) if isinstance(self.source, type) else self.source(model, **settings)
        except BitwrightError:
            raise
        except Exception as error:
            raise ScheduleError(f"the schedule {self.name!r} failed: {type(error).__name__}: {error}") from error
        if isinstance(made, ReplacePatternBase):
            return rewrite(made, model, self.name, index)
        notes = list(made or ())
        return PassResult(self.name, any(not line.startswith("not ") for line in notes), notes)


SCHEDULES: Registry[Schedule] = Registry("schedule")


def register_schedule(
    name: str,
    stage: Stage,
    *,
    after: tuple[str, ...] | list[str] | str = (),
    before: tuple[str, ...] | list[str] | str = (),
    default: bool = True,
    tolerance: float = 0.0,
    aliases: tuple[str, ...] = (),
    override: bool = False,
) -> Callable[[R], R]:
    """File a rewrite under a name; that is the whole plug-in.

    ::

        @register_schedule("swap_silu", stage="simplify")
        class ReplacePattern(ReplacePatternBase):
            def make_ops(self): ...
            def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx): ...

        @register_schedule("remove_identity", stage="simplify", after=["swap_silu"])
        def remove_identity(model: CapturedModel, keep: tuple[str, ...] = ()) -> list[str]: ...

    A function changes the graph and returns one line for each thing it did, or declined to do ("not removed: …").
    Keyword arguments with defaults, of the function or of the class, are options that the recipe can set:
    ``schedules: {remove_identity: {keep: [head]}}``; ``schedules: {remove_identity: false}`` switches it off.

    Args:
        name: its name in recipes and notes.
        stage: ``"simplify"``, on the float graph, or ``"fuse"``, once QModules are in it.
        after: schedules that run before this one; ``"*"`` for all.
        before: schedules that run after this one.
        default: whether it runs where the recipe does not mention it.
        tolerance: the largest acceptable change of an output, as a share of the largest output; checked by
            ``prepare(…, debug=True)``.
        aliases: other names that a recipe may use.
        override: replace the schedule that has the name.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a schedule's name must be a non-empty string, not {name!r}")
    if stage not in get_args(Stage):
        raise ConfigError(f"the stage of the schedule {name!r} must be 'simplify' or 'fuse', not {stage!r}")

    def decorate(source: R) -> R:
        if not callable(source) or (isinstance(source, type) and not issubclass(source, ReplacePatternBase)):
            raise ConfigError(f"the schedule {name!r} must be a function or a ReplacePatternBase, not {source!r}")
        schedule = Schedule(
            name, stage, source, _names(after), _names(before), default, tolerance, options_of(source, name)
        )
        SCHEDULES.register(name, aliases=aliases, override=override)(schedule)
        return source

    return decorate


def find_schedule(name: str) -> Schedule:
    """The schedule that a recipe calls ``name``, in whatever case."""
    known = {n.lower(): n for n in (*SCHEDULES.names(), *SCHEDULES.aliases())}
    if not isinstance(name, str) or name.lower() not in known:
        raise UnknownNameError(f"unknown schedule {name!r}{suggest(str(name), SCHEDULES.names())}")
    return SCHEDULES.get(known[name.lower()])


def _names(given: tuple[str, ...] | list[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
