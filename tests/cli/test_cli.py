"""The command line: help without torch, every refusal in one line, JSON, limits, and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitwright import __version__
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.cli import main

NETS = Path(__file__).parent / "nets.py"
SOURCE = Path(__file__).parents[2] / "src"
QUANTIZE = ["quantize", "nets:build", "--data", "nets:calibration", "-o", "out"]


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


def _python(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# ---------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"], ["inspect", "-h"], ["backends", "--help"]])
def test_help_has_an_example(arguments):
    process = _python("-m", "bitwright", *arguments)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Example: bitwright " in out


def test_the_command_line_needs_neither_torch_nor_rich():
    heavy = "'torch', 'numpy', 'onnx', 'rich', 'yaml'"
    code = f"import sys, bitwright.cli; print([m for m in ({heavy}) if m in sys.modules])"
    out, err = _python("-c", code).communicate(timeout=60)
    assert (out, err) == ("[]\n", "")


def test_without_arguments_it_shows_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Usage: bitwright" in out
    assert all(command in out for command in ("quantize", "inspect", "backends"))


def test_version(run):
    assert run("--version") == (0, f"bitwright {__version__}\n", "")


# ------------------------------------------------------------------------------------------------ backends


def test_backends_lists_what_exists(run):
    code, out, _ = run("backends")
    assert code == 0
    assert re.search(r"onnxruntime .* uint8 affine tensor +onnxruntime, openvino", out)
    listed = json.loads(run("backends", "--json")[1])["backends"]
    runtimes = {b["name"]: b["runtimes"] for b in listed}
    assert runtimes["onnxruntime"] == ["onnxruntime", "openvino"]
    assert runtimes["openvino"] == ["openvino", "onnxruntime"]


def test_backends_show_has_all_details(run):
    _, out, _ = run("backends", "show", "onnxruntime")
    operators = ONNXRUNTIME.operators
    expected = [*operators.integer, *operators.fused, *operators.reasons.values(), *ONNXRUNTIME.notes]
    assert [detail for detail in expected if detail not in out] == []
    details = json.loads(run("backends", "show", "onnxruntime", "--json")[1])
    assert details["operators"]["integer"] == operators.integer
    assert details["operators"]["fused"] == sorted(operators.fused)
    assert details["operators"]["conditions"] == ["softmax"]
    assert details["weights"]["spec"] == "int7 symmetric narrow channel:0"
    assert json.loads(run("backends", "--json", "show", "onnxruntime")[1]) == details


def test_backends_show_refuses_an_unknown_name(refused):
    assert refused("backends", "show", "opnvino") == "unknown backend 'opnvino': did you mean 'openvino'?"


# ------------------------------------------------------------------------------------------------- inspect


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
            "give one of --example, --data and --shape",
        ),
        (["--data", "nets:empty"], "--data nets:empty is empty: it gave no batch"),
        (["--data", "nets:number"], "must give an iterable of batches, but it gave int"),
        (["--shape", "1,5,8,8"], "Net does not take the example inputs (float32[1, 5, 8, 8]): RuntimeError"),
        (["--shape", "1,3,8,8", "--shape", "1"], "Net does not take the example inputs"),
    ],
)
def test_inspect_refuses_wrong_inputs(refused, arguments, message):
    assert message in refused("inspect", "nets:build", *arguments)


# ----------------------------------------------------------------------------------------- names of things


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nets:bild", "nets has no 'bild': did you mean 'build'"),
        (
            "net:build",
            "there is no module 'net' here or installed: did you mean 'nets'?",
        ),
        ("nets", "the model 'nets' must be MODULE:FUNCTION, such as mypkg.nets:build"),
        ("nets.py:build", "names a file; name the module: nets:build"),
        ("nets:build_dict", "must be a torch.nn.Module, but nets:build_dict gave dict"),
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


# ------------------------------------------------------------------------------------- quantize: bad input


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
            ["--data", "nets:broken_data"],
            "--data nets:broken_data raised OSError: disk is gone",
        ),
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


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_trace(run, before):
    command = ["inspect", "nets:build_broken", "--shape", "1,3,8,8"]
    code, out, err = run(*(["--debug", *command] if before else [*command, "--debug"]))
    assert (code, out) == (2, "")
    assert "Traceback" in err
    assert "in build_broken" in err
    assert err.endswith("raised RuntimeError: the checkpoint is missing\n")


def test_debug_by_environment(run, monkeypatch):
    monkeypatch.setenv("BITWRIGHT_DEBUG", "1")
    assert "Traceback" in run("backends", "show", "nope")[2]
    monkeypatch.setenv("BITWRIGHT_DEBUG", "")
    assert "Traceback" not in run("backends", "show", "nope")[2]


# -------------------------------------------------------------------------------- quantize: the whole road


def test_quantize_writes_a_file_and_a_report(run, here):
    code, out, _ = run(*QUANTIZE, "--eval", "nets:evaluate", "--backend", "onnxruntime")
    assert code == 0
    assert sorted(p.name for p in (here / "out").iterdir()) == ["model.onnx", "report.html"]
    assert re.search(r"agreement +\S+ +\S+ +\S+", out)
    assert re.search(r"operators in integers +4/5 \(80\.0%\)", out)
    assert "File:   out/model.onnx\nReport: out/report.html\n" in out


def test_quantize_json_is_all_there_is_on_stdout(run, here):
    (here / "out").mkdir()
    (here / "out" / "net.onnx").write_text("an old one")
    arguments = [
        "--eval",
        "nets:evaluate",
        "--name",
        "net.onnx",
        "--force",
        "--runtime",
        "onnxruntime",
    ]
    code, out, err = run(*QUANTIZE[:3], "nets:generated", *QUANTIZE[4:], *arguments, "--no-latency", "--json")
    data = json.loads(out)
    assert code == 0
    assert err == "evaluating\n" * 3
    assert data["ok"] is True
    assert data["missed"] == []
    assert data["file"] == "out/net.onnx"
    assert (here / data["file"]).stat().st_size == data["proof"]["size"]
    assert (here / data["report"]).read_text().startswith("<!")
    assert data["scores"]["float"] == {"agreement": 1.0, "samples": 64.0}
    assert list(data["scores"]["deployed"]) == ["onnxruntime"]
    assert data["proof"]["runtimes"]["onnxruntime"]["coverage"] == 0.8  # the mean runs in float
    assert data["proof"]["runtimes"]["onnxruntime"]["speedup"] is None
    assert data["operators"]["integer"] == 4


def test_missed_limits_give_exit_code_1(run, here):
    limits = ["--min-coverage", "1", "--min-speedup", "1000", "--max-accuracy-drop", "0.3"]
    arguments = ["--eval", "nets:evaluate_worse", "--runtime", "onnxruntime", "--skip", "head"]
    code, out, _ = run(*QUANTIZE, *arguments, *limits)
    assert code == 1
    missed = [line for line in out.splitlines() if line.startswith("Missed: ")]
    assert len(missed) == 3
    assert "onnxruntime: 50.0% of the executed operators run in integers, less than 100.0%" in missed[0]
    assert "times the speed of FP32, less than 1000.00" in missed[1]
    assert "onnxruntime: score drops by 0.4 (from 0.9 to 0.5), more than 0.3" in missed[2]
    assert re.search(r"head +linear +skipped by the rule 'head'", out)
    assert (here / "out" / "report.html").exists()


def test_scores_must_keep_their_names(run, here):
    code, out, err = run(*QUANTIZE, "--eval", "nets:evaluate_fickle", "--runtime", "onnxruntime")
    assert (code, out) == (2, "")
    assert "evaluate_fickle on the simulation returned loss, but accuracy before" in err
    assert (here / "out" / "model.onnx").exists()  # what was done is not lost


def test_limits_that_are_kept(run):
    limits = ["--min-coverage", "0.8", "--min-equal", "0.99", "--max-gap", "1", "--max-accuracy-drop", "0.4"]
    arguments = [
        "--eval",
        "nets:evaluate_worse",
        "--runtime",
        "onnxruntime",
        "--no-latency",
        "--json",
    ]
    code, out, _ = run(*QUANTIZE, *arguments, *limits)
    assert (code, json.loads(out)["missed"]) == (0, [])


# -------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_leaves_everything_as_it_was(here, existing):
    if existing:
        (here / "out").mkdir()
        (here / "out" / "model.onnx").write_text("precious")
    command = [*QUANTIZE[:3], "nets:slow_data", *QUANTIZE[4:], "--force"]
    # A background shell ignores SIGINT, and its children inherit that; a terminal does not.
    process = _python("-m", "bitwright", *command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 60
    while not (here / "calibrating").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (here / "calibrating").exists()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "bitwright: interrupted: nothing half-written was left behind\n"
    left = {p.name for p in here.rglob("*") if "__pycache__" not in p.parts} - {
        "nets.py",
        "calibrating",
    }
    assert left == ({"out", "model.onnx"} if existing else set())
    assert not existing or (here / "out" / "model.onnx").read_text() == "precious"
