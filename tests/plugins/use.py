"""Use every plug-in through the public functions, and print what came of it as JSON. Run in a process of its own."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act, self.cut = nn.Linear(6, 6), nn.Softsign(), nn.Threshold(0.1, 0.2)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(F.threshold(self.cut(self.act(torch.neg(torch.neg(self.fc(x))))), 0.3, 0.4))


def main():
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(16, 6)
    recipe = {"activation": {"observer": "ToyObserver"}, "rules": [{"match": "op:toy_softsign", "force": True}]}
    model = bw.prepare(net, x, recipe=recipe)
    with torch.no_grad():
        exact = torch.equal(model(x), net(x))
    bw.calibrate(model, [x], progress=False)
    ledger = bw.ledger_of(model)
    entries = {e.name: (e.operator, e.verdict.value) for e in ledger.entries}
    scale = float(model.fc.input_quantizer.scale)
    results = {
        "exact": exact,
        "observer": scale / float(2 * (x.max() - x.min()) / 255),
        "operator": entries["act"],
        "qmodule": [type(model.cut).__name__, *(v for n, (_, v) in entries.items() if n == "cut" or "threshold" in n)],
        "schedule": [n.name for n in model.graph.nodes if n.target is torch.neg],
    }
    rounded = bw.prepare(net, x, recipe={"activation": {"method": "toy"}})
    bw.calibrate(rounded, [x], progress=False)
    placed = [q for n, q in rounded.named_modules() if isinstance(q, bw.TensorQuantizer) and "weight" not in n]
    results["method"] = float(placed[0](torch.tensor([-1.0, 1.0])).detach().min())
    chosen = bw.prepare(net, x, "ToyChip")
    bw.calibrate(chosen, [x], progress=False)
    results["backend"] = bw.ledger_of(chosen).backend.title
    with tempfile.TemporaryDirectory() as folder:
        file = bw.export(chosen, Path(folder) / "net.onnx")
        proof = bw.verify(chosen, file, [x], latency=False, progress=False)
        finite = torch.isfinite(torch.as_tensor(bw.run_file(file, "toytime")(x))).all()
        results["constraint"] = [proof.ok, proof.constraints, [v.where for v in proof.violations]]
        results["runtime"] = [list(proof.runtimes), bool(finite)]
        other = bw.export(chosen, Path(folder) / "net.toy", format="toyformat")
        again = bw.verify(chosen, other, [x], latency=False, progress=False)
        results["format"] = [other.record.format, again.ok, list(again.runtimes)]
    swapped = bw.swap_modules(net)
    results["swapped"] = type(swapped.cut).__name__
    results["home"] = bw.__file__
    json.dump(results, sys.stdout)


main()
