"""Prove the file of one net, and compare it with the simulation again, end to end and independently."""

from pathlib import Path

import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.quantizer import quantizers
from bitwright.verification import Proof
from bitwright.verification.outputs import tensors_in

_ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2}  # of an output: what float arithmetic in another order makes
_FURTHER = 3.0  # than the simulation is from the float net: each tie that is rounded differently adds a step


def prove(net: nn.Module, x: Tensor, runtime: str, path: Path) -> tuple[Proof | None, list[str]]:
    """The proof of a net's file at every size that it leaves free, and what is wrong; None if all of the net is float.

    There are more samples than channels in some of the data.
    """
    data = [x.clone(), (0.7 * x).to(x.dtype) if x.is_floating_point() else x.flip(0)]
    model = bw.prepare(net, x.clone(), backend=runtime)
    if not quantizers(model):
        return None, []
    model = bw.calibrate(model, [each.clone() for each in data])
    file = bw.export(model, path)
    unseen = data[1].flip(1)
    sizes = [torch.cat([unseen, x] * (4 if axis == 0 else 1), axis) for axis in free_axes(path)]
    data += [each for each in sizes if _takes(model, each)]
    proof = bw.verify(model, file, data, runtimes=[runtime], latency=False)
    if proof.ok:
        return proof, [line for each in (*data, unseen) if (line := strays(net, model, path, runtime, each))]
    return proof, proof.missed


def _takes(model: nn.Module, x: Tensor) -> bool:
    """Whether a model takes an input: a size that it takes halved need not fit doubled."""
    try:
        with torch.no_grad():
            model.eval()(x.clone())
    except Exception:  # whatever the model says
        return False
    return True


def free_axes(path: Path) -> list[int]:
    """The axes of a file's first input that it leaves free."""
    import onnx

    shape = onnx.load(str(path)).graph.input[0].type.tensor_type.shape
    return [axis for axis, size in enumerate(shape.dim) if size.dim_param]


def strays(net: nn.Module, model: nn.Module, path: Path, runtime: str, x: Tensor) -> str:
    """Which result of a file is much further from the simulation than that is from the float net."""
    with torch.no_grad():
        simulated, exact = tensors_in(model.eval()(x.clone())), tensors_in(net(x.clone()))
    found = tensors_in(bw.run_file(path, runtime)(x.float() if x.dtype is torch.half else x.clone()))
    if len(found) != len(simulated):
        return f"{len(found)} results instead of {len(simulated)}"
    for i, (ours, theirs, true) in enumerate(zip(simulated, found, exact, strict=True)):
        away = float((theirs.double() - ours.double()).norm())
        allowed = _FURTHER * float((ours.double() - true.double()).norm()) + _ALLOWED.get(true.dtype, 0.0) * float(
            ours.double().norm()
        )
        if not away <= allowed and not torch.equal(theirs, ours):
            return f"result {i} for {list(x.shape)} is {away:.3g} from the simulation, more than {allowed:.3g}"
    return ""
