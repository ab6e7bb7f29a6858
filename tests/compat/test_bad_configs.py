"""Configs of every dialect with something wrong: only our own errors, short ones, and soon."""

from pathlib import Path

import pytest

from bitwright.compat.convert import convert
from bitwright.compat.quantrans import Config
from bitwright.compat.sparsebit import parse_qconfig
from bitwright.errors import ConfigError
from tests.compat.mutations import DIALECTS, as_text

BOMB = "a = [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new} = [{', '.join([old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".py"])
def test_the_configs_are_good_before_they_are_mutated(suffix, tmp_path: Path):
    for dialect, data in DIALECTS.items():
        path = tmp_path / f"config{suffix}"
        path.write_text(as_text(data, suffix))
        found, recipe, _ = convert(path)
        assert found == dialect
        assert recipe.rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "it has more than 20,000 values"),
        ("x = " + "[" * 60 + "]" * 60, "nested more than 40 levels deep"),
        ("x = " + "[" * 5000 + "]" * 5000, "nest"),
        ("x = " + "-" * 50_000 + "1", "nested too deeply"),
        ("x = 0x" + "f" * 5000, "it has a number of 20,000 bits"),
        ("x = '" + "y" * 1_000_001 + "'", "characters, more than 1,000,000"),
        ("x = {1: 2, 1: 3}", "the key 1 is given twice"),
        ("x = [1\0]", "null bytes"),
    ],
)
def test_python_configs_have_the_limits_of_recipes(text, message, tmp_path: Path):
    path = tmp_path / "config.py"
    path.write_text(text)
    for read in (convert, Config.fromfile):
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_other_ways_in_have_them_too(tmp_path: Path):
    wide = [0]
    for _ in range(30):
        wide = [wide, wide]
    with pytest.raises(ConfigError, match="more than 20,000 values"):
        parse_qconfig({"W": wide})
    with pytest.raises(ConfigError, match="the config cannot be read: the key 'W' appears twice"):
        parse_qconfig("W: {}\nW: {}\n")
    with pytest.raises(ConfigError, match=r"quan_policy must be a mapping of settings, not \[1\]"):
        convert(_written(tmp_path, "quan_policy: [1]\ntype: mTransformerV2\n"))
    pact = "A: {QSCHEME: per-tensor-affine, QUANTIZER: {TYPE: pact, BIT: 8, PACT: {ALPHA_VALUE: '8'}}}\n"
    with pytest.raises(ConfigError, match=r"ALPHA_VALUE must be a number, not '8'"):
        convert(_written(tmp_path, pact))


def _written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path
