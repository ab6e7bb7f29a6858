"""Every backend, method and granularity: loaded in another process, a model computes the same, to the bit."""

import pytest

from tests.saving.matrix import CASES, FILES, load_elsewhere, save_all


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    return save_all(folder, CASES, FILES), load_elsewhere(folder)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same_in_another_process(name, found):
    here, there = found
    assert ("file" in here[name]) == (name in FILES)
    assert there[name] == here[name]
