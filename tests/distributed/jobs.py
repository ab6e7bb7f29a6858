"""What two ranks do in the tests, each in a process of its own; what they find goes into files."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bitwright as bw
from bitwright.quantizer import quantizers

BATCHES = 6
FREE = ("MinMaxObserver", "HistogramObserver", "PercentileObserver", "MSEObserver", "KLObserver", "PoTModeObserver")


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def data(count=BATCHES):
    torch.manual_seed(4)
    return [torch.randn(2, 3, 8, 8) * (1 + i) for i in range(count)]


def prepared(observer="MinMaxObserver", method="FixedFakeQuantize", **options):
    tensor = {"method": method, "method_options": options}
    recipe = {
        "backend": "virtual",
        "weight": {"spec": "int8 channel:0", **tensor},
        "activation": {"spec": "int8 symmetric tensor", "observer": observer, **tensor},
    }
    return bw.prepare(net(), data()[0], recipe=recipe)


def scales(model):
    return {name: q.qparams()[0].detach().tolist() for name, q in quantizers(model).items()}


def training(model, batches, alone=()):
    """A step for each batch, a rank's share; FSDP leaves ``alone`` what is a single number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        for parameter in alone:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def plain(state):
    return {name: tensor.double().tolist() for name, tensor in state.items() if not name.endswith("about")}


def refused(call):
    """The error that a call ends with, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def calibration(rank, world, folder):
    mine = data()[rank * BATCHES // world : (rank + 1) * BATCHES // world]
    found = {name: scales(bw.calibrate(prepared(name), mine)) for name in (*FREE, "LSQObserver", "EMAMinMaxObserver")}
    model = prepared()
    found["no data"] = refused(lambda: bw.calibrate(model, mine if rank == 0 else []))
    found["unchanged"] = not any(q.calibrated for q in quantizers(model).values())
    found["different"] = refused(lambda: bw.calibrate(prepared(), mine[: 1 + rank]))
    found["uneven"] = scales(bw.calibrate(prepared(), mine[: 1 + rank], uneven=True))
    found["nan"] = refused(lambda: bw.calibrate(prepared(), [mine[0] * (float("nan") if rank else 1.0)]))
    other = prepared()
    with torch.no_grad():
        other.get_parameter("0.weight").add_(rank)
    found["other weights"] = refused(lambda: bw.calibrate(other, mine))
    model = bw.calibrate(prepared(), mine, checkpoint=folder / "progress")
    bw.save(model, folder / "model")
    found["loaded"] = scales(bw.load(folder / "model", net))
    found["file"] = refused(lambda: bw.save(model, "/dev/null/x" if rank == 0 else folder / "y"))
    found["exported"] = [
        t.tensor for t in bw.export(bw.calibrate(bw.prepare(net(), mine[0]), mine), folder / "m.onnx").tensors
    ]
    return found


def measuring(rank, world, folder):
    model, mine = bw.calibrate(prepared(), data(2), uneven=True), data()[rank::world]
    found = {metric: worth(bw.sensitivity(model, mine, metric)) for metric in ("kl", "mse", "sqnr")}
    found["score"] = worth(bw.sensitivity(model, mine, lambda m: float(m(mine[0]).mean())))
    found["no data"] = refused(lambda: bw.sensitivity(model, mine if rank == 0 else []))
    found["bits"] = bw.search_bits(model, mine, {"size": 700}, bits=(2, 4, 8), checkpoint=folder / "bits").bits
    return found


def worth(result):
    return {layer.name: layer.alone for layer in result.layers}


def qat(rank, world, folder):
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name in ("LSQ", "DDP", "FSDP"):
        options = {} if name == "LSQ" else {"use_grad_scaling": False}
        inner = bw.calibrate(prepared("MinMaxObserver", "LearnableFakeQuantize", **options), data(2), uneven=True)
        alone = [p for p in inner.parameters() if not p.ndim] if name == "FSDP" else []
        model = fully_shard(inner, ignored_params=set(alone)) if alone else DistributedDataParallel(inner)
        training(model, [batch[rank : rank + 1] for batch in data(1)], alone)
        state = inner.state_dict()
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
        found[name] = plain(whole)
    return found


def dying(rank, world, folder):
    batches = data()

    def mine():
        yield batches[0]
        if rank == 1:
            os._exit(7)
        yield batches[1]

    return {"error": refused(lambda: bw.calibrate(prepared(), mine(), timeout=20))}


def hanging(rank, world, folder):
    if rank == 1:
        time.sleep(6)
        return {"error": ""}
    return {"error": refused(lambda: bw.calibrate(prepared(), data(), timeout=2))}


def main():
    jobs, folder = sys.argv[1].split(","), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {job: globals()[job](rank, world, folder) for job in jobs}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group that lost a rank does not end well by itself


if __name__ == "__main__":
    main()
