"""The keys of Sparsebit's configs, with their defaults."""

from typing import Any

SCHEDULE = {"FUSE_BN": False, "BN_TUNING": False, "DISABLE_UNNECESSARY_QUANT": True}
_QUANTIZER = {"TYPE": "uniform", "DISABLE": False, "BIT": -1}
_OBSERVER = {"TYPE": "MINMAX", "PERCENTILE": {"ALPHA": 0.001}, "ACIQ": {"DISTRIBUTION": "GAUS"}}

DEFAULTS: dict[str, Any] = {
    "BACKEND": "virtual",
    "DEVICE": "",
    "SKIP_TRACE_MODULES": [],
    "SCHEDULE": SCHEDULE,
    "W": {
        "QSCHEME": None,
        "QUANTIZER": _QUANTIZER,
        "OBSERVER": _OBSERVER,
        "SPECIFIC": [],
    },
    "A": {
        "QSCHEME": None,
        "QUANTIZER": {**_QUANTIZER, "PACT": {"ALPHA_VALUE": 10}},
        "OBSERVER": {**_OBSERVER, "MOVING_AVERAGE": {"EMA_RATIO": 0.9}, "LAYOUT": "NCHW"},
        "QADD": {"ENABLE_QUANT": False},
        "SPECIFIC": [],
    },
}

OBSERVERS = {
    "minmax": "MinMaxObserver",
    "percentile": "PercentileObserver",
    "mse": "MSEObserver",
    "moving_average": "EMAMinMaxObserver",
    "kl_histogram": "KLObserver",
    "aciq": "ACIQObserver",
}
QUANTIZERS = {
    "uniform": "FixedFakeQuantize",
    "lsq": "LearnableFakeQuantize",
    "lsq+": "LSQPlusFakeQuantize",
    "lsq_plus": "LSQPlusFakeQuantize",
    "dorefa": "DoReFaFakeQuantize",
    "pact": "PACTFakeQuantize",
    "adaround": "AdaRoundFakeQuantize",
}
SCHEMES = [f"per-{grain}-{scheme}" for grain in ("tensor", "channel") for scheme in ("symmetric", "affine")]
LAYOUTS = {"NCHW": 1, "NLC": 2}
