"""Quantizers: ``register_quantizer`` and the class they derive from, with Sparsebit's own by their names.

One registered here is chosen by its name in ``QUANTIZER.TYPE``.
"""

from bitwright.compat.sparsebit.registers import register_quantizer
from bitwright.methods.adaround import AdaRoundFakeQuantize
from bitwright.methods.base import Method
from bitwright.methods.dorefa import DoReFaFakeQuantize
from bitwright.methods.fixed import FixedFakeQuantize
from bitwright.methods.learnable import LearnableFakeQuantize
from bitwright.methods.lsq_plus import LSQPlusFakeQuantize
from bitwright.methods.pact import PACTFakeQuantize

Quantizer = Method
_OWN = {
    "AdaRound": AdaRoundFakeQuantize,
    "DoReFa": DoReFaFakeQuantize,
    "LSQ": LearnableFakeQuantize,
    "LSQ_plus": LSQPlusFakeQuantize,
    "PACT": PACTFakeQuantize,
    "Uniform": FixedFakeQuantize,
}
Quantizer_LSQ, Uniform = LearnableFakeQuantize, FixedFakeQuantize
globals().update(_OWN)
