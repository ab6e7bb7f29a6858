"""Registries: list, filter, mistype, refuse duplicates, load plug-ins."""

import logging
from importlib import metadata

import pytest

from bitwright import registry as registries
from bitwright.backends import BACKENDS
from bitwright.errors import (
    BitwrightError,
    ConfigError,
    MissingExtraError,
    UnknownNameError,
    require,
    suggest,
)
from bitwright.graph import SCHEDULES
from bitwright.methods import METHODS
from bitwright.observers import OBSERVERS
from bitwright.registry import Registry


@pytest.fixture
def fruits():
    registry = Registry("fruit")
    registry.register("Apple", aliases=("pomme", "apfel"))("an apple")
    registry.register("Pear")("a pear")
    return registry


def test_get_list_filter(fruits):
    assert fruits.get("Apple") == fruits.get("pomme") == "an apple"
    assert fruits.names() == list(fruits) == ["Apple", "Pear"]
    assert fruits.names("P*") == ["Pear"]
    assert fruits.names("x*") == []
    assert "apfel" in fruits
    assert "Pear" in fruits
    assert "Plum" not in fruits


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Aple", "unknown fruit 'Aple': did you mean 'Apple'?"),
        ("apple", "unknown fruit 'apple': did you mean 'Apple'?"),
        ("ear", "unknown fruit 'ear': did you mean 'Pear'?"),
        ("pome", "unknown fruit 'pome': did you mean 'pomme'?"),
        ("xyz", "unknown fruit 'xyz': known are Apple, Pear, apfel, pomme"),
    ],
)
def test_mistyped_names(fruits, name, message):
    with pytest.raises(UnknownNameError) as caught:
        fruits.get(name)
    assert str(caught.value) == message


def test_a_name_is_text(fruits):
    with pytest.raises(ConfigError, match=r"a fruit must be chosen by its name \(a str\), not 3"):
        fruits.get(3)


@pytest.mark.parametrize("taken", ["Apple", "pomme"])
def test_duplicates_are_refused(fruits, taken):
    def banana():
        pass

    with pytest.raises(ConfigError, match=f"fruit '{taken}' is registered twice: by 'an apple' and by .*banana"):
        fruits.register(taken)(banana)
    with pytest.raises(ConfigError, match="choose another name or pass override=True"):
        fruits.register("Banana", aliases=(taken,))(banana)
    assert "Banana" not in fruits
    assert fruits.get(taken) == "an apple"


def test_override(fruits):
    fruits.register("Apple", override=True)("a better apple")
    assert fruits.get("pomme") == fruits.get("Apple") == "a better apple"
    fruits.register("pomme", override=True)("a French apple")
    assert fruits.get("pomme") == "a French apple"
    assert fruits.get("Apple") == "a better apple"


def test_unregister(fruits):
    fruits.unregister("pomme")
    assert fruits.names() == ["Pear"]
    assert "apfel" not in fruits
    with pytest.raises(UnknownNameError, match="unknown fruit 'Apple': known are Pear"):
        fruits.unregister("Apple")


def test_an_empty_registry_says_so():
    with pytest.raises(UnknownNameError, match="unknown tree 'oak': there are none"):
        Registry("tree").get("oak")


def test_what_is_registered():
    assert {"onnxruntime", "openvino"} <= set(BACKENDS)
    assert {"MinMaxObserver", "EMAMinMaxObserver"} <= set(OBSERVERS)
    assert {"FixedFakeQuantize"} <= set(METHODS)
    assert {"fold_batchnorm", "functionalize"} <= set(SCHEDULES)
    assert METHODS.get("ste") is METHODS.get("FixedFakeQuantize")


class FakeEntry:
    def __init__(self, name, action):
        self.name, self.load = name, action


def test_plugins_are_loaded_once_and_a_broken_one_is_left_out(monkeypatch, fruits, caplog):
    loaded = []

    def good():
        loaded.append(1)
        fruits.register("Quince")("a quince")

    def bad():
        raise ImportError("no such module")

    entries = [FakeEntry("broken", bad), FakeEntry("quince", good)]
    monkeypatch.setattr(Registry, "_plugins_loaded", False)
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "bitwright.plugins" else [])
    with caplog.at_level(logging.ERROR):
        assert fruits.get("Quince") == "a quince"
    assert fruits.names() == ["Apple", "Pear", "Quince"]
    registries.load_plugins()
    assert loaded == [1]
    assert "the plug-in 'broken' could not be loaded and is left out" in caplog.text


def test_suggest_shows_a_few_of_many():
    text = suggest("zzz", [f"name{i:02}" for i in range(40)])
    assert text.startswith(": known are name00, name01")
    assert text.endswith("(40 in all)")
    assert suggest("", ["b", "a"]) == ": known are a, b"


def test_a_missing_extra_says_what_to_install():
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package", "onnx", "ONNX export")
    assert str(caught.value) == (
        "ONNX export needs the package 'no_such_package', which is not installed: pip install 'bitwright[onnx]'"
    )
    assert isinstance(caught.value, BitwrightError)
    assert isinstance(caught.value, ImportError)
    assert require("json", "onnx", "x").dumps({}) == "{}"


def test_a_package_that_is_broken_inside_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("half_installed", "onnx", "x")
    assert not isinstance(caught.value, MissingExtraError)
