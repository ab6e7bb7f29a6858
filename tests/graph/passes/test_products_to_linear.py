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
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [ids], runtimes=[backend], latency=False)
    assert proof.ok
    products = [o for o in proof.runtimes[backend].operators if o.kind == "linear" or "FullyConnected" in o.runs_as]
    assert [o.integer for o in products] == [True] * 5


class Product(nn.Module):
    def __init__(self, compute) -> None:
        super().__init__()
        self.compute = compute
        self.matrix, self.row = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
        self.heads = nn.Parameter(torch.randn(2, 6, 4))
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
    "a constant first": lambda net, x: net.matrix.t() @ x.t(),
    "a constant before three dimensions": lambda net, x: torch.matmul(net.matrix.t(), torch.stack([x, -x]).mT),
    "bmm": lambda net, x: torch.bmm(torch.stack([x, -x]), net.matrix.expand(2, -1, -1)),
    "baddbmm": lambda net, x: torch.baddbmm(net.row, torch.stack([x, -x]), net.matrix.expand(2, -1, -1)),
    "baddbmm by name": lambda net, x: torch.baddbmm(net.row, batch1=x[None], batch2=net.matrix.expand(1, 6, 4)),
    "einsum": lambda net, x: torch.einsum("ni,io->no", x, net.matrix),
    "einsum, constant first": lambda net, x: torch.einsum("io, ni -> on", net.matrix, x),
    "einsum without a result": lambda net, x: torch.einsum("ni,io", x, net.matrix),
    "einsum of heads": lambda net, x: torch.einsum("...i,hio->h...o", torch.stack([x, -x]), net.heads),
    "einsum over two dimensions": lambda net, x: torch.einsum("hni,hio->no", torch.stack([x, -x]), net.heads),
    "einsum over two in another order": lambda net, x: torch.einsum("nih,hio->on", torch.stack([x, -x], 2), net.heads),
}
OTHER = {
    "two computed factors": lambda net, x: x @ x.t(),
    "einsum of two computed factors": lambda net, x: torch.einsum("ni,mi->nm", x, x),
    "einsum with a matrix for each": lambda net, x: torch.einsum("hni,hio->hno", torch.stack([x, -x]), net.heads),
    "einsum of three": lambda net, x: torch.einsum("ni,io,o->no", x, net.matrix, net.row),
    "einsum that sums a factor": lambda net, x: torch.einsum("ni,io->n", x, net.matrix),
    "einsum that repeats": lambda net, x: torch.einsum("ni,io->no", x[:, :1], net.matrix),
    "einsum of a diagonal": lambda net, x: torch.einsum("ii,io->io", x[:, :5], net.matrix[:5]),
    "einsum, elementwise": lambda net, x: torch.einsum("ni,i->ni", x, net.matrix[:, 0]),
    "bmm of constants of each": lambda net, x: torch.bmm(torch.stack([x, -x]), net.heads),
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
        trained = model.heads if "heads" in name or "two" in name else model.matrix
        assert (trained.grad is not None) == (name != "method")  # that one multiplies by a buffer


def test_why_an_equation_is_no_linear_layer():
    for name, reason in {
        "einsum with a matrix for each": "each h has its own matrix",
        "einsum of three": "it does not have two factors",
        "einsum that sums a factor": "it sums dimensions of one factor",
        "einsum that repeats": "it repeats a dimension of size 1",
        "einsum of a diagonal": "it takes a diagonal",
        "einsum, elementwise": "each i has its own matrix",
    }.items():
        model = bw.prepare(Product(OTHER[name]).eval(), torch.randn(5, 6), "virtual")
        assert f"not made linear: einsum, {reason}" in "\n".join(bw.ledger_of(model).notes)


class Einsums(nn.Module):
    """Attention as it is written with einsum, a constant that comes first, and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 8, 2, 4) / 3)
        self.out, self.mix = nn.Parameter(torch.randn(2, 4, 8) / 3), nn.Parameter(torch.randn(6, 6) / 3)
        self.up, self.row = nn.Parameter(torch.randn(8, 16) / 3), nn.Parameter(torch.randn(16) / 3)

    def forward(self, x):
        q, k, v = torch.einsum("bld,cdhk->cbhlk", x, self.qkv).unbind(0)
        weights = torch.einsum("bhqk,bhlk->bhql", q, k).softmax(-1)
        x = x + torch.einsum("bhlk,hkd->bld", weights @ v, self.out)
        x = x + self.mix @ x
        return torch.baddbmm(self.row, x, self.up.expand(x.shape[0], -1, -1)).relu()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_einsums_with_constants_run_in_integers(backend, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    net = Einsums().eval()
    model = bw.prepare(net, x, backend, debug=True)
    for given in (x, torch.randn(3, 6, 8)):
        assert torch.equal(model(given), net(given))
    linear = [e for e in bw.ledger_of(model).entries if e.operator == "linear"]
    assert [e.verdict.value for e in linear] == ["integer"] * 4
    bw.calibrate(model, [x])
    proof = bw.verify(model, bw.export(model, tmp_path / "m.onnx"), [x, -x], runtimes=[backend], latency=False)
    assert proof.ok, proof.missed
    products = [o for o in proof.runtimes[backend].operators if o.kind == "linear" or "FullyConnected" in o.runs_as]
    assert [o.integer for o in products] == [True] * 4
