"""Prove many random nets: ``python -m tests.zoo.random_nets FIRST END RUNTIME [FAMILY]``."""

import sys
import tempfile
from pathlib import Path

from tests.zoo.random_nets import random_net
from tests.zoo.random_nets.proving import prove

first, end, runtime = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
family = sys.argv[4] if len(sys.argv) > 4 else "images"
failed = 0
for seed in range(first, end):
    net, x = random_net(seed, family=family)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _, wrong = prove(net, x, runtime, Path(folder) / "net.onnx")
        except Exception as error:  # whatever it is, the next seed is tried
            wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        failed += 1
        print(f"{seed}: {'; '.join(wrong)}\n{net.extra_repr()}\n", flush=True)
print(f"{end - first - failed} of {end - first} proven in {runtime}")
sys.exit(bool(failed))
