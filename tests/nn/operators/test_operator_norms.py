"""Norms in every form."""

import torch.nn.functional as F
from torch import nn

from tests.nn.operators.harness import Cases, check

CASES = Cases()
case, function = CASES.add, CASES.function

for d in (1, 2, 3):
    norm, instance = getattr(nn, f"BatchNorm{d}d"), getattr(nn, f"InstanceNorm{d}d")
    case(f"nn.BatchNorm{d}d", "batch_norm", lambda n=norm: n(4), f"{d}d")
    case(f"nn.BatchNorm{d}d eps", "batch_norm", lambda n=norm: n(4, eps=0.1, affine=False), f"{d}d")
    case(
        f"nn.BatchNorm{d}d without statistics",
        "batch_norm",
        lambda n=norm: n(4, track_running_stats=False),
        f"{d}d",
    )
    case(f"nn.InstanceNorm{d}d", "instance_norm", lambda n=instance: n(4, affine=True), f"{d}d")
    case(
        f"nn.BatchNorm{d}d after relu",
        "batch_norm",
        lambda n=norm: nn.Sequential(nn.ReLU(), n(4)),
        f"{d}d",
    )
case("nn.BatchNorm1d of vectors", "batch_norm", lambda: nn.BatchNorm1d(8), "vector")
case("nn.BatchNorm1d of sequences", "batch_norm", lambda: nn.BatchNorm1d(5), "sequence")
function(
    "F.batch_norm",
    "batch_norm",
    lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach().abs() + 0.5, w, b, eps=1e-3),
    mean=(4,),
    var=(4,),
    weight=(4,),
    bias=(4,),
)
case("nn.LayerNorm", "layer_norm", lambda: nn.LayerNorm(8), "sequence")
case("nn.LayerNorm plain", "layer_norm", lambda: nn.LayerNorm((9, 8), 1e-3, elementwise_affine=False))
case("nn.LayerNorm no bias", "layer_norm", lambda: nn.LayerNorm(8, bias=False), "sequence")
function("F.layer_norm", "layer_norm", lambda x, w: F.layer_norm(x, (8,), w, eps=0.01), "sequence", weight=(8,))
function("F.layer_norm shape", "layer_norm", lambda x: F.layer_norm(x, x.shape[1:]))
case("nn.GroupNorm", "group_norm", lambda: nn.GroupNorm(2, 4, eps=1e-3))
case("nn.GroupNorm plain", "group_norm", lambda: nn.GroupNorm(4, 4, affine=False))
function("F.group_norm", "group_norm", lambda x, w: F.group_norm(x, 2, w), weight=(4,))
case("nn.RMSNorm", "rms_norm", lambda: nn.RMSNorm(8), "sequence")


@CASES.each()
def test_operator(chosen, backend):
    check(chosen, backend)
