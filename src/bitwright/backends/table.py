"""What works where, as tables: one backend explained, and the page of all backends for the documentation."""

from collections.abc import Iterable, Sequence

from bitwright.backends.base import Backend
from bitwright.nn.operators import OPERATORS

PLACES = {"both": "inputs and result", "inputs": "inputs", "outputs": "result"}
_SIGNS = {"both": "in, out", "inputs": "in", "outputs": "out"}
_FORMATS = (*(f"{kind}{bits}" for kind in ("int", "uint") for bits in (*range(2, 9), 16)), "e4m3", "e5m2")

_SNIPPET = """```python
from bitwright.backends import find_backend

print(find_backend("TensorRT").weight, find_backend("TensorRT").integer["conv2d"])
```"""


def facts(backend: Backend) -> list[tuple[str, str]]:
    """What is true of a backend as a whole: specs, defaults, fusions, sharing and limits."""
    weight_method = backend.weight_method or backend.method
    lines = [
        ("weights", f"{spec_text(backend.weight)} ({backend.weight_observer}, {weight_method})"),
        ("activations", f"{spec_text(backend.activation)} ({backend.observer}, {backend.method})"),
        ("weights can be", _limits(backend.weight_formats, backend.weight_grains, backend.weight_schemes)),
        (
            "activations can be",
            _limits(backend.activation_formats, backend.activation_grains, backend.activation_schemes),
        ),
        ("scales", "powers of two" if backend.power_of_two else ""),
        ("fused activations", _listed(backend.fused)),
        ("nothing fused with", _listed(backend.unfused)),
        ("no quantizer between", ", ".join(f"{b} and {a}" for a, bs in backend.merged.items() for b in sorted(bs))),
        ("plain numbers in", _listed(backend.numbers)),
        ("one scale for all inputs", _listed(backend.share_inputs)),
        ("first and last layers", f"{backend.ends} bits" if backend.ends else ""),
        ("BatchNorm", "folded into the layer before it" if backend.folds_norms else "kept apart"),
        ("attention", "products and softmax, each for itself" if backend.splits_attention else ""),
        ("constant factors", "folded into layers" if backend.folds_scales else ""),
        ("bias", "int32, in steps of input scale × weight scale" if backend.integer_bias else "float"),
        ("runs here in", ", ".join(backend.runtimes) or "nothing on this machine"),
    ]
    return [line for line in lines if line[1]]


def page(backends: Sequence[Backend]) -> str:
    """The page on backends in the documentation: every backend, operator by backend, format by backend."""
    parts = [
        "# Backends",
        "Made by `bitwright backends matrix`; do not edit. `bitwright backends show NAME` explains one; in Python:",
        _SNIPPET,
        "## What they are",
        _markdown(
            ("name", "what it is", "weights", "activations", "runs here in"),
            [
                (f"`{b.name}`", b.title, spec_text(b.weight), spec_text(b.activation), ", ".join(b.runtimes))
                for b in backends
            ],
        ),
        "## Which operator runs in integers where",
        "*in*: its inputs are quantized; *out*: its result is; *fused*: computed as part of the operator before it; "
        "*moves*: it only moves quantized values, and needs no scale of its own; empty: float.",
        _markdown(("operator", *(b.name for b in backends)), [_operator_row(o, backends) for o in OPERATORS]),
        "## Which number formats there are",
        "*W*: weights; *A*: activations.",
        _markdown(("format", *(b.name for b in backends)), [_format_row(f, backends) for f in _FORMATS]),
    ]
    return "\n\n".join(parts) + "\n"


def _operator_row(operator: str, backends: Iterable[Backend]) -> tuple[str, ...]:
    return (f"`{operator}`", *(_sign(operator, b) for b in backends))


def _sign(operator: str, backend: Backend) -> str:
    moves = OPERATORS.get(operator).carries_when
    if moves == "always":
        return "moves"
    place = _SIGNS.get(backend.integer.get(operator, ""), "")
    fused = "fused" if operator in backend.fused else ""
    return " / ".join(p for p in ("moves" if moves == "sometimes" else "", fused, place) if p)


def _format_row(name: str, backends: Iterable[Backend]) -> tuple[str, ...]:
    cells = []
    for b in backends:
        kinds = (("W", b.weight_formats), ("A", b.activation_formats))
        cells.append("".join(kind for kind, formats in kinds if not formats or name in formats))
    return (f"`{name}`", *cells)


def _limits(formats: frozenset[str], grains: Iterable[str], schemes: Iterable[str]) -> str:
    return f"{_listed(formats) or 'any format'}; {' or '.join(sorted(schemes))}; one scale per {_listed(grains)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def spec_text(spec: object) -> str:
    """A spec, or the word that there is none."""
    return "yours to choose" if spec is None else str(spec)


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
