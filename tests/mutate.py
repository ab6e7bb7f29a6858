"""Mutated configurations of all dialects, and mutated folders and files: ``python -m tests.mutate 10000 2000``.

Whatever they hold, only Bitwright's own errors may come of them, each shorter than 2,000 characters and within two
seconds of the processor's time.
"""

import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS, find_backend
from bitwright.compat.convert import convert
from bitwright.errors import BitwrightError
from bitwright.exporting import FORMATS
from bitwright.preparation import resolve_recipe
from bitwright.saving.backend_data import to_data
from bitwright.saving.manifest import _digest
from tests.compat.mutations import mutated_data, mutated_text, mutations

MOST, SECONDS = 2000, 2.0
INPUTS = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


class Named(nn.Module):
    """Layers of the names that the configurations have rules for."""

    def __init__(self):
        super().__init__()
        self.conv1, self.layer1, self.layer_1_conv = nn.Conv2d(3, 4, 3), nn.Module(), nn.Conv2d(4, 4, 1)
        self.layer1.conv, self.my_conv_1, self.a1 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.lstm, self.fc, self.head = nn.LSTM(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    def forward(self, x, mask=None):
        x = self.layer_1_conv(torch.relu(self.layer1.conv(self.conv1(x)) + 1))
        x = self.a1(self.my_conv_1(x)).flatten(2).transpose(1, 2)
        return self.head(self.fc(self.lstm(x)[0] + x))


class Tally:
    """What came of mutations."""

    def __init__(self):
        self.counts, self.wrong, self.longest, self.slowest = Counter(), [], 0, 0.0
        self.tried = 0

    def run(self, kind, call):
        """Call something that may refuse; note what it must not do."""
        self.tried += 1
        start = time.process_time()
        try:
            call()
            self.counts[kind, "taken"] += 1
        except BitwrightError as error:
            self.counts[kind, "refused"] += 1
            self.longest = max(self.longest, len(str(error)))
            if len(str(error)) > MOST:
                self.wrong.append(f"{kind}: a message of {len(str(error))}: {str(error)[:300]}")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong.append(f"{kind}: {type(error).__name__}: {str(error)[:300]} at {where.filename}:{where.lineno}")
        spent = time.process_time() - start
        self.slowest = max(self.slowest, spent)
        if spent > SECONDS:
            self.wrong.append(f"{kind}: {spent:.1f} s")

    def __str__(self):
        parts = [f"{kind} {what} {n}" for (kind, what), n in sorted(self.counts.items())]
        kept = f"longest message {self.longest}, slowest {self.slowest:.2f} s"
        return f"{self.tried} mutations: {', '.join(parts)}; {kept}; wrong: {len(self.wrong)}"


def configs(count, seed=0):
    """Read, resolve and apply mutated configurations."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        for dialect, suffix, text in mutations(seed, count):
            path = Path(place) / f"config{suffix}"
            path.write_text(text, encoding="utf-8")
            tally.run(dialect, lambda path=path: apply(path))
    return tally


def apply(path):
    _, recipe, notes = convert(path)
    assert all(len(note) < MOST for note in notes), "a note is too long"
    resolve_recipe(None, recipe)
    bw.calibrate(bw.prepare(Named().eval(), INPUTS, recipe=recipe), [INPUTS])


def changed(data, chance):
    """Bytes with a few of them changed, cut out, doubled or cut off."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 4))):
        at, what = chance.randrange(len(data) + 1), chance.randrange(4)
        if what == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            data[at : at + chance.randrange(1, 60)] = b""
        elif what == 2:
            data[at:at] = data[at : at + chance.randrange(1, 60)] or b"\xff" * 8
        else:
            data = data[:at] if chance.random() < 0.3 else data
    return bytes(data)


class Files:
    """A saved model, progress, an exported file, weights and a backend, to be mutated one at a time."""

    def __init__(self, place):
        torch.manual_seed(0)
        self.place, self.model = place, bw.prepare(Net().eval(), INPUTS)
        bw.calibrate(self.model, [INPUTS], checkpoint=place / "progress")
        bw.save(self.model, place / "saved", example=True)
        bw.export(self.model, place / "m.onnx")
        save_file(Net().state_dict(), place / "w.safetensors")
        (place / "backend.yaml").write_text(yaml.safe_dump(to_data(BACKENDS.get("vitis"))))
        self.fresh = bw.prepare(Net().eval(), INPUTS)
        self.fresh.load_state_dict(self.model.state_dict())
        self.kinds = (self.folder, self.folder, self.manifest, self.manifest, self.progress, self.file, self.weights)
        self.kinds += (self.backend,)

    def _with(self, path, data, call):
        whole = path.read_bytes()
        path.write_bytes(data)
        try:
            call()
        finally:
            path.write_bytes(whole)

    def _bytes(self, path, chance, call):
        whole = path.read_bytes()
        data = next(made for made in (changed(whole, chance) for _ in range(1000)) if made != whole)
        self._with(path, data, call)

    def folder(self, chance):
        """Any byte of any file of a saved model."""
        path = chance.choice(sorted((self.place / "saved").iterdir()))
        self._bytes(path, chance, lambda: bw.load(self.place / "saved", Net))

    def manifest(self, chance):
        """The manifest, with a digest that fits."""
        path = self.place / "saved" / "bitwright.json"
        data = mutated_data({k: v for k, v in json.loads(path.read_text()).items() if k != "digest"}, chance)
        data = json.loads(json.dumps(data, default=str, skipkeys=True))
        text = json.dumps({"digest": _digest(data), **data}).encode()
        self._with(path, text, lambda: bw.load(self.place / "saved", Net))

    def progress(self, chance):
        """A checkpoint."""
        path = self.place / "progress" / "calibration.safetensors"
        folder = self.place / "progress"
        self._bytes(path, chance, lambda: bw.calibrate(self.fresh, [INPUTS], checkpoint=folder))

    def file(self, chance):
        """An exported file."""
        path = self.place / "m.onnx"
        self._bytes(path, chance, lambda: FORMATS.get("onnx")().read(path).record)

    def weights(self, chance):
        """Weights to be mapped."""
        with torch.device("meta"):
            model = Net()
        path = self.place / "w.safetensors"
        self._bytes(path, chance, lambda: bw.map_weights(model, path))

    def backend(self, chance):
        """A backend of the user's."""
        path = self.place / "backend.yaml"
        text = path.read_text()
        made = mutated_text(text, chance)
        if chance.random() < 0.7:
            made = json.dumps(mutated_data(yaml.safe_load(text), chance), default=str, skipkeys=True)
        self._with(path, made.encode(), lambda: find_backend(path))


def files(count, seed=0):
    """Load mutated folders and files."""
    tally, chance = Tally(), random.Random(seed)
    place = Path(tempfile.mkdtemp())
    try:
        all_files = Files(place)
        for _ in range(count):
            kind = chance.choice(all_files.kinds)
            tally.run(kind.__name__, lambda kind=kind: kind(chance))
    finally:
        shutil.rmtree(place)
    return tally


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    tallies = [configs(int(sys.argv[1]), seed), files(int(sys.argv[2]), seed)]
    for tally in tallies:
        print(tally)
        for line, times in Counter(tally.wrong).most_common(20):
            print(f"  {times} x {line}")
    raise SystemExit(any(tally.wrong for tally in tallies))


if __name__ == "__main__":
    main()
