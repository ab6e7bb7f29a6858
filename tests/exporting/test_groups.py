"""Experts: rows sorted by group and multiplied with the matrix of each, proven in both runtimes."""

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw
from bitwright.errors import ExportError
from bitwright.numerics.grouped import grouped_product


class Experts(nn.Module):
    """Each row goes to the two experts that the router prefers."""

    def __init__(self, width=8, inner=12, experts=5, chosen=2):
        super().__init__()
        self.experts, self.chosen, self.router = experts, chosen, nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, inner, width) / 3)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / 4)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, experts = torch.topk(self.router(rows).softmax(-1), self.chosen, dim=-1)
        experts, order = torch.sort(experts.reshape(-1))
        counts = torch.histc(experts.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        found = F.grouped_mm(rows[order // self.chosen], self.up.transpose(-2, -1), offs=ends)
        found = F.grouped_mm(F.gelu(found), self.down.transpose(-2, -1), offs=ends)
        found = found * shares.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return found[back].view(rows.shape[0], self.chosen, -1).sum(1).reshape(x.shape)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_experts_are_proven_with_a_free_batch_size(backend, tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 3)).eval(), torch.randn(2, 9, 8)
    with torch.no_grad():
        net[1].router.bias[2] = -100.0  # an expert that no row goes to
    model = bw.calibrate(bw.prepare(net, x, backend), [x, torch.randn(2, 9, 8)], progress=False)
    file = bw.export(model, tmp_path / "net.onnx")
    other = torch.randn(5, 9, 8)
    proof = bw.verify(model, file, [x, other], runtimes=[backend], latency=False, progress=False)
    assert proof.ok, proof.missed
    assert (model(other) - net(other)).norm() < 0.05 * net(other).norm()


def test_products_of_groups_are_torchs():
    torch.manual_seed(0)
    x, weight, ends = torch.randn(11, 8), torch.randn(4, 8, 4), torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    wanted = F.grouped_mm(x, weight, offs=ends)
    assert torch.allclose(grouped_product(x, weight, offs=ends), wanted, atol=1e-5)
    assert grouped_product(x, weight, offs=ends, out_dtype=torch.float64).dtype is torch.float64
    batched = torch.randn(4, 5, 8)
    assert torch.allclose(grouped_product(batched, weight), batched @ weight, atol=1e-5)


class Counts(nn.Module):
    """Sorts and counts, next to a quantized layer."""

    def __init__(self, **limits):
        super().__init__()
        self.layer, self.limits = nn.Linear(6, 4), limits

    def forward(self, x):
        values, order = torch.sort(x, 0, descending=True)
        largest = torch.topk(x + torch.arange(9).unsqueeze(1) / 64, 5, 0, False, False)[1]
        return self.layer(x), torch.histc(x, 7, **self.limits), values, order, x.round().argsort(1), largest


def run(net, x, tmp_path):
    model = bw.calibrate(bw.prepare(net.eval(), x, "onnxruntime"), [x], progress=False)
    session = onnxruntime.InferenceSession(bw.export(model, tmp_path / "net.onnx"))
    return model, [torch.from_numpy(v) for v in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def test_counts_and_orders_are_torchs(tmp_path):
    torch.manual_seed(0)
    x = (torch.randint(-12, 12, (9, 6)) / 4).float()  # many equal values, some beyond the limits, some at them
    model, (_, counts, values, order, ranks, smallest) = run(Counts(min=-2, max=1.5), x, tmp_path)
    assert torch.equal(counts, torch.histc(x, 7, -2, 1.5))
    assert torch.equal(values, x.sort(0, descending=True)[0])
    assert torch.equal(order, torch.sort(x, dim=0, descending=True, stable=True)[1])
    assert torch.equal(ranks, torch.argsort(x.round(), dim=1, stable=True))
    assert torch.equal(smallest, torch.argsort(x + torch.arange(9).unsqueeze(1) / 64, 0)[:5])
    assert all(torch.equal(a, b) for a, b in zip(model(x)[1:], (counts, values, order, ranks, smallest), strict=True))


def test_counts_without_limits_are_refused(tmp_path):
    with pytest.raises(ExportError, match=r"torch\.histc needs its limits min and max in a file"):
        run(Counts(), torch.randn(9, 6), tmp_path)
