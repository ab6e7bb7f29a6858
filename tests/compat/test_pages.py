"""The tables of names in docs/how-to/from-*.md: made from the names themselves, and up to date."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compat_pages", ROOT / "tools" / "compat_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("toolkit", ["pytorch_quantization", "mqbench", "sparsebit", "quantrans"])
def test_a_page_says_what_holds(tool, toolkit):
    path, text = tool.page(toolkit)
    assert path.read_text() == text, "run python tools/compat_pages.py"
    assert text.count("| works |") >= 4


def test_names_that_differ_are_names_that_are_there(tool):
    known = {
        ".".join(part for part in (toolkit, module, name) if part)
        for toolkit, modules in tool.NAMES.items()
        for module, names in modules.items()
        for name in names.split()
    }
    assert set(tool.DIFFERS) <= known
    with pytest.raises(SystemExit, match=r"mqbench.observer.NoObserver is neither there nor refused"):
        tool.verdict("mqbench", "observer", "NoObserver")
