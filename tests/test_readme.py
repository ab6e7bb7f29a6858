"""Every Python snippet in the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_snippets_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert snippets, f"{page.name} shows no Python"
    names: dict[str, object] = {"__name__": "snippet"}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), names)
    if page.name == "README.md":
        assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
