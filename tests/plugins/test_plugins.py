"""One new file is enough: dropped into the package, imported by the user, or offered by another distribution."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bitwright
from tests.plugins.files import FILES

PACKAGE = Path(bitwright.__file__).parent
USE = Path(__file__).with_name("use.py").read_text()
WAYS = ("a file in the package", "code of the user", "another distribution")


def outcome(folder, script, *paths):
    """What the script prints when only these folders and installed packages can be imported."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "could not be loaded" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=WAYS)
def used(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    names = {kind: Path(path).stem for kind, (path, _) in FILES.items()}
    if request.param == WAYS[0]:
        package = folder / "bitwright"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path, text in FILES.values():
            (package / path).write_text(text)
        return folder, outcome(folder, USE, folder)
    for kind, (_, text) in FILES.items():
        (folder / f"{names[kind]}.py").write_text(text)
    if request.param == WAYS[1]:
        imports = "".join(f"import {name}\n" for name in names.values())
        return PACKAGE.parent, outcome(folder, imports + USE, folder, PACKAGE.parent)
    about = folder / "toys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    lines = "".join(f"{kind} = {name}\n" for kind, name in names.items())
    (about / "entry_points.txt").write_text(f"[bitwright.plugins]\n{lines}")
    return PACKAGE.parent, outcome(folder, USE, folder, PACKAGE.parent)


def test_the_right_package_was_used(used):
    home, results = used
    assert Path(results["home"]).parent == home / "bitwright"
    assert results["exact"]


EXPECTED = {
    "method": pytest.approx(1.0, abs=0.02),
    "operator": ["toy_softsign", "integer"],
    "qmodule": ["QuantThreshold", "integer", "integer"],
    "swapped": "QuantThreshold",
    "schedule": [],
    "backend": "a toy",
    "runtime": [["toytime"], True],
    "constraint": [True, {"toychip-bias": "Layers have no bias."}, ["fc.bias", "last.bias"]],
    "format": ["toyformat", True, ["toytime"]],
    "observer": pytest.approx(1.0, abs=1e-5),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_one_file_is_enough(used, kind):
    assert used[1][kind] == EXPECTED[kind]
