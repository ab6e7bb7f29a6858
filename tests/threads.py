"""Overlapping threads, and what they must leave behind: ``python -m tests.threads 200`` runs 200 rounds.

Every round, threads prepare and calibrate a net each, and one reconstructs; every fourth round, one exports and
verifies instead. What they find must be what they find one after the other, and the process must be as it was.
(Torch's optimizers do not step reliably while another thread exports: torch 2.13 shares a table between the two.)
"""

import logging
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import skip_init

import bitwright as bw
from bitwright.checkpoints import digest_of
from bitwright.graph.capture import patches
from bitwright.torch_internals import find_attribute

PATCHED = {**patches._RUN.wraps, **patches._RECORD.wraps}


class Noisy(nn.Module):
    """Looks at sizes and makes tensors."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.head = skip_init(nn.Conv2d, 3, width, 3), skip_init(nn.Linear, width, 4)

    def forward(self, x):
        y = torch.relu(self.conv(x)) + torch.zeros(x.shape[0], 1, 1, 1)
        return self.head(y.mean((2, 3)))


def net(number):
    generator = torch.Generator().manual_seed(number)
    model = Noisy(4 + number).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model, [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(3)]


def deploy(number, folder):
    """Prepare, calibrate, export and verify; what came of it."""
    model, batches = net(number)
    model = bw.calibrate(bw.prepare(model, batches[0]), batches)
    file = folder / f"{number}-{threading.get_ident()}.onnx"
    bw.export(model, file)
    proof = bw.verify(model, file, [batches[0]], latency=False)
    return digest_of(dict(model.state_dict())), file.read_bytes(), proof.ok


def simulate(number, _):
    """Prepare and calibrate, which is quick; what came of it."""
    model, batches = net(number)
    model = bw.calibrate(bw.prepare(model, batches[0]), batches)
    with torch.no_grad():
        return digest_of(dict(model.state_dict())), digest_of(model(batches[1]))


def learn(number, _):
    """Reconstruct; what came of it."""
    model, batches = net(number)
    model = bw.calibrate(bw.prepare(model, batches[0], "virtual", weight="int3 channel:0", activation="uint4"), batches)
    bw.reconstruct(model, batches, steps=30, batch_size=4)
    return digest_of(dict(model.state_dict()))


QUICK = [(simulate, 1), (simulate, 2), (learn, 3), (simulate, 4)]
WHOLE = [(deploy, 1), (simulate, 2), (simulate, 4)]


def state():
    """What threads could leave changed."""
    named = [vars(owner)[name] for owner, name in map(find_attribute, PATCHED)]
    heard = [warnings.showwarning if type(warnings.showwarning).__name__ != "_MuteWarnings" else "muted by thread"]
    return [*named, sys.stdout, sys.stderr, logging.root.manager.disable, *warnings.filters, *heard]


def rounds(count):
    """Run this many rounds; return what went wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        expected = {job: job[0](job[1], folder) for job in {*QUICK, *WHOLE}}
        before, numbers = state(), torch.get_rng_state()
        for i in range(count):
            jobs = QUICK if i % 4 else WHOLE
            start = threading.Barrier(len(jobs))

            def one(job, start=start):
                start.wait()
                return job[0](job[1], folder)

            with ThreadPoolExecutor(len(jobs)) as pool:
                found = dict(zip(jobs, pool.map(one, jobs), strict=True))
            wrong += [f"round {i}: {job[0].__name__} {job[1]}" for job in jobs if found[job] != expected[job]]
            if not all(a is b or a == b for a, b in zip(state(), before, strict=True)):
                wrong.append(f"round {i}: the process is not as it was")
            if not torch.equal(torch.get_rng_state(), numbers):
                wrong.append(f"round {i}: torch's random numbers are not as they were")
            for file in folder.iterdir():
                file.unlink()
    return wrong


def main():
    torch.set_num_threads(1)
    count = int(sys.argv[1])
    wrong = rounds(count)
    print(f"{count} rounds of {len(QUICK)} threads, wrong: {wrong[:5]}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
