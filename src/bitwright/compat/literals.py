"""Read a Python settings file without running it: literals, dict(...), names set earlier, and dotted names."""

import ast
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import ConfigError, suggest
from bitwright.validation import LONGEST, within_limits

ALLOWED = "literals, lists, tuples, sets, dicts, dict(…), names set above, and imported names such as torch.nn.Conv2d"
Resolve = Callable[[str], Any]
_COLLECTIONS: dict[type[ast.expr], Callable[[Iterable[Any]], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}


def read_assignments(path: str | Path, resolve: Resolve | None = None) -> dict[str, Any]:
    """The settings of a Python file by name; nothing in it is executed.

    ``resolve`` returns what an imported, dotted name stands for; without it, such a name is refused.
    """
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text):,} characters, more than {LONGEST:,}")
        tree = ast.parse(text, filename=where)
    except (RecursionError, MemoryError) as error:  # Python's error for brackets nested too deeply
        raise ConfigError(f"the config {where!r} cannot be read: it is nested too deeply") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"the config {where!r} cannot be read: {error}") from error
    except SyntaxError as error:
        raise ConfigError(f"{where}:{error.lineno}: this is not Python: {error.msg}") from error
    reader = _Reader(where, resolve)
    try:
        for statement in tree.body:
            reader.statement(statement)
    except RecursionError as error:
        raise ConfigError(f"the config {where!r} cannot be read: it is nested too deeply") from error
    return reader.found


class _Reader:
    def __init__(self, where: str, resolve: Resolve | None) -> None:
        self.where, self.resolve = where, resolve
        self.found: dict[str, Any] = {}
        self.imported: dict[str, str] = {}

    def refuse(self, node: ast.AST, what: str) -> ConfigError:
        return ConfigError(f"{self.where}:{getattr(node, 'lineno', 1)}: {what}")

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                try:
                    self.found[name] = within_limits(self.value(node.value))
                except TypeError as error:  # unhashable
                    what = "a list, set or dict cannot be a key of a dict or an element of a set"
                    raise self.refuse(node, what) from error
                except ValueError as error:
                    raise error if isinstance(error, ConfigError) else self.refuse(node, str(error)) from error
            case ast.Import():
                self.imported.update(map(_bound, node.names))
            case ast.ImportFrom():
                prefix = "." * node.level + (node.module or "")
                self.imported.update({(a.asname or a.name): f"{prefix}.{a.name}" for a in node.names})
            case ast.Expr(value=ast.Constant()):
                pass  # ignore docstrings
            case _:
                what = f"{_shown(node)} is not allowed: a config is read, not run; write name = {ALLOWED}"
                raise self.refuse(node, what)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List() | ast.Tuple() | ast.Set():
                return _COLLECTIONS[type(node)](map(self.value, node.elts))
            case ast.Dict():
                return self.pairs(node, [(None if k is None else self.value(k), v) for k, v in _items(node)])
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return self.pairs(node, [(k.arg, k.value) for k in node.keywords])
            case ast.Name() | ast.Attribute():
                return self.name(node)
        raise self.refuse(node, f"{_shown(node)} is not allowed: a config is read, not run; it may have {ALLOWED}")

    def pairs(self, node: ast.AST, items: list[tuple[Any, ast.expr]]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in items:
            if key is None:
                raise self.refuse(node, f"**{_shown(value)} is not allowed in a dict: write its keys out")
            if key in made:
                raise self.refuse(value, f"the key {key!r} is given twice")
            made[key] = self.value(value)
        return made

    def name(self, node: ast.Name | ast.Attribute) -> Any:
        dotted = dotted_name(node)
        if dotted is None:
            raise self.refuse(node, f"{_shown(node)} is not allowed: a config is read, not run; it may have {ALLOWED}")
        if dotted in self.found:
            return self.found[dotted]
        head, _, tail = dotted.partition(".")
        if self.resolve is not None and (head in self.imported or tail):
            full = ".".join(p for p in (self.imported.get(head, head), tail) if p)
            try:
                return self.resolve(full)
            except ConfigError as error:
                raise self.refuse(node, str(error)) from error
        hint = suggest(dotted, [*self.found, *self.imported])
        raise self.refuse(node, f"the name {dotted} is set nowhere above (or needs quotes){hint}")


def _bound(alias: ast.alias) -> tuple[str, str]:
    """The name that ``import a.b`` or ``import a.b as c`` sets, and what it stands for."""
    if alias.asname:
        return alias.asname, alias.name
    head = alias.name.partition(".")[0]
    return head, head


def _items(node: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    return list(zip(node.keys, node.values, strict=True))


def dotted_name(node: ast.expr) -> str | None:
    """``a.b.c`` as text; None for anything but names."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted_name(node.value) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if before is not None and isinstance(node, ast.Attribute) else None


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return f"'{text if len(text) <= 60 else text[:57] + '…'}'"


def attribute(root: object, path: str, what: str) -> Any:
    """Follow a dotted path from ``root``; a misspelt part is refused with the nearest."""
    for part in path.split("."):
        known: Mapping[str, Any] = {n: None for n in dir(root) if not n.startswith("_")}
        if part not in known:
            raise ConfigError(f"{what} has no {part!r}{suggest(part, known)}")
        root, what = getattr(root, part), f"{what}.{part}"
    return root
