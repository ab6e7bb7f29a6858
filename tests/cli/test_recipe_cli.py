"""``bitwright recipe`` and ``bitwright backends`` at the command line."""

import json

import pytest

from bitwright.backends import BACKENDS
from bitwright.backends.table import page
from bitwright.recipe import PRESETS, Recipe


def test_the_schema_is_printed_and_written(run, tmp_path):
    code, out, _ = run("recipe", "schema")
    assert code == 0
    assert json.loads(out) == Recipe.schema()
    assert run("recipe", "schema", "-o", str(tmp_path / "s.json"))[:2] == (0, "")
    assert json.loads((tmp_path / "s.json").read_text()) == Recipe.schema()


def test_presets_are_listed(run):
    _, out, _ = run("recipe", "presets")
    assert all(name in out for name in PRESETS)
    listed = json.loads(run("recipe", "presets", "--json")[1])["presets"]
    assert listed["W4A4"]["backend"] == "academic"
    assert listed["W4A4"]["weight"]["bits"] == listed["W4A4"]["activation"]["bits"] == 4
    assert listed["W4A4"]["correct"] == ["equalize", "gptq", "norms", "bias"]


def test_a_recipe_is_shown_as_it_is_read(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("preset: W4A8\nbackend: snpe\nrules: [{match: fc, skip: true}]\n")
    code, out, _ = run("recipe", "show", str(path))
    assert code == 0
    assert Recipe.parse(out) == Recipe.parse(path)
    assert json.loads(run("recipe", "show", "FP8", "--json")[1]) == Recipe.parse("FP8").to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bakend: snpe\n", "bakend: is unknown: did you mean 'backend'?"),
        ("backend: snp\n", "unknown backend 'snp': did you mean 'snpe'"),
        ("backend: snpe\nactivation: int8\n", "the recipe: snpe has no activations in int8; it has uint8"),
        ("backend: academic\n", "the backend academic leaves the specs to you"),
    ],
)
def test_a_recipe_with_mistakes_is_refused(run, tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    code, out, err = run("recipe", "show", str(path))
    assert (code, out) == (2, "")
    assert message in err


def test_a_backend_is_explained(run, tmp_path):
    code, out, _ = run("backends", "show", "Tensorrt")
    assert code == 0
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "weights int8 symmetric narrow channel:0 (MinMaxObserver, LearnableFakeQuantize)" in lines
    assert "fused activations clamp, relu, relu6" in lines
    assert "no quantizer between mul and add" in lines
    assert "conv2d inputs" in lines
    assert "conv2d result" in {" ".join(w.split()) for w in run("backends", "show", "vitis")[1].splitlines()}
    mine = tmp_path / "mine.yaml"
    mine.write_text("{base: snpe, name: mine, title: my own chip}")
    assert "mine: my own chip" in run("backends", "show", str(mine))[1]
    details = json.loads(run("backends", "show", "vitis", "--json")[1])
    assert details["weights"]["power_of_two"] is details["activations"]["power_of_two"] is True
    assert details["weights"]["spec"] == "int8 symmetric pot tensor"
    assert json.loads(run("backends", "show", "academic", "--json")[1])["weights"]["spec"] is None


def test_the_matrix_is_printed_and_written(run, tmp_path):
    expected = page([BACKENDS.get(name) for name in BACKENDS])
    assert run("backends", "matrix")[:2] == (0, expected)
    assert run("backends", "matrix", "-o", str(tmp_path / "b.md"))[0] == 0
    assert (tmp_path / "b.md").read_text() == expected
