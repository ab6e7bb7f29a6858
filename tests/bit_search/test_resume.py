"""sensitivity and search_bits that were stopped go on from their checkpoint with the same result, to the bit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bitwright as bw
from bitwright.bit_search.damage import Damage
from bitwright.errors import SaveError
from tests.bit_search.test_search import RECIPE
from tests.reconstruction.nets import calibrated

ROOT = Path(__file__).parents[2]


def fresh(recipe=RECIPE):
    torch.manual_seed(0)
    return calibrated("residual", recipe)


def sensitive(model, batches, **options):
    return bw.sensitivity(model, batches, "kl", cumulative=True, **options)


def searched(model, batches, **options):
    return bw.search_bits(model, batches, {"size": 1000}, bits=(2, 4, 8), **options)


class Count:
    """Counts measurements, and ends the job at one of them."""

    def __init__(self, monkeypatch, dies_at=None):
        self.number = 0
        of = Damage.of

        def counted(damage, chosen):
            self.number += 1
            if self.number == dies_at:
                raise KeyboardInterrupt
            return of(damage, chosen)

        monkeypatch.setattr(Damage, "of", counted)


@pytest.mark.parametrize("job", [sensitive, searched])
def test_the_result_is_the_same_as_without_a_stop(job, tmp_path, monkeypatch):
    model, batches = fresh()
    with monkeypatch.context() as patch:
        whole = Count(patch)
        wanted = job(model, batches)
    with monkeypatch.context() as patch:
        Count(patch, dies_at=5)
        first, _ = fresh()
        before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
        with pytest.raises(KeyboardInterrupt):
            job(first, batches, checkpoint=tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in first.state_dict().items())
    with monkeypatch.context() as patch:
        rest = Count(patch)
        found = job(first, batches, checkpoint=tmp_path)
    assert rest.number == whole.number - 4
    assert found == wanted
    assert torch.equal(first(*batches[0]), model(*batches[0]))


def test_other_bits_and_budgets_use_what_is_known(tmp_path, monkeypatch):
    model, batches = fresh()
    searched(model, batches, checkpoint=tmp_path)
    again, _ = fresh()
    count = Count(monkeypatch)
    found = bw.search_bits(again, batches, {"size": 1600}, bits=(4, 8), checkpoint=tmp_path)
    assert count.number == 1  # that of all together
    other, _ = fresh()
    assert found == bw.search_bits(other, batches, {"size": 1600}, bits=(4, 8))


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model, batches = fresh()
    sensitive(model, batches, checkpoint=tmp_path)
    with pytest.raises(SaveError, match="belongs to another metric; remove it to start over"):
        bw.sensitivity(model, batches, "mse", checkpoint=tmp_path)
    with pytest.raises(SaveError, match="belongs to another data set"):
        sensitive(model, batches[::-1], checkpoint=tmp_path)
    recalibrated, _ = fresh()
    bw.calibrate(recalibrated, [[batch[0] * 2] for batch in batches])
    with pytest.raises(SaveError, match="belongs to another calibration"):
        sensitive(recalibrated, batches, checkpoint=tmp_path)
    other, _ = fresh({**RECIPE, "activation": "uint4 affine"})
    with pytest.raises(SaveError, match="belongs to another recipe and another calibration"):
        sensitive(other, batches, checkpoint=tmp_path)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(SaveError, match="belongs to another model"):
        sensitive(model, batches, checkpoint=tmp_path)
    (tmp_path / "sensitivity.safetensors").write_bytes(b"torn")
    with pytest.raises(SaveError, match="cannot be read"):
        sensitive(model, batches, checkpoint=tmp_path)
    with pytest.raises(SaveError, match="is not a folder"):
        sensitive(model, batches, checkpoint=tmp_path / "sensitivity.safetensors")


JOB = """
import sys, time
from bitwright.bit_search.damage import Damage
from tests.bit_search.test_resume import fresh, searched
of = Damage.of
Damage.of = lambda *args: (time.sleep(0.05), of(*args))[1]
model, batches = fresh()
print("ready", flush=True)
searched(model, batches, checkpoint=sys.argv[1])
"""


def test_killed_in_the_middle(tmp_path):
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as job:
            assert job.stdout is not None
            job.stdout.readline()
            time.sleep(0.2)
            job.send_signal(number)
        assert job.returncode == -number
    assert (tmp_path / "bits.safetensors").exists()
    (model, batches), (other, _) = fresh(), fresh()
    assert searched(model, batches, checkpoint=tmp_path) == searched(other, batches)
