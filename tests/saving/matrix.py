"""Models of every backend, method and granularity: what they compute before they are saved, and in another process.

``python -m tests.saving.matrix FOLDER`` loads each model saved there and tells what it computes. With ``--all`` it
first saves every one of them, and the nets of the zoo, and compares the files of all that can be exported.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS
from bitwright.checkpoints import digest_of
from bitwright.methods import METHODS
from bitwright.reconstruction.whole import tensors_in
from tests.saving.nets import Small, outputs, training_step
from tests.zoo import ZOO

ROOT = Path(__file__).parents[2]
INPUTS = torch.linspace(-2, 2, 2 * 3 * 4 * 4).sin().reshape(2, 3, 4, 4)
OPEN = {"academic", "academic_nlp", "virtual"}  # these leave the specs to the user
SIGNED = {"AmaxFakeQuantize", "APoTFakeQuantize", "TqtFakeQuantize"}  # these have no zero points
NOT_EVEN = {"APoTFakeQuantize", "DoReFaFakeQuantize", "NNIEFakeQuantize"}  # ONNX has no such numbers
SPECS = (
    *("int4 symmetric group:4:1", "int2 affine group:2:1", "int3 symmetric narrow channel:0", "uint8 affine channel:0"),
    *("int8 affine tensor", "int16 symmetric channel:1", "int8 symmetric pot channel:0", "int6 symmetric pot tensor"),
    *("e4m3 symmetric channel:0", "e5m2 symmetric tensor", "e4m3 symmetric group:4:1"),
)


class Little(nn.Module):
    """A layer of each usual kind."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


class Row(nn.Sequential):
    """Linear layers in a row."""

    def __init__(self, count):
        super().__init__(nn.Flatten(), nn.Linear(48, 8), *(nn.Linear(8, 8) for _ in range(count)))


def of_backend(name):
    own = {"weight": "int4 channel:0", "activation": "int8"} if name in OPEN else {}
    return Little, {"backend": name, **own}


def of_method(method):
    spec = "int4 symmetric tensor" if method in SIGNED else "uint4 affine tensor"
    weight = {"spec": "int4 symmetric narrow channel:0", "method": method}
    recipe = {"backend": "virtual", "weight": weight, "activation": {"spec": spec, "method": method}}
    return Little, {"recipe": recipe}


def of_layers(tensors):
    """One net with another choice for each of its layers."""
    rules = [{"match": str(i + 2), **tensor} for i, tensor in enumerate(tensors)]
    recipe = {"backend": "virtual", "weight": "int8 channel:0", "activation": "int8", "rules": rules}
    return lambda: Row(len(tensors)), {"recipe": recipe}


def _both(method):
    recipe = of_method(method)[1]["recipe"]
    return {"weight": recipe["weight"], "activation": recipe["activation"]}


CASES = {
    **{f"backend {name}": of_backend(name) for name in BACKENDS},
    **{f"method {name}": of_method(name) for name in METHODS},
    "methods of a file": of_layers([_both(name) for name in METHODS if name not in NOT_EVEN]),
    "granularities": of_layers([{"weight": spec} for spec in SPECS]),
    "tied weights and constants": (Small, of_method("LearnableFakeQuantize")[1]),
}
FILES = ("methods of a file", "granularities", "tied weights and constants")
"""The cases whose exported files the tests compare; ``--all`` compares all that can be exported."""


def look(model, file=None):
    """What a model computes, in evaluation and in a training step, and its file: a digest of each."""
    found = {"evaluation": digest_of(outputs(model, INPUTS)), **written(model, file)}
    found["training"] = digest_of(training_step(model, INPUTS))
    return found


def written(model, file):
    """A digest of the exported file, or why there is none."""
    if file is None:
        return {}
    try:
        bw.export(model, file)
    except bw.errors.BitwrightError as error:
        file.touch()  # so that the other process tries, too
        return {"file": type(error).__name__}
    return {"file": hashlib.sha256(file.read_bytes()).hexdigest()}


def zoo_inputs(case):
    torch.manual_seed(0)
    return case.inputs(2, case.size)


def look_at_net(case, model, file):
    """What a net of the zoo computes, and its file."""
    torch.manual_seed(1)
    with torch.no_grad():
        result = case.call(model, zoo_inputs(case))
    return {"evaluation": digest_of(tensors_in(result)), **written(model, file)}


def save_all(folder, names, files):
    """Save the cases, and say what each computes."""
    found = {}
    for name in names:
        build, options = CASES[name]
        torch.manual_seed(0)
        model = bw.calibrate(bw.prepare(build(), INPUTS, **options), [INPUTS, INPUTS * 0.7])
        bw.save(model, folder / name)
        found[name] = look(model, folder / f"{name}.onnx" if name in files else None)
    return found


def save_zoo(folder):
    """Save every net of the zoo, and say what it computes."""
    found = {}
    for name, case in ZOO.items():
        inputs = zoo_inputs(case)
        model = bw.calibrate(bw.prepare(case.build(), inputs), [inputs])
        bw.save(model, folder / name)
        found[name] = look_at_net(case, model, folder / f"{name}.onnx")
    return found


def load_elsewhere(folder):
    """Print what each saved case computes, in a process that orders sets differently."""
    mine = os.environ.get("PYTHONHASHSEED", "random")
    command = [sys.executable, "-m", "tests.saving.matrix", str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "7" if mine != "7" else "8"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if not given.all:
        found = {}
        for name in [name for name in CASES if (given.folder / name).exists()]:
            torch.manual_seed(99)
            exported = (given.folder / f"{name}.onnx").exists()
            model = bw.load(given.folder / name, CASES[name][0])
            found[name] = look(model, given.folder / f"{name} again.onnx" if exported else None)
        for name in [name for name in ZOO if (given.folder / name).exists()]:
            model = bw.load(given.folder / name, ZOO[name].build)
            found[name] = look_at_net(ZOO[name], model, given.folder / f"{name} again.onnx")
        print(json.dumps(found))
        return
    folder = Path(tempfile.mkdtemp())
    no_file = {f"method {name}" for name in NOT_EVEN} | {"backend nnie"}
    here = save_all(folder, CASES, set(CASES) - no_file) | save_zoo(folder)
    there = load_elsewhere(folder)
    wrong = [name for name in here if here[name] != there[name]]
    refused = {name: found["file"] for name, found in here.items() if "Error" in found.get("file", "")}
    files = sum("file" in found for found in here.values()) - len(refused)
    print(f"{len(here)} cases, {files} files, not exported: {refused}, not equal: {wrong}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
