"""``bitwright inspect``, and the names of models and data that it refuses."""

import json
import re

import pytest


def test_inspect_shows_every_operator(run):
    code, out, err = run("inspect", "nets:build", "--shape", "1,3,8,8", "--skip", "body")
    assert (code, err) == (0, "")
    assert re.search(r"stem\.0 +conv2d +integer +uint8 affine tensor +int7 symmetric narrow channel:0", out)
    assert re.search(r"stem\.1 +batch_norm +fused .*folded into the layer before it", out)
    assert re.search(r"body +conv2d +float .*skipped by the rule 'body'", out)


@pytest.mark.parametrize(
    "source",
    [
        ["--shape", "2,3,8,8"],
        ["--example", "nets:example_inputs"],
        ["--data", "nets:generated"],
        [],  # the module has example_inputs
    ],
)
def test_inspect_takes_example_inputs_from(run, source):
    code, out, err = run("inspect", "nets:instance", *source, "--json", "--backend", "openvino")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["backend"] == "openvino"
    assert data["counts"]["integer"] == sum(o["verdict"] == "integer" for o in data["operators"])
    assert [o["name"] for o in data["operators"] if o["weight"]] == ["stem.0", "body", "head"]


def test_inspect_takes_the_backend_from_the_recipe(run, here):
    (here / "recipe.yaml").write_text("backend: openvino\nweight: {spec: int4 narrow channel}\n")
    data = json.loads(run("inspect", "nets:build", "--recipe", "recipe.yaml", "--json")[1])
    assert data["backend"] == "openvino"
    assert {o["weight"] for o in data["operators"] if o["weight"]} == {"int4 symmetric narrow channel:0"}


def test_inspect_lists_islands(run):
    command = ["inspect", "nets:build_untraceable"]
    _, out, _ = run(*command)
    assert "(the model)" in out
    islands = json.loads(run(*command, "--json")[1])["islands"]
    assert list(islands) == [""]
    assert "Untraceable" in islands[""]


def test_inspect_says_how_to_give_example_inputs(refused, here):
    (here / "bare.py").write_text("from nets import build\n")
    line = refused("inspect", "bare:build")
    assert "the model needs example inputs" in line
    assert all(way in line for way in ("--shape 1,3,224,224", "--example", "--data", "example_inputs in bare"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--shape", "1,3,a"],
            "--shape '1,3,a' must be positive sizes with commas between, such as 1,3,224,224",
        ),
        (
            ["--shape", "1,3,8,8", "--data", "nets:empty"],
            "give only one of --example, --data and --shape",
        ),
        (["--data", "nets:empty"], "--data nets:empty is empty: it yielded no batch"),
        (["--data", "nets:number"], "must return an iterable of batches, not int"),
        (["--shape", "1,5,8,8"], "Net does not take the example inputs (float32[1, 5, 8, 8]): RuntimeError"),
        (["--shape", "1,3,8,8", "--shape", "1"], "Net does not take the example inputs"),
    ],
)
def test_inspect_refuses_wrong_inputs(refused, arguments, message):
    assert message in refused("inspect", "nets:build", *arguments)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nets:bild", "nets has no 'bild': did you mean 'build'"),
        (
            "net:build",
            "no module 'net' here or among the installed packages: did you mean 'nets'?",
        ),
        ("nets", "the model 'nets' must be MODULE:FUNCTION, such as mypkg.nets:build"),
        ("nets.py:build", "names a file; name the module: nets:build"),
        ("nets:build_dict", "must be a torch.nn.Module, but nets:build_dict is or returns a dict"),
        ("nets:NETS", "nets has no 'NETS'"),
        (
            "nets:build_broken",
            "nets:build_broken raised RuntimeError: the checkpoint is missing",
        ),
        ("broken_module:build", "importing broken_module raised NameError: name 'nn' is not defined"),
        ("needs_more:build", "importing needs_more raised ModuleNotFoundError: No module named 'not_there'"),
        ("quits:build", "importing quits raised SystemExit: bye"),
    ],
)
def test_models_that_cannot_be_loaded(refused, here, model, message):
    (here / "broken_module.py").write_text("nn.Conv2d(1, 1, 1)\n")
    (here / "needs_more.py").write_text("import not_there\n")
    (here / "quits.py").write_text("import sys\nsys.exit('bye')\n")
    assert message in refused("inspect", model, "--shape", "1,3,8,8")


def test_a_module_in_a_package_is_suggested(refused, here):
    package = here / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text("from nets import build\n")
    assert "did you mean 'mypackage.nets'?" in refused("inspect", "mypackage.netz:build")
