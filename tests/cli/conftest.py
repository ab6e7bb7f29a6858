"""A user's folder, and ways to run the command line in it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright.cli import main

NETS = Path(__file__).parent / "nets.py"
SOURCE = Path(__file__).parents[2] / "src"
QUANTIZE = ["quantize", "nets:build", "--data", "nets:calibration", "-o", "out"]


def python(*arguments, **options):
    """Start Python in another process."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A user's folder: their module in it, and nothing else."""
    shutil.copy(NETS, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delenv("BITWRIGHT_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = main([str(a) for a in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def refused(run, here):
    """Run a command that must be refused in one line, without a trace and without a file; return the line."""

    def refused(*arguments):
        before = _files(here)
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"bitwright: [^\n]+\n", err), err
        assert _files(here) == before
        return err.removeprefix("bitwright: ").rstrip("\n")

    return refused


def _files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
