"""Export in threads: files are right, and what other threads print, log and warn is heard, also afterwards."""

import importlib
import logging
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwright as bw
from bitwright.torch_internals import ONNX_FUNCTIONS, find_attribute


def test_two_threads_export_at_once(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    models = [bw.calibrate(bw.prepare(nn.Sequential(nn.Conv2d(3, 4, k)).eval(), x), [x]) for k in (1, 3)]
    before = sys.stdout, sys.stderr, logging.root.manager.disable
    threads = [
        threading.Thread(target=bw.export, args=(model, tmp_path / f"{i}.onnx")) for i, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sys.stdout, sys.stderr, logging.root.manager.disable) == before
    assert ("ignore", None, Warning, None, 0) not in warnings.filters
    for i, model in enumerate(models):
        assert bw.verify(model, tmp_path / f"{i}.onnx", [x], latency=False).ok


def test_other_threads_are_heard_while_one_exports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that speaks while it is exported is silenced; another thread at the same moment is not."""
    log = logging.getLogger("torch.anything")

    def speak(who: str) -> None:
        log.warning("log of %s", who)
        warnings.warn(f"warning of {who}", stacklevel=1)

    class Speaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                speak("the exporter")
                other = threading.Thread(target=lambda: (speak("another"), print("printed")))
                other.start()
                other.join()
            return x.relu()

    x = torch.randn(2, 3)
    model = bw.calibrate(bw.prepare(nn.Sequential(nn.Linear(3, 3), Speaks()).eval(), x, leaves=[Speaks]), [x])
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bw.export(model, tmp_path / "m.onnx")
        speak("the exporter's thread, later")
    heard = [r.getMessage() for r in caplog.records if r.name == log.name]
    shown = [str(w.message) for w in caught if "warning of" in str(w.message)]
    assert set(heard) == {"log of another", "log of the exporter's thread, later"}
    assert set(shown) == {"warning of another", "warning of the exporter's thread, later"}
    assert "printed" in capsys.readouterr().out


def test_exports_share_torchs_table_of_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once for all exports of Bitwright, and anew for every other."""
    owner, name = find_attribute(ONNX_FUNCTIONS)
    module = importlib.import_module(getattr(owner, name).__name__)
    while hasattr(module.get_torchlib_ops, "__wrapped__"):
        monkeypatch.setattr(module, "get_torchlib_ops", module.get_torchlib_ops.__wrapped__)
    made = []
    make = module.get_torchlib_ops
    monkeypatch.setattr(module, "get_torchlib_ops", lambda: made.append(1) or make())
    x = torch.randn(2, 3)
    model = bw.calibrate(bw.prepare(nn.Sequential(nn.Linear(3, 3)).eval(), x), [x])
    for i in range(2):
        bw.export(model, tmp_path / f"{i}.onnx", dynamic_shapes=False)
    assert made == [1]
    module.get_torchlib_ops()
    assert made == [1, 1]
