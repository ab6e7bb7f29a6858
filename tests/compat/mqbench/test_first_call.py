"""MQBench's models before their first call: optimizers, DistributedDataParallel, checkpoints, graphs.

Whatever is made before the first call must train what is trained afterwards.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitwright.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform
from bitwright.compat.mqbench.utils.state import enable_calibration, enable_quantization
from bitwright.preparation import ledger_of
from bitwright.quantizer import quantizers

ROOT = Path(__file__).parents[3]
METHODS = [
    *("FixedFakeQuantize", "LearnableFakeQuantize", "NNIEFakeQuantize", "DoReFaFakeQuantize", "DSQFakeQuantize"),
    *("PACTFakeQuantize", "TqtFakeQuantize", "AdaRoundFakeQuantize", "QDropFakeQuantize", "APoTFakeQuantize"),
]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(torch.relu(self.bn(self.conv(x))), 4).flatten(1))


class OtherWay(Small):
    """Its first call takes another way than inputs that are found: the model is prepared again."""

    def forward(self, x):
        y = super().forward(x)
        return y.contiguous() if x.shape[0] > 3 else y


def scheme(method, per_channel):
    even = {"symmetry": True, "per_channel": per_channel, "pot_scale": method.startswith("Tqt"), "bit": 4}
    return {"w_fakequantize": method, "a_fakequantize": method, "w_qscheme": even, "a_qscheme": even}


def train(model, optimizer, steps=3, seed=1):
    """Calibrate, then train; the first call is that of calibration."""
    torch.manual_seed(seed)
    enable_calibration(model)
    model(torch.randn(8, 3, 8, 8))
    enable_quantization(model)
    x, labels = 1.5 * torch.randn(8, 3, 8, 8), torch.randint(4, (8,))  # some of it beyond the range
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [Small, OtherWay])
@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_trains_all_that_is_learned(method, kind):
    for per_channel in (True, False):
        torch.manual_seed(0)
        config = {"extra_qconfig_dict": scheme(method, per_channel)}
        model = prepare_by_platform(kind().train(), BackendType.Academic, config)
        before = dict(model.named_parameters())
        values = {name: p.detach().clone() for name, p in before.items()}
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        assert not [name for name, p in after.items() if p.grad is None]
        assert not [name for name, p in after.items() if torch.equal(p, values[name])]  # calibrated, or trained
        learned = [name for name, p in after.items() if ".method." in name and p.grad.abs().max() > 0]
        assert bool(learned) == (method not in METHODS[:1] + METHODS[2:4] + ["AdaRoundFakeQuantize"])


@pytest.mark.parametrize("backend", [b.name for b in BackendType if "Academic" not in b.name])
def test_every_target_learns_as_it_did(backend):
    torch.manual_seed(0)
    model = prepare_by_platform(Small().train(), backend)
    before = dict(model.named_parameters())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert after.keys() == before.keys()
    scales = [name for name in after if name.endswith(("method.scale", "method.log2_threshold"))]
    assert bool(scales) == (backend not in ("NNIE", "STPU"))
    assert len(scales) in (0, len(quantizers(model)))


@pytest.mark.parametrize("kind", [Small, OtherWay])
def test_a_quantized_checkpoint_loads_before_the_first_call(kind, tmp_path):
    torch.manual_seed(0)
    trained = prepare_by_platform(kind().train(), "SNPE")
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    torch.save(trained.state_dict(), tmp_path / "checkpoint.pth")
    fresh = prepare_by_platform(kind().train(), "SNPE")
    assert fresh.load_state_dict(torch.load(tmp_path / "checkpoint.pth", weights_only=True)).missing_keys == []
    x = torch.randn(8, 3, 8, 8)
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


def test_graph_and_code_are_there_before_the_first_call():
    model = prepare_by_platform(Small().eval(), "Tensorrt")
    code, graph = model.code, str(model.graph)
    called = [node.target for node in model.graph.nodes if node.op == "call_module"]
    assert {"conv", "fc"} <= set(called)
    assert "self.fc(" in code
    model(torch.randn(4, 3, 8, 8))
    assert (model.code, str(model.graph)) == (code, graph)
    assert {entry.name for entry in ledger_of(model).entries} >= {"conv", "fc"}


JOB = """
import os, sys, torch
from tests.compat.mqbench.test_first_call import OtherWay, Small, train
from bitwright.compat.mqbench.prepare_by_platform import prepare_by_platform

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
for kind in (Small, OtherWay):
    torch.manual_seed(0)
    made = prepare_by_platform(kind().train(), "Tensorrt")
    parallel = torch.nn.parallel.DistributedDataParallel(made)
    values = {name: p.detach().clone() for name, p in parallel.named_parameters()}
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    train(parallel, optimizer, seed=rank)  # different data on each rank: ranges cover the data of all
    assert not [n for n, p in parallel.named_parameters() if torch.equal(p, values[n])]
    torch.save({n: p.detach() for n, p in made.named_parameters()}, f"{folder}/{kind.__name__}{rank}.pth")
torch.distributed.barrier()
os._exit(0)  # threads of gloo do not always end well by themselves
"""


def test_two_processes_train_it_from_before_the_first_call(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(rank), str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    for kind in ("Small", "OtherWay"):
        first, second = (torch.load(tmp_path / f"{kind}{rank}.pth", weights_only=True) for rank in range(2))
        assert any(name.endswith("method.scale") for name in first)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
