"""Kill both ways to calibrate, reconstruct, save and export at random moments: ``python -m tests.saving.kills 200``.

One process after the other does the same job and is killed, until one gets through. After every kill, what has its
final name must be what an uninterrupted job writes, byte for byte; so must be what the last one writes.
"""

import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import bitwright as bw
from bitwright import checkpoints

FOLDER, BLOCKS, FILE, DONE = "saved", "by block", "model.onnx", "done"


def job(folder):
    """All that is killed; progress is written after every batch and every unit."""
    checkpoints._EVERY = 0.0
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    batches = [torch.randn(4, 3, 8, 8) for _ in range(60)]
    recipe = {"weight": {"spec": "int4 channel:0"}, "activation": {"observer": "HistogramObserver"}}
    net = nn.Sequential(*net, nn.Linear(128, 4)).eval()
    model = bw.prepare(net, batches[0], "virtual", recipe=recipe)
    bw.calibrate_by_block(model, batches[:40], checkpoint=folder / "blocks")
    bw.save(model, folder / BLOCKS)
    model = bw.prepare(net, batches[0], "virtual", recipe=recipe)
    bw.calibrate(model, batches, checkpoint=folder / "calibration")
    bw.reconstruct(model, batches[:8], steps=60, batch_size=8, checkpoint=folder / "units")
    for _ in range(3):
        bw.save(model, folder / FOLDER)
    bw.export(model, folder / FILE)
    (folder / DONE).touch()


def start(folder):
    """Do the job in a new process, which has all modules already; return its number."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def written(folder):
    """Everything under its final name, except digests of the environment."""
    saved = [f"{name}/{part}" for name in (BLOCKS, FOLDER) for part in ("model.safetensors", "recipe.yaml")]
    return {part: (folder / part).read_bytes() for part in (*saved, FILE) if (folder / part).exists()}


def load_modules():
    """Import now what every child would import for itself."""
    for name in ("onnxscript", "onnx_ir", "torch._dynamo", "torch._inductor.decomposition", "bitwright.exporting"):
        importlib.import_module(name)


def strike(count, seed=0):
    """Kill ``count`` times at random moments; return how often, how many jobs got through, and what was found wrong."""
    chance, wrong, kills, rounds = random.Random(seed), [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        begin, reference = time.monotonic(), Path(place) / "reference"
        reference.mkdir()
        os.waitpid(start(reference), 0)
        usual, expected = time.monotonic() - begin, written(reference)
        assert len(expected) == 5, "the job itself failed"
        while kills < count:
            rounds += 1
            folder = Path(place) / str(rounds)
            folder.mkdir()
            while not (folder / DONE).exists():
                child, spare = start(folder), count - kills
                if spare > 0:
                    time.sleep(chance.random() * usual)
                    os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                if os.WIFSIGNALED(status):
                    kills += 1
                elif status != 0:
                    return kills, rounds, [*wrong, f"round {rounds}: the job ended with {status}"]
                wrong += [
                    f"round {rounds}, kill {kills}: {name} is not whole"
                    for name, held in written(folder).items()
                    if held != expected[name]
                ]
            if written(folder) != expected:
                wrong.append(f"round {rounds}: not all is there")
            left = [path.name for path in folder.iterdir() if path.name.startswith(".bitwright")]
            left += [f"blocks/{path.name}" for path in (folder / "blocks").iterdir() if path.is_dir()]
            wrong += [f"round {rounds}: {name} was left behind" for name in left]
    return kills, rounds, wrong


def main():
    torch.set_num_threads(1)
    load_modules()
    kills, rounds, wrong = strike(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{kills} kills, {rounds} jobs got through, found: {wrong}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
