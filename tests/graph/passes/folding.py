"""What the tests of folding share: nets with lively norms, and the check that folding changes no value."""

import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.backends import BACKENDS
from tests.graph.passes.nets import Net, notes_of


def livened(net):
    """Give norms statistics and parameters that are not the trivial ones."""
    for norm in net.modules():
        if isinstance(getattr(norm, "running_var", None), torch.Tensor):
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.3, 2.0)
            if getattr(norm, "weight", None) is not None:
                nn.init.uniform_(norm.weight, 0.3, 1.5)
                nn.init.normal_(norm.bias, 0, 0.5)
    return net.eval()


def check(net, *examples, name, layer="a", folds=True, steady=True):
    """Prepare; compare off bit for bit, and with 16-bit quantizers within what those round; return notes and model."""
    torch.manual_seed(1)
    livened(net)
    model = bw.prepare(net, examples[0], debug=True)
    with torch.no_grad():
        for x in examples:
            assert torch.equal(model(x), net(x))
        fine = bw.prepare(net, examples[0], WIDE)
        bw.calibrate(fine, list(examples))
        for x in examples if steady else ():
            assert torch.allclose(fine(x), net(x), atol=2e-3 * float(net(x).abs().max()))
    notes = notes_of(model, name)
    assert any(not n.startswith("not") for n in notes) is folds
    if layer is not None:
        assert type(model.get_submodule(layer)).__name__.startswith("Quant")
    return notes, model


WIDE = BACKENDS.get("openvino").with_(
    name="wide",
    weights={"spec": "int16 symmetric narrow channel:0", "formats": ()},
    activations={"spec": "int16 affine tensor", "formats": ()},
)


def image(batch=2, channels=3, size=6):
    return torch.randn(batch, channels, size, size)


class OwnNorm(nn.BatchNorm2d):
    """A norm with a forward of its own, as model libraries have them: it calls the function and an activation."""

    def forward(self, x):
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(y)


def with_gain(body, shape=(4,), **layers):
    net = Net(body, **layers)
    net.gain = nn.Parameter(torch.rand(shape) + 0.5)
    return net
