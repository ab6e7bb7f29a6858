"""A job that was stopped goes on from its checkpoint with the same result."""

import pytest
import torch

import bitwright as bw
from bitwright.errors import SaveError
from bitwright.quantizer import quantizers
from bitwright.reconstruction import run as job
from tests.reconstruction.nets import calibrated
from tests.reconstruction.test_reconstruct import FEW, same, weights


def fresh():
    torch.manual_seed(0)
    return calibrated("residual")


def test_the_result_is_the_same_as_without_a_stop(tmp_path, monkeypatch):
    model, batches = fresh()
    whole = bw.reconstruct(model, batches, **FEW)

    learn, count = job.Lesson.learn, 0

    def dies(self, source):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return learn(self, source)

    monkeypatch.setattr(job.Lesson, "learn", dies)
    first, batches = fresh()
    with pytest.raises(KeyboardInterrupt):
        bw.reconstruct(first, batches, checkpoint=tmp_path, **FEW)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["unit-0000.safetensors", "unit-0001.safetensors"]

    second, batches = fresh()
    result = bw.reconstruct(second, batches, checkpoint=tmp_path, **FEW)
    assert count == 5  # two of four units came from the files
    assert same(weights(second), weights(model))
    pairs = zip(quantizers(second).values(), quantizers(model).values(), strict=True)
    assert all(torch.equal(a.scale, b.scale) for a, b in pairs)
    assert [(u.before, u.after, u.kept) for u in result.units] == [(u.before, u.after, u.kept) for u in whole.units]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model, batches = fresh()
    bw.reconstruct(model, batches, checkpoint=tmp_path, **FEW)
    for change in ({"seed": 1}, {"method": "brecq"}):
        model, batches = fresh()
        with pytest.raises(SaveError, match="belongs to another choice of settings; remove it to start over"):
            bw.reconstruct(model, batches, checkpoint=tmp_path, **FEW, **change)
    model, batches = fresh()
    with pytest.raises(SaveError, match="belongs to another data set"):
        bw.reconstruct(model, batches[:1], checkpoint=tmp_path, **FEW)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(SaveError, match="belongs to another model"):
        bw.reconstruct(model, batches, checkpoint=tmp_path, **FEW)
    (tmp_path / "unit-0000.safetensors").write_bytes(b"torn")
    with pytest.raises(SaveError, match="cannot be read"):
        bw.reconstruct(model, batches, checkpoint=tmp_path, **FEW)
