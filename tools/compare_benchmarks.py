"""Run benchmarks of this tree and of another revision in turn, and print both side by side.

``python tools/compare_benchmarks.py REVISION [BENCHMARK…]``, such as ``… HEAD~20 numerics prepare graph qat_step``.
Both trees use this interpreter and its packages.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A temporary work tree of another revision."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(tree: Path, benchmark: str) -> list[str]:
    """The lines that a benchmark prints in one tree."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}"],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def side_by_side(left: list[str], right: list[str]) -> Iterator[str]:
    """The lines of two texts next to each other."""
    width = max(map(len, left), default=0)
    for before, now in itertools.zip_longest(left, right, fillvalue=""):
        yield f"{before:{width}}  |  {now}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("benchmarks", nargs="*", default=["numerics", "prepare", "graph", "qat_step"])
    parser.add_argument("--rounds", type=int, default=1, help="how often to run each, before and now in turn")
    given = parser.parse_args()
    with checked_out(given.revision) as tree:
        for benchmark, number in itertools.product(given.benchmarks, range(1, given.rounds + 1)):
            print(f"Benchmark: {benchmark}, round {number}: {given.revision}  |  this tree")
            print("\n".join(side_by_side(run(tree, benchmark), run(ROOT, benchmark))), flush=True)


if __name__ == "__main__":
    main()
