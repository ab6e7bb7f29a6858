"""Save each family's calibrated model, load it in another process, and compare the outputs, bit for bit.

``python -m benchmarks.zoo.round_trip 'gpt2*'``: one line per family, kept in ``results.jsonl``.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import bitwright as bw
from benchmarks.zoo.families import FAMILIES, Batch, Family
from benchmarks.zoo.libraries import declare_torchvision_operators, install
from benchmarks.zoo.measure import describe, floats
from benchmarks.zoo.run import ROOT
from benchmarks.zoo.weights import call, make_sane

_INPUT = "input."


def save(family: Family, folder: Path) -> None:
    """Save a calibrated model, a batch and what the model makes of it."""
    torch.manual_seed(0)
    model = family.build().eval()
    make_sane(model, family.inputs(8))
    qmodel = bw.calibrate(bw.prepare(model, family.inputs(2)), [family.inputs(4)], progress=False)
    batch = family.inputs(2)
    given = batch if isinstance(batch, dict) else {"": batch}
    tensors = {f"{_INPUT}{name}": value.contiguous() for name, value in given.items()}
    tensors |= {f"output.{i}": value for i, value in enumerate(_outputs(qmodel, batch))}
    bw.save(qmodel, folder / "model")
    save_file(tensors, folder / "expected.safetensors")


def load(family: Family, folder: Path) -> str:
    """Load a saved model into one with other random weights; return what differs, or nothing."""
    torch.manual_seed(1)
    qmodel = bw.load(folder / "model", lambda: family.build().eval())
    tensors = load_file(folder / "expected.safetensors")
    given = {name.removeprefix(_INPUT): value for name, value in tensors.items() if name.startswith(_INPUT)}
    found = _outputs(qmodel, given.get("", given))
    expected = [tensors[f"output.{i}"] for i in range(len(tensors) - len(given))]
    if len(found) != len(expected):
        return f"{len(found)} outputs instead of {len(expected)}"
    unequal = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    return f"outputs {unequal} differ" if unequal else ""


def _outputs(model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad():
        return [value.clone().contiguous() for value in floats(call(model, batch))]


def _step(name: str, family: Family, place: Path) -> dict[str, object]:
    """Save or load one family; say what went wrong, and the seconds it computed."""
    folder = place / family.name
    folder.mkdir(exist_ok=True)
    start = time.process_time()
    try:
        wrong = (save(family, folder) or "") if name == "save" else load(family, folder)
    except Exception as error:
        wrong = describe(error)
    return {"family": family.name, "step": name, "wrong": wrong, "cpu": round(time.process_time() - start, 2)}


def main() -> None:
    """Save the families in one process, and load them in another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["*"], help="names or globs; all by default")
    parser.add_argument("--libraries", type=Path, default=ROOT / ".zoo" / "libraries")
    parser.add_argument("--place", type=Path, help="where models and results are kept; by default nowhere")
    parser.add_argument("--step", choices=("save", "load"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (given.place or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        if given.step:
            _run(given.step, given.families, place)
            return
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(install(given.libraries.resolve()))])
        settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for step in ("save", "load"):
            command = [sys.executable, "-m", "benchmarks.zoo.round_trip", *given.families]
            subprocess.run([*command, "--place", str(place), "--step", step], cwd=ROOT, env=settings, check=True)


def _run(step: str, globs: list[str], place: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    declare_torchvision_operators()
    for family in [f for name, f in FAMILIES.items() if any(fnmatch.fnmatch(name, g) for g in globs)]:
        if step == "load" and not (place / family.name / "expected.safetensors").exists():
            continue  # its failure to be saved is on record
        line = json.dumps(_step(step, family, place))
        with (place / "results.jsonl").open("a") as results:
            results.write(f"{line}\n")
        print(line, flush=True)


if __name__ == "__main__":
    main()
