"""Detectors: queries over an encoded image, and anchors over three scales."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import member
from tests.zoo.images import conv_norm


class Detections(NamedTuple):
    logits: torch.Tensor
    boxes: torch.Tensor
    aux: list | None = None


class SinePositions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.temperature = width // 2, 10000.0

    def forward(self, x):
        b, _, h, w = x.shape
        mask = torch.ones(b, h, w, device=x.device)
        steps = torch.arange(self.width, dtype=torch.float32, device=x.device)
        steps = self.temperature ** (2 * torch.div(steps, 2, rounding_mode="floor") / self.width)
        both = []
        for dim in (1, 2):
            places = mask.cumsum(dim)
            places = places / (places.amax(dim, keepdim=True) + 1e-6) * 2 * math.pi
            angles = places[..., None] / steps
            both.append(torch.stack((angles[..., 0::2].sin(), angles[..., 1::2].cos()), dim=4).flatten(3))
        return torch.cat(both, dim=3).permute(0, 3, 1, 2)


class DecoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])

    @staticmethod
    def with_pos(tensor, pos=None):
        return tensor if pos is None else tensor + pos

    def forward(self, target, memory, pos=None, query_pos=None):
        q = k = self.with_pos(target, query_pos)
        target = self.norms[0](target + self.self_attn(q, k, value=target, need_weights=False)[0])
        out, _ = self.cross_attn(query=self.with_pos(target, query_pos), key=self.with_pos(memory, pos), value=memory)
        target = self.norms[1](target + out)
        return self.norms[2](target + self.linear2(F.relu(self.linear1(target))))


@member(size=32, other=40)
class Detr(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(conv_norm(3, 8, 3, 2), conv_norm(8, 16, 3, 2), conv_norm(16, 16, 3, 2))
        self.input_proj, self.position = nn.Conv2d(16, 16, 1), SinePositions(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.ModuleList([DecoderLayer(16), DecoderLayer(16)])
        self.query_embed = nn.Embedding(5, 16)
        self.class_embed, self.bbox_embed = (
            nn.Linear(16, 4),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        )

    def forward(self, x):
        features = self.backbone(x)
        pos = self.position(features).flatten(2).transpose(1, 2)
        memory = self.encoder(self.input_proj(features).flatten(2).permute(0, 2, 1) + pos)
        queries = self.query_embed.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        target, states = torch.zeros_like(queries), []
        for layer in self.decoder:
            target = layer(target, memory, pos=pos, query_pos=queries)
            states.append(target)
        hidden = torch.stack(states)
        logits, boxes = self.class_embed(hidden), self.bbox_embed(hidden).sigmoid()
        aux = [{"logits": a, "boxes": b} for a, b in zip(logits[:-1], boxes[:-1], strict=True)]
        return Detections(logits[-1], boxes[-1], aux)


class Csp(nn.Module):
    def __init__(self, source, width):
        super().__init__()
        self.cv1, self.cv2 = conv_norm(source, width, act=nn.SiLU), conv_norm(width + width // 2, width, act=nn.SiLU)
        self.m = nn.ModuleList(conv_norm(width // 2, width // 2, 3, act=nn.SiLU) for _ in range(1))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Detect(nn.Module):
    """Three scales; anchors are made of the sizes of the feature maps."""

    def __init__(self, widths, classes=3):
        super().__init__()
        self.no, self.stride = classes + 4, [4, 8, 16]
        self.heads = nn.ModuleList(nn.Conv2d(w, self.no, 1) for w in widths)

    @staticmethod
    def make_anchors(maps, strides):
        points, steps = [], []
        for feature, stride in zip(maps, strides, strict=True):
            _, _, h, w = feature.shape
            rows = torch.arange(end=h, device=feature.device, dtype=feature.dtype) + 0.5
            columns = torch.arange(end=w, device=feature.device, dtype=feature.dtype) + 0.5
            grid = torch.meshgrid(rows, columns, indexing="ij")
            points.append(torch.stack((grid[1], grid[0]), -1).view(-1, 2))
            steps.append(torch.full((h * w, 1), stride, dtype=feature.dtype, device=feature.device))
        return torch.cat(points).transpose(0, 1), torch.cat(steps).transpose(0, 1)

    def forward(self, maps):
        maps = [head(m) for head, m in zip(self.heads, maps, strict=True)]
        anchors, strides = self.make_anchors(maps, self.stride)
        joined = torch.cat([m.view(m.shape[0], self.no, -1) for m in maps], 2)
        distances, scores = joined.split((4, self.no - 4), 1)
        low, high = distances.chunk(2, 1)
        corners = torch.cat((anchors - low, anchors + high), 1) * strides
        return torch.cat((corners, scores.sigmoid()), 1), maps


@member(size=32, other=64)
class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 8, 3, 2, act=nn.SiLU), conv_norm(8, 8, 3, 2, act=nn.SiLU))
        self.p3, self.down4, self.p4 = Csp(8, 8), conv_norm(8, 16, 3, 2, act=nn.SiLU), Csp(16, 16)
        self.down5, self.p5 = conv_norm(16, 16, 3, 2, act=nn.SiLU), Csp(16, 16)
        self.pool, self.up = nn.MaxPool2d(5, 1, 2), nn.Upsample(scale_factor=2, mode="nearest")
        self.spp = conv_norm(64, 16, act=nn.SiLU)
        self.n4, self.n3 = Csp(32, 16), Csp(24, 8)
        self.detect = Detect([8, 16, 16])

    def forward(self, x):
        p3 = self.p3(self.stem(x))
        p4 = self.p4(self.down4(p3))
        pools = [self.p5(self.down5(p4))]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        p5 = self.spp(torch.cat(pools, 1))
        n4 = self.n4(torch.cat([self.up(p5), p4], 1))
        n3 = self.n3(torch.cat([F.interpolate(n4, size=p3.shape[-2:], mode="nearest"), p3], 1))
        return self.detect([n3, n4, p5])
