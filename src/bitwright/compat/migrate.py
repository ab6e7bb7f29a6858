"""Rewrite the imports of a script for one of the older toolkits, and find what has no equivalent here."""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from bitwright.compat.literals import dotted_name
from bitwright.errors import BitwrightError, ConfigError

ROOTS = ("mqbench", "pytorch_quantization", "quantrans", "sparsebit")
_HOME = "bitwright.compat"
_IN_TEXT = re.compile(rf"({'|'.join(ROOTS)})(\.\w+)+")
_FROM = re.compile(rb"from[\s\\]+")
_LINE_ENDS = re.compile(rb"\r\n|\r|\n")  # as Python counts lines


@dataclass
class Migration:
    """A script with its imports changed.

    Attributes:
        text: the new text.
        changed: the imports that are new: number of the old line, and the statement.
        missing: what has no equivalent, and text that may name a module: line number, what, and what to do.
    """

    text: str
    changed: list[tuple[int, str]] = field(default_factory=list)
    missing: list[tuple[int, str, str]] = field(default_factory=list)


def migrate(source: str, name: str = "the script") -> Migration:
    """Change the import root of the older toolkits to ``bitwright.compat``; the script is read, not run."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{name}:{error.lineno}: this is not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or brackets nested too deeply
        raise ConfigError(f"{name} cannot be read: {str(error) or 'it is nested too deeply'}") from error
    data = source.encode()
    starts = [0, *(found.end() for found in _LINE_ENDS.finditer(data))]
    imports: list[Any] = sorted(filter(_is_ours, ast.walk(tree)), key=_place)
    for node in reversed(imports):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        data = data[:begin] + _rewritten(node, data[begin:end]) + data[end:]
    changed = [(node.lineno, _rewritten(node, ast.unparse(node).encode()).decode()) for node in imports]
    missing = {(line, *lost) for line, path in _uses(tree, imports) if (lost := _missing(path)) is not None}
    return Migration(data.decode(), changed, sorted(missing.union(_in_text(tree))))


def _place(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_ours(node: object) -> bool:
    if isinstance(node, ast.Import):
        return any(_root(alias.name) for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and _root(node.module or "")


def _root(module: str) -> bool:
    return module.partition(".")[0] in ROOTS


def _rewritten(node: ast.Import | ast.ImportFrom, text: bytes) -> bytes:
    """An import with the new root; of one that names what it takes, nothing else changes."""
    if isinstance(node, ast.ImportFrom):
        return _FROM.sub(rb"\g<0>bitwright.compat.", text, count=1)
    parts: list[str] = []
    for alias in node.names:
        if not _root(alias.name) or alias.asname:
            home = f"{_HOME}." if _root(alias.name) else ""
            parts.append(f"import {home}{alias.name}{f' as {alias.asname}' if alias.asname else ''}")
        else:  # the root stays a name of the script
            if "." in alias.name:
                parts.append(f"import {_HOME}.{alias.name}")
            parts.append(f"from {_HOME} import {alias.name.partition('.')[0]}")
    return "; ".join(parts).encode()


def _uses(tree: ast.AST, imports: list[Any]) -> Iterator[tuple[int, str]]:
    """The modules and names that a script takes from the older toolkits, by their old paths."""
    bound: dict[str, str] = {}
    for node in imports:
        for name, path in _taken(node):
            yield node.lineno, path
            bound[name] = path
    for name in _set_again(tree):
        bound.pop(name, None)
    for node in ast.walk(tree):
        head, _, rest = (dotted_name(node) or "" if isinstance(node, ast.Attribute) else "").partition(".")
        if head in bound:
            yield getattr(node, "lineno", 0), f"{bound[head]}.{rest}"


def _taken(node: Any) -> Iterator[tuple[str, str]]:
    """The names that an import binds, with what they stand for in the older toolkits."""
    for alias in node.names:
        head = alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}".removesuffix(".*")
        elif alias.asname and _root(head):
            yield alias.asname, alias.name
        elif _root(head):
            yield alias.name, alias.name  # that it is there
            yield head, head


def _set_again(tree: ast.AST) -> Iterator[str]:
    """Names that a script gives to something else, too: what they stand for is not known."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _in_text(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Text that is a path below an older toolkit, as ``importlib.import_module`` takes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.fullmatch(node.value):
            yield node.lineno, repr(node.value), f"text stays as it is: if it names a module, begin it with {_HOME}."


def _missing(path: str) -> tuple[str, str] | None:
    """The part of a path that is not here and what to do about it, or None if all of it is."""
    home: Any = importlib.import_module(_HOME)
    known = ""
    for part in path.split("."):
        if not isinstance(home, ModuleType):
            return None  # what a class has is not followed
        known = f"{known}.{part}"
        try:
            home = getattr(home, part) if hasattr(home, part) else importlib.import_module(_HOME + known)
        except BitwrightError as error:
            return known[1:], str(error).partition(": ")[2]
        except ImportError:
            return known[1:], "it has no equivalent; see the page of the toolkit in docs/how-to"
    return None
