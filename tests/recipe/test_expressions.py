"""Regular expressions of rules: what ``re.fullmatch`` says of any name, and never for long."""

import random
import re
import time

import pytest

from bitwright.errors import ConfigError
from bitwright.recipe import Recipe, Rule, RuleTarget
from bitwright.recipe.expressions import Expression

ATOMS = (
    *("a", "b", "1", "_", "{", ".", r"\.", r"\d", r"\w", r"\W", r"\x61", r"\101"),
    *("[ab]", "[^a]", "[a-c.]", "[]a]", "[^]]", "(?i:A)", "(?s:.)", "(?#c)a"),
    *("^", "$", r"\b", r"\B", r"\A", r"\Z"),
)
COUNTS = ("*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "{0}", "{,}")


def generated(rng: random.Random, depth: int) -> str:
    """An expression of any kind; ``re`` may refuse it."""
    kind = rng.random() if depth else 0.0
    if kind < 0.35:
        return rng.choice(ATOMS)
    one, other = generated(rng, depth - 1), generated(rng, depth - 1)
    if kind < 0.7:
        return one + other if kind < 0.55 else rng.choice((f"({one}|{other})", f"(?:{one}|)"))
    if kind < 0.85:
        return f"({one}){rng.choice(COUNTS)}"
    return rng.choice((f"(?={one})", f"(?!{one})", f"(?<={rng.choice('ab.')}b)", "(?<!a)", f"(?P<n{kind}>{one})"))


def test_it_is_what_re_says():
    rng, compared, fitting = random.Random(0), 0, 0
    for _ in range(2500):
        text = ("(?i)" if rng.random() < 0.05 else "") + generated(rng, 4).replace("n0.", "n")
        try:
            wanted = re.compile(text)
        except re.error:
            with pytest.raises(ConfigError, match="is not a regular expression"):
                Expression(text)
            continue
        found = Expression(text)
        for _ in range(8):
            name = "".join(rng.choice("aabbcA.1_-{\n]") for _ in range(rng.randrange(7)))
            assert found.fits(name) == bool(wanted.fullmatch(name)), (text, name)
            compared += 1
            fitting += found.fits(name)
    assert compared > 10_000
    assert 500 < fitting < compared


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("(a+)+x", "aax"),
        ("(a|ab)*x", "aabx"),
        (".*.*.*.*.*x", "x"),
        ("(a?){30}a{30}", "a" * 45),
        ("(a{1,30}){1,30}x", "aax"),
        (r"(encoder|decoder)(\.\w+)+", "encoder.layer.fc"),
        (r"(?!.*(head|stem)).*", "layer1.conv"),
        (r"(?=.*conv)(?:[a-z]+\d*\.?)*", "layer1.conv2"),
    ],
)
def test_what_re_takes_forever_over_is_matched_at_once(text, fits):
    rule = Rule(match=f"re:{text}", skip=True)
    start = time.monotonic()
    assert rule.matches(RuleTarget(fits))
    assert not rule.matches(RuleTarget("a" * 300 + "head!"))
    assert time.monotonic() - start < 2


def test_work_has_an_end():
    evil = Expression("(((.{1,200}){1,200}){1,200}){1,200}" * 6)
    start = time.monotonic()
    with pytest.raises(ConfigError, match="takes too long over 'aaa"):
        evil.fits("a" * 400)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "is not a regular expression: missing"),
        ("a" * 600, "600 characters, more than 500"),
        (r"(a)\1", "refers back to a group"),
        (r"(?P<n>a)(?P=n)", "refers back to a group"),
        ("(a)?(?(1)b|c)", "depends on a group"),
        ("(?>a*)b", "has an atomic group"),
        ("a*+b", "has a possessive repetition"),
        ("(?x) a b", "it uses the flag x"),
    ],
)
def test_what_cannot_be_matched_so_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.parse({"rules": [{"match": f"re:{text}", "skip": True}]})


def test_many_brackets_are_read_or_refused():
    """How deep Python itself reads differs by version; there is no other error."""
    for depth in (50, 240):
        said = _refusal("(" * depth + "a" + ")" * depth)
        assert said is None or (depth > 50 and ("is not a regular" in said or "takes too long" in said))


def _refusal(text):
    try:
        assert Expression(text).fits("a")
    except ConfigError as error:
        return str(error)
    return None
