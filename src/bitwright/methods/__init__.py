"""Methods: how a value is rounded. A new one is one file with ``@register_method``."""

from bitwright.methods.adaround import AdaRoundFakeQuantize
from bitwright.methods.apot import APoTFakeQuantize
from bitwright.methods.base import METHODS, Method, register_method
from bitwright.methods.dorefa import DoReFaFakeQuantize
from bitwright.methods.dsq import DSQFakeQuantize
from bitwright.methods.fixed import FixedFakeQuantize
from bitwright.methods.groups import parameter_groups
from bitwright.methods.learnable import LearnableFakeQuantize
from bitwright.methods.lsq_plus import LSQPlusFakeQuantize
from bitwright.methods.nnie import NNIEFakeQuantize
from bitwright.methods.pact import PACTFakeQuantize
from bitwright.methods.qdrop import QDropFakeQuantize
from bitwright.methods.stochastic import StochasticFakeQuantize
from bitwright.methods.tqt import TqtFakeQuantize

__all__ = [
    "METHODS",
    "APoTFakeQuantize",
    "AdaRoundFakeQuantize",
    "DSQFakeQuantize",
    "DoReFaFakeQuantize",
    "FixedFakeQuantize",
    "LSQPlusFakeQuantize",
    "LearnableFakeQuantize",
    "Method",
    "NNIEFakeQuantize",
    "PACTFakeQuantize",
    "QDropFakeQuantize",
    "StochasticFakeQuantize",
    "TqtFakeQuantize",
    "parameter_groups",
    "register_method",
]
