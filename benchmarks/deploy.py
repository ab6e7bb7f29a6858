"""How much of a network runs in integers, how fast, and how close to the simulation: ``make bench BENCH=deploy``.

For each network: Bitwright's file for onnxruntime in onnxruntime, and its file for OpenVINO in OpenVINO, beside
onnxruntime's own ``quantize_static`` (u8 activations, s8 per-channel weights of 7 bits: the best it can do on any x86
CPU) timed in the same interleaved run. Random weights; one thread; best of several runs.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)
from rich.console import Console
from rich.table import Table

import bitwright as bw
from benchmarks.nets import NETS, example_input, randomize_batchnorm
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES, RuntimeProof
from bitwright.verification.runtimes.base import Session

RUNS = 20


class Reader(CalibrationDataReader):
    """Feeds onnxruntime's calibration."""

    def __init__(self, name: str, batch: torch.Tensor) -> None:
        self._items: Iterator[dict[str, np.ndarray]] = iter([{name: batch.numpy()}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or None."""
        return next(self._items, None)


def peer_file(float_file: Path, folder: Path, batch: torch.Tensor) -> Path:
    """What onnxruntime's own quantizer makes of the float model."""
    ready, target = folder / "ready.onnx", folder / "peer.onnx"
    quant_pre_process(str(float_file), str(ready), skip_symbolic_shape=True)
    name = onnx.load(str(ready)).graph.input[0].name
    quantize_static(
        str(ready),
        str(target),
        Reader(name, batch),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return target


def best_times(sessions: dict[str, Session], feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """Best time of each session, in milliseconds, all interleaved."""
    best = dict.fromkeys(sessions, float("inf"))
    for run in range(RUNS + 3):
        for name, session in sessions.items():
            start = time.perf_counter()
            session(feeds)
            if run >= 3:
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def measure(name: str, build: Callable[[], torch.nn.Module], table: Table, console: Console) -> None:
    """Quantize, export, prove and time one network for both backends."""
    torch.manual_seed(0)
    model = build().eval()
    randomize_batchnorm(model, 0)
    batch, sample = example_input(name, 4), example_input(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for backend in ("onnxruntime", "openvino"):
            qmodel = bw.prepare(model, sample, backend=backend)
            bw.calibrate(qmodel, [batch])
            file = bw.export(qmodel, folder / f"{backend}.onnx")
            proof = bw.verify(qmodel, file, [example_input(name, 2)], runtimes=[backend], latency=False)
            runtime = RUNTIMES.get(backend)()
            loaded = OnnxFile.read(file.path)
            sessions = {
                "ours": runtime.session(loaded, threads=1),
                "float": runtime.session(loaded.float_twin(), threads=1),
            }
            if backend == "onnxruntime":
                float_file = bw.export(qmodel, folder / "float.onnx", quantized=False)
                peer = peer_file(float_file.path, folder, batch)
                sessions["peer"] = runtime.session(OnnxFile.read(peer), threads=1)
            else:
                sessions["peer"] = runtime.session(OnnxFile.read(folder / "peer.onnx"), threads=1)
            times = best_times(sessions, {loaded.inputs[0]: sample.numpy()})
            add_row(table, name, proof.runtimes[backend], times, console)


def add_row(table: Table, name: str, proof: RuntimeProof, times: dict[str, float], console: Console) -> None:
    """One line of the table, and the reason for each operator that runs in float."""
    kinds = dict.fromkeys(o.kind for o in proof.operators)
    coverage = ", ".join("{}/{} {}".format(*proof.count(k), k) for k in kinds)
    table.add_row(
        name,
        proof.runtime,
        coverage,
        f"{times['float'] / times['ours']:.2f}x",
        f"{times['float'] / times['peer']:.2f}x",
        f"{proof.equal:.4%}",
        str(proof.largest),
    )
    for operator in proof.operators:
        if not operator.integer:
            console.print(f"{name} in {proof.runtime}: {operator.name} runs in float: {operator.reason}")


def main() -> None:
    """Measure the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    logging.getLogger().setLevel(logging.ERROR)  # the peer remarks on every BatchNorm
    parser.add_argument("nets", nargs="*", default=list(NETS), help=", ".join(NETS))
    console = Console(width=150)
    table = Table(title="Deployed, batch 1, one thread; speed against FP32 in the same runtime")
    for column in (
        "network",
        "runtime",
        "in integers",
        "speed",
        "ORT quantize_static's speed",
        "equal to simulation",
        "largest gap (steps)",
    ):
        table.add_column(column)
    for name in parser.parse_args().nets:
        measure(name, NETS[name], table, console)
    console.print(table)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    console.print(f"VNNI on this CPU: {'yes' if 'vnni' in flags else 'no (integer kernels reach about 2x of FP32)'}")


if __name__ == "__main__":
    main()
