"""Kill a rank at a random moment, and measure how soon the others end: ``python -m tests.distributed.kills 20 4``.

The first number says how often per job, the second is the number of ranks. Nothing but the ranks themselves watches
them, as ``torchrun`` would: a rank that waits for one that is gone must find out by itself, long before its timeout.
"""

import importlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bitwright as bw
from bitwright.errors import DistributedError
from tests.distributed.jobs import data, few_bits, learning, prepared

SOON = 60.0  # seconds; a rank that exports finishes that first


def train(_):
    model = DistributedDataParallel(learning())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in data(60):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()


JOBS = {
    "calibrate": lambda folder: bw.calibrate(prepared(), data(60)),
    "calibrate_by_block": lambda folder: bw.calibrate_by_block(prepared(), data(60), checkpoint=folder / "blocks"),
    "reconstruct": lambda folder: bw.reconstruct(few_bits(calibrated=True), data(), steps=150),
    "sensitivity": lambda folder: bw.sensitivity(few_bits(calibrated=True), data(30)),
    "search_bits": lambda folder: bw.search_bits(few_bits(calibrated=True), data(30), {"size": 700}, bits=(2, 4, 8)),
    "train": train,
    "save": lambda folder: [bw.save(few_bits(calibrated=True), folder / "m") for _ in range(8)],
    "export": lambda folder: bw.export(few_bits(calibrated=True), folder / "m.onnx"),
}


def rank_of(job, folder, rank, world, port):
    """Start one rank in a new process, which has all modules already; return its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    text = ""
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "RANK": str(rank)}
        dist.init_process_group("gloo")
        (folder / f"{rank}.up").touch()
        JOBS[job](folder)
    except DistributedError as error:
        text = f"refused: {error}"
    except Exception as error:  # what torch itself says, in training
        text = f"{type(error).__name__}: {error}" if job == "train" else traceback.format_exc()
    finally:
        (folder / f"{rank}.txt").write_text(text)
        os._exit(0)


def strike(job, world, chance, usual):
    """Kill one rank at a random moment; return how long the others took, how many had an error, and what was wrong."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port, folder = str(free.getsockname()[1]), Path(place)
        free.close()
        ranks = [rank_of(job, folder, rank, world, port) for rank in range(world)]
        victim = chance.randrange(world)
        while len(list(folder.glob("?.up"))) < world:  # torch itself waits for its whole timeout until all are there
            time.sleep(0.01)
        time.sleep(chance.random() * usual)
        os.kill(ranks[victim], signal.SIGKILL)
        begin = time.monotonic()
        waiting = dict(enumerate(ranks))
        while waiting and time.monotonic() - begin < 2 * SOON:
            time.sleep(0.01)
            waiting = {rank: child for rank, child in waiting.items() if os.waitpid(child, os.WNOHANG) == (0, 0)}
        took = time.monotonic() - begin
        for child in waiting.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        said = {file.stem: file.read_text() for file in folder.glob("?.txt")}
    wrong = [f"{job}: rank {rank} hangs after rank {victim} was killed" for rank in waiting]
    if not waiting and took > SOON:
        wrong.append(f"{job}: it took {took:.0f} s to notice that rank {victim} was killed")
    wrong += [f"{job}: rank {rank} says {text}" for rank, text in said.items() if "Traceback" in text]
    return took, sum(bool(text) for text in said.values()), wrong


def main():
    torch.set_num_threads(1)
    for name in ("onnxscript", "onnx_ir", "torch._dynamo", "torch._inductor.decomposition", "bitwright.exporting"):
        importlib.import_module(name)
    count, world = int(sys.argv[1]), int(sys.argv[2])
    jobs = sys.argv[3:] or list(JOBS)
    chance, all_wrong = random.Random(world), []
    for job in jobs:
        found = [strike(job, world, chance, 6.0 if job == "export" else 3.0) for _ in range(count)]
        wrong = [each for *_, found_wrong in found for each in found_wrong]
        slowest, errors = max(took for took, *_ in found), sum(number for _, number, _ in found)
        print(f"{job}: {count} kills of one rank of {world}; {errors} errors, all ended within {slowest:.1f} s")
        print(*wrong[:5], sep="\n", flush=True)
        all_wrong += wrong
    raise SystemExit(bool(all_wrong))


if __name__ == "__main__":
    main()
