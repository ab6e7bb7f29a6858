"""Every Python snippet in the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert snippets, f"{page.name} shows no Python"
    names: dict[str, object] = {"__name__": "snippet"}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), names)
    if page.name == "README.md":
        assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
        shown = re.search(r"```\n(out/model\.onnx: .*?)```", page.read_text(), flags=re.DOTALL)
        assert shown is not None
        assert re.match(re.escape(shown[1]).replace("…", ".*"), capsys.readouterr().out)
