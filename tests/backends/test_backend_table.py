"""Backends in the documentation."""

from pathlib import Path

from bitwright.backends import BACKENDS
from bitwright.backends.table import page, summary
from tests.backends.probe import SHIPPED, Probe


def test_a_summary_names_specs_limits_and_defaults():
    found = dict(summary(BACKENDS.get("vitis")))
    assert found["weights"] == "int8 symmetric pot tensor (MinMaxFloorObserver, TqtFakeQuantize)"
    assert found["scales"] == "powers of two"
    assert found["bias"] == "float"
    assert found["activations can be"] == "int8; symmetric; one scale per tensor"
    assert "scales" not in dict(summary(BACKENDS.get("snpe")))
    assert dict(summary(BACKENDS.get("tensorrt_nlp")))["no quantizer between"] == "div and add, mul and add"
    assert dict(summary(BACKENDS.get("academic")))["first and last layers"] == "8 bits"


def test_the_page_on_backends_is_current():
    made = page([BACKENDS.get(name) for name in SHIPPED])
    published = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
    assert published.read_text() == made, "run: bitwright backends matrix -o docs/reference/backends.md"
    rows = {line.split(" | ")[0]: line.split(" | ") for line in made.splitlines() if line.startswith("| `")}
    column = 1 + SHIPPED.index("snpe")
    assert rows["| `conv2d`"][column] == "in, out"
    assert rows["| `max_pool2d`"][column] == "moves"
    assert rows["| `interpolate`"][column] == "moves / in, out"
    assert rows["| `relu`"][column] == "fused"
    assert rows["| `uint8`"][column] == "WA"
    assert rows["| `int8`"][column].strip() == ""


def test_probe_is_the_net_that_was_measured():
    names = {type(m).__name__ for m in Probe().modules()}
    assert {"ConvTranspose2d", "Upsample", "MaxPool2d", "AdaptiveAvgPool2d", "Linear", "BatchNorm2d"} <= names
