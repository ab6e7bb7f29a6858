"""How much of a network runs in integers, how fast, and how close to the simulation: ``make bench BENCH=deploy``.

For each network: Bitwright's file for onnxruntime in onnxruntime, and its file for OpenVINO in OpenVINO, beside what
the runtime's own quantizer makes of it (``benchmarks/rivals.py``), in one interleaved run; with ``--inductor`` its
program for PyTorch in inductor beside torchao's, too, where images have 96 pixels a side, as each size is compiled.
Speed is against FP32 in the same runtime: best CPU time of many runs in one thread. Noise is that of the outputs
against FP32, in dB: more is better. Weights are random.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from rich.console import Console

import bitwright as bw
from benchmarks.nets import NETS, example_input, randomize_batchnorm
from benchmarks.nets.encoders import Bert, ViT, tokens
from benchmarks.rivals import Feeds, inductor_rival, onnxruntime_rival, openvino_rival
from bitwright.exporting.formats.base import format_of
from bitwright.exporting.onnx.file import OnnxFile
from bitwright.verification import RUNTIMES, RuntimeProof
from bitwright.verification.runtimes.base import Session

RUNS = 60
COMPILED = 96  # pixels a side of images for inductor
ENCODERS: dict[str, Callable[[], torch.nn.Module]] = {
    "vit": ViT,
    "bert": Bert,
    "bert_unmasked": lambda: Bert(masked=False),
}


def inputs(name: str, batch: int, backend: str) -> torch.Tensor:
    """Random inputs of a network."""
    if name.startswith("bert"):
        return tokens(batch)
    images = example_input("resnet18" if name in ENCODERS else name, batch)
    return images[..., :COMPILED, :COMPILED].contiguous() if backend == "inductor" and name in NETS else images


def best_times(sessions: dict[str, Session], feeds: Feeds) -> dict[str, float]:
    """Best CPU time of each session, in milliseconds, all interleaved: other work on the machine counts little."""
    best = dict.fromkeys(sessions, float("inf"))
    for run in range(RUNS + 3):
        for name, session in sessions.items():
            start = time.process_time()
            session(feeds)
            if run >= 3:
                best[name] = min(best[name], (time.process_time() - start) * 1e3)
    return best


def signal_to_noise(session: Session, feeds: Feeds, expected: np.ndarray) -> float:
    """How far the first output is from the float model's, in dB, sample by sample."""
    samples = [{name: x[i : i + 1] for name, x in feeds.items()} for i in range(len(expected))]
    found = np.concatenate([next(iter(session(each).values())) for each in samples])
    return float(10 * np.log10(np.square(expected).sum() / np.square(found - expected).sum()))


def measure(name: str, backend: str, console: Console) -> None:
    """Quantize, export, prove and race one network in one runtime."""
    torch.manual_seed(0)
    model = {**NETS, **ENCODERS}[name]().eval()
    randomize_batchnorm(model, 0)
    batch, sample, tried, unseen = (inputs(name, size, backend) for size in (4, 1, 8, 1))
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folder = Path(place)
        expected = model(tried).numpy()
        target = "onnxruntime" if backend == "inductor" else backend
        bits = None if backend == "onnxruntime" else "auto"  # as its rival, which uses 7 bits; the others use 8
        qmodel = bw.calibrate(bw.prepare(model, sample, target, weight=bits), [batch])
        format = "torch" if backend == "inductor" else "onnx"
        file = bw.export(qmodel, folder / f"ours.{'pt2' if format == 'torch' else 'onnx'}", format=format)
        proof = bw.verify(qmodel, file, [unseen], runtimes=[backend], latency=False)
        runtime = RUNTIMES.get(backend)()
        loaded: Any = format_of(file.path).read(file.path)
        feeds, more = ({loaded.inputs[0]: x.numpy()} for x in (sample, tried))
        plain = folder / "float.onnx"
        twin = loaded.float_twin() if backend == "inductor" else float_file(model, sample, loaded.inputs[0], plain)
        sessions = {"ours": runtime.session(loaded, threads=1), "float": runtime.session(twin, threads=1)}
        try:
            calibrating = {loaded.inputs[0]: batch.numpy()}
            sessions["rival"] = rival(backend, name, model, plain, calibrating)
        except ImportError as error:
            console.print(f"{name} in {backend}: no rival, {error.name} is not installed")
        times = best_times(sessions, feeds)
        noise = {n: signal_to_noise(s, more, expected) for n, s in sessions.items()}
    say(name, proof.runtimes[backend], times, noise, console)


def float_file(model: torch.nn.Module, sample: torch.Tensor, name: str, path: Path) -> OnnxFile:
    """A network as torch exports it."""
    free = ({0: torch.export.Dim.DYNAMIC},)
    twice = sample.repeat(2, *[1] * (sample.ndim - 1))  # a size of 1 would be fixed
    torch.onnx.export(
        model, (twice,), path, input_names=[name], dynamic_shapes=free, external_data=False, verbose=False
    )
    return OnnxFile(path, onnx.load(str(path)), None)


def rival(backend: str, name: str, model: torch.nn.Module, float_file: Path, feeds: Feeds) -> Session:
    """What the runtime's own quantizer makes of a network."""
    if backend == "inductor":
        compiled = inductor_rival(model, torch.from_numpy(next(iter(feeds.values()))))
        return lambda given: {"": compiled(torch.from_numpy(next(iter(given.values())))).numpy()}
    if backend == "openvino":
        return openvino_rival(float_file, feeds, transformer=name in ENCODERS)
    return onnxruntime_rival(float_file, feeds)


def say(name: str, proof: RuntimeProof, times: dict[str, float], noise: dict[str, float], console: Console) -> None:
    """One line, and what runs in float, with the reasons."""
    kinds = dict.fromkeys(o.kind for o in proof.operators)
    whole = ", ".join("{}/{} {}".format(*proof.count(k), k) for k in kinds)
    raced = ", ".join(f"{n} {times['float'] / times[n]:.2f}x {noise[n]:.1f} dB" for n in times if n != "float")
    against = f", {times['rival'] / times['ours']:.2f}x of the rival" if "rival" in times else ""
    console.print(f"{name} in {proof.runtime}: {times['float']:.2f} ms in FP32; {raced}{against}")
    console.print(f"    {proof.equal:.3%} equal to the simulation, largest gap {proof.largest}; in integers: {whole}")
    reasons: dict[tuple[str, str], int] = {}
    for operator in proof.operators:
        if not operator.integer:
            reasons[operator.kind, operator.reason] = reasons.get((operator.kind, operator.reason), 0) + 1
    for (kind, reason), count in reasons.items():
        console.print(f"    {count} {kind} in float: {reason}")


def main() -> None:
    """Measure the networks named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=[*NETS, *ENCODERS], help=", ".join([*NETS, *ENCODERS]))
    parser.add_argument("--runtimes", nargs="*", default=["onnxruntime", "openvino"])
    parser.add_argument("--inductor", action="store_true", help="compile for inductor, too: minutes for each network")
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # the rivals remark on every operator
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    console = Console(width=180, highlight=False)
    for name in given.nets:
        for backend in (*given.runtimes, *(["inductor"] if given.inductor else [])):
            measure(name, backend, console)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    console.print(f"VNNI on this CPU: {'yes' if 'vnni' in flags else 'no (integer kernels reach about 2x of FP32)'}")


if __name__ == "__main__":
    main()
