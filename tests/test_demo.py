"""The demo with almost no training: the five calls, the file in its runtimes, the report."""

import re

import torch

from bitwright import demo


def test_demo_proves_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    demo.main()
    out = capsys.readouterr().out
    assert re.search(r"operators in integers +12 of 12 \(100%\)", out)
    assert re.search(r"INT8 accuracy +\d", out)
    assert f"Report  {tmp_path / 'out/demo/report.html'}" in out
    assert (tmp_path / "out/demo/report.html").stat().st_size > 10_000
    assert (tmp_path / "out/demo/model.onnx").stat().st_size > 100_000


def test_train_and_test_digits_do_not_overlap():
    train, _, test, labels = demo.load_digits()
    assert train.shape == (1297, 1, 16, 16)
    assert test.shape == (500, 1, 16, 16)
    assert set(labels.tolist()) == set(range(10))
    assert not (torch.cdist(train.flatten(1), test.flatten(1)) == 0).any()
