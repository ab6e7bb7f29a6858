"""Every kernel against onnxruntime's own operator: equal bits, on random shapes, scales and integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from bitwright.verification.hardware import has_vnni

from .cases import CASES, Draw, run

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


def pairs_in_16_bits(x: np.ndarray, weight: np.ndarray) -> int:
    """A dot product as x86 CPUs without VNNI compute it: pairs of u8×s8 products are added in 16 bits and saturate."""
    products = x.astype(np.int32) * weight.astype(np.int32)
    return int(np.clip(products[::2] + products[1::2], -(2**15), 2**15 - 1).sum())


@pytest.mark.parametrize(("most", "equal"), [(64, True), (127, False)])
def test_weights_of_7_bits_make_all_cpus_equal(most: int, equal: bool) -> None:
    """On any CPU: where nothing saturates onnxruntime gives the exact sum, and no pair of 7-bit weights saturates."""
    draw = np.random.default_rng(0)
    extremes = [(np.full(64, 255, np.uint8), np.full(64, sign * most, np.int8)) for sign in (1, -1)]
    random = [(draw.integers(0, 256, 64).astype(np.uint8), draw.integers(-most, most + 1, 64).astype(np.int8))]
    same = [pairs_in_16_bits(x, w) == int(x.astype(int) @ w.astype(int)) for x, w in (*extremes, *random)]
    assert all(same) == equal
    for x, w in (*extremes, *random) if equal or has_vnni() else ():
        sums = run("MatMulInteger", [x[None], w[:, None]], {}, domain="", kind=TensorProto.INT32)
        assert sums.item() == int(x.astype(int) @ w.astype(int))
