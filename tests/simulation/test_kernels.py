"""Every kernel against onnxruntime's own operator: equal bits, on random shapes, scales and integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .cases import CASES, Draw

CALLS = st.tuples(st.sampled_from(sorted(CASES)), st.integers(0, 2**32))


def check(call: tuple[str, int]) -> None:
    ours, theirs = CASES[call[0]](Draw(np.random.default_rng(call[1])))
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_array_equal(ours, theirs)


@given(CALLS)
@settings(max_examples=60)
def test_kernels_give_the_bits_of_onnxruntime(call: tuple[str, int]) -> None:
    check(call)


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_onnxruntime_a_thousand_times(name: str) -> None:
    for seed in range(100):
        check((name, seed))
