"""Fake quantizers by MQBench's names: the methods that a prepared model's quantizers have as their ``method``."""

from bitwright.compat.mqbench.fake_quantize.quantize_base import QuantizeBase
from bitwright.methods.adaround import AdaRoundFakeQuantize
from bitwright.methods.dorefa import DoReFaFakeQuantize
from bitwright.methods.dsq import DSQFakeQuantize
from bitwright.methods.fixed import FixedFakeQuantize
from bitwright.methods.learnable import LearnableFakeQuantize
from bitwright.methods.nnie import NNIEFakeQuantize
from bitwright.methods.pact import PACTFakeQuantize
from bitwright.methods.qdrop import QDropFakeQuantize
from bitwright.methods.tqt import TqtFakeQuantize
