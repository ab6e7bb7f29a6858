"""What works where, as tables: one backend explained, and the page of all backends for the documentation."""

from collections.abc import Iterable, Sequence

from bitwright.backends.base import Backend
from bitwright.backends.rules import TensorRules, listed
from bitwright.nn.operators import OPERATORS

PLACES = {"both": "inputs and result", "inputs": "inputs", "outputs": "result"}
_SIGNS = {"both": "in, out", "inputs": "in", "outputs": "out"}
_FORMATS = (*(f"{kind}{bits}" for kind in ("int", "uint") for bits in (*range(2, 9), 16)), "e4m3", "e5m2")

_SNIPPET = """```python
from bitwright.backends import find_backend

tensorrt = find_backend("TensorRT")
print(tensorrt.weights.spec, tensorrt.operators.integer["conv2d"])
```"""


def summary(backend: Backend) -> list[tuple[str, str]]:
    """Summarize a backend: specs, defaults, fusions, sharing and limits."""
    operators = backend.operators
    merged = [f"{before} and {after}" for after, those in operators.merged.items() for before in sorted(those)]
    lines = [
        ("weights", _defaults(backend.weights)),
        ("activations", _defaults(backend.activations)),
        ("weights can be", _limits(backend.weights)),
        ("activations can be", _limits(backend.activations)),
        ("fused activations", listed(operators.fused)),
        ("nothing fused with", listed(operators.unfused)),
        ("no quantizer between", ", ".join(merged)),
        ("computed with one operand", ", ".join(f"{o} of {listed(those)}" for o, those in operators.absorbed.items())),
        ("inputs of their own", ", ".join(f"{o}: {spec}" for o, spec in operators.inputs.items())),
        ("only with weights of 8 bits", listed(operators.wide)),
        ("plain numbers in", listed(operators.numbers)),
        ("one scale for all inputs", listed(operators.share_inputs)),
        ("fixed ranges", ", ".join(f"{o} {low:g} to {high:g}" for o, (low, high) in operators.ranges.items())),
        *_choices(backend),
        ("reads", ", ".join(backend.formats) or "nothing that Bitwright writes"),
        ("runs here in", ", ".join(backend.runtimes) or "nothing on this machine"),
        ("files are checked for", ", ".join(backend.constraints)),
    ]
    return [line for line in lines if line[1]]


def _choices(backend: Backend) -> list[tuple[str, str]]:
    """The choices of a backend; empty where there is nothing to say."""
    operators, first_last = backend.operators, backend.first_last_bits
    both_powers = backend.weights.power_of_two and backend.activations.power_of_two
    choices: dict[str, tuple[object, str, str]] = {  # each with the words for yes and no
        "scales": (both_powers, "powers of two", ""),
        "first and last layers": (first_last, f"{first_last} bits", ""),
        "BatchNorm": (backend.folding.batchnorm, "folded into the layer before it", "kept apart"),
        "attention": (operators.split_attention, "split into products and a softmax", ""),
        "activations": (operators.split_activations, "split into sums, products and sigmoids", ""),
        "BatchNorm alone": (operators.norms_as_convolutions, "a depthwise convolution", ""),
        "positive factors": (operators.scaled_results, "part of the scale of what they multiply", ""),
        "constant factors": (backend.folding.constants, "folded into layers", ""),
        "bias": (backend.integer_bias, "int32, in steps of input scale × weight scale", "float"),
    }
    return [(name, yes if chosen else no) for name, (chosen, yes, no) in choices.items()]


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
                (f"`{b.name}`", b.title, spec_text(b.weights), spec_text(b.activations), ", ".join(b.runtimes))
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
    place = _SIGNS.get(backend.operators.integer.get(operator, ""), "")
    fused = "fused" if operator in backend.operators.fused else ""
    return " / ".join(p for p in ("moves" if moves == "sometimes" else "", fused, place) if p)


def _format_row(name: str, backends: Iterable[Backend]) -> tuple[str, ...]:
    cells = []
    for b in backends:
        kinds = (("W", b.weights.formats), ("A", b.activations.formats))
        cells.append("".join(kind for kind, formats in kinds if not formats or name in formats))
    return (f"`{name}`", *cells)


def _defaults(rules: TensorRules) -> str:
    return f"{spec_text(rules)} ({rules.observer}, {rules.method})"


def _limits(rules: TensorRules) -> str:
    formats = listed(rules.formats) or "any format"
    narrow = "; without the lowest integer" if rules.narrow else ""
    return f"{formats}; {listed(rules.schemes, ' or ')}; one scale per {listed(rules.granularities)}{narrow}"


def spec_text(rules: TensorRules) -> str:
    """The spec of a kind of tensors, or a note that there is none."""
    return "yours to choose" if rules.spec is None else str(rules.spec)


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
