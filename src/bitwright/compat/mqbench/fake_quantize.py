"""Fake quantizers by MQBench's names: the methods that a prepared model's quantizers have as their ``method``."""

from bitwright.compat.old_paths import add_paths
from bitwright.methods import METHODS
from bitwright.quantizer import TensorQuantizer

QuantizeBase = TensorQuantizer
_PATHS = {
    "adaround_quantizer": "AdaRoundFakeQuantize",
    "dorefa": "DoReFaFakeQuantize",
    "dsq": "DSQFakeQuantize",
    "fixed": "FixedFakeQuantize",
    "lsq": "LearnableFakeQuantize",
    "nnie": "NNIEFakeQuantize",
    "pact": "PACTFakeQuantize",
    "qdrop_quantizer": "QDropFakeQuantize",
    "tqt": "TqtFakeQuantize",
}
globals().update({name: METHODS.get(name) for name in _PATHS.values()})
add_paths(__name__, {"quantize_base": "QuantizeBase", **_PATHS})
