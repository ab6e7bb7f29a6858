"""Count the paths through every function, and list those with more than ten: ``python tools/complexity.py [FOLDER]``.

A path is counted for each ``if``, loop, handler, ``case``, comprehension and its conditions, conditional
expression, and each operand of ``and`` and ``or`` beyond the first. Functions inside a function count for themselves.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

LIMIT = 10
_ONE = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert, ast.match_case)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def complexity(function: ast.AST) -> int:
    """The number of independent paths through one function."""
    return 1 + sum(_paths(node) for child in ast.iter_child_nodes(function) for node in _within(child))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, _FUNCTION):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _within(child)


def _paths(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, _ONE))


def functions(folder: Path) -> Iterator[tuple[int, str]]:
    """The complexity and the place of every function below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, _FUNCTION):
                yield complexity(node), f"{path}:{node.lineno} {node.name}"


def main() -> None:
    """Print every function above the limit, the most complex first, and their share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("src"))
    found = list(functions(parser.parse_args().folder))
    above = sorted((f for f in found if f[0] > LIMIT), reverse=True)
    for count, place in above:
        print(f"{count:4} {place}")
    share = len(above) / max(len(found), 1)
    print(f"{len(above)} of {len(found)} functions ({share:.1%}) have more than {LIMIT} paths")


if __name__ == "__main__":
    main()
