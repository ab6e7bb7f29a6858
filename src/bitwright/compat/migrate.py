"""Rewrite the imports of a script for one of the older toolkits, and find what has no equivalent here."""

import ast
import importlib
from dataclasses import dataclass, field
from typing import Any

from bitwright.errors import BitwrightError, ConfigError

ROOTS = ("mqbench", "pytorch_quantization", "quantrans", "sparsebit")
_ATTRIBUTES = {"use_fb_fake_quant": "export inside pytorch_quantization.enable_onnx_export()"}


@dataclass
class Migration:
    """A script with its imports changed.

    Attributes:
        text: the new text.
        changed: the imports that are new: number of the old line, and the statement.
        missing: what has no equivalent: number of the line, what it is, and what to do.
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
    lines = source.splitlines(keepends=True)
    made = Migration(source)
    for node in sorted(_of_interest(tree), key=lambda n: -n.lineno):
        if isinstance(node, ast.Attribute):
            made.missing.append((node.lineno, node.attr, _ATTRIBUTES[node.attr]))
            continue
        made.missing += [(node.lineno, what, why) for what, why in _missing(node)]
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        begin, end = lines[first].encode()[: node.col_offset], lines[last].encode()[node.end_col_offset :]
        statement = _rewritten(node)
        lines[first : last + 1] = [f"{begin.decode()}{statement}{end.decode()}"]
        made.changed.append((node.lineno, statement))
    made.text = "".join(lines)
    made.changed.sort()
    made.missing.sort()
    return made


def _of_interest(tree: ast.AST) -> list[Any]:
    return [node for node in ast.walk(tree) if _is_of_interest(node)]


def _is_of_interest(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(_root(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and _root(node.module or "")
    return isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES


def _root(module: str) -> bool:
    return module.partition(".")[0] in ROOTS


def _rewritten(node: ast.Import | ast.ImportFrom) -> str:
    if isinstance(node, ast.ImportFrom):
        names = ", ".join(_alias(alias) for alias in node.names)
        return f"from bitwright.compat.{node.module} import {names}"
    parts: list[str] = []
    for alias in node.names:
        if not _root(alias.name):
            parts.append(f"import {_alias(alias)}")
        elif alias.asname:
            parts.append(f"import bitwright.compat.{alias.name} as {alias.asname}")
        else:  # the root stays a name of the script
            if "." in alias.name:
                parts.append(f"import bitwright.compat.{alias.name}")
            parts.append(f"from bitwright.compat import {alias.name.partition('.')[0]}")
    return "; ".join(parts)


def _alias(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _missing(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """The modules and names that are not there, and what to do."""
    if isinstance(node, ast.Import):
        wanted = [(alias.name, None) for alias in node.names if _root(alias.name)]
    else:
        wanted = [(str(node.module), alias.name) for alias in node.names if alias.name != "*"]
    found = []
    for module, name in wanted:
        reason = _reason(f"bitwright.compat.{module}", name)
        if reason is not None:
            found.append((f"{module}.{name}" if name else module, reason))
    return found


def _reason(module: str, name: str | None) -> str | None:
    """Why an import fails, or None if it does not."""
    try:
        home = importlib.import_module(module)
        if name is not None and not hasattr(home, name):
            importlib.import_module(f"{module}.{name}")
    except BitwrightError as error:
        return str(error).partition(": ")[2]
    except ImportError:
        return "it has no equivalent; see the page of the toolkit in docs/how-to"
    return None
