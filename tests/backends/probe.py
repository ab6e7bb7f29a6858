"""The probe net: a bit of everything, on which backends show where they have quantizers."""

import torch
from torch import nn

import bitwright as bw


class Block(nn.Module):
    """A residual block: c1 - b1 - r1 - c2 - b2, the sum with the input, r2."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1, self.r1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.c2, self.b2, self.r2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x):
        out = self.b2(self.c2(self.r1(self.b1(self.c1(x)))))
        return self.r2(out + x)


class Probe(nn.Module):
    """Stem, max-pool, residual block, concatenation, scale, deconvolution, upsampling, gate, average pool, head."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.layer1 = Block()
        self.conv3 = nn.Conv2d(16, 8, 1)
        self.deconv, self.dbn, self.drelu = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU()
        self.up, self.avg = nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.bn(self.stem(x))))
        y = self.layer1(x)
        z = self.conv3(torch.cat([y, x], 1)) * 2.0
        z = self.drelu(self.dbn(self.deconv(z))) + self.up(y)
        z = torch.sigmoid(z) * z
        return self.fc(torch.flatten(self.avg(z), 1))


def probe():
    """The net with a fixed seed, and BatchNorms that have seen data."""
    torch.manual_seed(0)
    net = Probe()
    net.train()
    for _ in range(3):
        net(torch.randn(4, 3, 16, 16))
    return net.eval()


def images(count=2, seed=1):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


LAYERS = {"stem", "layer1.c1", "layer1.c2", "conv3", "deconv", "fc"}
SHIPPED = [
    *("academic", "academic_nlp", "nnie", "onnx_qnn", "onnxruntime", "openvino", "pplcuda", "pplw8a16", "qdq"),
    *("snpe", "stpu", "tengine_u8", "tensorrt", "tensorrt_nlp", "virtual", "vitis"),
]


def options(name):
    """The papers' settings leave the specs to the user."""
    return {"recipe": {"weight": "int4 channel:0", "activation": "uint4"}} if name.startswith("academic") else {}


def prepared(name, **more):
    return bw.prepare(probe(), images(), name, **options(name), **more)


def old_names(model, fused):
    """Quantized tensors under the old toolkit's names, in which a layer, its BatchNorm and its ReLU are one."""
    layers = {"relu": "stem", "layer1_r1": "layer1_c1", "drelu": "deconv", "layer1_b2": "layer1_c2", "avg": "flatten"}
    if not fused:
        layers.pop("layer1_r1")
    found = [n.args[0].name for n in model.graph.nodes if is_quantizer(model, n)]
    assert len(found) == len(set(found))
    return {layers.get(name, name) for name in found}


def is_quantizer(model, node):
    return node.op == "call_module" and isinstance(model.get_submodule(node.target), bw.TensorQuantizer)
