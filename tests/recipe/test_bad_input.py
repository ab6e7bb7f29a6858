"""Bad input: whatever a recipe or config holds, only our own errors, short ones, and soon."""

import copy
import json
import random
import time
from pathlib import Path

import pytest
import yaml

from bitwright.compat.convert import convert
from bitwright.errors import BitwrightError, ConfigError
from bitwright.preparation import resolve_recipe
from bitwright.quantizer import TensorQuantizer
from bitwright.recipe import Recipe

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {
    "alias bomb": (BOMB + "weight: *i\n", "more than 20,000 values"),
    "deep YAML": ("weight:\n  - " + "[" * 900 + "]" * 900, "nested more than 40 levels deep"),
    "deep JSON": ('{"weight":\n' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 40 levels deep"),
    "deep by aliases": (
        "\n".join(f"k{i}: &k{i} [*k{i - 1}]" if i else "k0: &k0 [1]" for i in range(60)),
        "levels deep",
    ),
    "key twice in YAML": ("weight: int8\nweight: int4\n", "the key 'weight' appears twice in one mapping"),
    "key twice in JSON": ('{"weight": "int8",\n"weight": "int4"}', "the key 'weight' appears twice in one mapping"),
    "a tag and another value": ("allow_float: !!bool 7\n", "cannot be read: '7'"),
    "a key that cannot be": ("? [a, b]\n: 3\n", "cannot be read"),
    "many keys": ("".join(f"key{i}: {i}\n" for i in range(20_000)), "more than 20,000 values"),
    "a long key": ("? " + "k" * 100_000 + "\n: 1\n", "1 mistake: kkk"),
    "a long text": ("# " + "x" * 2_000_000 + "\nweight: int8\n", "2,000,016 characters, more than 1,000,000"),
    "a long value": (f"weight: int8\nbackend: [{'y' * 500_000}]\n", "must be text, not"),
}


def _refused(call, *args) -> str:
    start = time.monotonic()
    with pytest.raises(BitwrightError) as caught:
        call(*args)
    assert time.monotonic() - start < 5
    assert len(str(caught.value)) < 2000
    return str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    text, message = TEXTS[name]
    assert message in _refused(Recipe.parse, text)


@pytest.mark.parametrize("name", [name for name in TEXTS if "JSON" not in name])
def test_files(name, tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXTS[name][0])
    _refused(Recipe.parse, path)
    _refused(convert, path)


def test_mappings():
    endless: dict[str, object] = {}
    endless["weight"] = endless
    assert "levels deep" in _refused(Recipe.parse, endless)
    wide = [0]
    for _ in range(30):
        wide = [wide, wide]
    assert "more than 20,000 values" in _refused(Recipe.parse, {"weight": wide})


def test_a_name_that_no_file_can_have():
    assert "unknown preset" in _refused(Recipe.parse, "W" * 300)
    assert "unknown preset" in _refused(Recipe.parse, "W4\0A8")


@pytest.mark.parametrize(
    ("observer", "options", "message"),
    [
        ("EMAMinMaxObserver", {"ema_ratio": "0.9"}, "the option ema_ratio of EMAMinMaxObserver: Input should be"),
        ("EMAMinMaxObserver", {"ema_ratio": True}, "not True"),
        ("EMAMinMaxObserver", {"ema_ratio": [0.9]}, r"not \[0.9\]"),
        ("ClipStdObserver", {"std_scale": float("inf")}, "finite number, not inf"),
        ("MinMaxFloorObserver", {"candidates": 10**12}, "must be from 1 to 64, not 1000000000000"),
        ("MSEObserver", {"bins": 2**40}, "must be a power of two from 16 to 2"),
        ("MSEObserver", {"bins": 256.0}, "should be a valid integer, not 256.0"),
    ],
)
def test_options_of_observers(observer, options, message):
    with pytest.raises(ConfigError, match=message):
        TensorQuantizer("int8", observer, observer_options=options)
    given = {"activation": {"observer": observer, "observer_options": options}}
    with pytest.raises(ConfigError, match=message):
        resolve_recipe("onnxruntime", given)


CONFIGS = {
    "recipe.yaml": {
        "backend": "openvino",
        "weight": {"spec": "int4 narrow channel:0", "observer": "MSEObserver", "observer_options": {"bins": 256}},
        "activation": "uint8",
        "rules": [{"match": "re:a.*", "skip": True}, {"match": "op:conv*", "weight": "int8", "force": True}],
        "schedules": {"fold_batchnorm": False},
        "leaves": ["type:LSTM"],
    },
    "backend.json": {
        "base": "snpe",
        "name": "mine",
        "title": "t",
        "weights": "uint8",
        "operators": {"fused": ["relu"]},
    },
}
ODD = (
    None,
    True,
    -1,
    10**30,
    float("nan"),
    "",
    "\0",
    "ü" * 400,
    [],
    {},
    [[1]],
    {"a": {"b": 1}},
    {1: 2},
    b"x",
    "re:(a+)+",
    0.5,
)


def _places(data, path=()):
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(p for key, value in inside for p in _places(value, (*path, key)))]


def _mutated(data, rng: random.Random):
    data = copy.deepcopy(data)
    *way, last = rng.choice(_places(data)[1:])
    home = data
    for step in way:
        home = home[step]
    what = rng.randrange(4)
    if what == 0:
        home[last] = rng.choice(ODD)
    elif what == 1:
        del home[last]
    elif what == 2 and isinstance(home, dict):
        home[rng.choice(["x", "weights", 3, "observer", "spec", "bits"])] = home.pop(last)
    else:
        home[last] = [home[last]] * rng.randrange(3)
    return data


@pytest.mark.parametrize("name", CONFIGS)
def test_mutations_give_only_our_errors(name, tmp_path: Path):
    from bitwright.backends import find_backend

    rng = random.Random(0)
    refused = []
    for _ in range(200):
        data = _mutated(CONFIGS[name], rng)
        try:
            if name == "backend.json":
                find_backend(data)
            else:
                resolve_recipe(None, data)
        except BitwrightError as error:
            refused.append(len(str(error)))
    assert 50 < len(refused) < 200
    assert max(refused) < 2000


@pytest.mark.parametrize("name", CONFIGS)
def test_mutated_bytes_give_only_our_errors(name, tmp_path: Path):
    rng = random.Random(1)
    path = tmp_path / name
    text = yaml.safe_dump(CONFIGS[name]) if name.endswith("yaml") else json.dumps(CONFIGS[name])
    refused = []
    for _ in range(150):
        at, new = (
            rng.randrange(len(text)),
            rng.choice(["{", "]", ":", "&a ", "*a", "!!int ", "\t", '"', "- ", "\x07", "💣"]),
        )
        path.write_text(text[:at] + new + text[at + rng.randrange(3) :], encoding="utf-8")
        try:
            convert(path)
        except BitwrightError as error:
            refused.append(len(str(error)))
    assert len(refused) > 50
    assert max(refused) < 2000
