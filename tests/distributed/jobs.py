"""What two or four ranks do in the tests, each in its own process; they write what they find to files."""

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


def shares(rank, world, folder):
    """Calibration where some ranks have more batches than others, and learning by all of them."""
    mine = data()[rank * BATCHES // world : (rank + 1) * BATCHES // world]
    found = {name: scales(bw.calibrate(prepared(name), mine, uneven=True)) for name in FREE}
    for loss in ("mse", "fisher"):
        model = bw.calibrate(few_bits(), mine, uneven=True)
        options = {"steps": 20, "loss": loss, "batch_size": 4, "checkpoint": folder / loss}
        units = bw.reconstruct(model, mine, "qdrop", **options).units
        again = bw.calibrate(few_bits(), mine, uneven=True)
        bw.reconstruct(again, mine, "qdrop", **options)
        states = plain(model.state_dict()), plain(again.state_dict())
        found[loss] = [[unit.before, unit.after] for unit in units], states[0], states[0] == states[1]
    found["no data"] = refused(lambda: bw.reconstruct(few_bits(calibrated=True), mine if rank else []))
    other = few_bits(calibrated=True)
    with torch.no_grad():
        other.get_parameter("0.weight").add_(rank)
    found["other weights"] = refused(lambda: bw.reconstruct(other, mine))
    return found


def few_bits(calibrated=False):
    model = bw.prepare(net(), data()[0], "virtual", weight="int2 channel:0", activation="uint4")
    return bw.calibrate(model, data(2), uneven=True) if calibrated else model


def accumulating(rank, world, folder):
    """Two micro batches before a step, the first without talking, in mixed precision or not."""
    found = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        model = DistributedDataParallel(learning())
        with model.no_sync():
            backward(model, data(1)[0].repeat(2, 1, 1, 1)[rank : rank + 1], dtype)
        backward(model, data(2)[1].repeat(2, 1, 1, 1)[rank : rank + 1], dtype)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        found[name] = plain(model.module.state_dict())
    return found


def learning():
    model = prepared("MinMaxObserver", "LearnableFakeQuantize", use_grad_scaling=False)
    return bw.calibrate(model, data(2), uneven=True).train()


def backward(model, batch, dtype=None):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(batch).float().pow(2).mean()
    (loss / 2).backward()


def dying(rank, world, folder, what="calibrate"):
    batches = data()

    def mine():
        yield batches[0]
        if rank == 1:
            os._exit(7)
        yield batches[1]

    def at_once(_=None):
        return 0.0 if rank == 0 else os._exit(7)

    def writing(write):
        model = few_bits(calibrated=True)
        return at_once() if rank == 1 else write(model)

    calls = {
        "calibrate": lambda: bw.calibrate(prepared(), mine(), timeout=20),
        "reconstruct": lambda: bw.reconstruct(few_bits(calibrated=True), mine(), timeout=20),
        "learning": lambda: dies_learning(rank),
        "sensitivity": lambda: bw.sensitivity(few_bits(calibrated=True), mine()),
        "score": lambda: bw.sensitivity(few_bits(calibrated=True), batches, at_once),
        "search": lambda: bw.search_bits(few_bits(calibrated=True), mine(), {"size": 700}, bits=(2, 4, 8)),
        "save": lambda: writing(lambda model: bw.save(model, folder / "m", timeout=600)),
        "export": lambda: writing(lambda model: bw.export(model, folder / "m.onnx", timeout=600)),
    }
    return {"error": refused(calls[what])}


def dies_learning(rank):
    from bitwright.reconstruction import learn

    loss, steps = learn.Lesson._loss, []

    def counted(*given):
        steps.append(1)
        return os._exit(7) if rank == 1 and len(steps) == 5 else loss(*given)

    learn.Lesson._loss = counted
    bw.reconstruct(few_bits(calibrated=True), data(), steps=20, timeout=20)


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
    found = {job: globals()[job.partition(":")[0]](rank, world, folder, *job.split(":")[1:]) for job in jobs}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group that lost a rank does not end well by itself


if __name__ == "__main__":
    main()
