"""Products with parameters become linear layers: the same bits, integer weights, and nothing else is touched."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwright as bw


class Conv1D(nn.Module):
    """A linear layer as older transformers write it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.2)

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A block of a small GPT-2 with embeddings, positions and a tied head."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(20, width), nn.Embedding(16, width)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.fc, self.out = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]).unsqueeze(0))
        batch, time, width = x.shape
        parts = self.attn(self.norm(x)).split(width, 2)
        q, k, v = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, time, width))
        x = x + self.out(F.gelu(self.fc(self.norm2(x))))
        return x @ self.tokens.weight.t()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_every_product_of_a_gpt_block_runs_in_integers(backend, tmp_path):
    ids = torch.randint(0, 20, (2, 8))
    net = Block().eval()
    model = bw.prepare(net, ids, backend)
    for given in (ids, torch.randint(0, 20, (3, 5))):
        assert torch.equal(model(given), net(given))
    linear = [e for e in bw.ledger_of(model).entries if e.operator == "linear"]
    assert [e.verdict.value for e in linear] == ["integer"] * 5
    bw.calibrate(model, [ids])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [ids], runtimes=[backend])
    assert proof.ok
    products = [o for o in proof.runtimes[backend].operators if o.kind == "linear" or "FullyConnected" in o.runs_as]
    assert [o.integer for o in products] == [True] * 5


class Product(nn.Module):
    def __init__(self, compute) -> None:
        super().__init__()
        self.compute = compute
        self.matrix, self.row = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("stored", torch.randn(6, 4))

    def forward(self, x):
        return self.compute(self, x)


LINEAR = {
    "operator": lambda net, x: x @ net.matrix,
    "matmul in three dimensions": lambda net, x: torch.matmul(x.unsqueeze(0), net.matrix),
    "mm": lambda net, x: torch.mm(x, mat2=net.matrix),
    "method": lambda net, x: x.matmul(net.stored) + net.row,
    "addmm": lambda net, x: torch.addmm(net.row, x, net.matrix),
    "addmm by name": lambda net, x: torch.addmm(input=net.row, mat1=x, mat2=net.matrix),
    "a matrix that is computed": lambda net, x: x @ (net.matrix * 2),
}
OTHER = {
    "two computed factors": lambda net, x: x @ x.t(),
    "a constant first": lambda net, x: net.matrix.t() @ x.t(),
    "a weighted sum": lambda net, x: torch.addmm(net.row, x, net.matrix, alpha=2),
    "a bias for each row": lambda net, x: torch.addmm(x[:, :4], x, net.matrix),
    "a vector": lambda net, x: x @ net.matrix[:, 0],
}


@pytest.mark.parametrize(("name", "compute"), [*LINEAR.items(), *OTHER.items()])
def test_which_products_are_linear(name, compute):
    x = torch.randn(5, 6)
    net = Product(compute).eval()
    model = bw.prepare(net, x, "virtual")
    assert torch.equal(model(x), net(x))
    kinds = {e.operator for e in bw.ledger_of(model).entries}
    assert ("linear" in kinds) == (name in LINEAR)
    if name in LINEAR:
        bw.calibrate(model, [x]).train()
        model(x).sum().backward()
        assert (model.matrix.grad is not None) == (name != "method")  # that one multiplies by a buffer
