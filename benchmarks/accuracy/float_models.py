"""Float nets, trained once and kept outside of the repository (BITWRIGHT_CACHE, by default ~/.cache/bitwright)."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from benchmarks.accuracy.data import Split
from benchmarks.accuracy.nets import NETS, make_uneven, scale_below_limits
from bitwright.files import atomic_write

CACHE = Path(os.environ.get("BITWRIGHT_CACHE", Path.home() / ".cache" / "bitwright")) / "accuracy"
LOOKED_AT = 2000  # images that say which channels reach their limits


def float_model(name: str, seed: int, train: Split, epochs: int) -> nn.Module:
    """The net of that name, trained with that seed for this many epochs, from the cache if possible."""
    if name == "uneven":
        return make_uneven(float_model("mobilenet", seed, train, epochs), seed)
    if name == "limited":
        images = train.images[:LOOKED_AT]
        return scale_below_limits(float_model("mobilenet", seed, train, epochs), images, seed)
    path = CACHE / f"{name}-{epochs}-{seed}.safetensors"
    torch.manual_seed(seed)
    model = NETS[name]()
    if path.exists():
        load_model(model, path)
    else:
        _train(model, train, epochs, seed)
        with atomic_write(path) as partial:
            save_model(model.to(memory_format=torch.contiguous_format), str(partial))
    return model.to(memory_format=torch.channels_last).eval()


def _train(model: nn.Module, train: Split, epochs: int, seed: int, batch: int = 128) -> None:
    """SGD with a cosine over all steps; images are mirrored and moved by up to two pixels."""
    source = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (len(train.labels) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps, pct_start=0.2)
    model.to(memory_format=torch.channels_last).train()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(train.labels), generator=source).split(batch)[: steps // epochs]:
            loss = F.cross_entropy(model(augment(train.images[chosen], source)), train.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"  epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}", flush=True)


def augment(images: Tensor, source: torch.Generator) -> Tensor:
    """Mirror half of the images, and move the batch by up to two pixels."""
    left, up = torch.randint(0, 5, (2,), generator=source).tolist()
    mirrored = torch.rand(len(images), 1, 1, 1, generator=source) < 0.5
    images = F.pad(torch.where(mirrored, images.flip(3), images), (2, 2, 2, 2), value=-0.81)
    return images[:, :, up : up + 28, left : left + 28]
