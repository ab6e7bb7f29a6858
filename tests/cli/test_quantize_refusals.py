"""``bitwright quantize``: every refusal in one line, before any work begins."""

import os
import sys

import pytest

from tests.cli.conftest import QUANTIZE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "onnxruntim"], "unknown backend 'onnxruntim': did you mean 'onnxruntime' or"),
        (["--weight", "itn8"], "unknown number format 'itn8': did you mean 'int8'"),
        (
            ["--weight", "int8 chanxel:0"],
            "unknown word 'chanxel:0' in the spec 'int8 chanxel:0': did you mean 'channel:0'",
        ),
        (["--weight", "int8 affine"], "onnxruntime needs symmetric weights, not 'int8 affine tensor'"),
        (["--activation", "uint4"], "onnxruntime has no activations in uint4; it has int8, uint8"),
        (["--skip", "hed"], "the rule 'hed' matches no layer: did you mean 'head'?"),
        (["--skip", "op:conv3d"], "the rule 'op:conv3d' matches no layer: did you mean 'op:conv2d'?"),
        (["--runtime", "openvno"], "unknown runtime 'openvno': did you mean 'openvino'?"),
        (["--recipe", "none.yaml"], "the recipe 'none.yaml' cannot be read"),
        (["--name", "a/b.onnx"], "--name 'a/b.onnx' must be the name of an .onnx file, without a folder"),
        (["--name", "model.bin"], "--name 'model.bin' must be the name of an .onnx file"),
        (
            ["--example", "nets:wrong_example"],
            "Net does not take the example inputs (float32[2, 5, 8, 8])",
        ),
        (["--data", "nets:empty"], "--data nets:empty is empty"),
        (
            ["--eval", "nets:evaluat3"],
            "--eval: nets has no 'evaluat3': did you mean 'evaluate'",
        ),
        (["--eval", "nets:instance.head.bias"], "must be a function of the model, not Parameter"),
        (
            ["--eval", "nets:evaluate_text"],
            "must return a number or a dict of numbers, but it returned str",
        ),
        (["--eval", "nets:evaluate_broken"], "evaluate_broken on the float model raised KeyError"),
        (["--min-speedup", "2", "--no-latency"], "--min-speedup needs the speed to be measured"),
        (["--max-accuracy-drop", "0.1"], "--max-accuracy-drop needs --eval"),
        (["--min-coverage", "90"], "'--min-coverage'"),
        (["--wieght", "int8"], "--wieght"),
        (
            ["--backend", "vitis", "--format", "openvino"],
            "nothing can check what vitis demands of files in the format openvino: use --format vitis or onnx",
        ),
    ],
)
def test_quantize_refuses(refused, arguments, message):
    assert message in refused(*QUANTIZE, *arguments)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("activation: {observer: EMAMinMaxObserv}", "did you mean 'EMAMinMaxObserver'"),
        ("weight: {spec: int99}", "weight.spec: unknown number format 'int99'"),
        ("rules: [{match: bodi, skip: true}]", "the rule 'bodi' matches no layer: did you mean 'body'?"),
        ("backend: opnvino", "unknown backend 'opnvino': did you mean 'openvino'?"),
        ("weigth_: {spec: int8}", "weigth_: is unknown: did you mean 'weight'?"),
        ("[]", "must be a mapping of settings, not list"),
        ("a: [", "the recipe 'recipe.yaml' cannot be read"),
    ],
)
def test_quantize_refuses_the_recipe(refused, here, recipe, message):
    (here / "recipe.yaml").write_text(recipe)
    assert message in refused(*QUANTIZE, "--recipe", "recipe.yaml")


def test_a_missing_option_is_named(refused):
    assert "'--data'" in refused("quantize", "nets:build", "-o", "out")
    assert "see bitwright quantize --help" in refused("quantize", "nets:build", "-o", "out")


@pytest.mark.parametrize("name", ["model.onnx", "report.html"])
def test_existing_output_is_kept(refused, here, name):
    (here / "out").mkdir()
    (here / "out" / name).write_text("precious")
    assert refused(*QUANTIZE) == f"the output 'out/{name}' exists already: add --force to replace it"


def test_output_below_a_file(refused, here):
    (here / "out").write_text("a file")
    assert refused(*QUANTIZE) == "the output 'out' is not a folder"
    assert "'out' is not a folder" in refused(*QUANTIZE[:-1], "out/deeper")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_read_only_output(refused, here):
    (here / "out").mkdir(mode=0o555)
    assert "'out' is read-only" in refused(*QUANTIZE)


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [("onnx", "onnx", []), ("onnxscript", "onnx", []), ("openvino", "openvino", ["--runtime", "openvino"])],
)
def test_a_missing_extra_is_named(refused, monkeypatch, package, extra, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    line = refused(*QUANTIZE, *arguments)
    assert f"needs the package '{package}', which is not installed: pip install 'bitwright[{extra}]'" in line


def test_no_runtime_installed(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "needs the package 'onnxruntime'" in refused(*QUANTIZE)
