"""How torch's tools see the operators: opcheck, torch.compile and export."""

import pytest
import torch
from torch import nn

from bitwright.numerics import quantize
from bitwright.numerics.pooling import global_average_pool
from bitwright.quantizer import TensorQuantizer

CASES = {
    "tensor": (lambda: torch.randn(4, 8), None, None, ()),
    "no dimension": (lambda: torch.tensor(1.5), None, None, ()),
    "empty": (lambda: torch.randn(0, 8), 1, None, (8,)),
    "channel": (lambda: torch.randn(4, 8, 3), 1, None, (8,)),
    "channels_last": (lambda: torch.randn(2, 4, 3, 5).to(memory_format=torch.channels_last), 1, None, (4,)),
    "sliced": (lambda: torch.randn(4, 8)[:, ::2], 0, None, (4,)),
    "expanded": (lambda: torch.randn(1, 8).expand(4, 8), 1, None, (8,)),
    "group": (lambda: torch.randn(4, 8), -1, 4, (4, 2)),
    "group of another axis": (lambda: torch.randn(2, 8, 3), 1, 4, (2, 2, 3)),
    "half": (lambda: torch.randn(4, 8).half(), None, None, ()),
    "double": (lambda: torch.randn(4, 8).double(), 0, None, (4,)),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    make, axis, group, size = CASES[name]
    x = make()
    scale, zero = torch.rand(size) * 0.1 + 0.01, torch.zeros(size, dtype=torch.int32)
    ops = torch.ops.bitwright
    args = (scale, zero, -128, 127, axis, group)
    results = [
        torch.library.opcheck(ops.quantize_dequantize.default, (x, *args)),
        torch.library.opcheck(ops.quantize_dequantize.default, (x.detach().clone().requires_grad_(), *args)),
        torch.library.opcheck(ops.quantize_dequantize_backward.default, (torch.ones_like(x), x, *args)),
        torch.library.opcheck(ops.quantize.default, (x, *args), {"dtype": torch.int8}),
        torch.library.opcheck(ops.dequantize.default, (quantize(x, *args, dtype=torch.int8), scale, zero, axis, group)),
    ]
    assert all(set(r.values()) == {"SUCCESS"} for r in results)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_global_average_pool(shape):
    x = torch.randn(shape)
    expected = x.flatten(2).mean(2).reshape(*shape[:2], *(1 for _ in shape[2:]))
    assert torch.allclose(global_average_pool(x), expected, atol=1e-6)
    checked = torch.library.opcheck(torch.ops.bitwright.global_average_pool.default, (x,))
    assert set(checked.values()) == {"SUCCESS"}


def calls_of(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_compile_sees_one_operator():
    seen = []

    def backend(graph_module, example_inputs):
        seen.extend(calls_of(graph_module.graph))
        return graph_module.forward

    quantizer = TensorQuantizer("int8 channel:0")
    quantizer.set_range(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))
    quantizer.quantize()
    compiled = torch.compile(quantizer, backend=backend, fullgraph=True)
    x = torch.randn(2, 5)
    assert torch.equal(compiled(x), quantizer(x))
    assert seen == ["bitwright.quantize_dequantize"]


def test_export_sees_one_operator():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.quantizer = TensorQuantizer("uint8")
            self.quantizer.set_range(-1.0, 2.0)
            self.quantizer.quantize()

        def forward(self, x):
            return self.quantizer(x) * 2

    net, x = Net(), torch.randn(3, 4)
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net, (x,), dynamic_shapes=shapes)
    assert calls_of(program.graph) == ["bitwright.quantize_dequantize.default", "aten.mul.Tensor"]
    more = torch.randn(7, 4)
    assert torch.equal(program.module()(more), net(more))
