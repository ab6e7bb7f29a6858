"""Upsampling, padding, reductions and what moves values, in every form."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.operators.harness import Cases, check

CASES = Cases()
case, function = CASES.add, CASES.function

for mode, options in {
    "nearest": {},
    "nearest-exact": {},
    "bilinear": {"align_corners": False},
    "bilinear corners": {"align_corners": True},
    "bicubic": {"align_corners": False},
    "area": {},
}.items():
    way = mode.split()[0]
    if way != "area":
        case(
            f"nn.Upsample {mode}",
            "interpolate",
            lambda w=way, o=options: nn.Upsample(scale_factor=2, mode=w, **o),
        )
    function(
        f"F.interpolate {mode}",
        "interpolate",
        lambda x, w=way, o=options: F.interpolate(x, size=(13, 5), mode=w, **o),
    )
    function(
        f"F.interpolate {mode} of a size",
        "interpolate",
        lambda x, w=way, o=options: F.interpolate(F.max_pool2d(x, 2), x.shape[-2:], mode=w, **o),
    )
function("F.interpolate positional", "interpolate", lambda x: F.interpolate(x, None, 1.5, "nearest"))
function(
    "F.interpolate recompute",
    "interpolate",
    lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
)
function(
    "F.interpolate antialias",
    "interpolate",
    lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
)
case("nn.Upsample 1d", "interpolate", lambda: nn.Upsample(scale_factor=2, mode="linear"), "1d")
case("nn.Upsample 3d", "interpolate", lambda: nn.Upsample(size=(4, 4, 4), mode="trilinear"), "3d")
case("nn.UpsamplingBilinear2d", "interpolate", lambda: nn.UpsamplingBilinear2d(scale_factor=2))
case("nn.UpsamplingNearest2d", "interpolate", lambda: nn.UpsamplingNearest2d(size=(11, 7)))
for kind, arguments in {
    "ConstantPad": (2, 1.5),
    "ZeroPad": (1,),
    "ReflectionPad": (2,),
    "ReplicationPad": (3,),
    "CircularPad": (1,),
}.items():
    for d in (1, 2, 3):
        case(f"nn.{kind}{d}d", "pad", partial(getattr(nn, f"{kind}{d}d"), *arguments), f"{d}d")
for i, f in enumerate(
    [
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (1, 2, 0, 1), "constant", 0.0),
        lambda x: F.pad(x, [1, 1, 1, 1], value=-1.0),
        lambda x: F.pad(x, (-1, 2)),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: F.pad(x, (2, 1, 0, 1), "replicate"),
        lambda x: F.pad(x, (2, 1, 0, 1), mode="circular"),
        lambda x: F.pad(x, (0, 10 - x.shape[3], 0, 10 - x.size(2))),
    ]
):
    function(f"F.pad {i}", "pad", f)

for operator, functions in {
    "mean": [
        lambda x: x.mean((1, 3)),
        lambda x: x.mean(dim=(-1, -3), keepdim=True),
        lambda x: torch.mean(x, 1),
        lambda x: torch.mean(x, dim=[2, 3], keepdim=True, dtype=torch.float32),
        lambda x: x.mean(),
    ],
    "sum": [
        lambda x: x.sum(1),
        lambda x: torch.sum(x, dim=(2, 3), keepdim=True),
        lambda x: x.sum(dim=1, dtype=torch.float32),
    ],
    "flatten": [
        lambda x: torch.flatten(x, 1),
        lambda x: x.flatten(2),
        lambda x: torch.flatten(x, start_dim=1, end_dim=2),
        lambda x: torch.flatten(input=x, start_dim=1),
    ],
    "unflatten": [lambda x: x.unflatten(1, (2, 2)), lambda x: torch.unflatten(x, 1, (2, -1))],
    "reshape": [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view(x.shape[0], 2, 2, *x.shape[2:]),
        lambda x: x.reshape((x.shape[0], -1)),
        lambda x: torch.reshape(x, (-1, 4 * x.shape[2], x.shape[3])),
        lambda x: x.reshape_as(x.transpose(2, 3)),
        lambda x: x.view_as(x),
        lambda x: x.view(*x.size()[:2], -1),
    ],
    "permute": [
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.permute((0, 3, 1, 2)),
        lambda x: torch.permute(x, (0, 2, 1, 3)),
    ],
    "transpose": [
        lambda x: x.transpose(1, 2),
        lambda x: torch.transpose(x, 2, 3),
        lambda x: x.swapaxes(1, 3),
        lambda x: torch.swapaxes(x, 1, 3),
        lambda x: x.flatten(1).t().t(),
    ],
    "movedim": [lambda x: torch.movedim(x, 1, -1), lambda x: x.movedim(1, 3)],
    "split": [
        lambda x: torch.cat(torch.split(x, 2, dim=1)[::-1], 1),
        lambda x: x.split([1, 3], 1)[1],
        lambda x: torch.split(x, split_size_or_sections=3, dim=1)[-1],
        lambda x: x.tensor_split(2, dim=1)[0],
    ],
    "chunk": [
        lambda x: torch.chunk(x, 2, 1)[0] * torch.chunk(x, 2, 1)[1].sigmoid(),
        lambda x: x.chunk(chunks=2, dim=1)[1],
    ],
    "unbind": [lambda x: x.unbind(1)[2], lambda x: sum(torch.unbind(x, dim=1))],
    "squeeze": [lambda x: x[:, :1].squeeze(1), lambda x: torch.squeeze(x[:, :1], dim=1)],
    "unsqueeze": [lambda x: x.unsqueeze(1), lambda x: torch.unsqueeze(x, -1)],
    "getitem": [
        lambda x: x[:, 1],
        lambda x: x[:, 1:3, ::2],
        lambda x: x[..., None, 0],
        lambda x: x[:, [2, 0]],
        lambda x: x[:, : x.shape[1] // 2],
        lambda x: x[:, torch.arange(x.shape[1] - 1)],
    ],
    "expand": [lambda x: x[:, :1].expand(-1, 4, -1, -1), lambda x: x[:, :1].expand_as(x)],
    "repeat": [
        lambda x: x[:, :2].repeat(1, 2, 1, 1),
        lambda x: torch.tile(x[:, :2], (1, 2, 1, 1)),
        lambda x: x[:, :2].repeat_interleave(2, dim=1),
    ],
    "narrow": [
        lambda x: x.narrow(1, 1, 2),
        lambda x: torch.select(x, 1, 0),
        lambda x: x.index_select(1, torch.tensor([3, 0])),
    ],
    "contiguous": [lambda x: x.permute(0, 2, 3, 1).contiguous(), lambda x: x.clone(), torch.clone],
    "pixel_shuffle": [lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_unshuffle(x[:, :, :8], 2)],
    "channel_shuffle": [lambda x: F.channel_shuffle(x, 2)],
    "roll": [lambda x: torch.roll(x, 1, 2), lambda x: x.roll((1, 2), (2, 3)), lambda x: torch.flip(x, [3])],
    "dropout": [
        lambda x: F.dropout(x, 0.5, False),
        lambda x: F.dropout(x, p=0.3, training=False, inplace=True),
        lambda x: F.dropout2d(x, 0.5, training=False),
    ],
}.items():
    for i, f in enumerate(functions):
        function(f"{operator} {i}", operator, f)
case("nn.Flatten", "flatten", nn.Flatten)
case("nn.Flatten some", "flatten", lambda: nn.Flatten(1, 2))
case("nn.Unflatten", "unflatten", lambda: nn.Unflatten(1, (2, 2)))
case("nn.PixelShuffle", "pixel_shuffle", lambda: nn.PixelShuffle(2))
case("nn.ChannelShuffle", "channel_shuffle", lambda: nn.ChannelShuffle(2))
case("nn.Identity", "identity", lambda: nn.Identity(1, two=2))
for i, build in enumerate([lambda: nn.Dropout(0.4), lambda: nn.Dropout(0.4, True), nn.Dropout2d, nn.AlphaDropout]):
    case(f"nn.Dropout {i}", "dropout", build)


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)
