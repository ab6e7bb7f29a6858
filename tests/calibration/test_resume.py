"""Calibration that was interrupted goes on with the same result, to the bit; what does not fit is refused."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright import checkpoints
from bitwright.errors import BitwrightError, ConfigError, SaveError
from bitwright.observers import OBSERVERS, Observer, register_observer

ROOT = Path(__file__).parents[2]
FILE = "calibration.safetensors"


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def data(count=6):
    torch.manual_seed(4)
    return [torch.randn(2, 3, 8, 8) * (1 + i) for i in range(count)]


def prepared(observer="MinMaxObserver", model=None):
    recipe = {
        "backend": "virtual",
        "weight": "int8 channel:0",
        "activation": {"spec": "int8 symmetric tensor", "observer": observer},
    }
    return bw.prepare(model or net(), data()[0], recipe=recipe)


class Stop(Exception):
    """Ends calibration in the middle."""


def stopping(batches, at):
    for number, batch in enumerate(batches):
        if number == at:
            raise Stop
        yield batch


def scales(model):
    return [q.scale for q in bw.quantizer.quantizers(model).values()]


@pytest.fixture
def always_due(monkeypatch):
    monkeypatch.setattr(checkpoints, "_EVERY", 0.0)


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize("observer", sorted(OBSERVERS))
def test_goes_on_where_it_was(observer, tmp_path):
    whole = bw.calibrate(prepared(observer), data())
    with pytest.raises(Stop):
        bw.calibrate(prepared(observer), stopping(data(), 4), checkpoint=tmp_path)
    ran = []
    model = prepared(observer)
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    bw.calibrate(model, data(), checkpoint=tmp_path)
    assert len(ran) == 2
    assert all(map(torch.equal, scales(model), scales(whole)))
    again = bw.calibrate(prepared(observer), data(), checkpoint=tmp_path)
    assert all(map(torch.equal, scales(again), scales(whole)))


def test_data_that_fails_loses_nothing(tmp_path):
    with pytest.raises(Stop):
        bw.calibrate(prepared(), stopping(data(), 4), checkpoint=tmp_path)
    ran = []
    model = prepared()
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    bw.calibrate(model, data(), checkpoint=tmp_path)
    assert len(ran) == 2
    assert all(map(torch.equal, scales(model), scales(bw.calibrate(prepared(), data()))))


@pytest.mark.usefixtures("always_due")
def test_another_model_recipe_or_order_is_refused(tmp_path):
    bw.calibrate(prepared(), data(4), checkpoint=tmp_path)
    torch.manual_seed(8)
    other = net()
    other[0].weight.data += 1
    with pytest.raises(SaveError, match=r"belongs to another model; remove it to start over"):
        bw.calibrate(prepared(model=other), data(), checkpoint=tmp_path)
    with pytest.raises(SaveError, match=r"belongs to another recipe"):
        bw.calibrate(prepared("MSEObserver"), data(), checkpoint=tmp_path)
    with pytest.raises(SaveError, match=r"other data, or of the same in another order: its 4 batches are not"):
        bw.calibrate(prepared(), data()[::-1], checkpoint=tmp_path)
    with pytest.raises(SaveError, match=r"has 4 batches, but the data only 3"):
        bw.calibrate(prepared(), data(3), checkpoint=tmp_path)
    model = prepared()
    with pytest.raises(SaveError):
        bw.calibrate(model, data()[::-1], checkpoint=tmp_path)
    assert all(not q.calibrated and not q.observer.batches for q in bw.quantizer.quantizers(model).values())


def test_damaged_checkpoints_are_refused(tmp_path):
    bw.calibrate(prepared(), data(2), checkpoint=tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    chance = random.Random(0)
    for length in (0, 5, 100, len(whole) - 1):
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(SaveError, match=r"cannot be read.*remove it to start over"):
            bw.calibrate(prepared(), data(), checkpoint=tmp_path)
    for _ in range(40):
        at = chance.randrange(len(whole))
        (tmp_path / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(BitwrightError):
            bw.calibrate(prepared(), data(), checkpoint=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="is not a folder"):
        bw.calibrate(prepared(), data(), checkpoint=tmp_path / "file")


@pytest.mark.usefixtures("own_plugins")
def test_an_observer_that_does_not_say_what_it_keeps_is_refused_first(tmp_path):
    @register_observer("SecretObserver")
    class Secret(Observer):
        def observe(self, x):
            self.top = x.abs().max()

        def range(self):
            return -self.top, self.top

    with pytest.raises(ConfigError, match="Secret does not define what it keeps"):
        bw.calibrate(prepared("SecretObserver"), stopping(data(), 0), checkpoint=tmp_path)


@pytest.fixture
def interruptible():
    """A background shell ignores SIGINT, and its children inherit that; a terminal does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_waits_for_the_batch_and_is_obeyed(tmp_path):
    def interrupted():
        for number, batch in enumerate(data()):
            if number == 3:
                signal.raise_signal(signal.SIGINT)  # while batch 4 is under way
            yield batch

    with pytest.raises(KeyboardInterrupt):
        bw.calibrate(prepared(), interrupted(), checkpoint=tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ran = []
    model = prepared()
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    bw.calibrate(model, data(), checkpoint=tmp_path)
    assert len(ran) == 2
    assert all(map(torch.equal, scales(model), scales(bw.calibrate(prepared(), data()))))


@pytest.mark.usefixtures("interruptible")
def test_two_signals_do_not_wait(tmp_path):
    def impatient():
        yield data()[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one was not obeyed")

    with pytest.raises(KeyboardInterrupt):
        bw.calibrate(prepared(), impatient(), checkpoint=tmp_path)


def test_in_a_thread_there_are_no_signals(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(bw.calibrate(prepared(), data(), checkpoint=tmp_path)))
    thread.start()
    thread.join()
    assert done
    assert (tmp_path / FILE).exists()


JOB = """
import sys, time
import bitwright as bw
from bitwright import checkpoints
from tests.calibration.test_resume import data, prepared
checkpoints._EVERY = 0.0
def slow():
    for batch in data(400):
        time.sleep(0.002)
        yield batch
model = prepared("HistogramObserver")
print("ready", flush=True)
bw.calibrate(model, slow(), checkpoint=sys.argv[1])
bw.save(model, sys.argv[1] + "/model")
print("done", flush=True)
"""


def run_job(folder, seconds, number):
    job = subprocess.Popen([sys.executable, "-c", JOB, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
    assert job.stdout is not None
    job.stdout.readline()
    time.sleep(seconds)
    job.send_signal(number)
    out, _ = job.communicate(timeout=60)
    return out, job.returncode


def test_killed_at_any_moment(tmp_path):
    """Killed and then terminated, it ends with the result of a run that was left alone."""
    for seconds, number in ((0.3, signal.SIGKILL), (0.3, signal.SIGTERM)):
        out, code = run_job(tmp_path, seconds, number)
        assert out == b""
        assert code == -number
        assert (tmp_path / FILE).exists()
    resumed = bw.calibrate(prepared("HistogramObserver"), data(400), checkpoint=tmp_path)
    assert all(map(torch.equal, scales(resumed), scales(bw.calibrate(prepared("HistogramObserver"), data(400)))))
