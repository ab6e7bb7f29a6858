"""Prove many random nets: ``python -m tests.zoo.random_nets FIRST END RUNTIME``."""

import sys
import tempfile
from pathlib import Path

import bitwright as bw
from bitwright.quantizer import quantizers
from tests.zoo.random_nets import random_net


def failure(seed: int, runtime: str) -> str:
    """What is wrong with the file of one net; nothing if it is proven."""
    net, x = random_net(seed)
    data = [x, 0.7 * x]
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = bw.prepare(net, x, backend=runtime)
            if not quantizers(model):
                return ""  # all of it stays float
            model = bw.calibrate(model, data)
            file = bw.export(model, Path(folder) / "net.onnx")
            proof = bw.verify(model, file, data, runtimes=[runtime], latency=False)
        except Exception as error:  # whatever it is, the next seed is tried
            return f"{type(error).__name__}: {error}"
    return "" if proof.ok else "; ".join(proof.missed)


first, end, runtime = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
failed = 0
for seed in range(first, end):
    if why := failure(seed, runtime):
        failed += 1
        print(f"{seed}: {why}\n{random_net(seed)[0].extra_repr()}\n", flush=True)
print(f"{end - first - failed} of {end - first} proven in {runtime}")
sys.exit(bool(failed))
