"""From public models to proven files: ``make bench BENCH=zoo``.

Each family of timm, torchvision and transformers (random weights, small inputs) is prepared, calibrated, exported and
proven for onnxruntime and for OpenVINO. Results are kept, and a run that was interrupted goes on where it was.
"""

import argparse
import fnmatch
import hashlib
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks.zoo.families import FAMILIES
from benchmarks.zoo.libraries import install
from benchmarks.zoo.row import Row
from benchmarks.zoo.run import BACKENDS, ROOT, Limits, run_family
from benchmarks.zoo.table import as_table, summary

HOME = ROOT / ".zoo"


def main() -> None:
    """Measure the families that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["*"], help="names or globs, such as 'gpt2*'; all by default")
    parser.add_argument("--list", action="store_true", help="list the families and stop")
    parser.add_argument("--runtimes", nargs="+", choices=BACKENDS, default=BACKENDS, help="both by default")
    parser.add_argument("--results", type=Path, help="where results are kept; by default a folder for this source code")
    parser.add_argument("--libraries", type=Path, default=HOME / "libraries", help="where the libraries are installed")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time for one step")
    parser.add_argument("--megabytes", type=float, default=8000.0, help="most memory for one process")
    given = parser.parse_args()
    console = Console(width=200)
    chosen = [f for name, f in FAMILIES.items() if any(fnmatch.fnmatch(name, g) for g in given.families)]
    if not chosen:
        parser.error(f"no family is named {' or '.join(given.families)}; --list shows all {len(FAMILIES)}")
    if given.list:
        for family in chosen:
            console.print(f"{family.name:34}{family.library:14}{family.kind}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the next run goes on from here"))  # and its child with it
    libraries = install(given.libraries.resolve())
    results = (given.results or HOME / "results" / _digest()).resolve()
    rows: list[Row] = []
    for number, family in enumerate(chosen, start=1):
        start = time.perf_counter()
        found = run_family(family, given.runtimes, results, libraries, Limits(given.seconds, given.megabytes))
        rows += found
        states = ", ".join(f"{r.backend} {'proven' if r.proven else r.error[:90] or 'not proven'}" for r in found)
        console.print(
            f"{number}/{len(chosen)} {family.name} ({time.perf_counter() - start:.0f} s): {states}", markup=False
        )
    console.print(as_table(rows))
    console.print("\n".join(summary(rows)), markup=False)


def _digest() -> str:
    """Tell apart results of different source code."""
    files = sorted([*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.rglob("*.py")])
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


if __name__ == "__main__":
    main()
