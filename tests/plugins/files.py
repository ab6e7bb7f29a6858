"""One file of each kind of plug-in: where it stands inside the package, and its text, the same wherever it stands."""

OBSERVER = '''
from bitwright.observers.base import register_observer
from bitwright.observers.minmax import MinMaxObserver


@register_observer("ToyObserver")
class ToyObserver(MinMaxObserver):
    """Twice the range that was seen."""

    def range(self):
        lo, hi = super().range()
        return 2 * lo, 2 * hi
'''

METHOD = '''
from bitwright.methods.base import register_method
from bitwright.methods.fixed import FixedFakeQuantize


@register_method("ToyFakeQuantize", aliases=("toy",))
class ToyFakeQuantize(FixedFakeQuantize):
    """Rounds magnitudes only: every value is positive."""

    def forward(self, x, scale, zero_point):
        return super().forward(x.abs(), scale, zero_point)
'''

QMODULE = '''
import torch.nn.functional as F
from torch import nn

from bitwright.nn.opr import QuantOpr
from bitwright.nn.registry import register_qmodule


@register_qmodule(sources=[nn.Threshold, F.threshold])
class QuantThreshold(QuantOpr):
    """nn.Threshold with a quantized input."""

    def __init__(self, org_module):
        super().__init__()
        module = isinstance(org_module, nn.Module)
        self.arguments = (org_module.threshold, org_module.value) if module else org_module.args[1:3]

    def forward(self, x, *_, **__):
        return F.threshold(self.input_quantizer(x), *self.arguments)
'''

OPERATOR = """
from torch import nn

from bitwright.nn.operators.base import Operator, register_operator

register_operator(Operator("toy_softsign", (nn.Softsign, nn.functional.softsign), elementwise=True))
"""

SCHEDULE = '''
import torch

from bitwright.graph.match import MatcherNode
from bitwright.graph.rewriting.replace import ReplacePatternBase
from bitwright.graph.rewriting.schedule import register_schedule


@register_schedule("toy_negation", stage="simplify")
class DoubleNegation(ReplacePatternBase):
    """neg(neg(x))  ->  x."""

    def make_ops(self):
        return [MatcherNode("first", None, [torch.neg]), MatcherNode("second", ["first"], [torch.neg])]

    def get_new_graph(self, nodes_dict, *_):
        return nodes_dict["first"].args[0]
'''

BACKEND = """
from bitwright.backends.files import register_backend
from bitwright.backends.onnxruntime import ONNXRUNTIME

register_backend(
    ONNXRUNTIME.with_(
        name="toychip",
        title="a toy",
        operators={"integer": {"linear": "inputs"}},
        runtimes=("toytime",),
        constraints=("toychip-*",),
    )
)
"""

RUNTIME = '''
from bitwright.verification.runtimes.base import register_runtime
from bitwright.verification.runtimes.onnxruntime import OnnxRuntime


@register_runtime("toytime")
class ToyTime(OnnxRuntime):
    """onnxruntime under another name."""

    name = "toytime"
    formats = ("onnx", "toyformat")
'''

FORMAT = '''
from bitwright.exporting.formats.base import register_format
from bitwright.exporting.formats.onnx import OnnxFormat


@register_format("toyformat")
class ToyFormat(OnnxFormat):
    """ONNX under another name."""

    name = "toyformat"
    suffix = ".toy"
'''

CONSTRAINT = '''
from bitwright.verification.constraints.base import Finding, register_constraint


@register_constraint("toychip-bias", advice=True)
def no_bias(view):
    """Layers have no bias."""
    return [Finding(t.name, "is a bias", "leave it out") for t in view.of_kind("bias")]
'''

FILES = {
    "observer": ("observers/toy_observer.py", OBSERVER),
    "method": ("methods/toy_method.py", METHOD),
    "qmodule": ("nn/toy_qmodule.py", QMODULE),
    "operator": ("nn/operators/toy_operator.py", OPERATOR),
    "schedule": ("graph/passes/simplify/toy_schedule.py", SCHEDULE),
    "backend": ("backends/a_toy_backend.py", BACKEND),
    "format": ("exporting/formats/toy_format.py", FORMAT),
    "constraint": ("verification/constraints/toy_constraint.py", CONSTRAINT),
    "runtime": ("verification/runtimes/a_toy_runtime.py", RUNTIME),
}
