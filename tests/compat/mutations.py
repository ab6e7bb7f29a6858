"""Configs of the old dialects, and what may be wrong with them: mutations of their data and of their text."""

import copy
import json
import pprint
import random

import yaml

_SCHEME = {"bit": 8, "symmetry": True, "per_channel": False, "pot_scale": False}
MQBENCH = {
    "backend": "Academic",
    "extra_config": {
        "extra_qconfig_dict": {
            "w_observer": "MSEObserver",
            "a_observer": "EMAMinMaxObserver",
            "w_fakequantize": "LearnableFakeQuantize",
            "a_fakequantize": "DoReFaFakeQuantize",
            "w_qscheme": _SCHEME | {"p": 2.4},
            "a_qscheme": dict(_SCHEME),
            "a_observer_extra_args": {"ema_ratio": 0.9},
            "w_fakeq_params": {"use_grad_scaling": False},
        },
        "extra_quantizer_dict": {
            "additional_module_type": ["torch.nn.Linear"],
            "exclude_module_name": ["layer1.conv"],
            "exclude_function_type": ["operator.add"],
            "academic_mode": False,
        },
        "leaf_module": ["torch.nn.LSTM"],
        "preserve_attr": {"": ["name"]},
        "concrete_args": {"mask": None},
        "extra_fuse_dict": {"additional_fusion_pattern": {}},
    },
}
SPARSEBIT = {
    "BACKEND": "academic",
    "SKIP_TRACE_MODULES": ["head.*"],
    "SCHEDULE": {"FUSE_BN": True, "BN_TUNING": False},
    "W": {
        "QSCHEME": "per-channel-symmetric",
        "QUANTIZER": {"TYPE": "LSQ", "BIT": 4},
        "OBSERVER": {"TYPE": "PERCENTILE", "PERCENTILE": {"ALPHA": 0.01}},
        "SPECIFIC": [{"*conv_1*": ["QUANTIZER.BIT", 8, "OBSERVER.TYPE", "MSE"]}, {"head": ["QUANTIZER.DISABLE", True]}],
    },
    "A": {
        "QSCHEME": "per-tensor-affine",
        "QUANTIZER": {"TYPE": "pact", "BIT": 8, "PACT": {"ALPHA_VALUE": 10}},
        "OBSERVER": {"TYPE": "moving_average", "MOVING_AVERAGE": {"EMA_RATIO": 0.9}, "LAYOUT": "NCHW"},
        "QADD": {"ENABLE_QUANT": True},
        "SPECIFIC": [{"layer_?_conv": ["QUANTIZER.BIT", 4]}],
    },
}
QUANTRANS = {
    "quant_transformer": {
        "type": "mTransformerV2",
        "quan_policy": {
            "Conv2d": {"type": "LSQConv2d", "num_bit_w": 8, "num_bit_a": 8, "signed": True},
            "Linear": {"type": "DRFLinear", "num_bit_w": 4, "num_bit_a": 4},
        },
        "special_layers": {"layers_name": ["conv1", "fc"], "convert_type": [{"type": "LSQConv2d", "num_bit_w": 8}] * 2},
    }
}
NATIVE = {
    "backend": "openvino",
    "weight": {"spec": "int4 narrow channel:0", "observer": "MSEObserver", "observer_options": {"bins": 256}},
    "activation": "uint8",
    "rules": [{"match": "re:a.*", "skip": True}, {"match": "op:conv*", "weight": "int8", "force": True}],
    "schedules": {"fold_batchnorm": False},
    "leaves": ["type:LSTM"],
}
DIALECTS = {"MQBench": MQBENCH, "Sparsebit": SPARSEBIT, "QuanTransformer": QUANTRANS, "Bitwright": NATIVE}

_endless = [0, 1]
for _ in range(12):
    _endless = [_endless, _endless]
_deep: list = []
for _ in range(60):
    _deep = [_deep]
ODD = (
    *(None, True, -1, 0, 10**30, 10**400, 0.5, 1e308, float("nan"), float("-inf"), "", "\0", "ü" * 400, "x" * 5000),
    *([], {}, [[1]], {"a": {"b": 1}}, {1: 2}, {None: 3}, {("a", "b"): 1}, b"x", (1, 2), {1, 2}, _endless, _deep),
    *("re:(a+)+", "*" * 60 + "x", "[", "{}", "torch", "torch.nn", "torch.nn.Conv9d", "torch.compile", "..", ".", ",,"),
    *({f"key{i}": i for i in range(3000)}, [f"x{i}" for i in range(3000)], "8", "True", "int8", "float", 3, 32, 64),
)
_BITS = (
    "{",
    "]",
    ":",
    "&a ",
    "*a",
    "!!int ",
    "\t",
    '"',
    "- ",
    "\x07",
    "💣",
    "\n",
    "'",
    ",",
    "=",
    "(",
    "**",
    "#",
    "10**9",
)


def _places(data, path=()):
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(p for key, value in inside for p in _places(value, (*path, key)))]


def mutated_data(data, rng: random.Random):
    """The same data with one thing wrong, or two."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2))):
        *way, last = rng.choice(_places(data)[1:] or [(None,)])
        if last is None:
            return data
        home = data
        for step in way:
            home = home[step]
        what = rng.randrange(5)
        if what <= 1:
            home[last] = copy.deepcopy(rng.choice(ODD))  # a second change may be made inside it
        elif what == 2:
            del home[last]
        elif what == 3 and isinstance(home, dict):
            home[rng.choice(["x", "type", "bit", 3, None, "OBSERVER", "x" * 3000, "*", "re:("])] = home.pop(last)
        else:
            home[last] = [home[last]] * rng.randrange(3)
    return data


def mutated_text(text: str, rng: random.Random) -> str:
    """The same text with a few wrong characters."""
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(_BITS) + text[at + rng.randrange(3) :]
    return text


def as_text(data, suffix: str) -> str:
    """Data as YAML, as JSON, or as Python."""
    if suffix == ".py":
        return "".join(f"{name} = {pprint.pformat(value)}\n" for name, value in data.items())
    if suffix == ".json":
        return json.dumps(data, default=str, skipkeys=True)
    try:
        return yaml.safe_dump(data)
    except (yaml.YAMLError, TypeError):
        return json.dumps(data, default=str, skipkeys=True)


def mutations(seed: int, count: int):
    """Yield names of dialects, endings of files and mutated texts."""
    rng = random.Random(seed)
    for number in range(count):
        name, suffix = rng.choice(list(DIALECTS)), rng.choice((".yaml", ".json", ".py"))
        if number % 3:
            yield name, suffix, as_text(mutated_data(DIALECTS[name], rng), suffix)
        else:
            yield name, suffix, mutated_text(as_text(DIALECTS[name], suffix), rng)
