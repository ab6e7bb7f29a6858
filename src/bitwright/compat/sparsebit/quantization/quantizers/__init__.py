"""Quantizers: ``register_quantizer`` and the class they derive from, with Sparsebit's own by their names.

One registered here is chosen by its name in ``QUANTIZER.TYPE``.
"""

from bitwright.compat.old_paths import add_paths
from bitwright.compat.sparsebit.descriptor import QuantDescriptor
from bitwright.compat.sparsebit.own_classes import STE, Quantizer
from bitwright.compat.sparsebit.registers import register_quantizer
from bitwright.methods.adaround import AdaRoundFakeQuantize as AdaRound
from bitwright.methods.dorefa import DoReFaFakeQuantize as DoReFa
from bitwright.methods.fixed import FixedFakeQuantize as Uniform
from bitwright.methods.learnable import LearnableFakeQuantize as LSQ
from bitwright.methods.lsq_plus import LSQPlusFakeQuantize as LSQ_plus
from bitwright.methods.pact import PACTFakeQuantize as PACT

BaseQuantizer = Quantizer
torch_fake_quant = ort_fake_quant = trt_fake_quant = STE.apply
add_paths(
    __name__,
    {
        "base": "BaseQuantizer Quantizer",
        "uniform": "Uniform",
        "lsq": "LSQ",
        "lsq_plus": "LSQ_plus",
        "dorefa": "DoReFa",
        "pact": "PACT",
        "adaround": "AdaRound",
        "quant_descriptor": "QuantDescriptor",
        "quant_tensor": "STE torch_fake_quant ort_fake_quant trt_fake_quant",
    },
)
