"""A compiled kernel proves itself: a wrong one, or one from a cache for another CPU, is found before its first use."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from bitwright.methods import METHODS, clipped, nnie
from bitwright.numerics import qdq
from bitwright.numerics.fused import SMALL, Fused
from bitwright.numerics.kinds import PerScale, PerValue, kinds_of
from bitwright.numerics.proof import LARGE, difference
from bitwright.spec import QuantSpec

SCALE, ZERO = torch.tensor(0.1), torch.tensor(3.0)
PER_CHANNEL = (torch.rand(16, 1) + 0.1, torch.arange(16.0).unsqueeze(1))


def of_vectors(values: Tensor, width: int = 8) -> Tensor:
    """Every other vector is left as memory was."""
    flat = values.clone().view(-1)
    for start in range(0, len(flat) - width, 2 * width):
        flat[start : start + width] = 7.5e22
    return flat.view(values.shape)


def at_the_end(values: Tensor) -> Tensor:
    values = values.clone()
    values.view(-1)[-1] += 1.0
    return values


# What a compiler, a cache or a wrong instruction may do to a result.
RESULTS = {
    "vectors unwritten": of_vectors,
    "the end of a vector": at_the_end,
    "last bit": lambda y: torch.where(y == y.amax(), y.nextafter(torch.tensor(torch.inf)), y),
    "NaN lost": torch.nan_to_num,
    "nothing written": torch.zeros_like,
    "another type": lambda y: y.double(),
    "another shape": lambda y: y[:-1],
}


def half_up(x, scale, zero_point, qmin, qmax):
    return ((torch.floor(x / scale + 0.5) + zero_point).clamp(qmin, qmax) - zero_point) * scale


def by_reciprocal(x, scale, zero_point, qmin, qmax):
    return (((x * (1 / scale)).round() + zero_point).clamp(qmin, qmax) - zero_point) * scale


def not_below(x, scale, zero_point, qmin, qmax):
    return (((x / scale).round() + zero_point).clamp(max=qmax) - zero_point) * scale


def not_above(x, scale, zero_point, qmin, qmax):
    return (((x / scale).round() + zero_point).clamp(min=qmin) - zero_point) * scale


def off_by_one(x, scale, zero_point, qmin, qmax):
    return (((x / scale).round() + zero_point).clamp(qmin, qmax - 1) - zero_point) * scale


def first_channel(x, scale, zero_point, qmin, qmax):
    return qdq.nearest_level.eager(x, scale.reshape(-1)[0], zero_point.reshape(-1)[0], qmin, qmax)


FORMULAS = [half_up, by_reciprocal, not_below, not_above, off_by_one]


def compiled_to(monkeypatch, wrong):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: wrong(function, *args))


def run_and_expect_eager(fused, args, caplog):
    with caplog.at_level(logging.WARNING):
        results = [fused(*args) for _ in range(3)]
    expected = fused.eager(*args)
    for result in results:
        assert torch.equal(result, expected)
    assert list(fused._kernels.values()) == [fused.eager]
    (record,) = caplog.records
    assert "gives wrong results" in record.message
    assert "it runs eagerly, with the same results but slower" in record.message


@pytest.mark.parametrize("params", [(SCALE, ZERO), PER_CHANNEL], ids=["tensor", "channel"])
@pytest.mark.parametrize("fault", RESULTS)
def test_a_wrong_result_is_found_and_eager_takes_over(fault, params, monkeypatch, caplog):
    compiled_to(monkeypatch, lambda function, *args: RESULTS[fault](function(*args)))
    x = torch.randn(SMALL) if params[0].ndim == 0 else torch.randn(2, 16, SMALL // 16)
    run_and_expect_eager(Fused(qdq.nearest_level.eager), (x, *params, -8, 7), caplog)


@pytest.mark.parametrize("formula", [*FORMULAS, first_channel])
def test_a_wrong_formula_is_found_even_if_the_data_does_not_show_it(formula, monkeypatch, caplog):
    compiled_to(monkeypatch, lambda _, *args: formula(*args))
    x = torch.full((2, 16, SMALL // 16), 0.0)  # every formula is right for zeros
    run_and_expect_eager(Fused(qdq.nearest_level.eager), (x, *PER_CHANNEL, -8, 7), caplog)


def difference_of(kernel, wrong, args, exact=True):
    return difference(wrong, kernel, args, [*kinds_of(kernel).values()], exact)


@pytest.mark.parametrize("place", range(4))
def test_a_sum_that_lacks_one_value_is_found(place):
    kernel, x = clipped._gradients.eager, torch.randn(4, 3, 99)
    args = (x, x, torch.full((3, 1), 0.2), torch.zeros(3, 1), -8, 7)

    def wrong(x, grad, *rest):
        results = list(kernel(x, grad, *rest))
        left_out = grad.clone()
        left_out[-1, -1, -40:] = 0.0
        results[place] = kernel(x, left_out, *rest)[place]
        return tuple(results)

    assert difference_of(kernel, kernel, args) is None
    assert f"of result {place} differ from eager for a tensor of {LARGE}" in difference_of(kernel, wrong, args)


def test_what_is_not_exact_may_differ_in_the_last_bits_only():
    method = METHODS.get("nnie")(QuantSpec.parse("int8"))
    args, kernel = (torch.randn(500), torch.tensor(2.0), method.constants, method.powers), nnie._values
    assert difference_of(kernel, lambda *a: kernel(*a) * (1 + 2**-23), args) is not None
    assert difference_of(kernel, lambda *a: kernel(*a) * (1 + 2**-23), args, exact=False) is None
    assert difference_of(kernel, lambda *a: kernel(*a) * (1 + 2**-10), args, exact=False) is not None
    assert difference_of(kernel, lambda *a: of_vectors(kernel(*a)), args, exact=False) is not None
    assert difference_of(kernel, lambda *a: at_the_end(kernel(*a)), args, exact=False) is not None


@pytest.mark.parametrize("shape", [(99,), (1, 5, 9), (7, 5, 1), (7, 1, 9), (1, 1, 9), (1, 5, 1), (7, 1, 1), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_inputs_have_the_layout_of_the_call(shape, dtype):
    seen, scales = [], []

    def kernel(x: Tensor, grad: PerValue, scale: PerScale, zero_point: PerScale | None, table: Tensor, qmin: int):
        seen.append(x)
        scales.append(scale)
        assert grad.shape == x.shape
        assert scale.shape == ((x.shape[1], 1) if x.ndim == 3 else ())
        assert table.shape == (5,)
        assert qmin == -8
        assert zero_point is None
        return x * scale

    x = torch.randn(shape).to(dtype)
    scale = torch.rand(shape[1], 1) if x.ndim == 3 else torch.tensor(0.5)
    assert difference_of(kernel, kernel, (x, x, scale, None, torch.rand(5), -8)) is None
    assert all(made.dtype == dtype and made.is_contiguous() for made in seen)
    assert all([n == 1 for n in made.shape] == [n == 1 for n in shape] for made in seen)
    plain, strange = seen[0].double(), seen[2].double()
    if dtype != torch.float16:  # where large multiples are infinite
        assert plain.isfinite().all()
    assert plain.abs().amax() > 1e3
    assert (plain == 0).any()
    if dtype == torch.float32:
        for multiple in (-8.5, -8, -7.5, -9, -7, 0.5, 130.0):
            assert ((plain / scales[0] - multiple).abs() < 1e-4).any()
    assert strange.isnan().any()
    assert strange.isposinf().any()
    assert strange.isneginf().any()


def test_the_proof_draws_no_random_numbers_of_the_user(monkeypatch):
    compiled_to(monkeypatch, lambda function, *args: function(*args))
    fused, before = Fused(qdq.nearest_level.eager), torch.get_rng_state()
    fused(torch.zeros(SMALL), SCALE, ZERO, -8, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert fused.eager not in fused._kernels.values()


def test_no_proof_while_torch_compiles(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    fused = Fused(qdq.nearest_level.eager)
    x = torch.randn(SMALL)
    run = torch.compile(lambda x: fused(x, SCALE, ZERO, -8, 7), backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x), fused.eager(x, SCALE, ZERO, -8, 7))
    assert fused._kernels == {}


def test_threads_that_come_while_one_compiles_run_eagerly(monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def slow(function, *args):
        entered.set()
        assert leave.wait(20)
        return function(*args)

    compiled_to(monkeypatch, slow)
    fused, x = Fused(qdq.nearest_level.eager), torch.randn(SMALL)
    results = []
    first = threading.Thread(target=lambda: results.append(fused(x, SCALE, ZERO, -8, 7)))
    first.start()
    assert entered.wait(20)
    results.append(fused(x, SCALE, ZERO, -8, 7))  # does not wait
    assert fused._kernels == {}
    leave.set()
    first.join(20)
    assert len(fused._kernels) == 1
    results.append(fused(x, SCALE, ZERO, -8, 7))
    assert all(torch.equal(r, results[0]) for r in results)
    assert len(results) == 3


def test_many_threads_compile_once(monkeypatch):
    compiled = []
    monkeypatch.setenv("BITWRIGHT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    fused, x = Fused(qdq.nearest_level.eager), torch.randn(SMALL)
    threads = [threading.Thread(target=fused, args=(x, SCALE, ZERO, -8, 7)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(compiled) == len(fused._kernels) == 1


RUN = """
import logging, os, sys
import torch
logging.basicConfig(level=logging.WARNING)
from bitwright.numerics import quantize_dequantize
from bitwright.numerics.qdq import nearest_level
torch.manual_seed(0)
x, scale, zero = torch.randn(37, 1031), torch.rand(37) + 0.01, torch.zeros(37, dtype=torch.int32)
for params in ((scale[0], zero[0], -128, 127), (scale, zero, -128, 127, 0)):
    y = quantize_dequantize(x, *params)
    assert torch.equal(y, (torch.round(x / (s := params[0].view(-1, 1))).clamp(-128, 127)) * s), "wrong values"
assert len(nearest_level._kernels) == 2 and nearest_level.eager not in nearest_level._kernels.values(), "not compiled"
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has no second width of vectors to switch to"
)
@pytest.mark.parametrize("order", [("avx512", "avx2"), ("avx2", "avx512")], ids=" then ".join)
def test_a_cache_for_other_instructions_is_not_used(order, tmp_path):
    """Kernels for one width of vectors, found on disk under another, leave values unwritten or write beyond the end."""
    for capability in order:
        environment = {
            **os.environ,
            "BITWRIGHT_COMPILE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "ATEN_CPU_CAPABILITY": capability,
        }
        done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip() == capability.upper()
        assert "WARNING" not in done.stderr
