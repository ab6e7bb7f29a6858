"""Calibration block by block that was interrupted goes on with the same result; what does not fit is refused."""

import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright import checkpoints
from bitwright.checkpoints import digest_of
from bitwright.errors import ConfigError, SaveError
from bitwright.observers import OBSERVERS
from bitwright.quantizer import quantizers
from bitwright.reconstruction import blockwise
from bitwright.reconstruction.block_values import CannotPack, Laid, pack, unpack
from bitwright.reconstruction.columns import Memory
from tests.saving.test_mapped import NETS, ranges

ROOT = Path(__file__).parents[2]
FILE = "blocks.safetensors"
CALLS = 24  # of blocks, with four batches


class Net(nn.Module):
    """Six blocks; later ones read an input and a size again."""

    def __init__(self, fill=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.fill = fill

    def forward(self, x, mask):
        y = self.layers[0](x).transpose(1, 2)
        size = y.shape[0] * 2
        for layer in self.layers[1:4]:
            y = torch.relu(layer(y))
        return self.layers[4](y.masked_fill(mask, self.fill)).reshape(size, -1)


def data(count=4):
    source = torch.Generator().manual_seed(4)
    mask = torch.arange(6)
    return [(torch.randn(2, 6, 6, generator=source) * (1 + i), mask == i) for i in range(count)]


def prepared(observer="MinMaxObserver", **given):
    torch.manual_seed(3)
    recipe = {"backend": "virtual", "activation": {"spec": "int8 symmetric tensor", "observer": observer}}
    return bw.prepare(Net(**given).eval(), data()[0], recipe=recipe)


class Killed(BaseException):
    """Nothing that code expects: what is done when it comes is what a kill leaves."""


def run_until(monkeypatch, folder, calls, model=None, batches=None, **given):
    """Calibrate, and end with the given call of a block."""
    whole, count = blockwise._Job._through, 0

    def through(*args):
        nonlocal count
        count += 1
        if count > calls:
            raise Killed
        return whole(*args)

    with monkeypatch.context() as patch:
        patch.setattr(blockwise._Job, "_through", through)
        with pytest.raises(Killed):
            bw.calibrate_by_block(model or prepared(), batches or data(), checkpoint=folder, **given)


def calls_left(monkeypatch, folder, model, batches):
    """Calibrate to the end; how often a block was called."""
    count, whole = [], blockwise._Job._through
    with monkeypatch.context() as patch:
        patch.setattr(blockwise._Job, "_through", lambda *args: (count.append(1), whole(*args))[1])
        bw.calibrate_by_block(model, batches, checkpoint=folder)
    return len(count)


@pytest.mark.parametrize("observer", sorted(OBSERVERS))
def test_goes_on_after_every_batch_of_every_block(observer, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_EVERY", 0.0)
    whole = bw.calibrate(prepared(observer), data())
    for _ in range(2):  # ten calls of 24, by processes that are killed after five and ten
        run_until(monkeypatch, tmp_path, 5, prepared(observer))
    model = prepared(observer)
    assert calls_left(monkeypatch, tmp_path, model, data()) == CALLS - 10
    assert ranges(model) == ranges(whole)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    again = prepared(observer)
    assert calls_left(monkeypatch, tmp_path, again, data()) == 0
    assert ranges(again) == ranges(whole)


@pytest.mark.parametrize("calls", range(0, 24, 5))
def test_finished_blocks_are_kept(calls, tmp_path, monkeypatch):
    run_until(monkeypatch, tmp_path, calls, memory_limit=100)
    model = prepared()
    assert calls_left(monkeypatch, tmp_path, model, data()) == CALLS - calls // 4 * 4
    assert ranges(model) == ranges(bw.calibrate(prepared(), data()))


@pytest.mark.parametrize("name", NETS)
def test_nets_with_shared_weights_and_islands(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_EVERY", 0.0)
    build, batches = NETS[name]
    torch.manual_seed(0)
    net = build().eval()
    run_until(monkeypatch, tmp_path, len(batches) - 1, bw.prepare(net, batches[0]), batches)
    model = bw.prepare(net, batches[0])
    bw.calibrate_by_block(model, batches, checkpoint=tmp_path)
    assert ranges(model) == ranges(bw.calibrate(bw.prepare(net, batches[0]), batches))


def test_another_model_recipe_or_data_is_refused(tmp_path, monkeypatch):
    run_until(monkeypatch, tmp_path, 9)
    other = prepared()
    other.layers[0].weight.data += 1
    given = [(other, data()), (prepared(fill=0.5), data())]
    for model, batches in given:
        with pytest.raises(SaveError, match=r"belongs to another model; remove it to start over"):
            bw.calibrate_by_block(model, batches, checkpoint=tmp_path)
    with pytest.raises(SaveError, match=r"belongs to another recipe; remove it to start over"):
        bw.calibrate_by_block(prepared("MSEObserver"), data(), checkpoint=tmp_path)
    model = prepared()
    for batches in (data()[::-1], data(3), data(5)):
        with pytest.raises(SaveError, match=r"belongs to another data set; remove it to start over"):
            bw.calibrate_by_block(model, batches, checkpoint=tmp_path)
    assert all(not q.calibrated and not q.observer.batches for q in quantizers(model).values())
    bw.calibrate_by_block(model, data(), checkpoint=tmp_path)


def test_damaged_and_missing_files_are_refused(tmp_path, monkeypatch):
    run_until(monkeypatch, tmp_path, 9)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) > 4
    chance = random.Random(0)
    for file in (files[0], files[-1]):
        whole = file.read_bytes()
        for _ in range(10):
            at = chance.randrange(len(whole))
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
            with pytest.raises(SaveError, match=r"remove it to start over"):
                bw.calibrate_by_block(prepared(), data(), checkpoint=tmp_path)
        file.write_bytes(whole)
    value = next(file for file in files if file.name != FILE)
    value.unlink()
    with pytest.raises(SaveError, match=rf"lacks '.*{value.name}'; remove it to start over"):
        bw.calibrate_by_block(prepared(), data(), checkpoint=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="is not a folder"):
        bw.calibrate_by_block(prepared(), data(), checkpoint=tmp_path / "file")


def test_a_signal_waits_for_the_batch_and_is_obeyed(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(Killed))
    whole = blockwise._Job._through

    def through(self, call, unit, own, number):
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return whole(self, call, unit, own, number)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(blockwise._Job, "_through", through)
            with pytest.raises(Killed):
                bw.calibrate_by_block(prepared(), data(), checkpoint=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    model = prepared()
    assert calls_left(monkeypatch, tmp_path, model, data()) == CALLS - 3
    assert ranges(model) == ranges(bw.calibrate(prepared(), data()))


JOB = """
import sys, time
import bitwright as bw
from bitwright import checkpoints
from bitwright.reconstruction import blockwise
from tests.calibration.test_resume_by_block import data, prepared
checkpoints._EVERY = 0.0
whole = blockwise._Job._through
def through(*given):
    time.sleep(0.002)
    return whole(*given)
blockwise._Job._through = through
model = prepared("HistogramObserver")
print("ready", flush=True)
bw.calibrate_by_block(model, data(60), checkpoint=sys.argv[1])
"""


def test_killed_at_any_moment(tmp_path):
    """Killed, it ends with the result of a run that was left alone."""
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert job.stdout is not None
    job.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.4)
    job.kill()
    job.communicate(timeout=60)
    assert (tmp_path / "blocks").is_dir()
    resumed = bw.calibrate_by_block(prepared("HistogramObserver"), data(60), checkpoint=tmp_path)
    assert ranges(resumed) == ranges(bw.calibrate(prepared("HistogramObserver"), data(60)))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_full_disk_is_an_error_before_anything_is_written_there(tmp_path, monkeypatch):
    """A process that writes to a mapped file on a full disk is killed."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, model = resource.getrlimit(resource.RLIMIT_FSIZE), prepared()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"values do not fit into .*: File too large; raise memory_limit"):
            bw.calibrate_by_block(model, data(), memory_limit=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_packed_values_are_the_same(tmp_path):
    memory = Memory(1e9, tmp_path)
    laid = [torch.arange(12.0).reshape(3, 4).T, torch.ones(1, 2, 2).expand(3, 2, 2), torch.tensor(1 + 2j)]
    plain = [None, True, 3, 0.1, "a", (1, [2.5, None]), torch.Size([2, 3]), torch.bfloat16, torch.zeros(0, 3)]
    for value in (*laid, *plain):
        tensors = {}
        kept = Laid.of(value, memory) if any(value is each for each in laid) else value
        found = unpack(pack(kept, tensors), tensors)
        assert type(found) is type(value)
        if isinstance(value, torch.Tensor):
            assert found.stride() == value.stride()
        assert digest_of(found) == digest_of(value)
    with pytest.raises(CannotPack):
        pack((1, object()), {})
